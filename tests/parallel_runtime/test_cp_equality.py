"""Context parallelism computes what one process computes: every mode and layout, alone and with the other axes.

Long enough padding leaves some ranks without a valid token in some microbatches. The last test makes mistakes on purpose.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from equality import GROUPED, TOLERANCE, Case, difference

from stepscope.parallel_runtime.config import CP_LAYOUTS, CP_MODES, ParallelConfig

P = ParallelConfig
LONG = replace(GROUPED, layers=2, seq=16)
EIGHT = replace(LONG, hidden=32, heads=8, kv_heads=4)  # heads and key and value heads for four ranks of Ulysses
MODES = [{"cp_mode": mode, "cp_layout": layout} for mode in CP_MODES for layout in CP_LAYOUTS]
CASES = [
    *(Case(f"cp2 {' '.join(mode.values())}", P(cp=2, **mode), LONG) for mode in MODES),
    *(Case(f"cp4 {' '.join(mode.values())}", P(cp=4, **mode), EIGHT) for mode in MODES),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    d = difference(pool, case)
    print(case.name, d)
    assert d < TOLERANCE
