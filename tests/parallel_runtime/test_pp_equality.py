"""Interleaved and zero-bubble pipelines compute what one process computes, alone and with every other axis.

The comparison and its tolerance are those of equality.py; mistakes on purpose see that it bites; torch's own interleaved
and zero-bubble pipelines are a second witness.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality import BIASED, CLASSIC, GROUPED, TIED, TOLERANCE, TRAIN, Case, difference
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from stepscope.parallel_runtime.comm import Ready
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.tracer.recorder import NullRecorder

FOUR, FIVE, EIGHT = (replace(TRAIN, microbatches=number) for number in (4, 5, 8))
DEEP = replace(GROUPED, layers=8)
MIXTURE = replace(GROUPED, experts=4, balance="none", seq=12)


def two(**axes):
    """Two stages of two chunks each."""
    return ParallelConfig(pp=2, schedule="interleaved", chunks=2, **axes)


def zero_bubble(pp=2, **axes):
    return ParallelConfig(pp=pp, schedule="zb-h1", **axes)


HEADS_12 = replace(CLASSIC, seq=12)
CASES = [
    Case("interleaved pp2 v2", two(), BIASED, FOUR),
    Case("interleaved pp2 v2, tied, as few microbatches as stages", two(), TIED, replace(TRAIN, microbatches=2)),
    Case("interleaved pp2 v2, unequal parts", two(split=(2, 1, 1, 1)), replace(CLASSIC, layers=5), FOUR),
    Case("interleaved pp2 v4", replace(two(), chunks=4), DEEP, FOUR),
    Case("interleaved pp4 v1, tied", ParallelConfig(pp=4, schedule="interleaved"), TIED, FOUR),
    Case("interleaved pp4 v2", replace(two(), pp=4), DEEP, EIGHT),
    Case("interleaved pp2 v2 dp2", two(dp=2, bucket_mb=0.01), TIED, FOUR),
    Case("interleaved pp2 v2 dp2, no overlap", two(dp=2, bucket_mb=0.01, overlap=False), CLASSIC, FOUR),
    Case("interleaved pp2 v2 tp2", two(tp=2), CLASSIC, FOUR),
    Case("interleaved pp2 v2 tp2 sp, full recomputation", two(tp=2, sp=True, recompute="full"), CLASSIC, FOUR),
    Case("interleaved pp2 v2 cp2", two(cp=2), replace(TIED, seq=12), FOUR),
    Case("interleaved pp2 v2 zero1 dp2", two(dp=2, zero=1), TIED, FOUR),
    Case("interleaved pp2 v2 zero2 dp2", two(dp=2, zero=2), CLASSIC, FOUR),
    Case("interleaved pp2 v2 zero3 dp2", two(dp=2, zero=3), TIED, FOUR),
    Case("interleaved pp2 v2 ep2 dp2", two(dp=2, ep=2), MIXTURE, FOUR),
    Case("zb-h1 on one stage, tied", zero_bubble(1), TIED),
    Case("zb-h1 pp2", zero_bubble(), BIASED),
    Case("zb-h1 pp3, tied", zero_bubble(3), TIED, FOUR),
    Case("zb-h1 pp4", zero_bubble(4), CLASSIC, FIVE),
    Case("zb-h1 pp4, fewer microbatches than stages", zero_bubble(4), TIED, replace(TRAIN, microbatches=2)),
    Case(
        "zb-h1 pp2, unequal stages, selective recomputation", zero_bubble(split=(3, 1), recompute="selective"), CLASSIC
    ),
    Case("zb-h1 pp2, full recomputation, dropout", zero_bubble(recompute="full"), replace(CLASSIC, dropout=0.2)),
    Case("zb-h1 pp2 dp2", zero_bubble(dp=2, bucket_mb=0.01), TIED, FOUR),
    Case("zb-h1 pp2 dp2, no overlap", zero_bubble(dp=2, bucket_mb=0.01, overlap=False), CLASSIC),
    Case("zb-h1 pp2 tp2", zero_bubble(tp=2), CLASSIC),
    Case("zb-h1 pp2 tp2, tied, full recomputation", zero_bubble(tp=2, recompute="full"), replace(TIED, kv_heads=2)),
    Case("zb-h1 pp2 tp2 sp", zero_bubble(tp=2, sp=True), CLASSIC),
    Case("zb-h1 pp2 tp2 sp, full recomputation", zero_bubble(tp=2, sp=True, recompute="full"), CLASSIC),
    Case("zb-h1 pp2 cp2", zero_bubble(cp=2), replace(CLASSIC, seq=12)),
    Case(
        "zb-h1 pp2 cp2 ulysses, selective recomputation",
        zero_bubble(cp=2, cp_mode="ulysses", recompute="selective"),
        HEADS_12,
    ),
    Case("zb-h1 pp2 zero1 dp2", zero_bubble(dp=2, zero=1), TIED),
    Case("zb-h1 pp2 zero2 dp2", zero_bubble(dp=2, zero=2), CLASSIC),
    Case("zb-h1 pp2 zero3 dp2", zero_bubble(dp=2, zero=3), TIED),
    Case(
        "zb-h1 pp2 zero3 dp2, full recomputation, no reshard",
        zero_bubble(dp=2, zero=3, recompute="full", reshard=False),
        CLASSIC,
    ),
    Case("zb-h1 pp2 ep2 dp2", zero_bubble(dp=2, ep=2), MIXTURE, FOUR),
]
CASES = [replace(case, train=FOUR) if case.train is TRAIN else case for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


# -- the comparison bites ------------------------------------------------------------------------------------------------


def drop_a_weight_gradient(program):
    """The second microbatch's weight gradients are forgotten on the last stage."""
    executor = program.executor
    if program.comm.index("pp") == program.comm.size("pp") - 1:
        wrong = [a for a in executor.table if not (a.phase == "weight_grad" and a.microbatch == 1)]
        executor.table = tuple(wrong)


