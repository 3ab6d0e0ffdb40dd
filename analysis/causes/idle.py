"""Idle time explained, as far as rows tell: why nothing of a rank was in flight.

Each idle stretch of the ledger goes to the first reason that applies; together they are the ledger's idle time exactly.
Definitions: definitions.md, Idle time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.decompose import Decomposition, step_column
from stepscope.analysis.ledger.rows import COMM, COMPUTE, HOST, MEMCPY, looked_up
from stepscope.analysis.ledger.steps import Windows
from stepscope.analysis.ledger.summary import RankSummary
from stepscope.analysis.ledger.waits import QUEUE_GAP_NS
from stepscope.analysis.run import Columns, Run
from stepscope.tracer.schema import STEP_ANNOTATION

REASONS = (
    *("synchronisation", "launch_bound", "queued", "hand_over", "device_gap", "held"),
    *("host_work", "head", "tail", "unexplained"),
)
"""In the order in which they are tried."""

IDLE_COLUMNS = ("rank", "step", "idle_ns", *(f"{reason}_ns" for reason in REASONS))
"""One row a rank and step; the reasons sum to `idle_ns`, which is the ledger's."""

SYNCHRONISES = re.compile(r"[sS]ynchronize|_local_scalar_dense|^(cuda|hip)Memcpy$")
"""Calls that stop the host until the device is done, by name."""

NEEDED = ("kind", "start_ns", "dur_ns", "name_id", "launch_id")


