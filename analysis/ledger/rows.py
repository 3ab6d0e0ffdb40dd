"""What the ledger needs of one rank, taken out of its columns once: device work, communications, waits, steps, launches.

Everything after this works on these arrays, so the columns themselves can be forgotten rank by rank.
Times are in the rank's own clock, int64 ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.analysis.run import Columns, RankData, Run
from stepscope.tracer.schema import FLAG_IMPOSSIBLE, FLAG_PARTIAL, KINDS, STEP_ANNOTATION, Lane

COMPUTE, COMM, WAIT, MEMCPY, HOST = (KINDS.index(kind) for kind in ("compute", "comm", "wait", "memcpy", "host"))

EVERY_ROW = ("lane", "start_ns", "dur_ns", "kind", "name_id", "launch_id", "flags", "stage")
COMM_ROW = (
    "axis",
    "strategy",
    "collective",
    "bytes",
    "group_id",
    "seq",
    "peer",
    "peer_from",
    "op_id",
    "issue_ns",
    "dtype_id",
    "in_elements",
    "out_elements",
)


@dataclass
class RankRows:
    """One rank's rows by what they are. `*_rows` are indices into the rank's events, in the store's order."""

    rank: int
    strings: tuple[str, ...]
    lanes: tuple[Lane, ...]
    host: bool  # no device row: its communication are annotations of host threads
    device_rows: np.ndarray
    kind: np.ndarray  # int8, of each device row, as all of the following
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    launch: np.ndarray  # launch_id of each device row
    impossible: np.ndarray  # bool
    comm: Columns  # COMM_ROW and row, lane, start, end, name_id, launch_id, impossible of each communication
    waits: Columns  # start, end, op_id of each wait row
    steps: Columns  # number, start, end, partial of each step annotation, by start
    calls: Columns  # launch_id, start of each launching call
    stages: tuple[int, ...]  # stages that its rows name
    partial: bool  # some row says that the file ended before it should

    def of_kind(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of the device rows of one kind, in the store's order."""
        chosen = self.kind == kind
        return self.start[chosen], self.end[chosen]

    def launched_at(self, launch: np.ndarray) -> np.ndarray:
        """Start of the call with each of these launch ids, -1 without one."""
        return _looked_up(launch, self.calls["launch_id"], self.calls["start"])


def _looked_up(keys: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of the first id that equals each key, -1 for none: by a table where ids are dense, else by sorting."""
    answer = np.full(len(keys), -1, np.int64)
    if len(ids) == 0 or len(keys) == 0:
        return answer
    low, span = int(ids.min()), int(ids.max()) - int(ids.min()) + 1
    if span <= 16 * len(ids) + 1024:
        inside = np.flatnonzero((keys >= low) & (keys < low + span))
        table = np.full(span, -1, np.int64)
        table[ids[::-1] - low] = values[::-1]
        answer[inside] = table[keys[inside] - low]
        return answer
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], keys), len(ids) - 1)
    hit = ids[order][place] == keys
    answer[hit] = values[order][place[hit]]
    return answer


def rank_rows(run: Run, rank: int) -> RankRows:
    """Take one rank's rows out of the run."""
    data = run.part(rank, *EVERY_ROW, *COMM_ROW)
    events = data.events
    kind, start, lane = events["kind"], events["start_ns"], events["lane"]
    end = start + events["dur_ns"]
    device = np.flatnonzero((kind == COMPUTE) | (kind == COMM) | (kind == MEMCPY))
    on_host = np.array([one.role == "host" for one in data.lanes] + [False], bool)
    impossible = (events["flags"][device] & FLAG_IMPOSSIBLE) != 0
    return RankRows(
        rank=rank,
        strings=data.strings,
        lanes=data.lanes,
        host=bool(on_host[lane[device]].all()) if len(device) else True,
        device_rows=device,
        kind=kind[device],
        lane=lane[device],
        start=start[device],
        end=end[device],
        launch=events["launch_id"][device],
        impossible=impossible,
        comm=_communications(events, np.flatnonzero(kind == COMM), end),
        waits=_waits(events, np.flatnonzero(kind == WAIT), end),
        steps=_annotations(data, end),
        calls=_calls(events),
        stages=_stages(events["stage"][device]),
        partial=bool((events["flags"] & FLAG_PARTIAL).any()),
    )


def _communications(events: Columns, rows: np.ndarray, end: np.ndarray) -> Columns:
    found = {name: events[name][rows] for name in (*COMM_ROW, "lane", "name_id", "launch_id")}
    impossible = (events["flags"][rows] & FLAG_IMPOSSIBLE) != 0
    return found | {"row": rows, "start": events["start_ns"][rows], "end": end[rows], "impossible": impossible}


def _waits(events: Columns, rows: np.ndarray, end: np.ndarray) -> Columns:
    order = rows[np.argsort(events["start_ns"][rows], kind="stable")]
    return {"start": events["start_ns"][order], "end": end[order], "op_id": events["op_id"][order]}


def _calls(events: Columns) -> Columns:
    rows = np.flatnonzero((events["kind"] == HOST) & (events["launch_id"] >= 0))
    return {"launch_id": events["launch_id"][rows], "start": events["start_ns"][rows]}


def _stages(stage: np.ndarray) -> tuple[int, ...]:
    named = stage[stage >= 0]
    return tuple(np.flatnonzero(np.bincount(named)).tolist()) if len(named) else ()


def _annotations(data: RankData, end: np.ndarray) -> Columns:
    """Each step's number and extent, by start. A profiler repeats its annotations on device streams: not those."""
    numbers = {
        code: int(text[len(STEP_ANNOTATION) :])
        for code, text in enumerate(data.strings)
        if text.startswith(STEP_ANNOTATION) and text[len(STEP_ANNOTATION) :].isdecimal()
    }
    events = data.events
    rows = np.flatnonzero((events["kind"] == HOST) & np.isin(events["name_id"], list(numbers)))
    device = {lane.index for lane in data.lanes if lane.stream >= 0 or lane.name.startswith("stream")}
    best: dict[int, tuple[Any, ...]] = {}
    for row in rows.tolist():
        number = numbers[int(events["name_id"][row])]
        cut = int(events["flags"][row]) & FLAG_PARTIAL
        entry = (int(events["lane"][row]) in device, int(events["start_ns"][row]), int(end[row]), cut)
        best[number] = min(entry, best.get(number, entry))
    found = sorted((start, stop, number, cut) for number, (_, start, stop, cut) in best.items())
    columns = np.array(found, np.int64).reshape(-1, 4)
    return {"number": columns[:, 2], "start": columns[:, 0], "end": columns[:, 1], "partial": columns[:, 3] != 0}
