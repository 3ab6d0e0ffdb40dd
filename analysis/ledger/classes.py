"""Bubble or imbalance: what the rank that is waited for is doing then decides (docs/definitions.md).

While rank r waits for last arriver q, an instant takes q's own class if q is itself in an exposed wait then, followed from
rank to rank, never twice through one; else the class of r's own blocker. All ranks are followed at once, one link of the
chains a round, on one axis on which each rank has a stretch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ledger.blockers import Exposed

TOO_LONG = "ranks wait for {} s, which cannot be: is a duration in the traces none?"
"""What to say where all waits do not fit on one axis."""


@dataclass
class Charged:
    """Exposed waits of one rank after the chains were followed: disjoint, sorted, the rank's own clock."""

    start: np.ndarray
    end: np.ndarray
    part: np.ndarray  # the blocker
    bubble: np.ndarray  # bool, else imbalance
    nonblocking: np.ndarray


def follow(
    exposed: Sequence[Exposed], last_rank: np.ndarray, common: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[Charged]:
    """Classes of all ranks' exposed waits.

    `exposed`: one a rank place; `last_rank[part]`: place of the rank that a part waits for; `common`: of each rank, starts
    and ends of its exposed waits in the common clock (which may be a nanosecond shorter or longer where clocks drift).
    """
    count = np.array([len(one.start) for one in exposed])
    if int(count.sum()) == 0:
        return [Charged(one.start, one.end, one.part, one.bubble, one.nonblocking) for one in exposed]
    place = np.repeat(np.arange(len(exposed)), count)
    low, high = (np.concatenate([one[i] for one in common]) for i in range(2))
    start, end, part, bubble, nonblocking = (
        np.concatenate([getattr(one, name) for one in exposed])
        for name in ("start", "end", "part", "bubble", "nonblocking")
    )
    low, high = intervals.together(low, high)
    stretch = int(high.max()) + 1
    if stretch * len(exposed) >= 1 << 62:
        raise StepscopeError(TOO_LONG.format(stretch // 10**9))
    table = _Table(low + place * stretch, high + place * stretch, bubble, last_rank[part])
    pieces = _chase(table, place, low, high, stretch)
    order = np.lexsort((pieces.low, pieces.item))
    item, first, last = pieces.item[order], pieces.low[order], pieces.high[order]
    # back into each rank's own clock: the ends of an exposed wait are exact, cuts inside it keep their distance
    own_first = np.minimum(start[item] + (first - low[item]), end[item])
    own_last = np.where(last == high[item], end[item], np.minimum(start[item] + (last - low[item]), end[item]))
    columns = (own_first, own_last, part[item], pieces.bubble[order], nonblocking[item])
    edges = np.searchsorted(place[item], np.arange(len(exposed) + 1))
    return [Charged(*(column[edges[i] : edges[i + 1]] for column in columns)) for i in range(len(exposed))]


@dataclass
class _Table:
    """Exposed waits of all ranks on the one axis."""

    start: np.ndarray
    end: np.ndarray
    bubble: np.ndarray
    waits_for: np.ndarray


@dataclass
class _Pieces:
    """Stretches `[low, high)` (from the origin) of the exposed wait `item` with their class."""

    item: np.ndarray
    low: np.ndarray
    high: np.ndarray
    bubble: np.ndarray


def _chase(table: _Table, place: np.ndarray, start: np.ndarray, end: np.ndarray, stretch: int) -> _Pieces:
    whole = _Pieces(np.arange(len(start)), start, end, table.bubble)
    done = [_chosen(whole, end <= start)]  # a nanosecond that the change of clocks swallowed
    kept = end > start
    front, target, path = _chosen(whole, kept), table.waits_for[kept], place[kept][:, None]
    while len(front.item):
        base = target * stretch
        inside, entry, outside = _split(table, front.low + base, front.high + base)
        done.append(_part_of(front, outside.item, outside.low - base[outside.item], outside.high - base[outside.item]))
        low = np.maximum(front.low[inside] + base[inside], table.start[entry]) - base[inside]
        high = np.minimum(front.high[inside] + base[inside], table.end[entry]) - base[inside]
        onward = _Pieces(front.item[inside], low, high, table.bubble[entry])
        path = np.concatenate((path[inside], target[inside][:, None]), axis=1)
        target = table.waits_for[entry]
        ends_here = (path == target[:, None]).any(axis=1)
        done.append(_chosen(onward, ends_here))
        front, path, target = _chosen(onward, ~ends_here), path[~ends_here], target[~ends_here]
    return _Pieces(
        *(np.concatenate([getattr(one, name) for one in done]) for name in ("item", "low", "high", "bubble"))
    )


def _chosen(pieces: _Pieces, which: np.ndarray) -> _Pieces:
    return _Pieces(pieces.item[which], pieces.low[which], pieces.high[which], pieces.bubble[which])


def _part_of(pieces: _Pieces, which: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Pieces:
    return _Pieces(pieces.item[which], low, high, pieces.bubble[which])


def _split(table: _Table, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, _Pieces]:
    """Of each `[low, high)` on the axis: the (place, table entry) pairs that overlap, and what no entry overlaps."""
    first = np.searchsorted(table.end, low, "right")
    count = np.maximum(np.searchsorted(table.start, high, "left") - first, 0)
    place = np.repeat(np.arange(len(low)), count)
    step = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
    entry = step + np.repeat(first, count)
    # the gaps: before each overlapping entry (from the end of the one before, or low), and after the last
    gap_place = np.concatenate((place, np.arange(len(low))))
    before = np.where(step == 0, low[place], table.end[np.maximum(entry - 1, 0)])
    last_end = np.where(count > 0, table.end[np.maximum(first + count - 1, 0)], low)
    gap_low = np.concatenate((before, np.maximum(last_end, low)))
    gap_high = np.concatenate((np.minimum(table.start[entry], high[place]), high))
    full = gap_high > gap_low
    return place, entry, _Pieces(gap_place[full], gap_low[full], gap_high[full], np.empty(0, bool))
