"""The lanes of one rank as the timeline draws them, from the column store and the ledger's segments; nothing is drawn.

The first lane is the ledger's account of the rank: its compute operations, and where none runs, the term the instant
belongs to. Below it lie the operations themselves: other compute streams, one lane a communication axis (more where
operations of one axis overlap), memory copies, and on demand the host's rows. A communication is cut where it stops
waiting and starts transferring, and where compute starts and stops hiding it, so that its pieces say what they cost.
What a rank had issued and not finished when its recording ended waits in one queue a stream: it is one lane, named so.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

import numpy as np

from stepscope.analysis.run import RankData
from stepscope.dashboard import text
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.pieces import (
    MAX_DEPTH,
    TERM_CATEGORY,
    Clock,
    Pieces,
    Segments,
    layers,
    merged,
    pack_streams,
    split,
    uncovered,
)
from stepscope.dashboard.theme import CODE, TERM_LABEL
from stepscope.tracer.schema import AXES, FLAG_PARTIAL, KINDS, PHASES, code_of

COMPUTE, COMM, MEMCPY, HOST = (code_of(KINDS, kind) for kind in ("compute", "comm", "memcpy", "host"))
HOST_DEPTH = 8
"""Host rows nested deeper are left to the table of events."""

_PHASE_CATEGORY = np.array([CODE.get(phase, CODE["compute"]) for phase in (*PHASES, "other")], np.uint8)
"""By phase code; the last entry answers for -1."""


class Labels:
    """The run's table of labels: text -> id, one for all ranks, safe between threads."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []
        self._lock = Lock()

    def id_of(self, label: str) -> int:
        """Id of a label, new ones included."""
        with self._lock:
            if label not in self._ids:
                self._ids[label] = len(self._texts)
                self._texts.append(label)
            return self._ids[label]

    def text_of(self, identity: int) -> str:
        """The label, cut to what a person can use."""
        return text.name(self._texts[identity])

    def containing(self, wanted: str) -> np.ndarray:
        """Boolean by label id: those that contain `wanted`, whatever the case."""
        wanted = wanted.casefold()
        return np.array([wanted in label.casefold() for label in list(self._texts)], dtype=bool)


def build_tracks(
    rank: int, data: RankData, segments: Segments, last_arrival: np.ndarray, clock: Clock, labels: Labels
) -> list[Track]:
    """The lanes of one rank.

    `last_arrival`: per event row when its last partner arrived, in common time after the origin; below 0 where it is
    not known.
    """
    lanes = _RankLanes(rank, data, segments, clock, labels)
    return [
        *lanes.account_and_compute(),
        *lanes.communication(last_arrival),
        *lanes.plain("memcpy", MEMCPY, MAX_DEPTH),
        *lanes.plain("host", HOST, HOST_DEPTH),
    ]


