"""Matching across ranks: the keys, what verifies them, who waits for whom, and clocks."""

from __future__ import annotations

import numpy as np
import pytest
from timelines import Timeline

from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.match import Matches, match
from stepscope.analysis.ledger.overlap import contention
from stepscope.tracer.schema import ClockMeta

MS = 1_000_000


def pairs(found: Matches) -> set[tuple[tuple[int, int], ...]]:
    """The matches with at least two parts, as ((rank, arrival), ...)."""
    grouped = found.parts.sort_values(["match_id", "rank"]).groupby("match_id")
    rows = (tuple(zip(part["rank"], part["arrival_ns"], strict=True)) for _, part in grouped)
    return {row for row in rows if len(row) > 1}


def two_hosts(*starts: int, world: int = 2, **columns: object) -> Timeline:
    return Timeline(world=world, hosts=("one",) * world)


# -- key 1 -------------------------------------------------------------------------------------------------------------


def test_messages_match_by_both_ends_and_number() -> None:
    t = two_hosts(world=3)
    t.group("pp", "pp", 0, 1, 2)
    t.message((0, 5), (0, 5), 0, 1, "pp", seq=0)
    t.message((10, 15), (10, 15), 1, 2, "pp", seq=0)
    t.message((20, 25), (20, 25), 1, 0, "pp", seq=0)
    t.collective("pp", 0, {0: (30, 40), 1: (31, 40), 2: (32, 40)})
    assert pairs(match(t.run())) == {
        ((0, 0), (1, 0)),
        ((1, 10), (2, 10)),
        ((0, 20), (1, 20)),
        ((0, 30), (1, 31), (2, 32)),
    }


def test_one_name_for_different_groups_on_different_ranks() -> None:
    t = two_hosts(world=4)
    t.group("1", "tp", 0, 1)
    t.group("1", "tp", 2, 3)
    t.collective("1", 7, {rank: (rank, 10) for rank in range(4)})
    assert pairs(match(t.run())) == {((0, 0), (1, 1)), ((2, 2), (3, 3))}


def test_a_number_that_comes_twice_is_told_apart_by_order() -> None:
    t = two_hosts()
    t.group("g", "dp", 0, 1)
    for start in (0, 100):
        t.collective("g", 0, {0: (start, start + 10), 1: (start + 5, start + 10)})
    assert pairs(match(t.run())) == {((0, 0), (1, 5)), ((0, 100), (1, 105))}


def test_an_unequal_count_is_reported_and_stops_nothing() -> None:
    t = two_hosts()
    t.group("g", "dp", 0, 1)
    t.collective("g", 0, {0: (0, 10), 1: (5, 10)})
    t.collective("g", 1, {0: (20, 30)})
    run = t.run()
    found = match(run)
    assert len(pairs(found)) == 1
    codes = {item.code for item in run.health.items}
    assert {"unequal_counts", "unmatched"} <= codes
    rate = found.rates.set_index("group").loc["g"]
    assert (rate["operations"], rate["matched"], rate["unmatched"], rate["rate"]) == (2, 1, 1, 0.5)


def test_some_ranks_missing_is_partial_and_counts_as_unsplit() -> None:
    t = Timeline(world=4, present=(0, 1), hosts=("one",) * 4)
    t.group("g", "dp", 0, 1, 2, 3)
    t.step(0, 100)
    t.collective("g", 0, {0: (0, 80), 1: (50, 80)})
    found = decompose(t.run())
    assert found.matches.parts["partial"].tolist() == [True, True]
    assert found.matches.parts["wait_ns"].tolist() == [50, 0]
    assert found.ledger["imbalance_ns"].tolist() == [50, 0]
    assert found.ledger["visible_comm_ns"].tolist() == [30, 30] == found.ledger["unsplit_ns"].tolist()


# -- whom a part waits for ---------------------------------------------------------------------------------------------


