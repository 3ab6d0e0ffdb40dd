"""Context parallelism computes what one process computes: every mode and layout, alone and with the other axes.

Padding leaves some ranks without a valid token in some microbatches. The last tests make mistakes on purpose.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality import CLASSIC, GROUPED, TIED, TOLERANCE, TRAIN, Case, difference, on_rank, reference, relative

from stepscope.parallel_runtime.clip import EPSILON
from stepscope.parallel_runtime.comm import Ready
from stepscope.parallel_runtime.config import CP_LAYOUTS, CP_MODES, ParallelConfig
from stepscope.parallel_runtime.cp.layouts import positions_of
from stepscope.parallel_runtime.data import IGNORED, sequences

P = ParallelConfig
MODES = [{"cp_mode": mode, "cp_layout": layout} for mode in CP_MODES for layout in CP_LAYOUTS]
ULYSSES = {"cp_mode": "ulysses"}
GATHER = {"cp_mode": "allgather"}
FLAT = {"cp_layout": "contiguous"}

SHORT = replace(GROUPED, layers=2, seq=16, vocab=32)
WIDE = replace(
    SHORT, hidden=32, heads=8, kv_heads=4, ffn=40
)  # key and value heads for four ranks of ulysses, or two and tp
BIASES = replace(CLASSIC, layers=2, seq=16, vocab=32)
TABLE = replace(TIED, layers=2, seq=16, vocab=32)  # one key and value head
FEW = replace(TRAIN, microbatches=2)

CASES = [
    *(Case(f"cp2 {' '.join(mode.values())}", P(cp=2, **mode), SHORT) for mode in MODES),
    *(Case(f"cp4 {' '.join(mode.values())}", P(cp=4, **mode), WIDE) for mode in MODES),
    Case("cp2 ring, as many key heads, biases", P(cp=2), BIASES),
    Case("cp4 ring, one key head, tied", P(cp=4), TABLE),
    Case("cp3 ring", P(cp=3), replace(SHORT, seq=18)),
    Case("cp2 ulysses, biases", P(cp=2, **ULYSSES), BIASES),
    Case("cp2 ring, one microbatch, no padding", P(cp=2), SHORT, replace(TRAIN, microbatches=1, padding=0.0)),
    Case("cp2 ring without overlap", P(cp=2, overlap=False, bucket_mb=0.01), SHORT),
    *(Case(f"cp2 {mode}, dropout", P(cp=2, cp_mode=mode), replace(BIASES, dropout=0.25), FEW) for mode in CP_MODES),
    *(Case(f"cp2 {mode}, selective", P(cp=2, cp_mode=mode, recompute="selective"), WIDE, FEW) for mode in CP_MODES),
    Case("cp2 ring, full recomputation", P(cp=2, recompute="full"), replace(BIASES, dropout=0.25), FEW),
    Case("cp2 dp2 ring", P(cp=2, dp=2, bucket_mb=0.01), SHORT),
    Case("cp2 dp2 ulysses", P(cp=2, dp=2, **ULYSSES), BIASES, FEW),
    Case("cp2 dp2 all-gather", P(cp=2, dp=2, **GATHER, **FLAT), TABLE, FEW),
    Case("cp2 pp2 ring, tied", P(cp=2, pp=2), TABLE),
    Case("cp2 pp2 ulysses, gpipe", P(cp=2, pp=2, schedule="gpipe", **ULYSSES, **FLAT), SHORT),
    Case("cp2 pp2 all-gather", P(cp=2, pp=2, **GATHER), BIASES),
    Case("cp2 tp2 ring", P(cp=2, tp=2), SHORT, FEW),
    Case("cp2 tp2 sp ring", P(cp=2, tp=2, sp=True), replace(BIASES, dropout=0.25), FEW),
    Case("cp2 tp2 ulysses", P(cp=2, tp=2, **ULYSSES), WIDE, FEW),
    Case("cp2 tp2 sp ulysses", P(cp=2, tp=2, sp=True, **ULYSSES, **FLAT), WIDE, FEW),
    Case("cp2 tp2 sp all-gather, contiguous", P(cp=2, tp=2, sp=True, **GATHER, **FLAT), WIDE, FEW),
]
EIGHT = [
    Case("dp2 cp2 tp2 ring", P(dp=2, cp=2, tp=2, bucket_mb=0.01), SHORT, FEW),
    Case("dp2 cp2 tp2 sp ulysses", P(dp=2, cp=2, tp=2, sp=True, **ULYSSES), WIDE, FEW),
    Case("dp2 cp2 pp2 ring, tied", P(dp=2, cp=2, pp=2), TABLE, FEW),
    Case("cp2 tp2 sp pp2 all-gather", P(cp=2, tp=2, sp=True, pp=2, **GATHER), replace(BIASES, dropout=0.25), FEW),
]


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.name)
def test_three_axes_equal_one_process(eight, case):
    assert difference(eight, case) < TOLERANCE


def test_some_ranks_have_no_valid_token():
    """What the cases of four contiguous ranks rest on: shards of microbatches that are padding altogether."""
    last, empty = positions_of("contiguous", 4, 3, WIDE.seq), []
    for step in range(TRAIN.steps):
        _, targets_GS = sequences(WIDE, TRAIN, step, range(6))
        empty += [bool((part[:, last] == IGNORED).all()) for part in targets_GS.split(TRAIN.microbatch_size)]
    assert any(empty) and not all(empty)


def test_adamw(pool):
    """It divides by roots of squares, so the rounding of small gradients shows more."""
    train = replace(FEW, optimizer="adamw", lr=0.01, weight_decay=0.1)
    assert difference(pool, Case("adamw", P(cp=2, dp=2), TABLE, train)) < 1e-11


@pytest.mark.parametrize("mode", CP_MODES)
def test_float32(pool, mode):
    worst = difference(pool, Case("float32", P(cp=2, cp_mode=mode), BIASES, replace(FEW, dtype="float32")))
    assert 1e-8 < worst < 1e-4


def test_clipping(pool):
    """Ranks of cp hold equal gradients: the norm counts one of them."""
    train = replace(FEW, clip=0.5, steps=1)
    (step,) = reference(TABLE, replace(train, clip=0.0), 1)
    norm = torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm()
    assert norm > 0.6, "nothing to clip"
    for (got,) in pool.run(on_rank, Case("clip", P(cp=2, pp=2), TABLE, train)):
        for name, gradient in got.gradients.items():
            assert relative(gradient, step.gradients[name] * (0.5 / (norm + EPSILON))) < TOLERANCE, name


# -- the comparison bites ------------------------------------------------------------------------------------------------


def on_hop(program, stream, number, answer):
    """Hop `number` of every n on `stream` gives `answer(what was sent)`, though the message was sent."""
    shift, ranks, seen = program.comm.ring_shift, program.comm.size("cp"), []
    hops = ranks if stream == "cp.dkv" else ranks - 1

    def changed(tensor, axis, **how):
        handle = shift(tensor, axis, **how)
        if how["stream"] != stream:
            return handle
        seen.append(stream)
        if (len(seen) - 1) % hops != number:
            return handle
        handle.wait()
        return Ready(answer(tensor))

    program.comm.ring_shift = changed


def reuse_a_stale_block(program):
    """The second hop's keys and values are those that the rank had already."""
    on_hop(program, "cp.kv", 1, torch.clone)


