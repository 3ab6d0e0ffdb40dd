"""Hand-made timelines whose ledgers were worked out by hand: one rank first, then several."""

from __future__ import annotations

import pandas as pd
import pytest
from timelines import Timeline, terms

from stepscope.analysis.ledger.decompose import Decomposition, decompose


def ledger(timeline: Timeline, **options: object) -> tuple[pd.DataFrame, Decomposition]:
    """The ledger by rank, and everything behind it; every row must add up and be tiled by its segments."""
    found = decompose(timeline.run(), **options)  # type: ignore[arg-type]
    for rank in found.windows:
        segments = found.segments(rank)
        assert (segments["start_ns"].to_numpy()[1:] >= segments["end_ns"].to_numpy()[:-1]).all()
        rows = found.ledger[found.ledger["rank"] == rank]
        assert (segments["end_ns"] - segments["start_ns"]).sum() == rows["step_ns"].sum()
    return found.ledger.set_index("rank"), found


def test_synchronisation_rows_are_no_device_work() -> None:
    t = Timeline()
    t.step(0, 1000)
    t.compute(0, 0, 300)
    t.comm(0, 300, 900)
    t.row(0, "host", 300, 900, name="cudaStreamSynchronize")
    rows, _ = ledger(t)
    assert terms(rows.loc[0]) == {"compute": 300, "visible_comm": 600, "idle": 100}
    assert rows.loc[0, "overlap_efficiency"] == 0 and rows.loc[0, "unsplit_ns"] == 0


def test_two_communication_streams_count_once() -> None:
    t = Timeline()
    t.step(0, 1000)
    t.compute(0, 0, 400)
    t.compute(0, 800, 1000)
    t.comm(0, 300, 500, stream="a")
    t.comm(0, 300, 500, stream="b")
    rows, _ = ledger(t)
    assert terms(rows.loc[0]) == {"compute": 600, "visible_comm": 100, "idle": 300}
    assert (
        rows.loc[0, "hidden_comm_ns"] == 100 and rows.loc[0, "overlap_efficiency"] == 0.5 == rows.loc[0, "comm_overlap"]
    )


def test_memory_copies_come_after_communication() -> None:
    t = Timeline()
    t.step(0, 100)
    t.compute(0, 0, 40)
    t.comm(0, 30, 60)
    t.memcpy(0, 35, 80, stream="copies")
    rows, _ = ledger(t)
    assert terms(rows.loc[0]) == {"compute": 40, "visible_comm": 20, "memcpy": 20, "idle": 20}


def test_undefined_overlap_is_not_zero() -> None:
    t = Timeline()
    t.step(0, 100)
    t.compute(0, 0, 40)
    rows, _ = ledger(t)
    assert pd.isna(rows.loc[0, "overlap_efficiency"]) and pd.isna(rows.loc[0, "comm_overlap"])


# -- across ranks ------------------------------------------------------------------------------------------------------


def four_arrivals() -> Timeline:
    t = Timeline(world=4, mesh={"dp": 4})
    t.step(0, 75)
    t.group("dp_0", "dp", 0, 1, 2, 3)
    t.collective("dp_0", 0, {rank: (start, 75) for rank, start in enumerate((0, 60, 64, 62))}, axis="dp")
    return t


def test_the_shortest_kernel_is_the_straggler() -> None:
    rows, found = ledger(four_arrivals())
    parts = found.matches.parts.set_index("rank")
    assert parts["wait_ns"].tolist() == [64, 4, 0, 2]
    assert parts["transfer_ns"].tolist() == [11] * 4
    assert set(parts["last_rank"]) == {2} == set(parts["straggler"])
    assert terms(rows.loc[0]) == {"visible_comm": 11, "imbalance": 64}
    assert terms(rows.loc[2]) == {"visible_comm": 11, "idle": 64}


def test_equal_arrivals_have_no_straggler() -> None:
    t = Timeline(world=2)
    t.step(0, 10)
    t.group("g", "dp", 0, 1)
    t.collective("g", 0, {0: (2, 10), 1: (2, 9)})
    assert set(ledger(t)[1].matches.parts["last_rank"]) == {-1}


