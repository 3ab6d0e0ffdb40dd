"""What every equality test shares: a case, both sides of the comparison, and the worst difference between them.

float64 and plain SGD: then two correct programs differ by the order of additions alone. Over three steps that was at most
3.0e-14 of a tensor's largest entry; the tolerance leaves thirty times that for other machines and libraries. What the tests
are to find (a missing reduction, a factor, a dropped microbatch) is wrong in the first digit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from pool import Pool, gloo

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, Program, build, streams_of
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig, check
from stepscope.parallel_runtime.cp.layouts import positions_of
from stepscope.parallel_runtime.data import sequences
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.layout import gather
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import parameter_shapes
from stepscope.parallel_runtime.reference import Reference
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.recorder import NullRecorder

STEPS = 3
TOLERANCE = 1e-12  # of the largest entry of each tensor
NOTHING = 1e-6  # every gradient of every case has an entry above it

GROUPED = ModelConfig(layers=4, hidden=24, heads=4, kv_heads=2, ffn=36, vocab=30, seq=10)
CLASSIC = replace(
    GROUPED, kv_heads=4, norm="layernorm", activation="gelu", qkv_bias=True, output_bias=True, ffn_bias=True
)
TIED = replace(GROUPED, kv_heads=1, tied=True, ffn_bias=True)
BIASED = replace(GROUPED, qkv_bias=True, output_bias=True)
TRAIN = TrainConfig(
    microbatch_size=2,
    microbatches=3,
    steps=STEPS,
    dtype="float64",
    optimizer="sgd",
    lr=0.3,
    weight_decay=0.01,
    padding=0.8,
)


@dataclass(frozen=True)
class Case:
    """One layout and what it trains."""

    name: str
    parallel: ParallelConfig
    model: ModelConfig = GROUPED
    train: TrainConfig = TRAIN


@dataclass(frozen=True)
class Step:
    """What a step left: the loss (None where no rank knows it), gradients and parameters by global name."""

    loss: float | None
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


Mistake = Callable[[Program], None]
"""Breaks a composed program on purpose; a module-level function, since it travels to the ranks."""


def state_of(program: Program) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(gradients, parameters) of one rank, as `layout.gather` takes them: the parts that layout.TABLE describes."""
    gradients, parameters = program.gathered()
    assert gradients.keys() == parameters.keys() == dict(program.named_parameters()).keys()
    return gradients, parameters


def on_rank(rank: int, case: Case, mistake: Mistake | None = None) -> list[Step] | None:
    """The program of one rank, through the same composition and step as `stepscope run`."""
    check(case.model, case.parallel, case.train)
    configuration = Configuration(case.model, case.parallel, case.train)
    streams = streams_of(case.model, case.parallel, case.train)
    comm = gloo(Mesh.of(case.parallel), rank, NullRecorder(rank), streams)
    if comm is None:
        return None
    device = Device.named("cpu")
    program = build(configuration, comm, device)
    causes = InjectedCauses(case.train, rank, device, comm.recorder)
    if mistake is not None:
        mistake(program)
    steps = []
    for step in range(case.train.steps):
        loss = train_step(program, step, causes)
        steps.append(Step(None if loss is None else loss.item(), *state_of(program)))
    comm.close()
    return steps


def shares_of(model: ModelConfig, parallel: ParallelConfig) -> tuple[tuple[int, ...], ...] | None:
    """Positions that each rank of cp and tp routes to experts; None where the layout does not show."""
    if not model.experts or (model.routing_skew is None and model.balance != "capacity"):
        return None
    parts = [positions_of(parallel.cp_layout, parallel.cp, rank, model.seq) for rank in range(parallel.cp)]
    if parallel.cp == 1:
        parts = [list(range(model.seq))]
    size = model.seq // parallel.cp // parallel.tp
    return tuple(tuple(part[first : first + size]) for part in parts for first in range(0, len(part), size))


@lru_cache(maxsize=64)
def reference(
    model: ModelConfig, train: TrainConfig, dp: int, shares: tuple[tuple[int, ...], ...] | None = None
) -> list[Step]:
    """The same steps on one process, on the whole global batch."""
    plain = Reference(model, train, shares)
    steps = []
    for step in range(train.steps):
        batch = sequences(model, train, step, range(dp * train.microbatches * train.microbatch_size))
        loss, gradients = plain.step(*batch)
        steps.append(Step(loss, gradients, {name: p.detach().clone() for name, p in plain.parameters.items()}))
    return steps


def gathered(parts: list[dict[str, torch.Tensor]], mesh: Mesh) -> list[tuple[str, torch.Tensor]]:
    """Every whole tensor (name, value), gathered around every rank that holds a part of it: replicas come repeatedly."""
    wholes = []
    for rank, mine in enumerate(parts):
        for name in mine:
            around = {peer: theirs[name] for peer, theirs in enumerate(parts) if name in theirs}
            wholes.append((name, gather(name, around, mesh, rank)))
    return wholes


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry of `wanted`; infinite where a value is not a number."""
    assert value.shape == wanted.shape, (value.shape, wanted.shape)
    difference = ((value - wanted).abs().max() / wanted.abs().max()).item()
    return difference if difference == difference else float("inf")


def worst_difference(case: Case, ranks: list[list[Step]]) -> float:
    """Largest difference over all steps, ranks and tensors, relative to the largest entry of the reference's tensor."""
    mesh = Mesh.of(case.parallel)
    expected = reference(case.model, case.train, case.parallel.dp, shares_of(case.model, case.parallel))
    worst = 0.0
    for number, wanted in enumerate(expected):
        steps = [rank[number] for rank in ranks]
        losses = [step.loss for step in steps if step.loss is not None]
        assert len(losses) == mesh.stage_size, "the last stages' ranks report the loss"
        assert wanted.loss is not None
        least = min(wanted.gradients, key=lambda name: float(wanted.gradients[name].abs().max()))
        assert wanted.gradients[least].abs().max() > NOTHING, f"{least}: a gradient of nothing shows no mistake"
        worst = max(worst, *(abs(loss - wanted.loss) / abs(wanted.loss) for loss in losses))
        for kind in ("gradients", "parameters"):
            wholes = gathered([getattr(step, kind) for step in steps], mesh)
            assert {name for name, _ in wholes} == set(parameter_shapes(case.model)), "every parameter is on some rank"
            worst = max(worst, *(relative(whole, getattr(wanted, kind)[name]) for name, whole in wholes))
    return worst


def difference(pool: Pool, case: Case, mistake: Mistake | None = None) -> float:
    """Run the case (with a mistake, if any) on the pool and compare."""
    ranks: list[Any] = pool.run(on_rank, case, mistake)[: case.parallel.world_size]
    return worst_difference(case, ranks)
