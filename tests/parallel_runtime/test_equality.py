"""Every layout computes what one process computes: loss, every gathered gradient, every parameter, step by step.

float64 and plain SGD: then two correct programs differ by the order of additions alone. Over three steps that was at most
1.6e-14 of a tensor's largest entry; the tolerance leaves sixty times that for other machines and libraries. What this is
to find (a missing reduction, a factor, a dropped microbatch) is wrong in the first digit: the last test makes such mistakes
on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from pool import gloo

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, build, streams_of
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.data import IGNORED, sequences
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import parameter_shapes
from stepscope.parallel_runtime.reference import Reference
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.recorder import NullRecorder

STEPS = 3
TOLERANCE = 1e-12  # of the largest entry of each tensor

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


P = ParallelConfig
CASES = [
    Case("one rank", P()),
    Case("dp2", P(dp=2)),
    Case("dp4, a bucket a parameter", P(dp=4, bucket_mb=1e-6), CLASSIC),
    Case("dp4, one bucket", P(dp=4, bucket_mb=100.0), TIED),
    Case("dp4, some buckets", P(dp=4, bucket_mb=0.02)),
    Case("dp2 without overlap", P(dp=2, bucket_mb=0.02, overlap=False)),
    Case("pp2 naive", P(pp=2, schedule="naive"), CLASSIC),
    Case("pp2 gpipe, tied", P(pp=2, schedule="gpipe"), TIED),
    Case("pp2 1f1b", P(pp=2, schedule="1f1b"), BIASED),
    Case("pp4 naive, tied", P(pp=4, schedule="naive"), TIED),
    Case("pp4 gpipe", P(pp=4, schedule="gpipe"), train=replace(TRAIN, microbatches=5)),
    Case("pp4 1f1b, tied", P(pp=4, schedule="1f1b"), TIED, replace(TRAIN, microbatches=6)),
    Case("pp4 1f1b, fewer microbatches than stages", P(pp=4), CLASSIC, replace(TRAIN, microbatches=2)),
    Case("pp2 of unequal stages", P(pp=2, split=(1, 3))),
    Case("pp3, two layers first", P(pp=3), TIED),
    Case("dp2 pp2 naive", P(dp=2, pp=2, schedule="naive", bucket_mb=0.01), BIASED),
    Case("dp2 pp2 gpipe", P(dp=2, pp=2, schedule="gpipe"), CLASSIC),
    Case("dp2 pp2 1f1b, tied", P(dp=2, pp=2, schedule="1f1b", bucket_mb=0.01), TIED),
    Case("dp2 pp2 1f1b, tied, no overlap", P(dp=2, pp=2, bucket_mb=0.01, overlap=False), TIED),
    Case("dp2 pp2 1f1b, one microbatch, no padding", P(dp=2, pp=2), train=replace(TRAIN, microbatches=1, padding=0.0)),
]


# -- both sides --------------------------------------------------------------------------------------------------------


def on_rank(rank: int, case: Case, mistake: str = "") -> list[Step] | None:
    """The program of one rank, through the same composition and step as `stepscope run`."""
    configuration = Configuration(case.model, case.parallel, case.train)
    streams = streams_of(case.model, case.parallel, case.train)
    comm = gloo(Mesh.of(case.parallel), rank, NullRecorder(rank), streams)
    if comm is None:
        return None
    device = Device.named("cpu")
    program = build(configuration, comm, device)
    causes = InjectedCauses(case.train, rank, device, comm.recorder)
    if mistake:
        MISTAKES[mistake](program)
    steps = []
    for step in range(case.train.steps):
        loss = train_step(program, step, causes)
        named = program.named_parameters()
        steps.append(
            Step(
                None if loss is None else loss.item(),
                {name: parameter.grad.clone() for name, parameter in named},
                {name: parameter.detach().clone() for name, parameter in named},
            )
        )
    comm.close()
    return steps


@lru_cache(maxsize=64)
def reference(model: ModelConfig, train: TrainConfig, dp: int) -> list[Step]:
    """The same steps on one process, on the whole global batch."""
    plain = Reference(model, train)
    steps = []
    for step in range(train.steps):
        batch = sequences(model, train, step, range(dp * train.microbatches * train.microbatch_size))
        loss, gradients = plain.step(*batch)
        steps.append(Step(loss, gradients, {name: p.detach().clone() for name, p in plain.parameters.items()}))
    return steps


def worst_difference(case: Case, ranks: list[list[Step]]) -> float:
    """Largest difference over all steps, ranks and tensors, relative to the largest entry of the reference's tensor."""
    expected = reference(case.model, case.train, case.parallel.dp)
    worst = 0.0
    for number, wanted in enumerate(expected):
        steps = [rank[number] for rank in ranks]
        losses = [step.loss for step in steps if step.loss is not None]
        assert len(losses) == case.parallel.dp, "the last stages' ranks report the loss"
        worst = max(worst, *(abs(loss - wanted.loss) / abs(wanted.loss) for loss in losses))
        for kind in ("gradients", "parameters"):
            gathered = set()
            for step in steps:
                for name, value in getattr(step, kind).items():
                    gathered.add(name)
                    whole = getattr(wanted, kind)[name]
                    worst = max(worst, ((value - whole).abs().max() / whole.abs().max()).item())
            assert gathered == set(parameter_shapes(case.model)), "every parameter is on some rank"
    return worst