def test_a_skewed_clock_is_estimated_from_common_ends() -> None:
    t = Timeline(world=2)
    t.step(0, 3000)
    t.group("world", "world", 0, 1)
    for i in range(3):
        t.collective("world", i, {0: (1000 * i + 100, 1000 * i + 200), 1: (1000 * i + 650, 1000 * i + 700)})
    rows, found = ledger(t)
    clock = found.matches.clocks.set_index("rank")
    assert clock.loc[1, "offset_ns"] == 500 and clock.loc[1, "residual_ns"] == 0 and clock["violations"].sum() == 0
    parts = found.matches.parts
    assert parts[parts["rank"] == 0]["wait_ns"].tolist() == [50, 50, 50]
    assert parts[parts["rank"] == 0]["transfer_ns"].tolist() == [50, 50, 50]
    assert set(parts["last_rank"]) == {1}
    assert terms(rows.loc[0]) == {"visible_comm": 150, "imbalance": 150, "idle": 2700}


def test_only_equal_groups_and_numbers_match() -> None:
    t = Timeline(world=3, present=(0, 2))
    t.step(0, 100)
    t.group("world", "world", 0, 2)
    t.group("tp", "tp", 0, 1)
    t.collective("world", 5, {0: (0, 10), 2: (5, 10)})
    t.collective("tp", 9, {0: (20, 30)})
    t.collective("world", 6, {0: (40, 50), 2: (45, 50)})
    parts = ledger(t)[1].matches.parts
    assert parts.groupby("match_id")["rank"].count().tolist().count(2) == 2
    assert parts[parts["unmatched"]]["group"].tolist() == ["tp"]
    assert parts[parts["unmatched"]][["last_arrival_ns", "wait_ns", "transfer_ns"]].to_numpy().tolist() == [
        [-1, -1, -1]
    ]


def receiver(sender_recorded: bool) -> Timeline:
    t = Timeline(world=2, mesh={"pp": 2}, present=None if sender_recorded else (1,))
    t.group("pp", "pp", 0, 1)
    t.step(0, 100)
    t.message((85, 90), (10, 90), 0, 1, "pp")
    return t


def test_a_receive_waits_for_its_send() -> None:
    rows, _ = ledger(receiver(True))
    assert terms(rows.loc[1]) == {"visible_comm": 5, "bubble": 75, "idle": 20}
    assert terms(rows.loc[0]) == {"visible_comm": 5, "idle": 95}


def test_a_receive_without_its_sender_cannot_be_split() -> None:
    rows, found = ledger(receiver(False))
    assert terms(rows.loc[1]) == {"visible_comm": 80, "idle": 20}
    assert rows.loc[1, "unsplit_ns"] == 80
    assert found.matches.parts["unmatched"].tolist() == [True]


def test_a_bubble_is_inherited_through_a_broadcast() -> None:
    t = Timeline(world=3, mesh={})
    t.group("pp", "pp", 0, 1)
    t.group("tp", "tp", 1, 2)
    t.step(0, 110)
    t.message((100, 105), (0, 105), 0, 1, "pp")
    t.collective("tp", 0, {1: (105, 110), 2: (0, 110)}, "broadcast", peer=1, axis="tp")
    rows, _ = ledger(t)
    assert terms(rows.loc[2]) == {"bubble": 100, "imbalance": 5, "visible_comm": 5}


def test_a_late_peer_of_the_pipeline_is_half_bubble_half_imbalance() -> None:
    t = Timeline(world=3)
    t.group("pp", "pp", 0, 1)
    t.group("tp", "tp", 1, 2)
    t.step(0, 90)
    t.message((70, 70), (0, 70), 0, 1, "pp")
    t.compute(1, 70, 80)
    t.collective("tp", 0, {1: (80, 90), 2: (0, 90)}, axis="tp")
    rows, _ = ledger(t)
    assert terms(rows.loc[2]) == {"bubble": 70, "imbalance": 10, "visible_comm": 10}


@pytest.mark.parametrize(
    ("root", "leaf", "root_wait", "root_transfer", "leaf_transfer"),
    [((0, 75), (64, 75), 64, 11, 11), ((0, 5), (64, 75), 0, 5, 11)],
)
def test_a_broadcast_root_waits_only_for_whom_it_can_have_met(
    root: tuple[int, int], leaf: tuple[int, int], root_wait: int, root_transfer: int, leaf_transfer: int
) -> None:
    t = Timeline(world=2)
    t.group("dp", "dp", 0, 1)
    t.step(0, 80)
    t.collective("dp", 0, {0: root, 1: leaf}, "broadcast", peer=0)
    parts = ledger(t)[1].matches.parts.set_index("rank")
    assert (parts.loc[0, "wait_ns"], parts.loc[0, "transfer_ns"]) == (root_wait, root_transfer)
    assert (parts.loc[1, "wait_ns"], parts.loc[1, "transfer_ns"]) == (0, leaf_transfer)
    assert not parts["violation"].any()


