"""ZeRO computes what one process computes: every level and option, alone and with the other axes (equality.py).

The last test makes mistakes on purpose and sees that the comparison notices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from equality import BIASED, CLASSIC, GROUPED, TIED, TOLERANCE, Case, difference

from stepscope.parallel_runtime.config import ParallelConfig

P = ParallelConfig
MODEL = replace(GROUPED, layers=3)  # 5103 elements of a layer and 30 rows: neither divides by four
TIED_SMALL = replace(TIED, layers=2, kv_heads=2)
CLASSIC_SMALL = replace(CLASSIC, layers=2)
LONG = replace(GROUPED, layers=2, seq=16)
CASES = [
    Case("zero1 dp2", P(dp=2, zero=1), MODEL),
    Case("zero1 dp4, no overlap", P(dp=4, zero=1, overlap=False), TIED_SMALL),
    Case("zero2 dp2", P(dp=2, zero=2), CLASSIC_SMALL),
    Case("zero2 dp4", P(dp=4, zero=2), MODEL),
    Case("zero2 dp2, no overlap", P(dp=2, zero=2, overlap=False), TIED_SMALL),
    Case("zero3 dp2", P(dp=2, zero=3), MODEL),
    Case("zero3 dp4", P(dp=4, zero=3), CLASSIC_SMALL),
    Case("zero3 dp2, no reshard", P(dp=2, zero=3, reshard=False), MODEL),
    Case("zero3 dp4 tied, no reshard, no overlap", P(dp=4, zero=3, reshard=False, overlap=False), TIED_SMALL),
    Case("zero3 dp2 tied, prefetch 0", P(dp=2, zero=3, prefetch=0), TIED_SMALL),
    Case("zero3 dp2 tied, prefetch 2", P(dp=2, zero=3, prefetch=2), replace(TIED, layers=3)),
    Case("zero3 dp2, full recomputation", P(dp=2, zero=3, recompute="full"), CLASSIC_SMALL),
    Case("zero3 dp2, selective, no reshard", P(dp=2, zero=3, recompute="selective", reshard=False), MODEL),
    *(Case(f"zero{level} dp4, two copies", P(dp=4, zero=level, replicate=2), TIED_SMALL) for level in (1, 2, 3)),
    Case("zero3 dp4, two copies, no overlap", P(dp=4, zero=3, replicate=2, overlap=False), MODEL),
    *(Case(f"zero{level} dp2 pp2 tied", P(dp=2, pp=2, zero=level), TIED) for level in (1, 2, 3)),
    Case("zero3 dp2 pp2 gpipe, no reshard", P(dp=2, pp=2, zero=3, schedule="gpipe", reshard=False), BIASED),
    Case("zero3 dp2 tp2", P(dp=2, tp=2, zero=3), BIASED),
    Case("zero2 dp2 tp2 sp, tied", P(dp=2, tp=2, sp=True, zero=2), TIED_SMALL),
    Case("zero3 dp2 tp2 sp", P(dp=2, tp=2, sp=True, zero=3), CLASSIC_SMALL),
    Case("zero3 cp2", P(cp=2, zero=3), LONG),
    Case("zero3 dp2 cp2", P(dp=2, cp=2, zero=3), LONG),
    Case("zero1 dp2 cp2, a copy each place of dp", P(dp=2, cp=2, zero=1, replicate=2), LONG),
    Case("zero3 dp2 offload", P(dp=2, zero=3, offload="cpu"), MODEL),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE
