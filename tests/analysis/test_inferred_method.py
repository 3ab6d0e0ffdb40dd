"""The inferred and the balanced method: pipelines that recorded computations only."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from timelines import Timeline, terms

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ledger.decompose import decompose


def schedule(stages: int, microbatches: int, one_f_one_b: bool = True) -> list[list[tuple[str, int]]]:
    """Forward and backward of each stage in order: 1F1B or GPipe."""
    rows = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, microbatches) if one_f_one_b else microbatches
        order = [("forward", m) for m in range(warm)]
        for m in range(microbatches - warm):
            order += [("forward", m + warm), ("backward", m)]
        rows.append(order + [("backward", m) for m in range(microbatches - warm, microbatches)])
    return rows


def play(t: Timeline, orders: list[list[tuple[str, int]]], forward: int, backward: int, **columns: int) -> int:
    """Run the orders with free communication; returns the last end."""
    stages = len(orders)
    done: dict[tuple[str, int, int], int] = {}
    clock, place = [0] * stages, [0] * stages
    while any(place[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while place[s] < len(orders[s]):
                phase, m = orders[s][place[s]]
                peer = s - 1 if phase == "forward" else s + 1
                if 0 <= peer < stages and (phase, peer, m) not in done:
                    break
                start = max(clock[s], done.get((phase, peer, m), 0))
                clock[s] = done[phase, s, m] = start + (forward if phase == "forward" else backward)
                t.compute(s, start, clock[s], phase=phase, stage=s, microbatch=m, **columns)
                place[s] += 1
    return max(clock)


@pytest.mark.parametrize("one_f_one_b", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (2, 2), (3, 7)])
def test_equal_stages_and_free_communication_give_the_textbook_bubble(
    stages: int, microbatches: int, one_f_one_b: bool
) -> None:
    t = Timeline(world=stages, mesh={"pp": stages})
    step = play(t, schedule(stages, microbatches, one_f_one_b), 10, 20)
    t.step(-5, step + 40)  # the annotation is longer: the common window is of the operations
    found = decompose(t.run())
    assert set(found.ledger["method"]) == {"inferred"}
    assert step == (microbatches + stages - 1) * 30
    for _, row in found.ledger.iterrows():
        assert terms(row) == {"compute": microbatches * 30, "bubble": (stages - 1) * 30}


def test_what_nobody_waited_for_is_idle() -> None:
    """Stage 1 could begin at 10, does so at 25; its last operation ends at 60, stage 0 is done at 100."""
    t = Timeline(world=2)
    t.step(0, 100)
    t.compute(0, 0, 10, phase="forward", stage=0, microbatch=0)
    t.compute(1, 25, 40, phase="forward", stage=1, microbatch=0)
    t.compute(1, 40, 60, phase="backward", stage=1, microbatch=0)
    t.compute(0, 70, 100, phase="backward", stage=0, microbatch=0)
    found = decompose(t.run())
    rows = found.ledger.set_index("rank")
    assert terms(rows.loc[0]) == {"compute": 40, "bubble": 50, "idle": 10}
    assert terms(rows.loc[1]) == {"compute": 35, "bubble": 50, "idle": 15}
    assert found.segments(1)[["start_ns", "end_ns", "term"]].to_numpy().tolist() == [
        [0, 10, "bubble"],
        [10, 25, "idle"],
        [25, 60, "compute"],
        [60, 100, "bubble"],
    ]


def test_chunks_follow_the_virtual_stages() -> None:
    """Two stages, two chunks: forward goes 0, 1, then 0 and 1 again with chunk 1."""
    t = Timeline(world=2)
    t.step(0, 40)
    for place, (stage, chunk) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
        t.compute(stage, 10 * place, 10 * place + 10, phase="forward", stage=stage, chunk=chunk, microbatch=0)
    rows = decompose(t.run()).ledger.set_index("rank")
    assert terms(rows.loc[0]) == {"compute": 20, "bubble": 20}  # 10-20 for chunk 0 of stage 1, 30-40 at the end
    assert terms(rows.loc[1]) == {"compute": 20, "bubble": 20}


def test_a_memory_copy_inside_a_gap_does_not_hide_the_waiting() -> None:
    t = Timeline(world=2)
    t.step(0, 30)
    t.compute(0, 0, 20, phase="forward", stage=0, microbatch=0)
    t.compute(1, 20, 30, phase="forward", stage=1, microbatch=0)
    t.memcpy(1, 5, 15)
    assert terms(decompose(t.run()).ledger.set_index("rank").loc[1]) == {"compute": 10, "bubble": 20}


def test_without_a_mesh_two_ranks_of_one_stage_cannot_be_told_apart() -> None:
    t = Timeline(world=3)
    t.step(0, 30)
    for rank, stage in enumerate((0, 1, 1)):
        t.compute(rank, 0, 10, phase="forward", stage=stage, microbatch=0)
    with pytest.raises(StepscopeError, match="several ranks name the same stage"):
        decompose(t.run(), method="inferred")


def test_rows_that_say_nothing_cannot_be_inferred() -> None:
    t = Timeline()
    t.step(0, 30)
    t.compute(0, 0, 10)
    with pytest.raises(StepscopeError, match="stage, microbatch and phase"):
        decompose(t.run(), method="inferred")
    with pytest.raises(ValueError, match="unknown method"):
        decompose(t.run(), method="guessed")


def test_balanced_keeps_the_first_structural_part_of_the_waiting() -> None:
    t = Timeline(world=2)
    t.group("pp", "pp", 0, 1)
    t.group("dp", "dp", 0, 1)
    t.step(0, 100)
    t.message((30, 30), (0, 30), 0, 1, "pp", seq=0)
    t.message((70, 70), (50, 70), 0, 1, "pp", seq=1)
    t.collective("dp", 0, {0: (90, 90), 1: (80, 90)}, axis="dp")
    run = t.run()
    assert terms(decompose(run).ledger.loc[1]) == {"bubble": 50, "imbalance": 10, "idle": 40}
    found = decompose(run, method="balanced", structural={(0, 0): 0, (1, 0): 35})
    assert terms(found.ledger.loc[1]) == {"bubble": 35, "imbalance": 25, "idle": 40}
    assert found.segments(1)[["start_ns", "end_ns", "term"]].to_numpy().tolist() == [
        [0, 30, "bubble"],
        [30, 50, "idle"],
        [50, 55, "bubble"],
        [55, 70, "imbalance"],
        [70, 80, "idle"],
        [80, 90, "imbalance"],
        [90, 100, "idle"],
    ]
    assert set(found.ledger["method"]) == {"balanced"}
    more = decompose(run, method="balanced", structural={(0, 0): 10, (1, 0): 1000})
    assert terms(more.ledger.loc[1]) == {"bubble": 50, "imbalance": 10, "idle": 40}


def test_balanced_needs_the_waits_of_every_step() -> None:
    t = Timeline()
    t.step(0, 30)
    t.compute(0, 0, 10)
    with pytest.raises(ValueError, match="needs the structural waits"):
        decompose(t.run(), method="balanced")
    with pytest.raises(ValueError, match="no structural wait of step 0 on rank 0"):
        decompose(t.run(), method="balanced", structural={})


# -- a real pipeline ---------------------------------------------------------------------------------------------------


def pipeline_dump(folder: Path) -> Timeline:
    """Eight stages: starts and ends of forward and backward in ms, each iteration from its own zero."""
    t = Timeline(world=8, mesh={"pp": 8}, source="imported")
    ranks = [json.loads((folder / f"pp_rank_{rank}.json").read_text()) for rank in range(8)]
    origin = 0
    for iteration in ranks[0]:
        longest = 0
        for rank, phase in itertools.product(range(8), ("fwd", "bwd")):
            data = ranks[rank][iteration]
            spans = zip(data[f"{phase}_start"], data[f"{phase}_end"], strict=True)
            for microbatch, (start, end) in enumerate(spans):
                low, high = (round(at * 1e6) + origin for at in (start, end))
                word = "forward" if phase == "fwd" else "backward"
                t.compute(rank, low, high, phase=word, stage=rank, microbatch=microbatch)
                longest = max(longest, high)
        t.step(origin, longest, int(iteration))
        origin = longest + 1000
    return t


def test_a_recorded_pipeline_equals_its_independent_ledger(corpus: Path) -> None:
    folder = corpus / "pp-vis-1f1b"
    oracle = json.loads((folder / "oracle.json").read_text())["iterations"]
    run = pipeline_dump(folder).run()
    inferred = decompose(run)
    structural = {
        (rank, int(number)): int(iteration["structural_wait"])
        for number, iteration in oracle.items()
        for rank in range(8)
    }
    balanced = decompose(run, method="balanced", structural=structural)
    rows = {name: found.ledger.set_index(["rank", "step"]) for name, found in (("i", inferred), ("b", balanced))}
    assert len(rows["i"]) == 8 * len(oracle)
    for number, iteration in oracle.items():
        for expected in iteration["ranks"]:
            key = (expected["rank"], int(number))
            row = rows["i"].loc[key]
            assert row["step_ns"] == iteration["T"]
            assert terms(row) == {
                "compute": expected["compute"],
                "bubble": expected["bubble_direct"],
                "idle": expected["idle"],
            }
            row = rows["b"].loc[key]
            assert row["bubble_ns"] == expected["bubble_balanced"]
            assert row["imbalance_ns"] == expected["imbalance_balanced"]
    first = inferred.ledger[inferred.ledger["step"] == 1]
    assert all("slow_first" in flags for flags in first["flags"])
    assert not inferred.steps.set_index("step").loc[1, "in_means"].any()
