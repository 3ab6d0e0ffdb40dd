"""Whole-trace figures in plain Python: another way than the product's, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepscope.analysis.run import Columns
from stepscope.tracer.schema import KINDS

COMPUTE, COMM, MEMCPY, HOST = (KINDS.index(kind) for kind in ("compute", "comm", "memcpy", "host"))


def cover(events: Columns, *kinds: int) -> list[tuple[int, int]]:
    """Union of the rows of some kinds, as disjoint intervals (in plain Python: another way than the product's)."""
    rows = np.isin(events["kind"], kinds) & (events["dur_ns"] > 0)
    starts, ends = events["start_ns"][rows], events["start_ns"][rows] + events["dur_ns"][rows]
    union: list[tuple[int, int]] = []
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(union: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in union)


def whole_trace(events: Columns) -> dict[str, Any]:
    compute, comm = length(cover(events, COMPUTE)), length(cover(events, COMM))
    with_comm, with_all = length(cover(events, COMPUTE, COMM)), length(cover(events, COMPUTE, COMM, MEMCPY))
    device = events["kind"] != HOST
    start = events["start_ns"][device].min()
    window = int((events["start_ns"] + events["dur_ns"])[device].max() - start)
    return {
        "window": window,
        "compute": compute,
        "comm": comm,
        "visible": with_comm - compute,
        "memcpy": with_all - with_comm,
        "idle": window - with_all,
        "hidden": compute + comm - with_comm,
        "overlap": (compute + comm - with_comm) / comm if comm else None,
    }
