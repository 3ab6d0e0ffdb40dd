"""Applies the strategies of a configuration in one documented order, and holds what a step needs.

    1  mesh and streams        who communicates with whom, through what
    2  seams                   what tensor, sequence and context parallelism put into the model
    3  stages                  this rank's layers, initial values from (seed, name) alone
    4  data parallelism        gradient buckets and their hooks
    5  pipeline                the planned table and its executor
    6  other reductions        grad_sync.py, after data parallelism
    7  optimizer               over this rank's own parameters

The same order on every device: a dry run composes the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime import clip, grad_sync
from stepscope.parallel_runtime.comm import PIPELINE_STREAMS, Comm
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.cp import context_parallel
from stepscope.parallel_runtime.cp.layouts import positions_of
from stepscope.parallel_runtime.data import Batch, local_batch
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.dp.data_parallel import DataParallel
from stepscope.parallel_runtime.layout import local_sequence, shard
from stepscope.parallel_runtime.memory import ActivationCounter
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.pp.executor import PipelineExecutor
from stepscope.parallel_runtime.pp.schedules import Table
from stepscope.parallel_runtime.pp.validator import plan
from stepscope.parallel_runtime.sp.sequence_parallel import SequenceParallel
from stepscope.parallel_runtime.tp.tensor_parallel import TensorParallel

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
        grad_sync.gradient_view(parallel),
        "tp",
        *context_parallel.streams_of(parallel),
        *PIPELINE_STREAMS,
    ]
    streams += grad_sync.streams_of(model, parallel)
    return (*streams, "clip") if train.clip > 0.0 else tuple(streams)


def seams_of(parallel: ParallelConfig, comm: Comm) -> Seams:
    """What the layout puts into the model."""
    seams = Seams()
    if parallel.cp > 1:
        seams = context_parallel.seams(parallel, comm, seams)
    if parallel.tp > 1:
        seams = (SequenceParallel if parallel.sp else TensorParallel)(comm).seams(seams)
    return seams


def tables_of(parallel: ParallelConfig, train: TrainConfig) -> tuple[Table, ...]:
    """The planned pipeline table of each stage, sends and receives included, validated."""
    return plan(parallel.schedule, parallel.pp, train.microbatches)


@dataclass
class Program:
    """One rank's composed program: the parts that a step calls (train.py), in the order of calling."""

    configuration: Configuration
    comm: Comm
    device: torch.device
    chunks: Sequence[Stage]
    gradients: DataParallel
    executor: PipelineExecutor
    reductions: list[grad_sync.Reduction]
    counted: list[nn.Parameter]  # in the gradient norm
    optimizer: torch.optim.Optimizer

    @property
    def ends_model(self) -> bool:
        """Whether this rank computes the loss."""
        return any(chunk.last for chunk in self.chunks)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name, in order of use."""
        return [named for chunk in self.chunks for named in chunk.named_parameters()]

    def batch(self, step: int) -> Batch:
        """This rank's part of the step's data; each rank knows the valid tokens of all, so nothing is asked."""
        c = self.configuration
        held = None
        if c.parallel.cp > 1:
            held = positions_of(c.parallel.cp_layout, c.parallel.cp, self.comm.index("cp"), c.model.seq)
        return local_batch(c.model, c.train, c.parallel.dp, self.comm.index("dp"), step, self.device, held)

    def clip(self) -> Tensor | None:
        """Clip the gradients where the configuration says so; the global norm."""
        largest = self.configuration.train.clip
        if largest == 0.0:
            return None
        return clip.clip_gradients(self.gradients.parameters, self.counted, largest, self.comm)


def build(configuration: Configuration, comm: Comm, device: Device) -> Program:
    """Compose the program of `comm.rank`."""
    model, parallel, train = configuration.model, configuration.parallel, configuration.train
    where, stage = device.torch_device, comm.index("pp")
    layers = parallel.layers_of(stage, model.layers)
    part = Stage(
        model,
        comm.recorder,
        layers,
        first=stage == 0,
        last=stage == parallel.pp - 1,
        seams=seams_of(parallel, comm),
        dtype=configuration.dtype,
        device=where,
        recompute=parallel.recompute,
        seed=train.seed,
    )
    if device.kind != "dry":
        initialise(part, model, train.seed, lambda name, whole: shard(name, whole, comm.mesh, comm.rank))
    chunks = [part]
    named = [named for chunk in chunks for named in chunk.named_parameters()]
    parameters = [parameter for _, parameter in named]
    return Program(
        configuration=configuration,
        comm=comm,
        device=where,
        chunks=chunks,
        gradients=DataParallel(
            parameters, comm, round(parallel.bucket_mb * 1e6), parallel.overlap, grad_sync.gradient_view(parallel)
        ),
        executor=PipelineExecutor(
            chunks,
            tables_of(parallel, train)[stage],
            comm,
            (local_sequence(model, parallel), train.microbatch_size, model.hidden),
            configuration.dtype,
            where,
            ActivationCounter(chunks, comm.recorder),
        ),
        reductions=grad_sync.reductions_of(named, model, parallel),
        counted=clip.owned(named, comm.mesh, comm.rank),
        optimizer=_optimizer(parameters, train),
    )


def _optimizer(parameters: Sequence[nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """One loop in C++ over all parameters (`foreach`); `fused` does not run on dry tensors."""
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, train.lr, weight_decay=train.weight_decay, foreach=True)
    return torch.optim.AdamW(parameters, train.lr, weight_decay=train.weight_decay, foreach=True)