def forget_the_embedding(program):
    """A lookup leaves nothing."""
    if program.comm.index("pp") == 0:
        later = program.executor.later
        keep = later.leave
        later.leave = lambda piece: None if piece.kept[0].dtype == torch.int64 else keep(piece)
        take = later.take

        def with_zeros(stand_ins):
            table = stand_ins["embedding.weight"]
            table.grad = torch.zeros_like(table)
            return take(stand_ins)

        later.take = with_zeros


def announce_too_early(program):
    """Gradients are reduced from the backward before the last weight gradients on: those of the last are missing."""
    last = {action.chunk: action for action in program.executor.table if action.phase == "weight_grad"}
    program.executor._last_gradient = {
        chunk: action._replace(microbatch=action.microbatch - 1) for chunk, action in last.items()
    }
    reduce = program.comm.all_reduce

    def at_once(tensor, axis, **how):
        """Without this a reduction that is slow enough would meet the last gradients all the same."""
        return Ready(reduce(tensor, axis, **how).wait())

    program.comm.all_reduce = at_once


def swap_the_chunks(program):
    """Every rank runs its second chunk of layers where its first one's turn is; the ends stay at their places."""
    first, second = program.executor.chunks
    first.layers, second.layers = second.layers, first.layers


def reuse_a_message_that_went_round(program):
    """The first stage computes its second chunk of each microbatch on the message of the first one."""
    arrived, first = program.executor._arrived, []

    def stale(action):
        x = arrived(action)
        if x is None or (action.phase, action.chunk, program.comm.index("pp")) != ("forward", 1, 0):
            return x
        first.append(x.clone())
        return first[0].clone()

    program.executor._arrived = stale


MISTAKES = [
    (drop_a_weight_gradient, zero_bubble(dp=2, bucket_mb=0.01)),
    (forget_the_embedding, zero_bubble(dp=2)),
    (announce_too_early, zero_bubble(dp=2, bucket_mb=1e-6)),
    (swap_the_chunks, two(dp=2)),
    (reuse_a_message_that_went_round, two(dp=2)),
]


@pytest.mark.parametrize(("mistake", "parallel"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_noticed(pool, mistake, parallel):
    case = Case(mistake.__name__, parallel, CLASSIC, replace(FOUR, steps=1))
    assert difference(pool, case, mistake) > 0.05


# -- torch's own pipelines -------------------------------------------------------------------------------------------------

ORACLE = ModelConfig(layers=4, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=20, seq=6)
ORACLE_TRAIN = replace(FOUR, microbatch_size=1, padding=0.5)


class Part(nn.Module):
    """One of our stages as torch's pipeline wants it: one tensor in, one out, the microbatch found by its tokens."""

    def __init__(self, stage, batch):
        super().__init__()
        self.stage, self.batch = stage, batch
        self.calls = 0

    def forward(self, x):
        microbatch = self.batch.microbatches[self.calls % len(self.batch.microbatches)]
        self.calls += 1
        y = self.stage(None if self.stage.first else x, microbatch, self.batch.valid_tokens)
        return y.view(1) if self.stage.last else y


def torch_pipeline(rank, schedule):
    """Gradients of torch's pipeline on two ranks with two chunks each; each chunk meets the microbatches in order."""
    if rank >= 2:
        torch.distributed.new_group([0, 1])
        return None
    group = torch.distributed.new_group([0, 1])
    batch = local_batch(ORACLE, ORACLE_TRAIN, 1, 0, 0)
    parts, stages = [], []
    shape = (ORACLE.seq, 1, ORACLE.hidden)
    for place in (rank, 2 + rank):
        module = Stage(ORACLE, NullRecorder(), [place], place == 0, place == 3, dtype=torch.float64)
        initialise(module, ORACLE, seed=ORACLE_TRAIN.seed)
        parts.append(Part(module, batch))
        example = torch.zeros(shape, dtype=torch.float64, requires_grad=place > 0)
        output = torch.zeros((1,) if place == 3 else shape, dtype=torch.float64, requires_grad=True)
        stages.append(
            PipelineStage(
                parts[-1], place, 4, torch.device("cpu"), input_args=(example,), output_args=(output,), group=group
            )
        )
    kind = {"interleaved": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}[schedule]
    pipeline = kind(stages, len(batch.microbatches), loss_fn=lambda loss, target: loss.sum(), scale_grads=False)
    whole = torch.zeros(len(batch.microbatches) * shape[0], *shape[1:], dtype=torch.float64)
    inputs = (whole,) if rank == 0 else ()
    target = {"target": torch.zeros(len(batch.microbatches))} if rank == 1 else {}
    pipeline.step(*inputs, **target)
    return {name: p.grad for part in parts for name, p in part.stage.named_parameters()}


def ours(rank, parallel):
    from equality import on_rank

    case = Case("oracle", parallel, ORACLE, replace(ORACLE_TRAIN, steps=1))
    steps = on_rank(rank, case)
    return None if steps is None else steps[0].gradients


@pytest.mark.parametrize(
    ("schedule", "parallel"), [("interleaved", two()), ("zero bubble", zero_bubble())], ids=["interleaved", "zb"]
)
def test_torch_agrees(pool, schedule, parallel):
    """torch's zero bubble is an interleaved one (its backward too is split in two): the sums are the same."""
    theirs: dict[str, torch.Tensor] = {}
    for gradients in pool.run(torch_pipeline, schedule)[:2]:
        theirs |= gradients
    mine: dict[str, torch.Tensor] = {}
    for gradients in pool.run(ours, parallel)[:2]:
        mine |= gradients
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-11, atol=1e-14, msg=name)
