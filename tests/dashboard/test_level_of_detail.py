"""Level of detail: exact time in every bin at any zoom, single pieces where they fit, nothing ever absent."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.dashboard.level_of_detail import (
    EVENTS,
    EVENTS_PER_BIN,
    SHARES,
    Track,
    edges_of,
    pack_overview,
    pack_view,
    shares,
)


def track(*pieces: tuple[int, int, int]) -> Track:
    """(start, end, category) pieces as a lane."""
    start, end, category = (np.array([p[i] for p in pieces], np.int64) for i in range(3))
    rows = np.arange(len(pieces))
    return Track(0, "compute", "", start, end, category.astype(np.uint8), rows.astype(np.uint32), rows.astype(np.int32))


def parse(message: bytes) -> tuple[dict, bytes]:  # type: ignore[type-arg]
    length = int.from_bytes(message[:4], "little")
    return json.loads(message[4 : 4 + length]), message[4 + length :]


def test_time_in_bins_by_hand():
    lane = track((0, 10, 0), (10, 12, 1), (20, 36, 0))
    times = lane.times(edges_of(0, 5, 8))
    assert times[0].tolist() == [8, 2, 4, 8, 4]
    assert times[1].tolist() == [0, 2, 0, 0, 0]


def test_edges_outside_all_pieces_hold_nothing():
    lane = track((100, 200, 3))
    assert lane.times(edges_of(-4, 4, 16)) == {}
    assert lane.cumulative(7, np.array([0, 500])).tolist() == [0, 0]


@st.composite
def lanes(draw: st.DrawFn) -> Track:
    """Pieces that do not overlap, some of no length."""
    gaps = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=60))
    at, pieces = draw(st.integers(0, 100)), []
    for gap, length, category in gaps:
        pieces.append((at + gap, at + gap + length, category))
        at += gap + length
    return track(*pieces)


@given(lanes(), st.integers(-10, 10), st.integers(1, 60), st.sampled_from([1, 2, 8, 64]))
def test_time_in_bins_equals_counting_nanoseconds(lane: Track, first: int, bins: int, bin_ns: int):
    counted = np.zeros((4, bins), np.int64)
    for start, end, category in zip(lane.start, lane.end, lane.category, strict=True):
        for t in range(start, end):
            bin_ = t // bin_ns - first
            if 0 <= bin_ < bins:
                counted[category, bin_] += 1
    found = lane.times(edges_of(first, bins, bin_ns))
    for category in range(4):
        expected = counted[category]
        assert found.get(category, np.zeros(bins, np.int64)).tolist() == expected.tolist()


def test_any_time_at_all_is_drawn():
    lane = track(*[(i * 10, i * 10 + 9, 0) for i in range(1000)], (20_000, 20_001, 5))
    header, body = parse(pack_view([(7, lane)], 0, 64, 1024))
    (row,) = header["tracks"]
    assert row[:3] == [7, SHARES, 1001]
    offsets = dict(row[4])
    rare = np.frombuffer(body, np.uint8, 64, offsets[5])
    assert rare[20_000 // 1024] == 1  # 1 ns of 1024 is 0.25 of 255: shown as the least there is
    assert rare.sum() == 1


def test_full_bins_are_full_and_empty_ones_empty():
    assert shares(np.array([0, 1, 512, 1024]), 1024).tolist() == [0, 1, 128, 255]


def test_few_pieces_are_sent_one_by_one_exactly():
    lane = track((128, 160, 0), (200, 201, 1), (300, 300, 2))
    header, body = parse(pack_view([(3, lane)], 2, 8, 64, lambda i: f"name {i}"))
    (row,) = header["tracks"]
    identity, mode, n, first, x, w, category, name = row
    assert (identity, mode, n, first) == (3, EVENTS, 3, 0)
    assert np.frombuffer(body, "<f4", 3, x).tolist() == [0, 72 / 64, 172 / 64]
    assert np.frombuffer(body, "<f4", 3, w).tolist() == [0.5, 1 / 64, 0]
    assert np.frombuffer(body, np.uint8, 3, category).tolist() == [0, 1, 2]
    assert header["names"] == {"0": "name 0", "1": "name 1", "2": "name 2"}
    assert np.frombuffer(body, "<u4", 3, name).tolist() == [0, 1, 2]


def test_first_piece_in_view_is_found_though_it_began_earlier():
    lane = track((0, 1000, 0), (1000, 1010, 1), (2000, 2010, 0))
    header, _ = parse(pack_view([(0, lane)], 8, 8, 64))
    assert header["tracks"][0][2:4] == [2, 0]


def test_more_pieces_than_pixels_become_shares_and_the_payload_stops_growing():
    bins = 128
    most = int(EVENTS_PER_BIN * bins)
    few = track(*[(i * 10, i * 10 + 5, i % 2) for i in range(most)])
    many = track(*[(i * 10, i * 10 + 5, i % 2) for i in range(most + 1)])
    huge = track(*[(i, i + 1, i % 2) for i in range(50_000)])
    modes = [parse(pack_view([(0, lane)], 0, bins, 1024))[0]["tracks"][0][1] for lane in (few, many)]
    assert modes == [EVENTS, SHARES]
    sizes = [len(pack_view([(0, lane)], 0, bins, 1024)) for lane in (many, huge)]
    assert abs(sizes[0] - sizes[1]) < 64
    header = parse(pack_view([(0, few), (1, huge)], 0, bins, 1024))[0]
    assert (header["single"], header["merged"]) == (most, 50_000)


@pytest.mark.parametrize(("bins", "bin_ns"), [(0, 8), (20_000, 8), (10, 7), (10, 0), (10, 1 << 50)])
def test_views_that_make_no_sense_are_refused(bins: int, bin_ns: int):
    with pytest.raises(ValueError):
        edges_of(0, bins, bin_ns)


def test_overview_is_the_mean_over_the_ranks_of_a_row():
    full, half = track((0, 100, 0)), track((0, 50, 0), (50, 100, 1))
    header, body = parse(pack_overview([[full, half], [half]], np.array([0, 50, 100])))
    first, second = header["rows"]
    assert np.frombuffer(body, np.uint8, 2, dict(first)[0]).tolist() == [255, 128]
    assert np.frombuffer(body, np.uint8, 2, dict(first)[1]).tolist() == [0, 128]
    assert np.frombuffer(body, np.uint8, 2, dict(second)[0]).tolist() == [255, 0]
