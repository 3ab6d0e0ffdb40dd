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

SLICE = 1 << 16
"""Device rows that are worked on at a time."""

COMPUTE, COMM, WAIT, MEMCPY, HOST = (KINDS.index(kind) for kind in ("compute", "comm", "wait", "memcpy", "host"))

EVERY_ROW = ("lane", "start_ns", "dur_ns", "kind", "name_id", "launch_id", "flags", "stage", "op_id")
COMM_ROW = (
    "axis",
    "strategy",
    "collective",
    "bytes",
    "group_id",
    "seq",
    "peer",
    "peer_from",
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
    comm: Columns  # COMM_ROW and op_id, row, lane, start, end, name_id, launch_id, impossible of each communication
    waits: Columns  # start, end, op_id of each wait row
    steps: Columns  # number, start, end, partial of each step annotation, by start
    calls: Columns  # launch_id, start of each call that launched one of them, by id
    stages: tuple[int, ...]  # stages that its rows name
    partial: bool  # some row says that the file ended before it should

    def slices(self) -> Iterator[slice]:
        """The device rows, some at a time."""
        for at in range(0, len(self.start), SLICE):
            yield slice(at, at + SLICE)

    def forget_launches(self) -> None:
        """Give up what tells which call launched a row, once the windows are known."""
        self.launch = self.launch[:0].copy()
        self.calls = {name: values[:0].copy() for name, values in self.calls.items()}

    def calls_of(self) -> Lookup:
        """Start of the call with a launch id, -1 without one."""
        return Lookup(self.calls["launch_id"], self.calls["start"])


class Lookup:
    """The value of the first id that equals each key, -1 for none."""

    def __init__(self, ids: np.ndarray, values: np.ndarray) -> None:
        """`ids` and `values` (int64) are of one length; ids that are sorted are not copied."""
        if not (ids[1:] >= ids[:-1]).all():
            order = np.argsort(ids, kind="stable")
            ids, values = ids[order], values[order]
        self._ids, self._values = ids, values

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        """int64, one a key."""
        answer = np.full(len(keys), -1, np.int64)
        for at in range(0, len(keys), SLICE):
            self._answer(keys[at : at + SLICE], answer[at : at + SLICE])
        return answer

    def _answer(self, keys: np.ndarray, answer: np.ndarray) -> None:
        """Keys that follow each other are mostly near each other: by a table of the ids between them where those are dense."""
        if not len(keys) or not len(self._ids):
            return
        low, high = int(keys.min()), int(keys.max())
        first, last = np.searchsorted(self._ids, low), np.searchsorted(self._ids, high, "right")
        ids, values = self._ids[first:last], self._values[first:last]
        if not len(ids):
            return
        if high - low < 16 * (len(ids) + len(keys)):
            table = np.full(high - low + 1, -1, np.int32)
            table[ids[::-1] - low] = np.arange(
                len(ids) - 1, -1, -1, dtype=np.int32
            )  # the first of equal ids is written last
            place = table[keys - low]
            hit = place >= 0
        else:
            place = np.minimum(np.searchsorted(ids, keys), len(ids) - 1)
            hit = ids[place] == keys
        answer[hit] = values[place[hit]]


class Members:
    """Which of many ids are among some others: by a bit an id where they are dense, else by sorting."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids = np.sort(ids[ids != -1])
        self._bits: np.ndarray | None = None
        self._end = int(self._ids.max(initial=-1)) + 1
        if not len(self._ids) or (self._end <= 256 * len(self._ids) and self._ids[0] >= 0):
            self._bits = np.zeros((self._end >> 3) + 1, np.uint8)
            for low in range(0, self._end, 8 * SLICE):
                table = np.zeros(min(8 * SLICE, self._end - low), bool)
                first, last = np.searchsorted(self._ids, (low, low + len(table)))
                table[self._ids[first:last] - low] = True
                bits = np.packbits(table, bitorder="little")
                self._bits[low >> 3 : (low >> 3) + len(bits)] = bits
            self._ids = self._ids[:0].copy()

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """bool, one an id (none is -1)."""
        if self._bits is None:
            return self._ids[np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)] == ids
        inside = np.minimum(np.maximum(ids, 0), self._end)
        found: np.ndarray = (self._bits[inside >> 3] >> (inside & 7).astype(np.uint8)) & 1 != 0
        return found & (ids >= 0) & (ids < self._end)


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
    device, comm, waits, annotations, calls = (_Growing() for _ in range(5))
    before, stages, partial = 0, set[int](), False
    last_device_lane = max((lane.index for lane in lanes if lane.role != "host"), default=len(lanes))
    launches: Members | None = None
    for events in run.pieces(rank, *EVERY_ROW, rare=COMM_ROW, kinds=(COMM,)):
        piece = _piece(events, before, steps)
        before += len(events["kind"])
        if len(events["lane"]) and events["lane"][0] > last_device_lane:  # all device rows were seen
            if launches is None:
                launches = Members(device.so_far("launch"))
            # calls that launched nothing, events and synchronisations, are most of a trace's: they are forgotten
            kept = launches(piece.calls["launch_id"])
            piece.calls = {name: values[kept] for name, values in piece.calls.items()}
        device.append(piece.device)
        comm.append(piece.comm)
        waits.append(piece.waits)
        annotations.append(piece.steps)
        calls.append(piece.calls)
        stages |= piece.stages
        partial |= piece.partial
    work, held, called = device.whole(), waits.whole(), calls.whole()
    on_host = np.array([one.role == "host" for one in lanes] + [False], bool)
    order = np.argsort(held["start"], kind="stable")
    return RankRows(
        rank=rank,
        strings=strings,
        lanes=lanes,
        host=bool(on_host[work["lane"]].all()) if len(work["lane"]) else True,
        kind=work["kind"],
        lane=work["lane"],
        start=work["start"],
        end=work["end"],
        launch=work["launch"],
        comm=comm.whole(),
        waits={name: values[order] for name, values in held.items()},
        steps=_annotations(annotations.whole(), steps, lanes),
        calls=_by_id(called),
        stages=tuple(sorted(stages)),
        partial=partial,
    )


class _Growing:
    """Columns to which rows are added: no row is held twice while they grow, and none when they are done."""

    def __init__(self) -> None:
        self._columns: Columns = {}
        self._rows = 0

    def append(self, rows: Columns) -> None:
        """Further rows; a column takes the larger type of what it holds and what is added."""
        count = len(next(iter(rows.values())))
        end = self._rows + count
        for name, values in rows.items():
            column = self._columns.get(name, values[:0].copy())
            if (kind := np.promote_types(column.dtype, values.dtype)) != column.dtype:
                column = column.astype(kind)
            if end > len(column):  # the system moves pages, not bytes, where an array is large
                column.resize(max(end, len(column) * 9 // 8), refcheck=False)
            column[self._rows : end] = values
            self._columns[name] = column
        self._rows = end

    def so_far(self, name: str) -> np.ndarray:
        """What one column holds now; only until rows are added."""
        return self._columns[name][: self._rows]

    def whole(self) -> Columns:
        """The columns; nothing can be added after this."""
        for column in self._columns.values():
            column.resize(self._rows, refcheck=False)
        return self._columns


def _by_id(calls: Columns) -> Columns:
    """Calls by launch id, those of one id as they stood."""
    ids = calls["launch_id"]
    if (ids[1:] >= ids[:-1]).all():
        return calls
    order = np.argsort(ids, kind="stable")
    return {name: calls.pop(name)[order] for name in list(calls)}


@dataclass
class _Piece:
    """What matters of consecutive rows; fields as of RankRows."""

    device: Columns
    comm: Columns
    waits: Columns
    steps: Columns
    calls: Columns
    stages: set[int]
    partial: bool


def _piece(events: Columns, before: int, steps: dict[int, int]) -> _Piece:
    """`before`: rows of the rank in front of these; `steps`: name ids of step annotations."""
    kind, flags = events["kind"], events["flags"]
    end = events["start_ns"] + events["dur_ns"]
    device = np.flatnonzero((kind == COMPUTE) | (kind == COMM) | (kind == MEMCPY))
    comm, waits = np.flatnonzero(kind == COMM), np.flatnonzero(kind == WAIT)
    host = kind == HOST
    calls = np.flatnonzero(host & (events["launch_id"] != -1))
    annotations = np.flatnonzero(host & np.isin(events["name_id"], list(steps)))
    return _Piece(
        device={
            "kind": kind[device],
            "lane": _least(events["lane"][device]),
            "start": events["start_ns"][device],
            "end": end[device],
            "launch": _least(events["launch_id"][device]),
        },
        comm={name: events[name][comm] for name in (*COMM_ROW, "op_id", "lane", "name_id", "launch_id")}
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


def _least(values: np.ndarray) -> np.ndarray:
    """The same numbers in the least signed type that holds them (of one piece: joining takes the larger)."""
    if not len(values):
        return values.astype(np.int8)
    kind = np.result_type(np.min_scalar_type(min(int(values.min()), -1)), np.min_scalar_type(-1 - int(values.max())))
    return values.astype(kind)


def _stages(stage: np.ndarray) -> set[int]:
    named = stage[stage >= 0]
    return set(np.flatnonzero(np.bincount(named)).tolist()) if len(named) else set()


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