def test_a_ring_shift_waits_for_its_own_neighbours_only() -> None:
    """Ring 0 -> 1 -> 2 -> 3 -> 0; rank 0 comes at 50, rank 2 at 20. Rank 1 needs 0, rank 3 needs 2."""
    t = two_hosts(world=4)
    t.group("cp", "cp", 0, 1, 2, 3)
    for rank, (start, end) in enumerate(((50, 60), (0, 60), (20, 30), (0, 55))):
        t.comm(rank, start, end, "ring_shift", group="cp", seq=0, peer=(rank + 1) % 4, peer_from=(rank - 1) % 4)
    parts = match(t.run()).parts.set_index("rank")
    assert parts.loc[1, "wait_ns"] == 50 and parts.loc[1, "last_rank"] == 0
    assert (
        parts.loc[3, "wait_ns"] == 50
    )  # its receiver 0 came at 50, before its own end at 55: it held the sending half
    assert parts.loc[2, "wait_ns"] == 0 and parts.loc[0, "wait_ns"] == 0


def test_a_ring_shift_that_was_over_before_its_receiver_came_did_not_wait_for_it() -> None:
    t = two_hosts(world=3)
    t.group("cp", "cp", 0, 1, 2)
    for rank, (start, end) in enumerate(((0, 10), (50, 60), (2, 60))):
        t.comm(rank, start, end, "ring_shift", group="cp", seq=0, peer=(rank + 1) % 3, peer_from=(rank - 1) % 3)
    parts = match(t.run()).parts.set_index("rank")
    assert parts.loc[0, "wait_ns"] == 2  # sends to 1, which came at 50, after the end; receives from 2, which came at 2


def test_a_message_of_unknown_direction_is_synchronising() -> None:
    t = Timeline(world=2, source="imported", hosts=("one", "one"))
    t.group("pp", "pp", 0, 1)
    t.comm(0, 0, 60, "send", group="pp", seq=3)
    t.comm(1, 50, 60, "receive", group="pp", seq=3)
    assert match(t.run()).parts["wait_ns"].tolist() == [50, 0]


@pytest.mark.parametrize(("kind", "waits"), [("reduce", [30, 0, 10]), ("gather", [30, 0, 10])])
def test_a_reduce_root_waits_for_all_its_leaves_for_the_root_they_met(kind: str, waits: list[int]) -> None:
    """Root 0 arrives at 10; leaf 1 comes at 40, leaf 2 at 0 and could only hand over when the root came."""
    t = two_hosts(world=3)
    t.group("g", "dp", 0, 1, 2)
    t.collective("g", 0, {0: (10, 50), 1: (40, 50), 2: (0, 15)}, kind, peer=0)
    assert match(t.run()).parts["wait_ns"].tolist() == waits


def test_an_early_reduce_leaf_that_left_before_the_root_came_waited_for_nobody() -> None:
    t = two_hosts()
    t.group("g", "dp", 0, 1)
    t.collective("g", 0, {0: (50, 60), 1: (0, 5)}, "reduce", peer=0)
    parts = match(t.run()).parts
    assert parts["wait_ns"].tolist() == [0, 0] and not parts["violation"].any()


# -- key 2 -------------------------------------------------------------------------------------------------------------


def recorded_late(skew: int) -> Timeline:
    """Ten equal all-reduces without numbers; rank 1 began to record with the third, its clock `skew` ahead."""
    t = Timeline(world=2, source="imported")
    t.group("g", "dp", 0, 1)
    for i in range(10):
        start = 1000 * i + 37 * i * i
        t.comm(0, start, start + 200, group="g", in_elements=8, dtype="float32")
        if i >= 2:
            t.comm(1, start + 150 + skew, start + 200 + skew, group="g", in_elements=8, dtype="float32")
    return t


def test_a_recording_that_began_later_is_found_by_sliding() -> None:
    found = match(recorded_late(0).run())
    assert len(pairs(found)) == 8
    assert found.parts[found.parts["unmatched"]]["arrival_ns"].tolist() == [0, 1037]
    assert set(found.parts[found.parts["method"] != ""]["method"]) == {"order"}


