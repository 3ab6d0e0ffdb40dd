"""What the ledger needs of one rank, taken out of its columns once: device work, communications, waits, steps, launches.

Everything after this works on these arrays, so the columns themselves can be forgotten rank by rank.
Times are in the rank's own clock, int64 ns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.analysis.run import Columns, Run
from stepscope.tracer.schema import FLAG_IMPOSSIBLE, FLAG_PARTIAL, KINDS, STEP_ANNOTATION, Lane

SLICE = 1 << 18
"""Device rows that are worked on at a time."""

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
    """One rank's rows by what they are.

    Of a rank's millions of device rows as few bytes are kept as will do: `lane` and `launch` have the least type that holds
    them, and what is large is worked on SLICE rows at a time.
    """

    rank: int
    strings: tuple[str, ...]
    lanes: tuple[Lane, ...]
    host: bool  # no device row: its communication are annotations of host threads
    kind: np.ndarray  # int8, of each device row in the store's order, as all of the following
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    launch: np.ndarray  # launch_id of each device row
    comm: Columns  # COMM_ROW and row, lane, start, end, name_id, launch_id, impossible of each communication
    waits: Columns  # start, end, op_id of each wait row
    steps: Columns  # number, start, end, partial of each step annotation, by start
    calls: Columns  # launch_id, start of each call that launched one of them
    stages: tuple[int, ...]  # stages that its rows name
    partial: bool  # some row says that the file ended before it should

    def slices(self) -> Iterator[slice]:
        """The device rows, some at a time."""
        for at in range(0, len(self.start), SLICE):
            yield slice(at, at + SLICE)

    def calls_of(self) -> Lookup:
        """Start of the call with a launch id, -1 without one."""
        return Lookup(self.calls["launch_id"], self.calls["start"])


class Lookup:
    """The value of the first id that equals each key, -1 for none: by a table where ids are dense, else by sorting."""

    def __init__(self, ids: np.ndarray, values: np.ndarray) -> None:
        """`ids` and `values` (int64) are of one length, which is less than 2 ** 31."""
        self._low = self._high = 0  # the ids lie between; nothing is found where there is none
        self._places = self._ids = np.empty(0, np.int32)  # of a dense id its place among the values, or the sorted ids
        self._values = values
        if len(ids) == 0:
            return
        self._low, self._high = int(ids.min()), int(ids.max()) + 1
        if self._high - self._low <= 6 * len(ids) + 1024:
            self._places = np.full(self._high - self._low, -1, np.int32)
            for at in range((len(ids) - 1) // SLICE * SLICE, -1, -SLICE):  # the first of equal ids is written last
                part = ids[at : at + SLICE]
                self._places[part[::-1] - self._low] = np.arange(at + len(part) - 1, at - 1, -1, dtype=np.int32)
        elif (ids[1:] >= ids[:-1]).all():
            self._ids = ids
        else:
            order = np.argsort(ids, kind="stable")
            self._ids, self._values = ids[order], values[order]

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        """int64, one a key."""
        answer = np.full(len(keys), -1, np.int64)
        inside = np.flatnonzero((keys >= self._low) & (keys < self._high))
        if not len(inside):
            return answer
        if len(self._places):
            place = self._places[keys[inside] - self._low]
            hit = place >= 0
        else:
            place = np.searchsorted(self._ids, keys[inside])
            hit = self._ids[place] == keys[inside]
        answer[inside[hit]] = self._values[place[hit]]
        return answer


class Members:
    """Which of many ids are among some others: by a bit an id where they are dense, else by sorting."""

    def __init__(self, ids: np.ndarray) -> None:
        ids = ids[ids >= 0]
        self._bits: np.ndarray | None = None
        self._end = int(ids.max(initial=-1)) + 1
        if self._end <= 256 * len(ids):
            table = np.zeros(self._end + 1, bool)
            table[ids] = True
            self._bits = np.packbits(table, bitorder="little")
        else:
            self._ids = np.sort(ids)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """bool, one an id (from 0 on)."""
        if self._bits is None:
            return self._ids[np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)] == ids
        inside = np.minimum(ids, self._end)
        found: np.ndarray = (self._bits[inside >> 3] >> (inside & 7).astype(np.uint8)) & 1 != 0
        return found & (ids < self._end)


def looked_up(keys: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`Lookup(ids, values)(keys)`; of few keys and many ids, the ids that are no key are left out first."""
    if 8 * len(keys) < len(ids):
        chosen = np.flatnonzero(Members(keys)(ids))
        ids, values = ids[chosen], values[chosen]
    return Lookup(ids, values)(keys)


