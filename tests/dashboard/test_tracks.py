"""Drawn lanes from columns and ledger segments: every piece says what it costs, nothing overlaps, nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.run import RankData, empty_columns
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pieces import Segments, layers
from stepscope.dashboard.theme import CATEGORIES, CODE
from stepscope.dashboard.tracks import Labels, build_tracks
from stepscope.tracer.schema import AXES, EVENT_COLUMNS, FLAG_PARTIAL, KINDS, PHASES, Lane, code_of


def rank_data(*rows: tuple[str, int, int, int, dict[str, int]]) -> RankData:
    """(kind, lane, start, end, other columns) rows of one rank, given in the store's order."""
    events = empty_columns(EVENT_COLUMNS, len(rows))
    events["name_id"][:] = events["flags"][:] = 0
    for i, (kind, lane, start, end, more) in enumerate(rows):
        values = {"kind": code_of(KINDS, kind), "lane": lane, "start_ns": start, "dur_ns": end - start, **more}
        for name, value in values.items():
            events[name][i] = value
    lanes = (
        Lane(0, "stream 7", "compute"),
        Lane(1, "stream 8", "compute"),
        Lane(2, "dp", "comm", "dp"),
        Lane(3, "x", "comm"),
    )
    return RankData(events, ("op",), lanes)


def segments(*parts: tuple[int, int, str]) -> Segments:
    start, end = (np.array([p[i] for p in parts], np.int64) for i in (0, 1))
    return Segments(np.zeros(len(parts), object), start, end, np.array([CODE[p[2]] for p in parts], np.uint8))


def build(data: RankData, ledger: Segments, arrival: dict[int, int] | None = None) -> list[Track]:
    last = np.full(len(data.events["start_ns"]), -1, np.int64)
    for row, when in (arrival or {}).items():
        last[row] = when
    return build_tracks(0, data, ledger, last, lambda times: times, Labels())


def pieces(track: Track) -> list[tuple[int, int, str, int]]:
    return [
        (int(a), int(b), CATEGORIES[c].key, int(row))
        for a, b, c, row in zip(track.start, track.end, track.category, track.row, strict=True)
    ]


def by_role(tracks: list[Track], role: str) -> list[Track]:
    return [track for track in tracks if track.role == role]


DP = {"axis": code_of(AXES, "dp")}
FORWARD = {"phase": code_of(PHASES, "forward")}


def test_a_communication_half_hidden_half_exposed():
    # gemm 0-400 and 800-1000, NCCL 300-500: hidden 100, visible 100, idle 300 (definitions.md, Overlap)
    data = rank_data(("compute", 0, 0, 400, FORWARD), ("compute", 0, 800, 1000, FORWARD), ("comm", 2, 300, 500, DP))
    ledger = segments((0, 400, "compute"), (400, 500, "visible_comm"), (500, 800, "idle"), (800, 1000, "compute"))
    account, comm = build(data, ledger)
    assert pieces(account) == [
        (0, 400, "forward", 0),
        (400, 500, "visible_comm", -1),
        (800, 1000, "forward", 1),
    ]
    assert pieces(comm) == [(300, 400, "hidden_comm", 2), (400, 500, "visible_comm", 2)]
    assert comm.label == "dp"


def test_waiting_takes_the_ledgers_word_and_costs_nothing_under_compute():
    data = rank_data(("compute", 0, 0, 20, FORWARD), ("comm", 2, 10, 75, DP))
    ledger = segments((0, 20, "compute"), (20, 40, "bubble"), (40, 64, "imbalance"), (64, 75, "visible_comm"))
    _, comm = build(data, ledger, {1: 64})
    assert pieces(comm) == [
        (10, 20, "hidden_wait", 1),
        (20, 40, "bubble", 1),
        (40, 64, "imbalance", 1),
        (64, 75, "visible_comm", 1),
    ]


