"""Interval algebra on integer nanoseconds, in numpy.

An *interval set* is a pair of equally long int64 arrays `(starts, ends)` of half-open intervals `[start, end)`. What
`union` returns is *canonical*: sorted, disjoint, not touching, nothing empty. Every other function takes canonical sets
and returns one (or a measure of one). Nothing here rounds, and nothing loops over intervals.
"""

from __future__ import annotations

import numpy as np

Intervals = tuple[np.ndarray, np.ndarray]
"""(starts, ends), int64 ns, half open."""

SLICE = 1 << 16
"""Intervals of a set from which another is subtracted at a time."""

EMPTY: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: np.ndarray, ends: np.ndarray) -> Intervals:
    """Canonical set of the instants that at least one `[starts[i], ends[i])` holds; empty and inverted ones hold none.

    O(n) for starts that are already sorted, else O(n log n).
    """
    full = ends > starts
    if not full.all():
        starts, ends = starts[full], ends[full]
    if starts.size == 0:
        return EMPTY
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    breaks = np.flatnonzero(starts[1:] > reach[:-1])  # a touching interval merges
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [starts.size - 1]))
    return starts[firsts].astype(np.int64), reach[lasts].astype(np.int64)


def join(*sets: Intervals) -> Intervals:
    """Union of canonical sets."""
    held = [one for one in sets if one[0].size]
    if not held:
        return EMPTY
    if len(held) == 1:
        return held[0]
    return union(np.concatenate([one[0] for one in held]), np.concatenate([one[1] for one in held]))


def appended(parts: list[Intervals]) -> Intervals:
    """Union of canonical sets of which each begins where the one before begins or later; the list gives them up.

    Only the ends of the sets are looked at, so that no copy of the whole is made but the result.
    """
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    while parts:
        start, end = parts.pop(0)
        if not start.size:
            continue
        reach = int(ends[-1][-1]) if ends else None
        if reach is not None and start[0] <= reach:
            swallowed = int(np.searchsorted(start, reach, "right"))  # those begin before the last one ends
            ends[-1] = np.append(ends[-1][:-1], max(reach, int(end[swallowed - 1])))
            start, end = start[swallowed:], end[swallowed:]
            if not start.size:
                continue
        starts.append(start)
        ends.append(end)
    if not starts:
        return EMPTY
    low = np.concatenate(starts)
    starts.clear()
    return low, np.concatenate(ends)


def pairs(a: Intervals, b: Intervals) -> tuple[np.ndarray, np.ndarray]:
    """Indices `(i, j)` of all pairs with `a[i]` and `b[j]` overlapping, sorted by i, then j.

    `b` must be sorted and disjoint; `a` may be any intervals (an empty `a[i]` overlaps nothing).
    """
    low = np.searchsorted(b[1], a[0], "right")
    high = np.searchsorted(b[0], a[1], "left")
    count = np.where(a[1] > a[0], np.maximum(high - low, 0), 0)
    i = np.repeat(np.arange(a[0].size), count)
    j = np.arange(i.size) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    return i, j


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Instants of both sets: canonical for canonical inputs up to touching pieces where one of them touches."""
    if a[0].size > b[0].size:  # search the few in the many
        a, b = b, a
    if a[0].size == 0:
        return EMPTY
    i, j = pairs(a, b)
    return np.maximum(a[0][i], b[0][j]), np.minimum(a[1][i], b[1][j])


def complement(a: Intervals, low: int, high: int) -> Intervals:
    """Instants of `[low, high)` that `a` does not hold."""
    starts, ends = clip(a, low, high)
    gaps = (np.concatenate(([low], ends)), np.concatenate((starts, [high])))
    full = gaps[1] > gaps[0]
    return gaps[0][full].astype(np.int64), gaps[1][full].astype(np.int64)


def clip(a: Intervals, low: int, high: int) -> Intervals:
    """Instants of `a` inside `[low, high)`."""
    if high <= low:
        return EMPTY
    first = int(np.searchsorted(a[1], low, "right"))
    last = int(np.searchsorted(a[0], high, "left"))
    if first >= last:
        return EMPTY
    return np.maximum(a[0][first:last], low), np.minimum(a[1][first:last], high)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Instants of `a` that `b` does not hold."""
    if a[0].size == 0 or b[0].size == 0:
        return a
    if a[0].size > SLICE:
        slices = (slice(at, at + SLICE) for at in range(0, a[0].size, SLICE))
        return appended([subtract((a[0][part], a[1][part]), b) for part in slices])
    low, high = int(a[0][0]), int(a[1][-1])
    b = clip(b, low, high)
    if b[0].size > 8 * a[0].size:  # only those of `b` that meet `a`
        met = np.unique(pairs(a, b)[1])
        b = b[0][met], b[1][met]
    return intersect(a, complement(b, low, high))


def length(a: Intervals) -> int:
    """Measure of a set, ns."""
    return int((a[1] - a[0]).sum())


def cover(a: Intervals, instants: np.ndarray) -> np.ndarray:
    """For each instant x the measure of `a` before x; so `a` covers `cover(end) - cover(start)` of `[start, end)`."""
    begun = np.searchsorted(a[0], instants, "right")
    measure = _first(a, begun)
    if a[0].size:
        open_end = a[1][np.maximum(begun - 1, 0)]
        measure = measure - np.where(begun > 0, np.maximum(open_end - instants, 0), 0)
    return measure


def _first(a: Intervals, counts: np.ndarray) -> np.ndarray:
    """Measure of the first `counts` intervals, for each count; of few counts without an array as long as the set."""
    if 64 * counts.size > a[0].size:
        return np.concatenate(([0], np.cumsum(a[1] - a[0])))[counts]
    distinct, inverse = np.unique(counts, return_inverse=True)
    sums = [
        int(a[1][low:high].sum(dtype=np.uint64)) - int(a[0][low:high].sum(dtype=np.uint64))
        for low, high in zip([0, *distinct.tolist()], distinct.tolist(), strict=False)
    ]
    total = 0
    totals = np.empty(len(sums), np.int64)
    for place, one in enumerate(sums):
        total += one % (1 << 64)  # sums of stamps wrap around; their difference does not
        totals[place] = total
    return totals[inverse]


def covered(a: Intervals, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each `[starts[i], ends[i])` the time that `a` covers of it, ns."""
    measure = cover(a, np.concatenate((starts, ends)))
    return measure[len(starts) :] - measure[: len(starts)]


def together(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Any intervals (they may overlap) moved to 0, without the time in which there is none: clocks may be years apart.

    Those that touch or overlap keep their distances, and none changes its length.

    >>> together(np.array([100, 900, 90]), np.array([110, 950, 105]))
    (array([10, 20,  0]), array([20, 70, 15]))
    """
    if not len(low):
        return low, high
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    gaps = np.maximum(low[order][1:] - reach[:-1], 0)
    before = np.empty_like(low)
    before[order] = np.cumsum(np.concatenate(([low.min()], gaps)))
    return low - before, high - before
