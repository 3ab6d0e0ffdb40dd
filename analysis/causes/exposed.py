"""Exposed waits as columns, and whom each of them goes back to at the same instants.

A wait names the rank that it waited for. While that rank waits itself, the instant goes to whom *it* waits for, and so on,
never twice through one rank (definitions.md: waits inside waits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepscope.analysis import intervals

Step = int | str


@dataclass(frozen=True)
class WaitTable:
    """Exposed waits of all ranks, one value a wait: by rank and start, those of one rank disjoint; half open, integer ns."""

    steps: Sequence[Step]
    rank: np.ndarray
    step: np.ndarray  # place in `steps`
    start: np.ndarray
    end: np.ndarray
    on: np.ndarray  # the rank that it waited for, -1 unknown
    structural: np.ndarray  # bool: classified as bubble, the schedule's allowance pays for it first
    match: np.ndarray  # the communication

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def joined(cls, steps: Sequence[Step], pieces: Sequence[Sequence[np.ndarray]]) -> WaitTable:
        """Of the columns of some ranks each, in the order of the fields."""
        if not pieces:
            none = np.empty(0, np.int64)
            return cls(steps, none, none, none, none, none, none.astype(bool), none)
        columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
        order = np.lexsort((columns[2], columns[0]))
        return cls(steps, *(column[order] for column in columns))


class Held(NamedTuple):
    """Of the wait `wait` (a place among them) `ns` go back to the lane `holder`; one row a wait and holder, in that order."""

    wait: np.ndarray
    holder: np.ndarray
    ns: np.ndarray


def holders(lane: np.ndarray, start: np.ndarray, end: np.ndarray, on: np.ndarray, base: np.ndarray) -> Held:
    """Whom waits go back to at the same instants: all of them are followed at once, one link of the chains a round.

    A wait of the lane `lane` for the lane `on` (-1: unknown) lasts from `start` to `end`; waits come by lane and start,
    those of one lane disjoint. `base[lane]` is added to its instants, so that all lanes lie on one axis, each in a
    stretch of its own, one after the other.
    """
    table = (start + base[lane], end + base[lane])
    wait = np.flatnonzero((on >= 0) & (on != lane) & (end > start))
    low, high, holder = start[wait], end[wait], on[wait]
    path = np.stack((lane[wait], holder), axis=1)  # the lanes that a piece has gone through
    found = []
    while len(wait):
        found.append((wait, holder, high - low))
        piece, entry = intervals.pairs((low + base[holder], high + base[holder]), table)
        further = on[entry]
        inner = (further >= 0) & ~(path[piece] == further[:, None]).any(axis=1)
        piece, entry, further = piece[inner], entry[inner], further[inner]
        begin, stop = np.maximum(low[piece], start[entry]), np.minimum(high[piece], end[entry])
        again = np.flatnonzero(piece[1:] == piece[:-1]) + 1  # clocks that drift can make two waits touch within 1 ns
        begin[again] = np.maximum(begin[again], stop[again - 1])
        some = stop > begin
        piece, further, low, high = piece[some], further[some], begin[some], stop[some]
        found.append((wait[piece], holder[piece], low - high))  # the holder waits then: it goes on to the next
        path = np.concatenate((path[piece], further[:, None]), axis=1)
        wait, holder = wait[piece], further
    return _summed(found, len(base))


def _summed(found: Sequence[tuple[np.ndarray, ...]], lanes: int) -> Held:
    """One row a wait and holder that is left with some of it."""
    if not found:
        none = np.empty(0, np.int64)
        return Held(none, none, none)
    wait, holder, ns = (np.concatenate(column) for column in zip(*found, strict=True))
    code = wait * lanes + holder
    order = np.argsort(code, kind="stable")
    edges = np.flatnonzero(np.diff(code[order], prepend=-1))
    total = np.add.reduceat(ns[order], edges)
    first = order[edges[total > 0]]
    return Held(wait[first], holder[first], total[total > 0])
