"""Idle time explained, as far as rows tell: why nothing of a rank was in flight.

Each idle stretch of the ledger goes to the first reason that applies; together they are the ledger's idle time exactly.
Definitions: definitions.md, Idle time.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.decompose import Decomposition, step_column
from stepscope.analysis.ledger.rows import HOST, RankRows, rank_rows
from stepscope.analysis.ledger.steps import Windows
from stepscope.analysis.run import Run
from stepscope.tracer.schema import STEP_ANNOTATION

REASONS = ("synchronisation", "launch_bound", "queued", "host_work", "head", "tail", "unexplained")
"""In the order in which they are tried."""

IDLE_COLUMNS = ("rank", "step", "idle_ns", *(f"{reason}_ns" for reason in REASONS))
"""One row a rank and step; the reasons sum to `idle_ns`, which is the ledger's."""

SYNCHRONISES = re.compile(r"[sS]ynchronize|_local_scalar_dense|^(cuda|hip)Memcpy$")
"""Calls that stop the host until the device is done, by name."""


def idle(run: Run, decomposition: Decomposition) -> pd.DataFrame:
    """IDLE_COLUMNS of every rank and step, ns."""
    frames = []
    for rank, time in decomposition.time.items():
        windows, where = decomposition.windows[rank], time.terms["idle"]
        if not windows.steps:
            continue
        explained = _explained(run, rank, windows, where) if len(where[0]) else dict.fromkeys(REASONS, where)
        columns = {"rank": np.full(len(windows.steps), rank), "step": step_column(windows.steps)}
        for name, what in {"idle": where, **explained}.items():
            columns[f"{name}_ns"] = intervals.covered(what, windows.start_ns, windows.end_ns)
        frames.append(pd.DataFrame({name: columns[name] for name in IDLE_COLUMNS}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(IDLE_COLUMNS))


def _explained(run: Run, rank: int, windows: Windows, idle_time: Intervals) -> dict[str, Intervals]:
    """Reason -> its instants (own clock): disjoint, together `idle_time`."""
    rows = rank_rows(run, rank)
    stopped, working = _host_rows(run, rank)
    start, end = idle_time
    launched = _launch_of_next(rows, end)
    held = _touched(stopped, start, end)
    found = {"synchronisation": (start[held], end[held])}
    late = ~held & (launched >= start)
    found["launch_bound"] = (start[late], end[late])
    left = (start[~held & ~late], end[~held & ~late])
    found["queued"] = intervals.intersect(left, intervals.union(rows.waits["start"], rows.waits["end"]))
    left = intervals.subtract(left, found["queued"])
    unknown = ~held & ~late & (launched < 0)
    work = intervals.intersect((start[unknown], end[unknown]), intervals.union(*working))
    found["host_work"] = intervals.intersect(left, work)
    left = intervals.subtract(left, found["host_work"])
    for name, edges in zip(("head", "tail"), _edges(rows, windows), strict=True):
        found[name] = intervals.intersect(left, edges)
        left = intervals.subtract(left, found[name])
    return {**found, "unexplained": left}


def _host_rows(run: Run, rank: int) -> tuple[Intervals, Intervals]:
    """(synchronising calls, all other work of the host's threads) as recorded: starts and ends, in no order."""
    columns, strings = run.columns(rank, "kind", "start_ns", "dur_ns", "name_id"), run.strings(rank)
    chosen = np.flatnonzero((columns["kind"] == HOST) & (columns["dur_ns"] > 0) & (columns["name_id"] >= 0))
    name, start = columns["name_id"][chosen], columns["start_ns"][chosen]
    end = start + columns["dur_ns"][chosen]
    used = np.unique(name).tolist()
    stops = np.isin(name, [code for code in used if SYNCHRONISES.search(strings[code])])
    marks = np.isin(name, [code for code in used if strings[code].startswith(STEP_ANNOTATION)])
    works = ~stops & ~marks
    return (start[stops], end[stops]), (start[works], end[works])


def _launch_of_next(rows: RankRows, end: np.ndarray) -> np.ndarray:
    """Start of the call that launched the device row which ends each idle stretch; -1 where that is not recorded."""
    order = np.argsort(rows.start, kind="stable")
    place = np.searchsorted(rows.start[order], end)
    following = place < len(order)
    answer = np.full(len(end), -1, np.int64)
    answer[following] = rows.launched_at(rows.launch[order[place[following]]])
    return answer


def _touched(calls: Intervals, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether some call is in progress at the start of each stretch, or within it."""
    low, high = intervals.union(*calls)
    place = np.searchsorted(low, end)
    return (place > 0) & (np.append(high, 0)[place - 1] > start)


def _edges(rows: RankRows, windows: Windows) -> tuple[Intervals, Intervals]:
    """(before the first device row that begins in each window, after the last that ends in it)."""
    low, high = windows.start_ns, windows.end_ns
    if len(rows.start) == 0:
        return intervals.union(low, high), intervals.EMPTY
    starts, ends = np.sort(rows.start), np.sort(rows.end)
    first = np.minimum(np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, low)], high)
    last = np.append(ends, 0)[np.searchsorted(ends, high, "right") - 1]
    return intervals.union(low, first), intervals.union(np.maximum(last, first), high)