def test_a_buffered_send_is_all_transfer() -> None:
    t = Timeline(world=2, mesh={"pp": 2})
    t.group("pp", "pp", 0, 1)
    t.step(0, 100)
    t.message((0, 5), (50, 60), 0, 1, "pp")
    parts = ledger(t)[1].matches.parts.set_index("rank")
    assert parts["wait_ns"].tolist() == [0, 0] and parts["transfer_ns"].tolist() == [5, 10]
    assert not parts["violation"].any()


def test_equal_waits_of_pipeline_and_tensor_are_bubble() -> None:
    t = Timeline(world=3)
    t.group("pp", "pp", 0, 1)
    t.group("tp", "tp", 1, 2)
    t.step(0, 100)
    t.collective("tp", 0, {1: (0, 50), 2: (50, 50)}, axis="tp", stream="tp")
    t.message((50, 50), (0, 50), 0, 1, "pp")
    rows, _ = ledger(t)
    assert terms(rows.loc[1]) == {"bubble": 50, "idle": 50}


def test_an_end_before_the_last_arrival_is_all_wait_and_a_violation() -> None:
    t = Timeline(world=2, hosts=("a", "a"))
    t.group("dp", "dp", 0, 1)
    t.step(0, 200)
    t.collective("dp", 0, {0: (0, 106), 1: (108, 120)})
    rows, found = ledger(t)
    assert terms(rows.loc[0]) == {"imbalance": 106, "idle": 94}
    assert found.matches.parts["violation"].tolist() == [True, False]
    assert found.matches.clocks["violations"].tolist() == [1, 0]
    assert "clock" in rows.loc[0, "flags"]


def test_a_clip_over_stages_and_replicas() -> None:
    """World 4 = dp 2 x pp 2 (dp outermost): replica 0 is fast; its own last stage comes at 30, the other replica at 70."""
    t = Timeline(world=4, mesh={"dp": 2, "pp": 2})
    t.group("world", "world", 0, 1, 2, 3)
    t.step(0, 80)
    t.collective("world", 0, {0: (10, 80), 1: (30, 80), 2: (60, 80), 3: (70, 80)}, axis="world")
    rows, _ = ledger(t)
    assert terms(rows.loc[0]) == {"bubble": 20, "imbalance": 40, "visible_comm": 10, "idle": 10}
    assert terms(rows.loc[1]) == {"imbalance": 40, "visible_comm": 10, "idle": 30}
    assert terms(rows.loc[2]) == {"bubble": 10, "visible_comm": 10, "idle": 60}


def test_head_of_line_names_the_straggler_of_the_operation_before() -> None:
    """Rank 1 waits (hidden) for rank 0 until 100, so that its next operation starts at 105, where rank 2 waits."""
    t = Timeline(world=3)
    t.group("a", "dp", 0, 1)
    t.group("b", "tp", 1, 2)
    t.step(0, 120)
    t.compute(1, 0, 105)
    t.collective("a", 0, {0: (100, 105), 1: (0, 105)})
    t.collective("b", 0, {1: (105, 110), 2: (20, 110)})
    parts = ledger(t)[1].matches.parts
    second = parts[parts["group"] == "b"]
    assert set(second["last_rank"]) == {1} and set(second["straggler"]) == {0}


def test_a_foreign_gloo_trace_without_groups_is_not_paired() -> None:
    t = Timeline(world=2, source="imported")
    t.step(0, 100)
    for rank in (0, 1):
        t.row(rank, "comm", 10, 50, stream="thread", role="host", name="gloo:all_reduce", collective="all_reduce")
    run = t.run()
    found = decompose(run)
    assert found.matches.parts["unmatched"].all()
    assert "group_unknown" in [item.code for item in run.health.items]
    assert found.ledger["flags"].tolist() == [("host",), ("host",)]
    assert found.ledger["unsplit_ns"].tolist() == [40, 40]


def two_waits(*wait_rows: tuple[int, int, int], compute: tuple[int, int] = (60, 100)) -> Timeline:
    """Rank 1 is in a pipeline receive until 40 (op 7) and in a tp all-reduce until 50 (op 8); both partners come late."""
    t = Timeline(world=3)
    t.group("pp", "pp", 0, 1)
    t.group("tp", "tp", 1, 2)
    t.step(0, 100)
    t.message((40, 40), (0, 40), 0, 1, "pp", op_id=7)
    t.collective("tp", 0, {1: (0, 50), 2: (50, 50)}, axis="tp", stream="tp", op_id=8)
    for start, end, op_id in wait_rows:
        t.wait(1, start, end, op_id)
    t.compute(1, *compute)
    return t