def rank_rows(run: Run, rank: int) -> RankRows:
    """Take one rank's rows out of the run, piece by piece: most rows are the host's, and few of those matter."""
    strings, lanes = run.strings(rank), run.lanes(rank)
    steps = _step_numbers(strings)
    pieces: list[_Piece] = []
    before = 0
    last_device_lane = max((lane.index for lane in lanes if lane.role != "host"), default=len(lanes))
    launches: Members | None = None
    for events in run.pieces(rank, *EVERY_ROW, *COMM_ROW):
        pieces.append(_piece(events, before, steps))
        before += len(events["kind"])
        if len(events["lane"]) and events["lane"][0] > last_device_lane:  # all device rows were seen
            if launches is None:
                launches = Members(np.concatenate([piece.device["launch"] for piece in pieces]))
            # calls that launched nothing, events and synchronisations, are most of a trace's: they are forgotten
            kept = launches(pieces[-1].calls["launch_id"])
            pieces[-1].calls = {name: values[kept] for name, values in pieces[-1].calls.items()}
    partial = any(piece.partial for piece in pieces)
    stages = tuple(sorted({stage for piece in pieces for stage in piece.stages}))
    device, comm, waits, annotations, calls = (
        _joined([getattr(piece, name) for piece in pieces]) for name in ("device", "comm", "waits", "steps", "calls")
    )
    on_host = np.array([one.role == "host" for one in lanes] + [False], bool)
    order = np.argsort(waits["start"], kind="stable")
    return RankRows(
        rank=rank,
        strings=strings,
        lanes=lanes,
        host=bool(on_host[device["lane"]].all()) if len(device["lane"]) else True,
        kind=device["kind"],
        lane=device["lane"],
        start=device["start"],
        end=device["end"],
        launch=device["launch"],
        comm=comm,
        waits={name: values[order] for name, values in waits.items()},
        steps=_annotations(annotations, steps, lanes),
        calls=calls,
        stages=stages,
        partial=partial,
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
            "kind": kind[device],
            "lane": _least(events["lane"][device]),
            "start": events["start_ns"][device],
            "end": end[device],
            "launch": _least(events["launch_id"][device]),
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
        calls={"launch_id": _least(events["launch_id"][calls]), "start": events["start_ns"][calls]},
        stages=_stages(events["stage"][device]),
        partial=bool((flags & FLAG_PARTIAL).any()),
    )


def _joined(pieces: list[Columns]) -> Columns:
    """One array a column; the pieces give theirs up, so that no two columns are held twice."""
    return {name: np.concatenate([piece.pop(name) for piece in pieces]) for name in list(pieces[0])}


def _least(values: np.ndarray) -> np.ndarray:
    """The same numbers in the least signed type that holds them (of one piece: joining takes the larger)."""
    if not len(values):
        return values.astype(np.int8)
    kind = np.result_type(np.min_scalar_type(min(int(values.min()), -1)), np.min_scalar_type(-1 - int(values.max())))
    return values.astype(kind)


def _stages(stage: np.ndarray) -> tuple[int, ...]:
    named = stage[stage >= 0]
    return tuple(np.flatnonzero(np.bincount(named)).tolist()) if len(named) else ()


_STEP_NAME = re.compile(re.escape(STEP_ANNOTATION) + "[0-9]{1,18}")  # what a 64 bit column holds


def _step_numbers(strings: tuple[str, ...]) -> dict[int, int]:
    """Name id -> number, of the names of step annotations."""
    return {code: int(text[len(STEP_ANNOTATION) :]) for code, text in enumerate(strings) if _STEP_NAME.fullmatch(text)}


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