def test_a_last_arrival_after_the_end_is_all_wait_and_an_unknown_one_all_transfer():
    data = rank_data(("comm", 2, 0, 50, DP), ("comm", 2, 60, 90, DP))
    ledger = segments((0, 50, "imbalance"), (50, 60, "idle"), (60, 90, "visible_comm"))
    _, comm = build(data, ledger, {0: 80})
    assert pieces(comm) == [(0, 50, "imbalance", 0), (60, 90, "visible_comm", 1)]


def test_outside_every_window_is_said_so():
    data = rank_data(("comm", 2, 0, 30, DP))
    _, comm = build(data, segments((10, 40, "visible_comm")))
    assert pieces(comm) == [(0, 10, "outside", 0), (10, 30, "visible_comm", 0)]


def test_compute_on_another_stream_is_in_the_account_and_on_its_own_lane():
    data = rank_data(("compute", 0, 0, 50, FORWARD), ("compute", 1, 40, 70, FORWARD))
    account, other = build(data, segments((0, 70, "compute")))
    assert pieces(account) == [(0, 50, "forward", 0), (50, 70, "compute", -1)]
    assert pieces(other) == [(40, 70, "forward", 1)]
    assert other.label == "stream 8"


def test_rows_that_overlap_on_one_stream_are_both_drawn():
    # K(7,a,0,100), K(7,b,95,100): busy 195, both drawn on sub-lanes
    data = rank_data(("compute", 0, 0, 100, FORWARD), ("compute", 0, 95, 195, FORWARD))
    account, second = build(data, segments((0, 195, "compute")))
    assert pieces(account) == [(0, 100, "forward", 0), (100, 195, "compute", -1)]
    assert pieces(second) == [(95, 195, "forward", 1)]


def test_streams_of_one_axis_share_a_lane_unless_they_overlap():
    data = rank_data(("comm", 2, 0, 10, DP), ("comm", 2, 30, 40, DP), ("comm", 3, 12, 28, DP))
    tracks = by_role(build(data, segments((0, 40, "visible_comm"))), "comm")
    assert [(t.label, len(t)) for t in tracks] == [("dp", 3)]
    data = rank_data(("comm", 2, 0, 20, DP), ("comm", 2, 30, 40, DP), ("comm", 3, 12, 28, DP))
    tracks = by_role(build(data, segments((0, 40, "visible_comm"))), "comm")
    assert [(t.label, len(t)) for t in tracks] == [("dp", 2), ("x", 1)]


def test_unfinished_communications_of_a_stream_are_one_queue_on_one_lane():
    # issued at 20, 30, 30, 45 behind one another, and nothing ended before the recording did, at 100; one at 10 had begun
    open_dp = DP | {"flags": FLAG_PARTIAL}
    queue = [("comm", 2, start, 100, open_dp) for start in (20, 30, 30, 45)]
    data = rank_data(("comm", 2, 10, 25, DP), *queue)
    labels = Labels()
    last = np.full(5, -1, np.int64)
    tracks = build_tracks(0, data, segments((0, 100, "visible_comm")), last, lambda times: times, labels)
    finished, waiting = by_role(tracks, "comm")
    assert [finished.label, waiting.label] == ["dp", "dp unfinished"]
    assert pieces(finished) == [(10, 25, "visible_comm", 0)]
    assert [(a, b, row) for a, b, _, row in pieces(waiting)] == [(20, 30, 1), (30, 30, 2), (30, 45, 3), (45, 100, 4)]
    assert {labels.text_of(int(name)) for name in waiting.name} == {"op · unfinished"}
    assert {labels.text_of(int(name)) for name in finished.name} == {"op"}


def test_one_unfinished_communication_that_overlaps_nothing_stays_on_its_lane():
    data = rank_data(("comm", 2, 10, 20, DP), ("comm", 2, 20, 100, DP | {"flags": FLAG_PARTIAL}))
    (comm,) = by_role(build(data, segments((0, 100, "visible_comm"))), "comm")
    assert comm.label == "dp"
    assert [(a, b, row) for a, b, _, row in pieces(comm)] == [(10, 20, 0), (20, 100, 1)]