def test_sliding_without_overlap_uses_the_steadiest_difference_and_gives_the_offset() -> None:
    """The gaps between the operations differ by more than the tolerance, so that only one shift is steady."""
    t = Timeline(world=2, source="imported")
    t.group("g", "dp", 0, 1)
    skew = 10**12
    for i in range(10):
        start = MS * (10 * i + 3 * i * i)
        t.comm(0, start, start + 2 * MS, group="g", in_elements=8)
        if i >= 2:
            t.comm(1, start + MS + skew, start + 2 * MS + skew, group="g", in_elements=8)
    found = match(t.run())
    assert len(pairs(found)) == 8
    assert found.clocks["offset_ns"].tolist() == [0, skew]
    matched = found.parts[found.parts["method"] == "order"]
    assert matched[matched["rank"] == 0]["wait_ns"].tolist() == [MS] * 8


def test_different_sizes_are_different_operations() -> None:
    t = Timeline(world=2, source="imported", hosts=("one", "one"))
    t.group("g", "dp", 0, 1)
    t.comm(0, 0, 10, group="g", in_elements=8)
    t.comm(1, 0, 10, group="g", in_elements=9)
    assert not pairs(match(t.run()))


def test_messages_numbered_for_a_whole_group_fall_back_to_order() -> None:
    """A foreign writer counts a rank's messages over all its peers, so that the two ends count differently."""
    t = Timeline(world=3, source="imported", hosts=("one",) * 3)
    t.group("pp", "pp", 0, 1, 2)
    t.comm(1, 0, 10, "receive", group="pp", seq=0, peer=0, bytes=64, dtype="float")
    t.comm(0, 5, 10, "send", group="pp", seq=0, peer=1, bytes=64, dtype="float")
    t.comm(1, 20, 30, "send", group="pp", seq=1, peer=2, bytes=64, dtype="float")
    t.comm(2, 15, 30, "receive", group="pp", seq=0, peer=1, bytes=64, dtype="float")
    assert pairs(match(t.run())) == {((0, 5), (1, 0)), ((1, 20), (2, 15))}


# -- key 3 -------------------------------------------------------------------------------------------------------------


def nameless(rank_1: list[tuple[int, int]]) -> Timeline:
    t = Timeline(world=2, source="imported", hosts=("one", "one"))
    for start, end in ((0, 10), (20, 30), (40, 50)):
        t.comm(0, start * MS, end * MS, name="ncclKernel_AllReduce_RING_LL_Sum_float", stream="nccl")
    for start, end in rank_1:
        t.comm(1, start * MS, end * MS, name="ncclKernel_AllReduce_RING_LL_Sum_float", stream="nccl")
    return t


def test_without_groups_ends_must_agree_and_intervals_overlap() -> None:
    found = match(nameless([(25, 30), (45, 50)]).run())
    assert pairs(found) == {((0, 20 * MS), (1, 25 * MS)), ((0, 40 * MS), (1, 45 * MS))}
    assert set(found.parts[found.parts["method"] != ""]["method"]) == {"inferred"}


def test_without_groups_order_alone_matches_nothing() -> None:
    assert not pairs(match(nameless([(11, 12), (31, 32), (51, 52)]).run()))


def test_another_kind_of_kernel_does_not_match() -> None:
    t = Timeline(world=2, source="imported", hosts=("one", "one"))
    t.comm(0, 0, 10, "", name="ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t")
    t.comm(1, 0, 10, "", name="ncclKernel_AllReduce_RING_LL_Sum_float")
    assert not pairs(match(t.run()))


# -- clocks ------------------------------------------------------------------------------------------------------------


def reduces(t: Timeline, ahead: dict[int, int], count: int = 5, gap: int = 1000) -> Timeline:
    t.group("g", "dp", *ahead)
    for i in range(count):
        t.collective("g", i, {rank: (gap * i + 10 * rank + skew, gap * i + 90 + skew) for rank, skew in ahead.items()})
    return t


