"""Applies the strategies of a configuration in one documented order, and holds what a step needs.

    1  mesh and streams        who communicates with whom, through what
    2  seams                   what tensor, sequence, context parallelism and ZeRO-3 put into the model
    3  stages                  this rank's layers, initial values from (seed, name) alone
    4  data parallelism        gradient buckets, or shards of the model state (ZeRO), and their hooks
    5  pipeline                the planned table and its executor
    6  other reductions        grad_sync.py, after data parallelism
    7  optimizer               over this rank's own parameters, or its pieces of them

The same order on every device: a dry run composes the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime import clip, grad_sync
from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.comm_streams import pipeline_streams
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig, global_batch
from stepscope.parallel_runtime.cp import context_parallel
from stepscope.parallel_runtime.cp.layouts import positions_of
from stepscope.parallel_runtime.data import Batch, local_batch
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.dp.data_parallel import DataParallel
from stepscope.parallel_runtime.ep import expert_parallel
from stepscope.parallel_runtime.ep.balance import LoadBalance
from stepscope.parallel_runtime.ep.expert_parallel import ExpertParallel
from stepscope.parallel_runtime.ep.gradients import DenseAndExperts
from stepscope.parallel_runtime.layout import local_sequence, of_experts, shard
from stepscope.parallel_runtime.memory import ActivationCounter
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.mixture import Mixture
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.model.weight_gradients import WeightGradients
from stepscope.parallel_runtime.optimizer import Optimizer, loss_scale_of
from stepscope.parallel_runtime.pp.executor import PipelineExecutor
from stepscope.parallel_runtime.pp.schedules import Table
from stepscope.parallel_runtime.pp.validator import plan
from stepscope.parallel_runtime.sp.sequence_parallel import SequenceParallel
from stepscope.parallel_runtime.tp.tensor_parallel import TensorParallel
from stepscope.parallel_runtime.zero.fully_sharded import FullyShardedData, LateSeams
from stepscope.parallel_runtime.zero.sharded import DENSE, EXPERTS, Over, ShardedData
from stepscope.parallel_runtime.zero.units import stage_uses

Named = tuple[str, nn.Parameter]
"""A parameter, or a piece of one, and its global name."""

REPLICAS = "dp_cp"
"""The view whose ranks saw other tokens of the same step."""


@dataclass(frozen=True)
class Configuration:
    """The three configurations of a run, which travel together."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return getattr(torch, self.train.dtype)


