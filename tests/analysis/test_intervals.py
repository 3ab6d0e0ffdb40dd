"""Interval algebra against sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals

SPANS = st.lists(st.tuples(st.integers(-40, 40), st.integers(-3, 12)), max_size=12)
OFFSETS = st.sampled_from((0, 1_694_128_201_428_473_000))


def arrays(spans: list[tuple[int, int]], origin: int = 0) -> Intervals:
    starts = np.array([start for start, _ in spans], np.int64) + origin
    return starts, starts + np.array([length for _, length in spans], np.int64)


def instants(held: Intervals, origin: int = 0) -> set[int]:
    return {t - origin for start, end in zip(*(side.tolist() for side in held), strict=True) for t in range(start, end)}


def canonical(held: Intervals) -> bool:
    return bool((held[1] > held[0]).all() and (held[0][1:] > held[1][:-1]).all() and held[0].dtype == np.int64)


@given(SPANS, OFFSETS)
def test_union_holds_exactly_the_instants(spans: list[tuple[int, int]], origin: int) -> None:
    held = intervals.union(*arrays(spans, origin))
    assert canonical(held)
    assert instants(held, origin) == instants(arrays(spans))
    assert intervals.length(held) == len(instants(arrays(spans)))


@given(SPANS, SPANS)
def test_two_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = intervals.union(*arrays(a)), intervals.union(*arrays(b))
    mine, theirs = instants(one), instants(other)
    for found, expected in (
        (intervals.intersect(one, other), mine & theirs),
        (intervals.subtract(one, other), mine - theirs),
        (intervals.join(one, other), mine | theirs),
    ):
        assert canonical(found) and instants(found) == expected
    parts = (intervals.intersect(one, other), intervals.subtract(one, other))
    assert sum(map(intervals.length, parts)) == intervals.length(one)


@given(SPANS, st.integers(-45, 45), st.integers(-45, 45))
def test_clip_and_complement_share_the_range(spans: list[tuple[int, int]], low: int, high: int) -> None:
    held = intervals.union(*arrays(spans))
    inside, outside = intervals.clip(held, low, high), intervals.complement(held, low, high)
    assert canonical(inside) and canonical(outside)
    assert instants(inside) == instants(held) & set(range(low, high))
    assert instants(inside) | instants(outside) == set(range(low, high))
    assert not instants(inside) & instants(outside)


@given(SPANS, SPANS, OFFSETS)
def test_cover_measures_every_query(spans: list[tuple[int, int]], queries: list[tuple[int, int]], origin: int) -> None:
    held = intervals.union(*arrays(spans, origin))
    starts, ends = arrays([query for query in queries if query[1] >= 0], origin)
    for start, end, got in zip(starts, ends, intervals.covered(held, starts, ends), strict=True):
        assert got == len(instants(intervals.clip(held, int(start), int(end))))


@given(SPANS, SPANS)
def test_pairs_are_all_that_overlap(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    many, few = arrays(a), intervals.union(*arrays(b))
    found = set(zip(*(side.tolist() for side in intervals.pairs(many, few)), strict=True))
    expected = {
        (i, j)
        for i in range(len(many[0]))
        for j in range(len(few[0]))
        if max(many[0][i], few[0][j]) < min(many[1][i], few[1][j])
    }
    assert found == expected


def test_touching_intervals_merge_and_empty_ones_vanish() -> None:
    held = intervals.union(np.array([0, 5, 9, 20]), np.array([5, 9, 9, 19]))
    assert [side.tolist() for side in held] == [[0], [9]]
    assert intervals.length(intervals.EMPTY) == 0


def test_intervals_years_apart_come_together_with_their_lengths_and_overlaps() -> None:
    year = 365 * 86_400 * 10**9
    low = np.array([54 * year + 90, 10, 54 * year + 100, 0])
    high = np.array([54 * year + 120, 30, 54 * year + 110, 5])
    assert [one.tolist() for one in intervals.together(low, high)] == [[25, 5, 35, 0], [55, 25, 45, 5]]
    assert [one.tolist() for one in intervals.together(*intervals.EMPTY)] == [[], []]
