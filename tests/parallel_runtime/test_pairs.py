"""Every legal pair of ways to run in parallel: what the files of single strategies leave out of the matrix is here.

AdamW, float32, bfloat16 once for each strategy. The matrix, with the file of each pair: docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matrix
import pytest
import test_cp_equality
import test_ep_equality
import test_equality
import test_pp_equality
import test_tensor_parallel
import test_zero_equality
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
from stepscope.parallel_runtime.config import ParallelConfig, check
from stepscope.parallel_runtime.mesh import Mesh

P = ParallelConfig
FEW = replace(TRAIN, microbatches=2)
SHORT = replace(GROUPED, layers=2, seq=8, vocab=32)
BIASES = replace(CLASSIC, layers=2, seq=8, vocab=32)
TABLE = replace(TIED, kv_heads=2, layers=2, seq=8, vocab=32)
WIDE = replace(SHORT, hidden=32, heads=8, kv_heads=4, ffn=40)  # key and value heads for tp 2 and two ranks of ulysses
DEEP = replace(TABLE, layers=4)  # a layer for each of two chunks of two stages
MIXED = replace(DEEP, **matrix.EXPERTS)

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
FILES = {
    "E": test_equality.CASES,
    "T": test_tensor_parallel.CASES,
    "C": test_cp_equality.CASES,
    "Z": test_zero_equality.CASES,
    "P": test_pp_equality.CASES,
    "X": [*test_ep_equality.CASES, *test_ep_equality.EIGHT],
    "M": PAIRS,
}
"""Letter of the matrix -> the cases of its file."""

REST = [matrix.case_of(pair) for pair in matrix.pairs() if pair not in matrix.covered(FILES)]
TRIPLES = [
    Case("zero3 dp2 tp2 sp pp2", P(dp=2, tp=2, sp=True, pp=2, zero=3), TABLE, FEW),
    Case("zero1 dp2 tp2 pp2", P(dp=2, tp=2, pp=2, zero=1), TABLE, FEW),
    Case("zero2 dp2 cp2 pp2", P(dp=2, cp=2, pp=2, zero=2), TABLE, FEW),
    Case("dp2 cp2 tp2 all-gather", P(dp=2, cp=2, tp=2, cp_mode="allgather"), BIASES, FEW),
    Case("interleaved dp2 tp2 sp pp2", P(dp=2, tp=2, sp=True, **matrix.WAYS["pp"]["interleaved"]), DEEP, FEW),
    Case("interleaved zero3 dp2 cp2 pp2", P(dp=2, cp=2, zero=3, **matrix.WAYS["pp"]["interleaved"]), DEEP, FEW),
    Case("interleaved dp2 tp2 ep4 pp2", P(dp=2, tp=2, ep=4, **matrix.WAYS["pp"]["interleaved"]), MIXED, FEW),
    Case("zb-h1 dp2 cp2 pp2 ulysses", P(dp=2, cp=2, cp_mode="ulysses", **matrix.WAYS["pp"]["zb-h1"]), BIASES, FEW),
    Case("zb-h1 cp2 tp2 sp ep2 pp2", P(cp=2, tp=2, sp=True, ep=2, **matrix.WAYS["pp"]["zb-h1"]), MIXED, FEW),
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
    **{name: P(**matrix.WAYS["pp"][name]) for name in ("interleaved", "zb-h1")},
}
NUMERICS = Path(__file__).parents[2] / "docs/numerics.md"


@pytest.mark.parametrize("case", [*PAIRS, *REST], ids=lambda case: case.name)
def test_pairs_equal_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


def test_the_matrix_by_hand():
    """The ways two by two; what belongs to a layout's ways and what only carries them."""
    dp, tp, cp, ep, pp = (len(ways) for ways in matrix.WAYS.values())
    assert (dp, tp, cp, ep, pp) == (4, 2, 3, 1, 5)
    assert len(matrix.pairs()) == 4 * (2 + 3 + 1 + 5) + 2 * (3 + 1 + 5) + 3 * (1 + 5) + 5 == 85
    assert matrix.ways_of(P(dp=2, ep=2)) == {"dp", "ep"}
    assert matrix.ways_of(P(dp=2, ep=2, pp=2)) == {"ep", "1f1b"}
    assert matrix.ways_of(P(dp=2, ep=2, tp=2)) == {"dp", "ep", "tp"}
    assert matrix.ways_of(P(cp=2, zero=1, cp_mode="ulysses")) == {"zero1", "cp ulysses"}
    assert matrix.ways_of(P(tp=2, sp=True, pp=2, schedule="zb-h1")) == {"sp", "zb-h1"}


@pytest.mark.parametrize("pair", matrix.pairs(), ids=lambda pair: " ".join(sorted(pair)))
def test_the_case_of_a_pair_is_of_that_pair_and_legal(pair):
    case = matrix.case_of(pair)
    assert matrix.ways_of(case.parallel) == pair
    check(case.model, case.parallel, case.train)
    assert case.parallel.world_size == 4 or "ep" in pair


def test_the_documentation_holds_the_matrix():
    """Every pair and every way alone has its file; the page is what `matrix.table` makes."""
    found = matrix.covered({**FILES, "M": [*PAIRS, *REST]})
    assert not [pair for pair in matrix.pairs() if pair not in found]
    assert [way for way in matrix.AXIS_OF if frozenset((way,)) not in found] == ["ep"]  # it lies over another axis
    wanted = matrix.table(found)
    assert wanted in NUMERICS.read_text(), f"docs/numerics.md lacks the matrix:\n{wanted}"


@pytest.mark.parametrize("case", TRIPLES, ids=lambda case: case.name)
def test_triples_equal_one_process(eight, case):
    assert difference(eight, case) < TOLERANCE


@pytest.mark.parametrize("strategy", EACH)
def test_adamw(pool, strategy):
    """It divides by roots of squares, so the rounding of small gradients shows more."""
    train = replace(FEW, optimizer="adamw", lr=0.01, weight_decay=0.1)
    assert difference(pool, Case("adamw", EACH[strategy], DEEP, train)) < 1e-11


@pytest.mark.parametrize("strategy", EACH)
def test_float32(pool, strategy):
    """Units in the last place: neither exact nor wrong."""
    worst = difference(pool, Case("float32", EACH[strategy], replace(BIASES, layers=4), replace(FEW, dtype="float32")))
    assert 1e-8 < worst < 1e-4


@pytest.mark.parametrize("strategy", [name for name in EACH if not name.startswith("zero")])
def test_bfloat16_is_near_one_process_in_full(pool, strategy):
    """Within units of the last place of the model in float32, as tests/parallel_runtime/test_zero.py has it for ZeRO."""
    parallel, resolution = EACH[strategy], 2**-8
    model = replace(SHORT, layers=4 if strategy == "interleaved" else 2)
    ranks = pool.run(on_rank, Case("bfloat16", parallel, model, replace(FEW, dtype="bfloat16")))
    ranks = ranks[: parallel.world_size]
    for number, wanted in enumerate(reference(model, replace(FEW, dtype="float32"), parallel.dp)):
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