def streams_of(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> tuple[str, ...]:
    """Every stream that the program may use, the same on all ranks; those over one rank cost nothing."""
    streams = [
        "loss",
        *(DENSE.streams if parallel.zero else [grad_sync.gradient_view(parallel)]),
        "tp",
        *context_parallel.streams_of(parallel),
        *pipeline_streams(parallel.chunks),
        *expert_parallel.streams_of(model, parallel),
    ]
    if grad_sync.experts_apart(model, parallel):
        streams += EXPERTS.streams if parallel.zero else ["edp"]
    streams += grad_sync.streams_of(model, parallel)
    return (*streams, clip_stream(model, parallel)) if train.clip > 0.0 else tuple(streams)


def clip_stream(model: ModelConfig, parallel: ParallelConfig) -> str:
    """The stream that sums the gradient norm over the ranks that hold different parts of the gradients."""
    if model.experts:
        return "clip.world"
    return "clip.sharded" if parallel.zero else "clip"


def seams_of(parallel: ParallelConfig, comm: Comm, experts: ExpertParallel | None = None) -> Seams:
    """What the layout puts into the model."""
    seams = WeightGradients().seams(Seams()) if parallel.splits_backward else Seams()
    if parallel.cp > 1:
        seams = context_parallel.seams(parallel, comm, seams)
    if parallel.tp > 1:
        seams = (SequenceParallel if parallel.sp else TensorParallel)(comm).seams(seams)
    return seams if experts is None else experts.seams(seams)


def tables_of(parallel: ParallelConfig, train: TrainConfig) -> tuple[Table, ...]:
    """The planned pipeline table of each stage, sends and receives included, validated."""
    return plan(parallel.schedule, parallel.pp, train.microbatches, parallel.chunks)


@dataclass
class Program:
    """One rank's composed program: the parts that a step calls (train.py), in the order of calling."""

    configuration: Configuration
    comm: Comm
    device: torch.device
    chunks: Sequence[Stage]
    gradients: DataParallel | ShardedData | DenseAndExperts
    executor: PipelineExecutor
    reductions: list[grad_sync.Reduction]
    counted: list[nn.Parameter]  # in the gradient norm
    optimizer: Optimizer
    experts: ExpertParallel | None = None  # of a model that has some ...
    balance: LoadBalance | None = None  # ... and whose loads are balanced by offsets

    @property
    def ends_model(self) -> bool:
        """Whether this rank computes the loss."""
        return any(chunk.last for chunk in self.chunks)

    def arm(self, chunk: int) -> None:
        """What follows adds to the gradients of this chunk for the last time in the step: they may be reduced."""
        self.gradients.arm(self.chunks[chunk].parameters())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name, in order of use."""
        return [named for chunk in self.chunks for named in chunk.named_parameters()]

    def gathered(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(gradients, parameters) of this rank's part of the model by global name, put together from shards where these
        are cut; copies. Outside of steps, on all ranks together."""
        parts = self.gradients.parts if isinstance(self.gradients, DenseAndExperts) else [self.gradients]
        if all(isinstance(part, ShardedData) for part in parts):
            gradients: dict[str, Tensor] = {}
            parameters: dict[str, Tensor] = {}
            for part in parts:
                assert isinstance(part, ShardedData)
                for whole, into in zip(part.gathered(), (gradients, parameters), strict=True):
                    into.update(whole)
            return gradients, parameters
        named = self.named_parameters()
        gradients = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        return gradients, {name: parameter.detach().clone() for name, parameter in named}

    def batch(self, step: int) -> Batch:
        """This rank's part of the step's data; each rank knows the valid tokens of all, so nothing is asked."""
        c = self.configuration
        held = None
        if c.parallel.cp > 1:
            held = positions_of(c.parallel.cp_layout, c.parallel.cp, self.comm.index("cp"), c.model.seq)
        return local_batch(c.model, c.train, c.parallel.dp, self.comm.index("dp"), step, self.device, held)

    def clip(self) -> Tensor | None:
        """Clip the gradients where the configuration says so; the global norm."""
        train = self.configuration.train
        if train.clip == 0.0:
            return None
        stream = clip_stream(self.configuration.model, self.configuration.parallel)
        scale = loss_scale_of(train.dtype)
        return clip.clip_gradients(self.gradients.parameters, self.counted, train.clip, self.comm, stream, scale)


def build(configuration: Configuration, comm: Comm, device: Device) -> Program:
    """Compose the program of `comm.rank`."""
    model, parallel, train = configuration.model, configuration.parallel, configuration.train
    where, stage = device.torch_device, comm.index("pp")
    late = LateSeams()
    experts = ExpertParallel(model, parallel, comm) if model.experts else None
    seams = seams_of(parallel, comm, experts)
    chunks = [
        Stage(
            model,
            comm.recorder,
            parallel.chunk_layers(stage, chunk, model.layers),
            first=(stage, chunk) == (0, 0),
            last=(stage, chunk) == (parallel.pp - 1, parallel.chunks - 1),
            seams=late.into(seams) if parallel.zero == 3 else seams,
            dtype=configuration.dtype,
            device=where,
            recompute=parallel.recompute,
            seed=train.seed,
            loss_scale=loss_scale_of(train.dtype) / global_batch(parallel, train),
        )
        for chunk in range(parallel.chunks)
    ]
    for part in chunks:
        if device.kind != "dry":
            initialise(part, model, train.seed, lambda name, whole: shard(name, whole, comm.mesh, comm.rank))
    gradients, named = _data_parallel(configuration, comm, chunks, late)
    return Program(
        configuration=configuration,
        comm=comm,
        device=where,
        chunks=chunks,
        gradients=gradients,
        executor=PipelineExecutor(
            chunks,
            tables_of(parallel, train),
            comm,
            (local_sequence(model, parallel), train.microbatch_size, model.hidden),
            configuration.dtype,
            where,
            ActivationCounter(chunks, comm.recorder, varying=model.experts > 0),
            loss_scale_of(train.dtype),
            seams.later,
        ),
        reductions=grad_sync.reductions_of(named, model, parallel),
        counted=_counted(configuration, named, comm),
        optimizer=Optimizer(gradients.parameters, train, comm.recorder, parallel.offload == "cpu"),
        experts=experts,
        balance=_balance(model, chunks, comm) if model.experts and model.balance == "bias" else None,
    )


def _balance(model: ModelConfig, chunks: Sequence[Stage], comm: Comm) -> LoadBalance:
    """Over the routers of this rank's layers."""
    mixtures = [part for chunk in chunks for part in chunk.modules() if isinstance(part, Mixture)]
    return LoadBalance([mixture.router for mixture in mixtures], comm, model.balance_rate)


def _counted(configuration: Configuration, named: Sequence[tuple[str, nn.Parameter]], comm: Comm) -> list[nn.Parameter]:
    """What this rank counts in the gradient norm."""
    if configuration.model.experts:
        return clip.owned_in_the_world(named, comm.mesh, comm.rank, configuration.parallel.zero > 0)
    return clip.owned(named, comm.mesh, comm.rank)


def _data_parallel(
    configuration: Configuration, comm: Comm, chunks: Sequence[Stage], late: LateSeams
) -> tuple[DataParallel | ShardedData | DenseAndExperts, list[Named]]:
    """(the strategy over dp and cp, what this rank updates by global name): whole parameters, or pieces of them.

    The state of experts may lie on other ranks than all else: then each has a strategy of its own.
    """
    named = [named for chunk in chunks for named in chunk.named_parameters()]
    groups = {DENSE: named}
    if grad_sync.experts_apart(configuration.model, configuration.parallel):
        groups = {
            over: [(name, parameter) for name, parameter in named if of_experts(name) == (over is EXPERTS)]
            for over in (DENSE, EXPERTS)
        }
    parts = [_strategy(configuration, comm, group, over, late) for over, group in groups.items() if group]
    pieces = [piece for part in parts if isinstance(part, ShardedData) for piece in part.named]
    return parts[0] if len(parts) == 1 else DenseAndExperts(parts), pieces or named


def _strategy(
    configuration: Configuration, comm: Comm, named: Sequence[Named], over: Over, late: LateSeams
) -> DataParallel | ShardedData:
    """Data parallelism of these parameters, over the ranks of `over`."""
    parallel = configuration.parallel
    if parallel.zero == 0:
        view = "edp" if over is EXPERTS else grad_sync.gradient_view(parallel)
        size = round(parallel.bucket_mb * 1e6)
        return DataParallel([parameter for _, parameter in named], comm, size, parallel.overlap, view)
    if parallel.zero < 3:
        return ShardedData(named, comm, parallel.zero, parallel.overlap, over)
    uses = stage_uses(configuration.model, parallel, comm.index("pp"))
    late.strategies.append(
        FullyShardedData(named, comm, uses, parallel.overlap, parallel.reshard, parallel.prefetch, over)
    )
    return late.strategies[-1]