def idle(run: Run, decomposition: Decomposition) -> pd.DataFrame:
    """IDLE_COLUMNS of every rank and step, ns."""
    frames = []
    for rank, time in decomposition.time.items():
        windows, where = decomposition.windows[rank], time.terms["idle"]
        if not windows.steps:
            continue
        explained = _explained(run, time.summary, where) if len(where[0]) else dict.fromkeys(REASONS, where)
        columns = {"rank": np.full(len(windows.steps), rank), "step": step_column(windows.steps)}
        for name, what in {"idle": where, **explained}.items():
            columns[f"{name}_ns"] = intervals.covered(what, windows.start_ns, windows.end_ns)
        frames.append(pd.DataFrame({name: columns[name] for name in IDLE_COLUMNS}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(IDLE_COLUMNS))


def _explained(run: Run, summary: RankSummary, idle_time: Intervals) -> dict[str, Intervals]:
    """Reason -> its instants (own clock): disjoint, together `idle_time`."""
    rows = _rows(run, summary.rank)
    start, end = idle_time
    launched = _launch_of_next(rows, end)
    held = _touched(rows.stopped, start, end)
    found = {"synchronisation": (start[held], end[held])}
    late = ~held & (launched >= start)
    found["launch_bound"] = (start[late], end[late])
    left = (start[~held & ~late], end[~held & ~late])
    unknown = ~held & ~late & (launched < 0)
    ready = ~held & ~late & (launched >= 0)
    short = ready & (end - start <= QUEUE_GAP_NS)
    candidates = {
        "queued": intervals.union(summary.waits["start"], summary.waits["end"]),
        "hand_over": _handed_over(summary.comm["issue_ns"], start, end),
        "device_gap": (start[short], end[short]),
        "held": (start[ready & ~short], end[ready & ~short]),
        "host_work": intervals.intersect((start[unknown], end[unknown]), intervals.union(*rows.working)),
        **dict(zip(("head", "tail"), _edges(rows, summary.windows), strict=True)),
    }
    for name, instants in candidates.items():
        found[name] = intervals.intersect(left, instants)
        left = intervals.subtract(left, found[name])
    return {**found, "unexplained": left}


def _handed_over(issued: np.ndarray, start: np.ndarray, end: np.ndarray) -> Intervals:
    """Of each stretch the part from the first communication on that is issued in it."""
    issued = np.sort(issued[issued >= 0])
    first = np.append(issued, np.iinfo(np.int64).max)[np.searchsorted(issued, start)]
    some = first < end
    return first[some], end[some]


# -- the rows that tell ------------------------------------------------------------------------------------------------


@dataclass
class _Rows:
    """Device rows of one rank, the calls that launched them, and what its host did: starts and ends, in no order."""

    start: np.ndarray
    end: np.ndarray
    launch: np.ndarray  # launch_id of each device row
    calls: Columns  # launch_id, start
    stopped: Intervals  # calls that wait for the device
    working: Intervals  # all other rows of the host's threads


def _rows(run: Run, rank: int) -> _Rows:
    """One pass over the rank's rows, piece by piece."""
    device: list[tuple[np.ndarray, ...]] = []
    host: list[tuple[np.ndarray, ...]] = []
    calls: list[tuple[np.ndarray, ...]] = []
    for events in run.pieces(rank, *NEEDED):
        kind, start, length = events["kind"], events["start_ns"], events["dur_ns"]
        on_device = np.flatnonzero((kind == COMPUTE) | (kind == COMM) | (kind == MEMCPY))
        device.append((start[on_device], start[on_device] + length[on_device], events["launch_id"][on_device]))
        on_host = np.flatnonzero(kind == HOST)
        launching = on_host[events["launch_id"][on_host] != -1]
        calls.append((events["launch_id"][launching], start[launching]))
        named = on_host[(length[on_host] > 0) & (events["name_id"][on_host] >= 0)]
        host.append((start[named], start[named] + length[named], events["name_id"][named]))
    starts, ends, launch = (np.concatenate(column) for column in zip(*device, strict=True))
    launch_id, called = (np.concatenate(column) for column in zip(*calls, strict=True))
    begin, stop, name = (np.concatenate(column) for column in zip(*host, strict=True))
    role = _roles(run.strings(rank), name)[name]
    return _Rows(
        start=starts,
        end=ends,
        launch=launch,
        calls={"launch_id": launch_id, "start": called},
        stopped=(begin[role == STOPS], stop[role == STOPS]),
        working=(begin[role == WORKS], stop[role == WORKS]),
    )


WORKS, STOPS, MARKS = 0, 1, 2


def _roles(strings: tuple[str, ...], names: np.ndarray) -> np.ndarray:
    """Of each string: WORKS, STOPS (waits for the device) or MARKS (a step); only those that `names` holds are looked at."""
    role = np.zeros(len(strings) + 1, np.int8)
    used = np.zeros(len(strings) + 1, bool)
    used[names] = True
    for code in np.flatnonzero(used).tolist():
        if strings[code].startswith(STEP_ANNOTATION):
            role[code] = MARKS
        elif SYNCHRONISES.search(strings[code]):
            role[code] = STOPS
    return role


def _launch_of_next(rows: _Rows, end: np.ndarray) -> np.ndarray:
    """Start of the call that launched the device row which ends each idle stretch; -1 where that is not recorded."""
    order = np.argsort(rows.start, kind="stable")
    place = np.searchsorted(rows.start[order], end)
    following = place < len(order)
    answer = np.full(len(end), -1, np.int64)
    next_launch = rows.launch[order[place[following]]]
    answer[following] = looked_up(next_launch, rows.calls["launch_id"], rows.calls["start"])
    return answer


def _touched(calls: Intervals, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether some call is in progress at the start of each stretch, or within it."""
    low, high = intervals.union(*calls)
    place = np.searchsorted(low, end)
    return (place > 0) & (np.append(high, 0)[place - 1] > start)


def _edges(rows: _Rows, windows: Windows) -> tuple[Intervals, Intervals]:
    """(before the first device row that begins in each window, after the last that ends in it)."""
    low, high = windows.start_ns, windows.end_ns
    if len(rows.start) == 0:
        return intervals.union(low, high), intervals.EMPTY
    starts, ends = (np.sort(one, kind="stable") for one in (rows.start, rows.end))  # sorted lane by lane already
    first = np.minimum(np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, low)], high)
    last = np.append(ends, 0)[np.searchsorted(ends, high, "right") - 1]
    return intervals.union(low, first), intervals.union(np.maximum(last, first), high)
