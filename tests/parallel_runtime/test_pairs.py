"""What the files of single strategies leave out of the matrix of pairs; AdamW, float32, bfloat16 once for each strategy.

The matrix, with the file that holds the rest of it: docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality import (
    CLASSIC,
    GROUPED,
    TIED,
    TOLERANCE,
    TRAIN,
    Case,
    difference,
    gathered,
    on_rank,
    reference,
    relative,
)

from stepscope.parallel_runtime.clip import EPSILON
from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.mesh import Mesh

P = ParallelConfig
FEW = replace(TRAIN, microbatches=2)
SHORT = replace(GROUPED, layers=2, seq=8, vocab=32)
BIASES = replace(CLASSIC, layers=2, seq=8, vocab=32)
TABLE = replace(TIED, kv_heads=2, layers=2, seq=8, vocab=32)
WIDE = replace(SHORT, hidden=32, heads=8, kv_heads=4, ffn=40)  # key and value heads for tp 2 and two ranks of ulysses

PAIRS = [
    Case("zero1 dp2 tp2", P(dp=2, tp=2, zero=1), BIASES, FEW),
    Case("zero2 dp2 tp2", P(dp=2, tp=2, zero=2), TABLE, FEW),
    Case("zero1 dp2 tp2 sp", P(dp=2, tp=2, sp=True, zero=1), BIASES, FEW),
    *(Case(f"zero{level} dp2 cp2 ring", P(dp=2, cp=2, zero=level), SHORT, FEW) for level in (1, 2)),
    Case("zero2 dp2 cp2 ulysses", P(dp=2, cp=2, zero=2, cp_mode="ulysses"), BIASES, FEW),
    Case("zero3 dp2 cp2 all-gather", P(dp=2, cp=2, zero=3, cp_mode="allgather"), TABLE, FEW),
    *(Case(f"zero{level} cp2, dp 1", P(cp=2, zero=level), SHORT, FEW) for level in (1, 2)),
    Case("tp2 cp2 all-gather", P(tp=2, cp=2, cp_mode="allgather"), WIDE, FEW),
    Case("tp2 cp2 ring, biases, contiguous", P(tp=2, cp=2, cp_layout="contiguous"), BIASES, FEW),
]
TRIPLES = [
    Case("zero3 dp2 tp2 sp pp2", P(dp=2, tp=2, sp=True, pp=2, zero=3), TABLE, FEW),
    Case("zero1 dp2 tp2 pp2", P(dp=2, tp=2, pp=2, zero=1), TABLE, FEW),
    Case("zero2 dp2 cp2 pp2", P(dp=2, cp=2, pp=2, zero=2), TABLE, FEW),
    Case("dp2 cp2 tp2 all-gather", P(dp=2, cp=2, tp=2, cp_mode="allgather"), BIASES, FEW),
]
EACH = {
    "dp": P(dp=2, bucket_mb=0.01),
    "zero1": P(dp=2, zero=1),
    "zero2": P(dp=2, zero=2),
    "zero3": P(dp=2, zero=3),
    "tp": P(tp=2),
    "sp": P(tp=2, sp=True),
    **{mode: P(cp=2, cp_mode=mode) for mode in ("ring", "ulysses", "allgather")},
    "pp": P(pp=2),
}


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_pairs_equal_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


@pytest.mark.parametrize("case", TRIPLES, ids=lambda case: case.name)
def test_triples_equal_one_process(eight, case):
    assert difference(eight, case) < TOLERANCE


@pytest.mark.parametrize("strategy", EACH)
def test_adamw(pool, strategy):
    """It divides by roots of squares, so the rounding of small gradients shows more."""
    train = replace(FEW, optimizer="adamw", lr=0.01, weight_decay=0.1)
    assert difference(pool, Case("adamw", EACH[strategy], TABLE, train)) < 1e-11


@pytest.mark.parametrize("strategy", EACH)
def test_float32(pool, strategy):
    """Units in the last place: neither exact nor wrong."""
    worst = difference(pool, Case("float32", EACH[strategy], BIASES, replace(FEW, dtype="float32")))
    assert 1e-8 < worst < 1e-4


@pytest.mark.parametrize("strategy", [name for name in EACH if not name.startswith("zero")])
def test_bfloat16_is_near_one_process_in_full(pool, strategy):
    """Within units of the last place of the model in float32, as tests/parallel_runtime/test_zero.py has it for ZeRO."""
    parallel, resolution = EACH[strategy], 2**-8
    ranks = pool.run(on_rank, Case("bfloat16", parallel, SHORT, replace(FEW, dtype="bfloat16")))
    ranks = ranks[: parallel.world_size]
    for number, wanted in enumerate(reference(SHORT, replace(FEW, dtype="float32"), parallel.dp)):
        losses = [rank[number].loss for rank in ranks if rank[number].loss is not None]
        assert losses == pytest.approx([wanted.loss] * len(losses), rel=2 * resolution)
        for name, whole in gathered([rank[number].parameters for rank in ranks], Mesh.of(parallel)):
            assert whole.dtype == torch.bfloat16
            assert relative(whole.float(), wanted.parameters[name]) < 4 * resolution, name


@pytest.mark.parametrize(
    "parallel",
    [
        P(dp=2, tp=2, sp=True, pp=2),
        P(dp=2, cp=2, tp=2),
        P(dp=2, tp=2, pp=2, zero=3),
        P(dp=2, cp=2, tp=2, sp=True, zero=2),
    ],
    ids=["dp2 tp2 sp pp2", "dp2 cp2 tp2", "zero3 dp2 tp2 pp2", "zero2 dp2 cp2 tp2 sp"],
)
def test_clipping_over_three_axes(eight, parallel):
    """The norm counts each parameter once over all axes, the tied one too: as if one process had clipped."""
    train = replace(FEW, clip=0.5, steps=1)
    (step,) = reference(TABLE, replace(train, clip=0.0), parallel.dp)
    norm = torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm()
    assert norm > 0.6, "nothing to clip"
    ranks = eight.run(on_rank, Case("clip", parallel, TABLE, train))
    for name, whole in gathered([rank[0].gradients for rank in ranks], Mesh.of(parallel)):
        assert relative(whole, step.gradients[name] * (0.5 / (norm + EPSILON))) < TOLERANCE, name