def drop_the_last_hop(program):
    """Gradients of keys and values stay with the rank before the one that they belong to."""
    on_hop(program, "cp.dkv", program.comm.size("cp") - 1, torch.clone)


def lose_a_part_on_the_way(program):
    on_hop(program, "cp.dkv", 1, torch.zeros_like)


def forget_the_sum_over_cp(program):
    """Every rank of cp keeps the gradients of its own tokens."""
    reduce = program.comm.all_reduce

    def forgetful(tensor, axis, **how):
        return Ready(tensor) if how["strategy"] == "dp" else reduce(tensor, axis, **how)

    program.comm.all_reduce = forgetful


def rotate_by_local_position(program):
    """Each rank counts positions from 0."""
    run_executor = program.executor.run

    def local(batch, **how):
        moved = [m._replace(positions_S=torch.arange(m.positions_S.shape[0])) for m in batch.microbatches]
        return run_executor(batch._replace(microbatches=tuple(moved)), **how)

    program.executor.run = local


def drop_by_local_position(program):
    """Each rank counts its tokens from 0 for dropout."""
    run_executor = program.executor.run

    def local(batch, **how):
        moved = [m._replace(numbers_SB=m.numbers_SB - m.numbers_SB.min()) for m in batch.microbatches]
        return run_executor(batch._replace(microbatches=tuple(moved)), **how)

    program.executor.run = local


def average_over_own_tokens(program):
    """Each rank divides by its own valid tokens, each with the same weight."""
    stage, ranks = program.chunks[-1], program.comm.size("cp")
    forward = stage.forward

    def averaging(x, microbatch, valid_tokens):
        own = (microbatch.targets_SB != IGNORED).sum().clamp(min=1)
        return forward(x, microbatch, own * ranks * program.configuration.train.microbatches)

    stage.forward = averaging


def keep_the_order_of_ranks(program):
    """After the all-to-all the positions stand as the ranks hold them, not in the order of the sequence."""
    exchange, ranks = program.comm.all_to_all, program.comm.size("cp")

    def unordered(tensor, axis, send_rows, receive_rows, **how):
        rows = exchange(tensor, axis, send_rows, receive_rows, **how).wait()
        return Ready(rows.unflatten(0, (ranks, -1)).roll(1, 0).flatten(0, 1))

    program.comm.all_to_all = unordered


def forget_to_scatter(program):
    """Each rank keeps its own part of the gradients of its keys."""
    scatter, here = program.comm.reduce_scatter, program.comm.index("cp")

    def forgetful(tensor, axis, **how):
        scatter(tensor, axis, **how).wait()
        return Ready(tensor.chunk(program.comm.size("cp"))[here].clone())

    program.comm.reduce_scatter = forgetful


MISTAKES = [
    (reuse_a_stale_block, "ring"),
    (drop_the_last_hop, "ring"),
    (lose_a_part_on_the_way, "ring"),
    (forget_the_sum_over_cp, "ring"),
    (rotate_by_local_position, "ring"),
    (drop_by_local_position, "ring"),
    (average_over_own_tokens, "ring"),
    (keep_the_order_of_ranks, "ulysses"),
    (forget_the_sum_over_cp, "ulysses"),
    (forget_to_scatter, "allgather"),
    (forget_the_sum_over_cp, "allgather"),
]


@pytest.mark.parametrize(("mistake", "mode"), MISTAKES, ids=lambda value: getattr(value, "__name__", value))
def test_a_mistake_is_noticed(pool, mistake, mode):
    model = replace(WIDE, dropout=0.25)
    case = Case("four ranks", P(cp=4, cp_mode=mode), model, replace(FEW, steps=1))
    assert difference(pool, case) < TOLERANCE
    assert difference(pool, case, mistake) > 1e-3
