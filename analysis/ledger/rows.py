"""What the ledger needs of one rank, taken out of its columns once: device work, communications, waits, steps, launches.

Everything after this works on these arrays, so the columns themselves can be forgotten rank by rank.
Times are in the rank's own clock, int64 ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.analysis.run import Columns, Run
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
        return looked_up(launch, self.calls["launch_id"], self.calls["start"])


def looked_up(keys: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of the first id that equals each key, -1 for none: by a table where ids are dense, else by sorting."""
    answer = np.full(len(keys), -1, np.int64)
    if len(ids) == 0 or len(keys) == 0:
        return answer
    low, span = int(ids.min()), int(ids.max()) - int(ids.min()) + 1
    dense = span <= 16 * len(ids) + 1024
    if dense and 8 * len(keys) < len(ids):  # a few of many: leave out the rest first
        wanted = np.zeros(span, bool)
        wanted[keys[(keys >= low) & (keys < low + span)] - low] = True
        chosen = np.flatnonzero(wanted[ids - low])
        ids, values, dense = ids[chosen], values[chosen], False
        if len(ids) == 0:
            return answer
    if dense:
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
    """Take one rank's rows out of the run, piece by piece: most rows are the host's, and few of those matter."""
    strings, lanes = run.strings(rank), run.lanes(rank)
    steps = _step_numbers(strings)
    pieces: list[_Piece] = []
    before = 0
    for events in run.pieces(rank, *EVERY_ROW, *COMM_ROW):
        pieces.append(_piece(events, before, steps))
        before += len(events["kind"])
    device = _joined([piece.device for piece in pieces])
    on_host = np.array([one.role == "host" for one in lanes] + [False], bool)
    waits = _joined([piece.waits for piece in pieces])
    order = np.argsort(waits["start"], kind="stable")
    return RankRows(
        rank=rank,
        strings=strings,
        lanes=lanes,
        host=bool(on_host[device["lane"]].all()) if len(device["lane"]) else True,
        device_rows=device["row"],
        kind=device["kind"],
        lane=device["lane"],
        start=device["start"],
        end=device["end"],
        launch=device["launch"],
        impossible=device["impossible"],
        comm=_joined([piece.comm for piece in pieces]),
        waits={name: values[order] for name, values in waits.items()},
        steps=_annotations(_joined([piece.steps for piece in pieces]), steps, lanes),
        calls=_joined([piece.calls for piece in pieces]),
        stages=tuple(sorted({stage for piece in pieces for stage in piece.stages})),
        partial=any(piece.partial for piece in pieces),
    )


@dataclass
class _Piece:
    """What matters of consecutive rows; fields as of RankRows."""

    device: Columns
    comm: Columns
    waits: Columns
    steps: Columns
    calls: Columns
    stages: tuple[int, ...]
    partial: bool


def _piece(events: Columns, before: int, steps: dict[int, int]) -> _Piece:
    """`before`: rows of the rank in front of these; `steps`: name ids of step annotations."""
    kind, flags = events["kind"], events["flags"]
    end = events["start_ns"] + events["dur_ns"]
    device = np.flatnonzero((kind == COMPUTE) | (kind == COMM) | (kind == MEMCPY))
    comm, waits = np.flatnonzero(kind == COMM), np.flatnonzero(kind == WAIT)
    host = kind == HOST
    calls = np.flatnonzero(host & (events["launch_id"] >= 0))
    annotations = np.flatnonzero(host & np.isin(events["name_id"], list(steps)))
    return _Piece(
        device={
            "row": device + before,
            "kind": kind[device],
            "lane": events["lane"][device],
            "start": events["start_ns"][device],
            "end": end[device],
            "launch": events["launch_id"][device],
            "impossible": (flags[device] & FLAG_IMPOSSIBLE) != 0,
        },
        comm={name: events[name][comm] for name in (*COMM_ROW, "lane", "name_id", "launch_id")}
        | {
            "row": comm + before,
            "start": events["start_ns"][comm],
            "end": end[comm],
            "impossible": (flags[comm] & FLAG_IMPOSSIBLE) != 0,
        },
        waits={"start": events["start_ns"][waits], "end": end[waits], "op_id": events["op_id"][waits]},
        steps={"start": events["start_ns"][annotations], "end": end[annotations]}
        | {name: events[name][annotations] for name in ("name_id", "lane", "flags")},
        calls={"launch_id": events["launch_id"][calls], "start": events["start_ns"][calls]},
        stages=_stages(events["stage"][device]),
        partial=bool((flags & FLAG_PARTIAL).any()),
    )


def _joined(pieces: list[Columns]) -> Columns:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _stages(stage: np.ndarray) -> tuple[int, ...]:
    named = stage[stage >= 0]
    return tuple(np.flatnonzero(np.bincount(named)).tolist()) if len(named) else ()


def _step_numbers(strings: tuple[str, ...]) -> dict[int, int]:
    """Name id -> number, of the names of step annotations."""
    return {
        code: int(text[len(STEP_ANNOTATION) :])
        for code, text in enumerate(strings)
        if text.startswith(STEP_ANNOTATION) and text[len(STEP_ANNOTATION) :].isdecimal()
    }


def _annotations(rows: Columns, numbers: dict[int, int], lanes: tuple[Lane, ...]) -> Columns:
    """Each step's number and extent, by start. A profiler repeats its annotations on device streams: not those."""
    device = {lane.index for lane in lanes if lane.stream >= 0 or lane.name.startswith("stream")}
    best: dict[int, tuple[Any, ...]] = {}
    columns = (rows[name].tolist() for name in ("name_id", "lane", "start", "end", "flags"))
    for name, lane, start, end, flags in zip(*columns, strict=True):
        number = numbers[name]
        entry = (lane in device, start, end, flags & FLAG_PARTIAL)
        best[number] = min(entry, best.get(number, entry))
    found = sorted((start, stop, number, cut) for number, (_, start, stop, cut) in best.items())
    table = np.array(found, np.int64).reshape(-1, 4)
    return {"number": table[:, 2], "start": table[:, 0], "end": table[:, 1], "partial": table[:, 3] != 0}