def test_rows_of_no_length_stay():
    data = rank_data(("compute", 0, 5, 5, FORWARD), ("comm", 2, 7, 7, DP))
    account, comm = build(data, segments((0, 10, "idle")))
    assert pieces(account) == [(5, 5, "forward", 0)]
    assert pieces(comm) == [(7, 7, "visible_comm", 1)]


def test_nested_rows_lie_below_their_parents():
    start, end = np.array([0, 0, 10, 30, 100]), np.array([100, 20, 15, 90, 110])
    assert [layer.tolist() for layer in layers(start, end)] == [[0, 4], [1, 3], [2]]
    assert [layer.tolist() for layer in layers(start, end, 2)] == [[0, 4], [1, 3]]
    assert layers(start[:0], end[:0]) == []


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=40))
def test_layers_hold_every_row_once_and_never_overlap(rows: list[tuple[int, int]]):
    rows.sort(key=lambda row: (row[0], -row[1]))
    start = np.array([r[0] for r in rows], np.int64)
    end = start + np.array([r[1] for r in rows], np.int64)
    found = layers(start, end)
    assert sorted(i for layer in found for i in layer.tolist()) == list(range(len(rows)))
    for layer in found:
        assert np.all(start[layer][1:] >= end[layer][:-1])


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["compute", "visible_comm", "bubble", "idle"])),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 25), st.integers(-5, 40)), max_size=12),
)
def test_pieces_cover_each_communication_exactly(ledger: list[tuple[int, str]], comms: list[tuple[int, int, int]]):
    edges = np.cumsum([5, *(length for length, _ in ledger)])
    partition = segments(*[(int(a), int(b), term) for (a, b), (_, term) in zip(pairwise(edges), ledger, strict=False)])
    at, rows, arrival = 0, [], {}
    for i, (gap, length, late) in enumerate(comms):
        rows.append(("comm", 2, at + gap, at + gap + length, DP))
        arrival[i] = at + gap + late if late >= 0 else -1
        at += gap + length
    tracks = by_role(build(rank_data(*rows), partition, arrival), "comm")
    covered: dict[int, int] = {}
    for track in tracks:
        assert np.all(track.start[1:] >= track.end[:-1])
        for a, b, _, row in pieces(track):
            covered[row] = covered.get(row, 0) + b - a
    assert covered == {i: end - start for i, (_, _, start, end, _) in enumerate(rows)}


def test_lanes_of_a_run_agree_with_its_ledger(slow: LoadedRun):
    """The account's exposed terms are the ledger's, to the nanosecond, and no lane overlaps itself."""
    for rank, ids in slow.of_rank.items():
        for track in (slow.tracks[i] for i in ids):
            assert np.all(track.start[1:] >= track.end[:-1]), (rank, track.label)
        account = slow.tracks[ids[0]]
        edges = np.array([account.start.min(), account.end.max()])
        rows = slow.report.ledger[slow.report.ledger["rank"] == rank]
        for term in ("visible_comm", "bubble", "imbalance", "memcpy"):
            drawn = int(np.diff(account.cumulative(CODE[term], edges))[0])
            assert drawn == int(rows[f"{term}_ns"].sum()), (rank, term)
        hidden = sum(
            int(np.diff(slow.tracks[i].cumulative(CODE["hidden_comm"], edges))[0])
            for i in ids
            if slow.tracks[i].role == "comm"
        )
        assert hidden >= int(rows["hidden_comm_ns"].sum())  # operations that overlap each other count twice here


def test_search_is_blind_to_case_and_labels_are_shared():
    labels = Labels()
    assert [labels.id_of("All_Reduce"), labels.id_of("gemm"), labels.id_of("All_Reduce")] == [0, 1, 0]
    assert labels.containing("reduce").tolist() == [True, False]
    long = labels.id_of("x" * 10_000 + "\n")
    assert len(labels.text_of(long)) == 160
    with pytest.raises(IndexError):
        labels.text_of(99)
