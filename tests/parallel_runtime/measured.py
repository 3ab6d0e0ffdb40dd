"""Prints the table *Measured* of docs/numerics.md: the largest difference of each family of equality cases.

.venv/bin/python tests/parallel_runtime/measured.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import matrix
import test_cp_equality
import test_ep_equality
import test_equality
import test_pairs
import test_pp_equality
import test_tensor_parallel
import test_zero_equality
import torch
from equality import Case, difference
from pool import Pool

ADAMW = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}
SINGLE = {"float32": {"dtype": "float32"}, "AdamW": ADAMW}

FAMILIES: dict[str, tuple[Iterable[Case], Iterable[str]]] = {
    "dp, pp and both": (test_equality.CASES, ("dp", "pp")),
    "zero1, zero2, zero3, alone and with one other axis": (test_zero_equality.CASES, ("zero1", "zero2", "zero3")),
    "tp, sp, alone and with dp, pp": (test_tensor_parallel.CASES, ("tp", "sp")),
    "cp in each mode, alone and with dp, pp, tp, sp": (test_cp_equality.CASES, ("ring", "ulysses", "allgather")),
    "ep with each balance, alone and with the other axes": (test_ep_equality.CASES, ("ep",)),
    "interleaved, alone and with each other axis": (
        [case for case in test_pp_equality.CASES if case.parallel.schedule == "interleaved"],
        ("interleaved",),
    ),
    "zb-h1, alone and with each other axis": (
        [case for case in test_pp_equality.CASES if case.parallel.schedule == "zb-h1"],
        ("zb-h1",),
    ),
    "the other pairs": ([*test_pairs.PAIRS, *test_pairs.REST], ()),
    "three axes and more": (
        [*test_tensor_parallel.EIGHT, *test_cp_equality.EIGHT, *test_ep_equality.EIGHT, *test_pairs.TRIPLES],
        (),
    ),
    "everything at once (`-m slow`)": (test_ep_equality.EVERYTHING, ()),
}
"""Family -> (its cases in float64 with SGD, the strategies that also run in AdamW and float32)."""


def single(strategy: str, train: dict[str, object]) -> Case:
    """A strategy alone with another optimizer or type, as test_pairs.py and test_ep_equality.py have it."""
    fields = replace(test_pairs.FEW, **train)
    if strategy == "ep":
        return Case(strategy, test_pairs.P(dp=2, pp=2, ep=2), test_ep_equality.TABLE, fields)
    return Case(strategy, test_pairs.EACH[strategy], test_pairs.DEEP, fields)


def main() -> None:
    """One row a family."""
    torch.set_num_threads(1)
    pools = {size: Pool(size) for size in (4, 8)}

    def worst(cases: Iterable[Case]) -> str:
        found = [difference(pools[4 if case.parallel.world_size <= 4 else 8], case) for case in cases]
        return f"{max(found):.1e}".replace("e-0", "e-") if found else ""

    print(f"{len(matrix.pairs())} pairs; torch {torch.__version__}")
    for family, (cases, strategies) in FAMILIES.items():
        cells = [worst([single(name, SINGLE[kind]) for name in strategies]) for kind in ("AdamW", "float32")]
        print(f"| {family} | {len(list(cases))} | {worst(cases)} | {cells[0]} | {cells[1]} |", flush=True)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