def test_ranks_of_one_host_are_never_estimated() -> None:
    found = match(reduces(Timeline(world=2, hosts=("a", "a")), {0: 0, 1: 500}).run())
    assert found.clocks["offset_ns"].tolist() == [0, 0] and found.clocks["violations"].sum() > 0


def test_hosts_are_estimated_together() -> None:
    t = reduces(Timeline(world=4, hosts=("a", "a", "b", "b")), {0: 0, 1: 0, 2: 30, 3: 30})
    found = match(t.run())
    assert found.clocks["offset_ns"].tolist() == [0, 0, 30, 30]
    assert found.clocks["source"].tolist() == ["host", "host", "estimated", "estimated"]
    assert found.parts[found.parts["rank"] == 0]["wait_ns"].tolist() == [30] * 5


def test_unknown_hosts_without_a_violation_share_a_clock() -> None:
    found = match(reduces(Timeline(world=2), {0: 0, 1: 40}).run())
    assert found.clocks["offset_ns"].tolist() == [0, 0] and found.clocks["source"].tolist() == ["host", "host"]


def test_only_the_rank_whose_clock_is_wrong_is_estimated() -> None:
    found = match(reduces(Timeline(world=3), {0: 0, 1: 0, 2: 5000}).run())
    assert found.clocks["offset_ns"].tolist() == [0, 0, 5000]
    assert found.clocks["violations"].sum() == 0


def test_recorded_clocks_are_used() -> None:
    t = Timeline(world=2, hosts=("a", "b"), clock=(ClockMeta(), ClockMeta(offset_ns=-500, bound_ns=3)))
    found = match(reduces(t, {0: 0, 1: 500}).run())
    assert found.clocks["source"].tolist() == ["host", "recorded"]
    assert found.parts[found.parts["rank"] == 0]["wait_ns"].tolist() == [10] * 5
    assert set(found.parts["last_rank"]) == {1}


def test_a_lead_within_the_clocks_uncertainty_names_nobody() -> None:
    t = Timeline(world=2, hosts=("a", "b"), clock=(ClockMeta(bound_ns=5), ClockMeta(bound_ns=5)))
    found = match(reduces(t, {0: 0, 1: 0}).run())
    assert set(found.parts["last_rank"]) == {-1}


