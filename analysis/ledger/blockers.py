"""Exposed waiting: when it happens on a rank, and which operation it is charged to.

An instant is an *exposed wait* of a rank when nothing computes, operations are in flight, and all of them wait for a
peer. Of several, the one that counts is the *blocker* (docs/definitions.md, Bubble or imbalance).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.tracer.schema import AXES, code_of

PIPELINE = code_of(AXES, "pp")
FOREVER = np.iinfo(np.int64).max


@dataclass
class RankParts:
    """The communications of one rank, in its own clock, one value a part."""

    part: np.ndarray  # place in the whole table
    start: np.ndarray
    end: np.ndarray
    wait_end: np.ndarray  # waiting is [start, wait_end), transferring or not to be split [wait_end, end)
    own_last: np.ndarray  # last arrival of the rank's own pipeline in a collective that joins several; else the start
    axis: np.ndarray
    last_arrival: np.ndarray
    op_id: np.ndarray  # as recorded, -1 for none
    order: np.ndarray  # the recorded id, else the row: what decides between equals


@dataclass
class Exposed:
    """Exposed waits, disjoint and sorted; every value of `part` is a place in the whole table."""

    start: np.ndarray
    end: np.ndarray
    part: np.ndarray  # the blocker
    bubble: np.ndarray  # bool: the blocker's own class
    nonblocking: np.ndarray  # bool: the next computation did not depend on it

    @classmethod
    def none(cls) -> Exposed:
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty, empty.astype(bool), empty.astype(bool))


def exposed_waits(parts: RankParts, exposed: Intervals, compute: Intervals, waits: dict[str, np.ndarray]) -> Exposed:
    """Cut the exposed waits of a rank where anything about them changes, and name the blocker of each piece.

    `exposed`: the instants; `compute`: when the rank computes (canonical); `waits`: its wait rows (start, end, op_id).
    """
    waiting = np.flatnonzero(parts.wait_end > parts.start)
    op, piece = intervals.pairs((parts.start[waiting], parts.wait_end[waiting]), exposed)
    if len(op) == 0:
        return Exposed.none()
    op = waiting[op]
    low = np.maximum(parts.start[op], exposed[0][piece])
    high = np.minimum(parts.wait_end[op], exposed[1][piece])
    cuts = np.concatenate((low, high, *_inner_cuts(parts, op, low, high), *_wait_cuts(waits, exposed)))
    cuts.sort(kind="stable")
    cuts = cuts[np.concatenate(([True], cuts[1:] != cuts[:-1]))]
    segments = (cuts[:-1], cuts[1:])
    which, segment = intervals.pairs((low, high), segments)
    op = op[which]
    start, end = segments[0][segment], segments[1][segment]
    named = _named(parts.op_id[op], start, waits)
    after = np.searchsorted(compute[0], start, "right")
    next_compute = np.append(compute[0], FOREVER)[after]
    in_time = parts.end[op] <= next_compute
    not_pipeline = parts.axis[op] != PIPELINE
    several = np.flatnonzero(np.bincount(segment)[segment] > 1)
    keys = (parts.order[op], -parts.last_arrival[op], not_pipeline, -parts.end[op], ~in_time, ~named, segment)
    order = several[np.lexsort([key[several] for key in keys])]
    beaten = np.zeros(len(op), bool)
    beaten[order[1:][segment[order][1:] == segment[order][:-1]]] = True
    first = np.flatnonzero(~beaten)
    first = first[np.argsort(segment[first], kind="stable")]
    blocker = op[first]
    return Exposed(
        start[first],
        end[first],
        parts.part[blocker],
        (parts.axis[blocker] == PIPELINE) | (start[first] < parts.own_last[blocker]),
        ~(in_time[first] | named[first]),
    )


def _inner_cuts(parts: RankParts, op: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """Where the waits of collectives that join several pipelines turn from bubble to imbalance."""
    at = parts.own_last[op]
    return [at[(at > low) & (at < high)]]


def _wait_cuts(waits: dict[str, np.ndarray], exposed: Intervals) -> list[np.ndarray]:
    """Where wait rows begin and end inside the exposed waits."""
    edges = np.concatenate((waits["start"], waits["end"]))
    place = np.searchsorted(exposed[0], edges, "right") - 1
    inside = (place >= 0) & (edges < exposed[1][np.maximum(place, 0)])
    return [edges[inside]]


def _named(op_id: np.ndarray, start: np.ndarray, waits: dict[str, np.ndarray]) -> np.ndarray:
    """Whether a wait row in force at `start` names the operation (bool a pair)."""
    begin, end, target = waits["start"], waits["end"], waits["op_id"]
    if len(begin) == 0:
        return np.zeros(len(op_id), bool)
    # the wait rows of each operation are disjoint: look among those that name it
    order = np.lexsort((begin, target))
    begin, end, target = begin[order], end[order], target[order]
    low, high = np.searchsorted(target, op_id, "left"), np.searchsorted(target, op_id, "right")
    answer = np.zeros(len(op_id), bool)
    for shift in range(int((high - low).max(initial=0))):
        at = np.minimum(low + shift, len(target) - 1)
        answer |= (low + shift < high) & (begin[at] <= start) & (start < end[at])
    return answer
