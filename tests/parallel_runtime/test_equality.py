"""Every data and pipeline parallel layout computes what one process computes: loss, gradients, parameters, step by step.

The last test makes mistakes on purpose and sees that the comparison notices (equality.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality import BIASED, CLASSIC, GROUPED, TIED, TOLERANCE, TRAIN, Case, difference, on_rank, reference

from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.data import IGNORED, sequences

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


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


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
    assert difference(pool, Case("adamw", P(dp=2, pp=2, bucket_mb=0.01), TIED, train)) < 1e-11


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
    worst = difference(pool, case)
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


MISTAKES = (
    forget_one_bucket,
    forget_the_tied_embedding,
    double_one_gradient,
    drop_a_microbatch,
    mean_of_means,
    reuse_a_stale_message,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_noticed(pool, mistake):
    case = Case(mistake.__name__, P(dp=2, pp=2, bucket_mb=0.01), TIED)
    assert difference(pool, case) < TOLERANCE
    assert difference(pool, case, mistake) > 0.1