def test_of_two_waits_the_one_that_ends_last_before_the_next_computation_counts() -> None:
    rows, found = ledger(two_waits())
    assert terms(rows.loc[1]) == {"imbalance": 50, "compute": 40, "idle": 10}
    assert found.steps.set_index("rank").loc[1, "nonblocking_ns"] == 0


def test_a_computation_that_begins_before_an_end_did_not_depend_on_it() -> None:
    """The all-reduce is in flight past 45, where the computation begins: until 40 the receive is to blame, then nobody."""
    rows, found = ledger(two_waits(compute=(45, 100)))
    assert terms(rows.loc[1]) == {"bubble": 40, "imbalance": 5, "compute": 55}
    assert found.steps.set_index("rank").loc[1, "nonblocking_ns"] == 5
    assert "nonblocking" in rows.loc[1, "flags"]
    assert rows.loc[1, "hidden_wait_ns"] == 5


def test_a_wait_row_names_the_blocker_while_it_is_in_force() -> None:
    rows, found = ledger(two_waits((10, 40, 7)))
    assert terms(rows.loc[1]) == {"bubble": 30, "imbalance": 20, "compute": 40, "idle": 10}
    assert found.steps.set_index("rank").loc[1, "blocking_comm_ns"] == 0
    assert pd.isna(found.steps.set_index("rank").loc[0, "blocking_comm_ns"])


def test_blocking_communication_is_what_a_wait_row_names() -> None:
    t = Timeline()
    t.step(0, 100)
    t.compute(0, 0, 20)
    t.comm(0, 10, 60, op_id=3)
    t.wait(0, 40, 60, 3)
    rows, found = ledger(t)
    assert terms(rows.loc[0]) == {"compute": 20, "visible_comm": 40, "idle": 40}
    assert found.steps.loc[0, "blocking_comm_ns"] == 20


def test_grouped_sends_and_receives_without_peers_are_an_all_to_all() -> None:
    t = Timeline(world=2, source="imported", hosts=("one", "one"))
    for rank, start in ((0, 100), (1, 160)):
        t.step(0, 1000, ranks=(rank,))
        t.comm(
            rank, start, 200 + rank, "", name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", stream="nccl"
        )
    rows, _ = ledger(t)
    assert terms(rows.loc[0]) == {"imbalance": 60, "visible_comm": 40, "idle": 900}


def test_one_f_one_b_bubble() -> None:
    """1F1B, 4 stages, 8 microbatches, forward 1, backward 2 (in units of 10): step 33, bubble 9 a stage."""
    unit, stages, microbatches = 10, 4, 8
    t = Timeline(world=stages, mesh={"pp": stages})
    t.group("f", "pp", *range(stages))
    t.group("b", "pp", *range(stages))
    clock = [0] * stages
    done: dict[tuple[str, int, int], int] = {}
    order = {}
    for s in range(stages):
        warm = min(stages - 1 - s, microbatches)
        order[s] = [("F", m) for m in range(warm)]
        for m in range(microbatches - warm):
            order[s] += [("F", m + warm), ("B", m)]
        order[s] += [("B", m) for m in range(microbatches - warm, microbatches)]
    place = [0] * stages
    receives = []
    while any(place[s] < len(order[s]) for s in range(stages)):
        for s in range(stages):
            while place[s] < len(order[s]):
                kind, m = order[s][place[s]]
                need = ("F", s - 1, m) if kind == "F" else ("B", s + 1, m)
                peer = need[1]
                if 0 <= peer < stages and need not in done:
                    break
                ready = done.get(need, 0)
                if 0 <= peer < stages and ready > clock[s]:
                    receives.append((kind, peer, s, m, clock[s], ready))
                start = max(clock[s], ready)
                clock[s] = done[kind, s, m] = start + unit * (1 if kind == "F" else 2)
                t.compute(s, start, clock[s])
                place[s] += 1
    for kind, source, destination, m, start, end in receives:
        t.message((end, end), (start, end), source, destination, kind.lower(), seq=m)
    step = max(clock)
    # what a stage waits at the end is the next step's first receive: here a collective of the pipeline closes the step
    t.group("end", "pp", *range(stages))
    t.collective("end", 0, {s: (clock[s], step) for s in range(stages)}, "barrier", axis="pp")
    t.step(0, step)
    rows, _ = ledger(t)
    assert step == 33 * unit
    assert rows["bubble_ns"].tolist() == [9 * unit] * stages
    assert rows["compute_ns"].tolist() == [24 * unit] * stages