def test_drift_is_found_in_long_recordings() -> None:
    """Rank 1 gains 20 ppm over 200 s."""
    t = Timeline(world=2, hosts=("a", "b"))
    t.group("g", "dp", 0, 1)
    for i in range(40):
        start = 5_000_000_000 * i
        gained = round(start * 20e-6)
        t.collective("g", i, {0: (start, start + MS), 1: (start + MS // 2 + gained, start + MS + gained)})
    found = match(t.run())
    assert found.clocks["drift_ppm"].tolist()[1] == pytest.approx(20, abs=0.01)
    waits = found.parts[found.parts["rank"] == 0]["wait_ns"].to_numpy()
    assert np.abs(waits - MS // 2).max() < 100


def test_drifting_clocks_still_give_an_exact_ledger() -> None:
    t = Timeline(
        world=3, hosts=("a", "b", "c"), clock=(ClockMeta(), ClockMeta(drift_ppm=90.5), ClockMeta(drift_ppm=-70.25))
    )
    t.group("g", "dp", 0, 1, 2)
    t.step(0, 10_000_000)
    for i in range(60):
        t.collective(
            "g", i, {r: (100_000 * i + 13_337 * r * (i % 3), 100_000 * i + 70_001) for r in range(3)}, stream="a"
        )
        t.collective(
            "g", 1000 + i, {r: (100_000 * i + 17_333 * (2 - r), 100_000 * i + 80_003) for r in range(3)}, stream="b"
        )
    ledger = decompose(t.run()).ledger
    assert (ledger[["compute_ns", "visible_comm_ns", "imbalance_ns", "idle_ns"]].sum(axis=1) == 10_000_000).all()


# -- beside the ledger -------------------------------------------------------------------------------------------------


def test_the_wait_of_an_unmatched_operation_is_estimated_from_eight_samples_up() -> None:
    def alone(count: int) -> Matches:
        t = Timeline(world=2, present=(0,))
        t.group("g", "dp", 0, 1)
        for i in range(count):
            t.comm(0, 1000 * i, 1000 * i + 100 + 10 * i, group="g", seq=i, bytes=64)
        return match(t.run())

    assert alone(7).parts["estimated_wait_ns"].tolist() == [-1] * 7
    assert alone(8).parts["estimated_wait_ns"].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert [alone(count).rates["estimated_wait_ns"].tolist() for count in (7, 8)] == [[-1], [280]]


def test_contention_compares_the_same_kernel_beside_and_without_a_transfer() -> None:
    t = Timeline()
    t.step(0, 1000)
    t.comm(0, 100, 200)
    t.compute(0, 0, 40, name="gemm")
    t.compute(0, 110, 170, name="gemm")
    t.compute(0, 300, 320, name="gemm")
    t.compute(0, 400, 450, name="relu")
    t.compute(0, 120, 220, name="gemm", grid="8x8x1")  # another shape
    t.compute(0, 500, 600, name="gemm", grid="8x8x1")
    t.compute(0, 700, 710, name="gemm", grid="2x2x1")  # never beside a transfer
    run = t.run()
    table = contention(run, decompose(run), 0)
    small = {"name": "gemm", "grid": "", "inside": 1, "outside": 2, "inside_ns": 60, "outside_ns": 30, "contention": 2}
    large = {"grid": "8x8x1", "inside": 1, "outside": 1, "inside_ns": 100, "outside_ns": 100, "contention": 1}
    assert table.to_dict("records") == [
        small | {"outside_square_ns": (40**2 + 20**2) / 2},
        small | large | {"outside_square_ns": 100**2},
    ]


def test_the_axis_comes_from_the_mesh_the_group_or_the_user() -> None:
    t = Timeline(world=4, mesh={"pp": 2, "tp": 2})
    t.group("a", "", 0, 2)
    t.group("b", "", 0, 1)
    t.group("all", "", 0, 1, 2, 3)
    for name in ("a", "b", "all"):
        t.collective(name, 0, {0: (0, 10), 1: (0, 10), 2: (0, 10), 3: (0, 10)})
    axes = match(t.run()).parts.drop_duplicates("group").set_index("group")["axis"]
    assert axes.to_dict() == {"a": "pp", "b": "tp", "all": "world"}
    bare = Timeline(world=2)
    bare.group("x", "", 0, 1)
    bare.collective("x", 0, {0: (0, 10), 1: (5, 10)})
    assert match(bare.run()).parts["axis"].tolist() == ["", ""]
    assert match(bare.run(), axes={"x": "pp"}).parts["axis"].tolist() == ["pp", "pp"]


def test_ranks_that_have_come_apart_are_named() -> None:
    t = two_hosts()
    t.group("g", "dp", 0, 1)
    t.comm(0, 0, 10, "all_reduce", group="g", seq=4)
    t.comm(1, 0, 10, "all_gather", group="g", seq=4)
    run = t.run()
    match(run)
    (item,) = [item for item in run.health.items if item.code == "mismatched"]
    assert "all_reduce number 4 of g on rank 0 against all_gather number 4 of g on rank 1" in item.text


def test_a_group_of_unknown_ranks_may_miss_somebody_when_ranks_were_not_recorded() -> None:
    def parts(present: tuple[int, ...] | None) -> Matches:
        t = Timeline(world=4, present=present, source="imported", hosts=("one",) * 4)
        for rank in (0, 1):
            t.comm(rank, 10 * rank, 50, group="who knows", seq=0)
        return match(t.run())

    assert parts((0,)).parts["unmatched"].tolist() == [True]
    assert parts((0, 1)).parts["partial"].tolist() == [True, True]
    assert parts(None).parts["partial"].tolist() == [False, False]  # all ranks were recorded: these two are the group
