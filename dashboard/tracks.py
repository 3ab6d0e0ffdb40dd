"""The lanes of one rank as the timeline draws them, from the column store and the ledger's segments; nothing is drawn.

The first lane is the ledger's account of the rank: its compute operations, and where none runs, the term the instant
belongs to. Below it lie the operations themselves: other compute streams, one lane a communication axis (more where
operations of one axis overlap), memory copies, and on demand the host's rows. A communication is cut where it stops
waiting and starts transferring, and where compute starts and stops hiding it, so that its pieces say what they cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pandas as pd

from stepscope.analysis.records import TERMS
from stepscope.analysis.run import RankData
from stepscope.dashboard import text
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.theme import CODE, TERM_LABEL
from stepscope.tracer.schema import AXES, KINDS, PHASES, code_of

COMPUTE, COMM, MEMCPY, HOST = (code_of(KINDS, kind) for kind in ("compute", "comm", "memcpy", "host"))
MAX_DEPTH, HOST_DEPTH = 64, 8
"""Most layers of a lane whose rows overlap; host rows nested deeper are left to the table of events."""

_PHASE_CATEGORY = np.array([CODE.get(phase, CODE["compute"]) for phase in (*PHASES, "other")], np.uint8)
"""By phase code; the last entry answers for -1."""

_TERM_CATEGORY = {term: CODE[term] for term in TERMS}


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


@dataclass(frozen=True)
class Pieces:
    """Parallel arrays of pieces, sorted by start."""

    start: np.ndarray
    end: np.ndarray
    category: np.ndarray
    name: np.ndarray
    row: np.ndarray

    def take(self, index: np.ndarray) -> Pieces:
        """The pieces at `index`."""
        return Pieces(*(values[index] for values in (self.start, self.end, self.category, self.name, self.row)))

    def track(self, rank: int, role: str, label: str) -> Track:
        """As a drawn lane."""
        return Track(rank, role, label, self.start, self.end, self.category, self.name, self.row)


def merged(parts: list[Pieces]) -> Pieces:
    """All parts as one, sorted by start."""
    columns = [np.concatenate([getattr(p, f) for p in parts]) for f in ("start", "end", "category", "name", "row")]
    pieces = Pieces(*columns)
    return pieces.take(np.lexsort((pieces.end, pieces.start)))


Clock = Callable[[np.ndarray], np.ndarray]
"""A rank's own times (absolute ns) -> common time after the run's origin."""


@dataclass(frozen=True)
class Segments:
    """The ledger's partition of one rank: sorted, tiling each window. Times in ns after the run's origin."""

    step: np.ndarray
    start: np.ndarray
    end: np.ndarray
    category: np.ndarray

    @classmethod
    def of(cls, frame: pd.DataFrame, clock: Clock) -> Segments:
        """From `Decomposition.segments(rank)`: columns step, start_ns, end_ns, term."""
        codes = frame["term"].astype("category")
        by_code = np.array([_TERM_CATEGORY[str(term)] for term in codes.cat.categories] or [0], np.uint8)
        return cls(
            frame["step"].to_numpy(),
            clock(frame["start_ns"].to_numpy(np.int64)),
            clock(frame["end_ns"].to_numpy(np.int64)),
            by_code[codes.cat.codes.to_numpy()] if len(frame) else np.zeros(0, np.uint8),
        )

    def track(self, rank: int) -> Track:
        """The partition as a lane: exact sums of every term in any range."""
        n = len(self.start)
        return Track(
            rank, "terms", "", self.start, self.end, self.category, np.zeros(n, np.uint32), np.full(n, -1, np.int32)
        )


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
                by_axis[int(axis)].append((lane, rows[axis_of[rows] == axis]))
        tracks = []
        for axis in sorted(by_axis, key=lambda code: code if code >= 0 else len(AXES)):
            label = AXES[axis] if axis >= 0 else "communication"
            packed = _pack_streams(by_axis[axis], self.start, self.end)
            for depth, (lanes, rows) in enumerate(packed):
                stream = self.lane_name.get(lanes[0], "") if len(set(lanes)) == 1 and len(packed) > 1 else ""
                whole = self.pieces(rows, np.zeros(len(rows), np.uint8))
                pieces = _split(whole, last_arrival[rows], self.segments)
                tracks.append(pieces.track(self.rank, "comm", stream or (label if depth == 0 else "")))
        return tracks

    def plain(self, role: str, kind: int, most: int) -> list[Track]:
        """Streams drawn as they are, overlapping or nested rows on lanes of their own."""
        tracks = []
        for lane, rows in self.streams(kind).items():
            found = self.pieces(rows, np.full(len(rows), CODE[role], np.uint8))
            for depth, at in enumerate(layers(found.start, found.end, most)):
                title = self.lane_name.get(lane, role) if depth == 0 else ""
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
        gaps = _uncovered(segments.start[compute], segments.end[compute], busy)
        start = np.concatenate([start, gaps[0]])
        end = np.concatenate([end, gaps[1]])
        category = np.concatenate([category, np.full(len(gaps[0]), CODE["compute"], np.uint8)])
    ids = np.zeros(256, np.uint32)
    for term, code in _TERM_CATEGORY.items():
        ids[code] = labels.id_of(TERM_LABEL[term] if term != "compute" else "compute on another stream")
    return Pieces(start, end, category, ids[category], np.full(len(start), -1, np.int32))


def _uncovered(start: np.ndarray, end: np.ndarray, busy: Pieces | None) -> tuple[np.ndarray, np.ndarray]:
    """The parts of sorted disjoint intervals that `busy` (sorted, disjoint) does not cover."""
    if busy is None or not len(busy.start):
        return start, end
    edges = np.unique(np.concatenate([start, end, busy.start, busy.end]))
    left, right = edges[:-1], edges[1:]
    inside = _covered(left, start, end) & ~_covered(left, busy.start, busy.end)
    left, right = left[inside], right[inside]
    first = np.ones(len(left), bool)
    first[1:] = left[1:] != right[:-1]
    at = np.flatnonzero(first)
    return left[at], right[np.append(at[1:] - 1, len(right) - 1)] if len(at) else right[:0]


def _covered(points: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether each point lies in one of the sorted disjoint intervals."""
    index = np.searchsorted(start, points, "right") - 1
    return (index >= 0) & (points < end[np.maximum(index, 0)])


