"""What the files of single strategies leave out of the matrix of pairs, and AdamW and float32 once for each strategy.

The matrix, with the file that holds the rest of it: docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from equality import CLASSIC, GROUPED, TIED, TOLERANCE, TRAIN, Case, difference

from stepscope.parallel_runtime.config import ParallelConfig

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
