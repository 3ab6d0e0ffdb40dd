"""Exact answers: an operation on all its ranks, sums of a range, search, neighbours, tables."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.records import TERMS
from stepscope.dashboard import details, questions
from stepscope.dashboard.details import bus_factor
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.theme import CATEGORIES
from stepscope.tracer.schema import COLLECTIVES, KINDS


def dp_lane(run: LoadedRun, rank: int) -> int:
    return next(i for i in run.of_rank[rank] if run.tracks[i].label == "dp")


def test_bus_bandwidth_as_nccl_tests_define_it():
    assert [bus_factor(c, 8) for c in ("all_reduce", "all_gather", "all_to_all", "send", "broadcast")] == [
        1.75,
        0.875,
        0.875,
        1,
        1,
    ]
    assert bus_factor("all_reduce", 1) == 1


def test_an_operation_on_all_its_ranks(slow: LoadedRun):
    """Rank 5 (stage 2, replica 1) computes 22 % longer: it comes last to its dp all-reduces, and rank 4 waits."""
    track = dp_lane(slow, 4)
    found = details.event(slow, track, 0)
    parts = {p["rank"]: p for p in found["parts"]}
    assert set(parts) == {4, 5}
    assert found["last_rank"] == 5
    assert found["note"].startswith("rank 5 arrives last")
    columns = slow.run.rank(4).events
    row = int(slow.tracks[track].row[0])
    assert found["end"] - found["start"] == int(columns["dur_ns"][row])
    assert parts[5]["turn"] == parts[5]["start"] and parts[4]["turn"] == parts[5]["start"]
    assert parts[4]["end"] - parts[4]["start"] == sum(b - a for _, a, b in parts[4]["pieces"])
    facts = dict(found["facts"])
    assert facts["Bytes"] == "26.21 MB"
    transfer = parts[5]["end"] - parts[5]["start"]
    assert f"{26_214_400 / transfer:.2f}"[:4] in facts["Bandwidth"]
    assert facts["Rank"] == "4 · pp2 dp0"
    assert [parts[r]["track"] for r in (4, 5)] == [dp_lane(slow, 4), dp_lane(slow, 5)]


def test_a_term_of_the_ledger_names_what_was_in_flight(slow: LoadedRun):
    account = slow.of_rank[7][0]
    track = slow.tracks[account]
    index = int(np.flatnonzero(track.row < 0)[0])
    found = details.event(slow, account, index)
    assert not found["event"] and found["definition"]
    assert found["in_flight"][0]["name"].startswith(("receive", "all_reduce"))


def test_sums_of_the_whole_range_are_the_ledgers(slow: LoadedRun):
    sums = questions.range_sums(slow, 0, slow.span_ns)
    for rank, row in zip(sums["ranks"], sums["ns"], strict=True):
        ledger = slow.report.ledger[slow.report.ledger["rank"] == rank]
        assert row == [int(ledger[f"{term}_ns"].sum()) for term in TERMS]
    some = questions.range_sums(slow, 0, slow.span_ns, [3, 99])
    assert some["ranks"] == [3]


def test_sums_of_two_halves_add_up(slow: LoadedRun):
    middle = slow.span_ns // 3
    left, right = questions.range_sums(slow, 0, middle), questions.range_sums(slow, middle, slow.span_ns)
    whole = questions.range_sums(slow, 0, slow.span_ns)
    assert (np.array(left["ns"]) + np.array(right["ns"])).tolist() == whole["ns"]


def test_search_counts_events_not_pieces(slow: LoadedRun):
    found = questions.search(slow, "ALL_REDUCE", 100, after=None)
    comm, all_reduce = KINDS.index("comm"), COLLECTIVES.index("all_reduce")
    expected = sum(
        int(((c["kind"] == comm) & (c["collective"] == all_reduce)).sum())
        for c in (slow.run.columns(r, "kind", "collective") for r in slow.run.ranks)
    )
    assert found["count"] == expected == sum(n for _, n in found["bins"])
    assert questions.search(slow, "no such thing", 100)["count"] == 0


def test_the_next_hit_follows_in_time_and_wraps(slow: LoadedRun):
    first = questions.search(slow, "gradient norm", 10, after=-1)["next"]
    start = int(slow.tracks[first[0]].start[first[1]])
    second = questions.search(slow, "gradient norm", 10, after=start)["next"]
    assert int(slow.tracks[second[0]].start[second[1]]) > start
    assert questions.search(slow, "gradient norm", 10, after=slow.span_ns)["next"] == first


def test_next_and_previous_of_the_same_name(slow: LoadedRun):
    track = dp_lane(slow, 0)
    there = questions.same_name(slow, track, 0, 1)
    assert there is not None
    names = slow.run.rank(0).events["name_id"]
    rows = slow.tracks[track].row
    assert names[rows[there[1]]] == names[rows[0]] and rows[there[1]] != rows[0]
    assert questions.same_name(slow, track, 0, -1) is None
    with pytest.raises(IndexError):
        questions.same_name(slow, track, 10**6, 1)


def test_an_operation_is_located_by_its_number(slow: LoadedRun):
    found = questions.locate(slow, 4, 9, 0)
    assert found is not None
    row = int(slow.tracks[found[0]].row[found[1]])
    assert int(slow.run.rank(4).events["op_id"][row]) == 9
    assert questions.locate(slow, 4, 10**9, 0) is None
    assert questions.locate(slow, 99, 1, 0) is None


def test_the_table_lists_the_longest_first_with_their_whole_length(slow: LoadedRun):
    rows, total = questions.table(slow, "bucket", 0, slow.span_ns)
    lengths = [row["duration_ns"] for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    longest = max(
        int(e["dur_ns"][(e["kind"] == 1) & (e["bytes"] == 26_214_400)].max())
        for e in (slow.run.rank(r).events for r in slow.run.ranks)
    )
    assert lengths[0] == longest
    assert total == len(rows) == 4 * 6 * 8


def test_steps_are_described_for_the_ruler(slow: LoadedRun):
    described = slow.describe()
    assert [step["step"] for step in described["steps"]] == list(range(6))
    assert described["ranks"][5]["label"] == "pp2 dp1"
    assert [len(edges) for edges in described["bounds"].values()] == [7] * 8
    assert all(track[3] >= 0 for rank in described["ranks"] for track in rank["tracks"])
    assert max(c for t in slow.tracks for c in t.category) < len(CATEGORIES)