def _pack_streams(
    streams: list[tuple[int, np.ndarray]], start: np.ndarray, end: np.ndarray
) -> list[tuple[list[int], np.ndarray]]:
    """The streams of one axis on as few lanes as overlap allows (first fit); a stream that overlaps itself is cut."""
    packed: list[tuple[list[int], np.ndarray]] = []
    for lane, rows in streams:
        for at in layers(start[rows], end[rows]):
            mine = rows[at]
            for i, (lanes, taken) in enumerate(packed):
                both = np.concatenate([taken, mine])
                both = both[np.lexsort((end[both], start[both]))]
                if np.all(start[both][1:] >= end[both][:-1]):
                    packed[i] = ([*lanes, lane], both)
                    break
            else:
                packed.append(([lane], mine))
    return packed


def _split(whole: Pieces, last_arrival: np.ndarray, segments: Segments) -> Pieces:
    """Communications cut at the last arrival and at the ledger's segments; each piece says what it costs.

    transferring under compute: hidden; transferring else: visible; waiting where the ledger has bubble or imbalance:
    that; waiting else: hidden wait. A communication whose last arrival is unknown is all transfer, as in the ledger.
    """
    begin, end = whole.start, whole.end
    turn = np.where(last_arrival >= 0, np.clip(last_arrival, begin, end), begin)
    first = np.searchsorted(segments.end, begin, "right")
    last = np.maximum(np.searchsorted(segments.start, end, "left"), first)
    cuts = [begin, turn, end]
    owner = [np.arange(len(begin))] * 3
    inside = last - first
    of_event = np.repeat(np.arange(len(begin)), inside)
    offset = np.arange(len(of_event)) - np.repeat(np.cumsum(inside) - inside, inside)
    segment = np.repeat(first, inside) + offset
    for edge in (segments.start, segments.end):
        cuts.append(np.clip(edge[segment], begin[of_event], end[of_event]))
        owner.append(of_event)
    point, who = np.concatenate(cuts), np.concatenate(owner)
    order = np.lexsort((point, who))
    point, who = point[order], who[order]
    real = (who[1:] == who[:-1]) & (point[1:] > point[:-1])
    left, right, who = point[:-1][real], point[1:][real], who[:-1][real]
    category = _cost(left, left < turn[who], segments)
    empty = np.flatnonzero(end == begin)  # a row of no length stays a mark
    left, right = np.concatenate([left, begin[empty]]), np.concatenate([right, end[empty]])
    category = np.concatenate([category, np.full(len(empty), CODE["visible_comm"], np.uint8)])
    who = np.concatenate([who, empty])
    order = np.lexsort((right, left))
    left, right, category, who = left[order], right[order], category[order], who[order]
    fresh = np.ones(len(left), bool)
    fresh[1:] = (who[1:] != who[:-1]) | (category[1:] != category[:-1]) | (left[1:] != right[:-1])
    at = np.flatnonzero(fresh)
    until = np.append(at[1:], len(left)) - 1
    who = who[at]
    return Pieces(left[at], right[until] if len(at) else right, category[at], whole.name[who], whole.row[who])


def _cost(point: np.ndarray, waiting: np.ndarray, segments: Segments) -> np.ndarray:
    """Category of a communication at each point, by what the ledger says of that instant."""
    if not len(segments.start):
        return np.full(len(point), CODE["outside"], np.uint8)
    index = np.searchsorted(segments.start, point, "right") - 1
    within = (index >= 0) & (point < segments.end[np.maximum(index, 0)])
    term = np.where(within, segments.category[np.maximum(index, 0)], CODE["outside"])
    charged = (term == CODE["bubble"]) | (term == CODE["imbalance"])
    wait = np.where(charged, term, CODE["hidden_wait"])
    transfer = np.where(term == CODE["compute"], CODE["hidden_comm"], CODE["visible_comm"])
    cost = np.where(waiting, wait, transfer)
    return np.where(within, cost, CODE["outside"]).astype(np.uint8)


def layers(start: np.ndarray, end: np.ndarray, limit: int = MAX_DEPTH) -> list[np.ndarray]:
    """Indices of rows sorted by start, distributed first fit over layers in which nothing overlaps.

    Nested rows land below their parents. At most `limit` layers; what would lie deeper is left out.
    """
    if len(start) < 2 or np.all(start[1:] >= end[:-1]):
        return [np.arange(len(start))] if len(start) else []
    free: list[int] = []
    layer = np.full(len(start), -1, np.int32)
    for i, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for depth, when in enumerate(free):
            if when <= begin:
                free[depth], layer[i] = until, depth
                break
        else:
            if len(free) < limit:
                layer[i] = len(free)
                free.append(until)
    return [np.flatnonzero(layer == depth) for depth in range(len(free))]