class _RankLanes:
    """One rank while its lanes are made."""

    def __init__(self, rank: int, data: RankData, segments: Segments, clock: Clock, labels: Labels) -> None:
        self.rank, self.segments, self.labels = rank, segments, labels
        self.events = data.events
        self.start = clock(data.events["start_ns"])
        self.end = clock(data.events["start_ns"] + data.events["dur_ns"])
        self.name = _label_ids(data, labels)
        self.lane_name = {lane.index: lane.name for lane in data.lanes}
        self.unfinished = (data.events["kind"] == COMM) & ((data.events["flags"] & FLAG_PARTIAL) > 0)
        if self.unfinished.any():
            self._queue_unfinished()

    def _queue_unfinished(self) -> None:
        """Draw each unfinished communication up to the next of its stream, and say in its name what it is.

        A stream does one operation at a time, so all behind the first only waited for it; yet the recording can only
        say of each that it lasted from its issue to the end of the recording, one over the other.
        """
        self.end = self.end.copy()
        for rows in self.streams(COMM).values():
            queue = rows[self.unfinished[rows]]
            self.end[queue[:-1]] = np.minimum(self.end[queue[:-1]], self.start[queue[1:]])
        known, inverse = np.unique(self.name[self.unfinished], return_inverse=True)
        named = [self.labels.id_of(f"{self.labels.text_of(int(one))} · unfinished") for one in known]
        self.name[self.unfinished] = np.array(named, np.uint32)[inverse.reshape(-1)]

    def pieces(self, rows: np.ndarray, category: np.ndarray) -> Pieces:
        """Whole events as pieces."""
        return Pieces(self.start[rows], self.end[rows], category, self.name[rows], rows.astype(np.int32))

    def streams(self, kind: int) -> dict[int, np.ndarray]:
        """Rows of a kind by lane, each sorted by start."""
        rows = np.flatnonzero(self.events["kind"] == kind)
        lanes = self.events["lane"][rows]
        return {int(lane): rows[lanes == lane] for lane in np.unique(lanes)}

    def account_and_compute(self) -> list[Track]:
        """The ledger's account on the busiest compute stream, then the other compute streams."""
        compute = self.streams(COMPUTE)
        busiest: Pieces | None = None
        others: list[Track] = []
        for lane in sorted(compute, key=lambda one: -int(self.events["dur_ns"][compute[one]].sum())):
            rows = compute[lane]
            for depth, at in enumerate(layers(self.start[rows], self.end[rows])):
                mine = self.pieces(rows[at], _PHASE_CATEGORY[self.events["phase"][rows[at]]])
                if busiest is None:
                    busiest = mine
                else:
                    title = self.lane_name.get(lane, "compute") if depth == 0 else ""
                    others.append(mine.track(self.rank, "compute", title))
        rest = _unexplained(self.segments, busiest, bool(others), self.labels)
        account = merged([rest] if busiest is None else [busiest, rest])
        return [account.track(self.rank, "account", "compute"), *others]

    def communication(self, last_arrival: np.ndarray) -> list[Track]:
        """One lane an axis (several where operations of one axis overlap), cut by what each instant costs."""
        axis_of = self.events["axis"]
        by_axis: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for lane, rows in self.streams(COMM).items():
            for axis in np.unique(axis_of[rows]):
                mine = rows[axis_of[rows] == axis]
                parts = (mine[~self.unfinished[mine]], mine[self.unfinished[mine]])
                by_axis[int(axis)] += [(lane, part) for part in parts if len(part)]
        tracks = []
        for axis in sorted(by_axis, key=lambda code: code if code >= 0 else len(AXES)):
            label = AXES[axis] if axis >= 0 else "communication"
            packed = pack_streams(by_axis[axis], self.start, self.end)
            for depth, (lanes, rows) in enumerate(packed):
                stream = self.lane_name.get(lanes[0], "") if len(set(lanes)) == 1 and len(packed) > 1 else ""
                whole = self.pieces(rows, np.zeros(len(rows), np.uint8))
                pieces = split(whole, last_arrival[rows], self.segments)
                title = stream or (label if depth == 0 else "")
                if depth and self.unfinished[rows].all():
                    title = f"{stream or label} unfinished"
                tracks.append(pieces.track(self.rank, "comm", title))
        return tracks

    def plain(self, role: str, kind: int, most: int) -> list[Track]:
        """Streams drawn as they are, overlapping or nested rows on lanes of their own."""
        tracks = []
        for lane, rows in self.streams(kind).items():
            found = self.pieces(rows, np.full(len(rows), CODE[role], np.uint8))
            for depth, at in enumerate(layers(found.start, found.end, most)):
                name = self.lane_name.get(lane, "")
                title = "" if depth else f"copy {name}".strip() if role == "memcpy" else name or role
                tracks.append(found.take(at).track(self.rank, role, title))
        return tracks


def _label_ids(data: RankData, labels: Labels) -> np.ndarray:
    """Per event the id of its label: its name, and the microbatch where there is one."""
    names, microbatch = data.events["name_id"].astype(np.int64), data.events["microbatch"].astype(np.int64)
    spread = int(microbatch.max(initial=-1)) + 2
    key, inverse = np.unique(names * spread + microbatch + 1, return_inverse=True)
    ids = np.zeros(len(key), np.uint32)
    for i, value in enumerate(key.tolist()):
        name_id, batch = value // spread, value % spread - 1
        label = data.strings[name_id] if 0 <= name_id < len(data.strings) else "unnamed"
        ids[i] = labels.id_of(f"{label} · mb {batch}" if batch >= 0 else label)
    return ids[inverse.reshape(-1)] if len(names) else np.zeros(0, np.uint32)


def _unexplained(segments: Segments, busy: Pieces | None, elsewhere: bool, labels: Labels) -> Pieces:
    """The ledger's segments that the first lane's own operations do not explain, idle left empty.

    `elsewhere`: whether any compute lies on another lane.
    """
    category = segments.category
    wanted = (category != CODE["idle"]) & (category != CODE["compute"])
    start, end, category = segments.start[wanted], segments.end[wanted], category[wanted]
    compute = segments.category == CODE["compute"]
    if elsewhere and compute.any():  # compute on another stream while this one rests
        gaps = uncovered(segments.start[compute], segments.end[compute], busy)
        start = np.concatenate([start, gaps[0]])
        end = np.concatenate([end, gaps[1]])
        category = np.concatenate([category, np.full(len(gaps[0]), CODE["compute"], np.uint8)])
    ids = np.zeros(256, np.uint32)
    for term, code in TERM_CATEGORY.items():
        ids[code] = labels.id_of(TERM_LABEL[term] if term != "compute" else "compute on another stream")
    return Pieces(start, end, category, ids[category], np.full(len(start), -1, np.int32))
