"""Pieces of lanes: how events are cut and laid so that nothing on one lane overlaps and each piece says what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope.analysis.records import TERMS
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.theme import CODE

MAX_DEPTH = 64
"""Most layers of a lane whose rows overlap."""

TERM_CATEGORY = {term: CODE[term] for term in TERMS}


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
        by_code = np.array([TERM_CATEGORY[str(term)] for term in codes.cat.categories] or [0], np.uint8)
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


def pack_streams(
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


def split(whole: Pieces, last_arrival: np.ndarray, segments: Segments) -> Pieces:
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


def uncovered(start: np.ndarray, end: np.ndarray, busy: Pieces | None) -> tuple[np.ndarray, np.ndarray]:
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