def run(pool, case: Case, mistake: str = "") -> float:
    ranks = pool.run(on_rank, case, mistake)[: case.parallel.world_size]
    return worst_difference(case, ranks)


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert run(pool, case) < TOLERANCE


@pytest.mark.parametrize("model", [GROUPED, CLASSIC, TIED, BIASED], ids=["grouped", "classic", "tied", "biased"])
def test_no_gradient_is_zero(model):
    """A gradient of nothing could not show a missing reduction; padding makes the microbatches really unequal."""
    for step in reference(model, TRAIN, 2):
        assert min(gradient.abs().max() for gradient in step.gradients.values()) > 1e-4
    _, targets_GS = sequences(model, TRAIN, 0, range(12))
    counts = (targets_GS != IGNORED).sum(1).view(6, 2).sum(1)
    assert len(set(counts.tolist())) > 3


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(pool, weight_decay):
    """AdamW divides by the root of the squares, so the rounding of small gradients shows more (measured: 8e-14)."""
    train = replace(TRAIN, optimizer="adamw", lr=0.01, weight_decay=weight_decay)
    assert run(pool, Case("adamw", P(dp=2, pp=2, bucket_mb=0.01), TIED, train)) < 1e-11


def test_clipping(pool):
    """The norm counts each parameter once, the tied one included: as if one process had clipped."""
    train = replace(TRAIN, clip=0.5, steps=1)
    case = Case("clip", P(dp=2, pp=2), TIED, train)
    (step,) = reference(TIED, replace(train, clip=0.0), 2)
    norm = torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm()
    assert norm > 0.6, "nothing to clip"
    for rank in pool.run(on_rank, case):
        for name, gradient in rank[0].gradients.items():
            wanted = step.gradients[name] * (0.5 / (norm + 1e-6))
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()), msg=name)


def test_float32(pool):
    """The precision that runs really use (measured: 2e-6, some units in the last place over layers and steps)."""
    case = Case("float32", P(dp=2, pp=2), CLASSIC, replace(TRAIN, dtype="float32"))
    worst = run(pool, case)
    assert 1e-8 < worst < 1e-4


# -- the comparison bites ------------------------------------------------------------------------------------------------


def forget_one_bucket(program):
    """The first bucket of the gradients is never reduced."""
    reduce = program.comm.all_reduce

    def forgetful(tensor, axis, **how):
        first = tensor is program.gradients.buffers[0]
        return reduce(tensor.clone() if first else tensor, axis, **how)

    program.comm.all_reduce = forgetful


def forget_the_tied_embedding(program):
    program.reductions.clear()


def double_one_gradient(program):
    name, parameter = program.named_parameters()[-1]
    assert parameter.dim() > 0, name
    parameter.register_hook(lambda gradient: 2 * gradient)


def drop_a_microbatch(program):
    """The last microbatch counts in the denominator but nowhere else."""
    run_executor = program.executor.run

    def without_last(batch, **how):
        *others, last = batch.microbatches
        empty = last._replace(targets_SB=torch.full_like(last.targets_SB, IGNORED))
        return run_executor(batch._replace(microbatches=(*others, empty)), **how)

    program.executor.run = without_last


def mean_of_means(program):
    """Each microbatch divides by its own valid tokens, each with the same weight: wrong where these differ."""
    stage, count = program.chunks[-1], program.configuration.train.microbatches * program.configuration.parallel.dp
    forward = stage.forward

    def averaging(x, microbatch, valid_tokens):
        return forward(x, microbatch, (microbatch.targets_SB != IGNORED).sum() * count)

    stage.forward = averaging


def reuse_a_stale_message(program):
    """The second microbatch computes on the boundary activation of the first."""
    arrived, first = program.executor._arrived, []

    def stale(action):
        x = arrived(action)
        if x is None or action.phase != "forward":
            return x
        first.append(x.clone())
        return first[-2] if action.microbatch == 1 else x

    program.executor._arrived = stale


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        forget_one_bucket,
        forget_the_tied_embedding,
        double_one_gradient,
        drop_a_microbatch,
        mean_of_means,
        reuse_a_stale_message,
    )
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_mistake_is_noticed(pool, mistake):
    case = Case(mistake, P(dp=2, pp=2, bucket_mb=0.01), TIED)
    assert run(pool, case) < TOLERANCE
    assert run(pool, case, mistake) > 0.1
