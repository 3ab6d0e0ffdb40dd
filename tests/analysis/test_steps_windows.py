"""Step windows: with launches, without, and what is said about the steps that are not whole."""

from __future__ import annotations

import numpy as np
import pytest
from timelines import Timeline, terms

from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.steps import mark_steps, whole_steps, windows
from stepscope.tracer.schema import FLAG_PARTIAL


def kernel(
    t: Timeline, launch_id: int, call: int, start: int, end: int, kind: str = "compute", **columns: object
) -> None:
    """A device row and the call that launched it."""
    t.launch(0, call, launch_id)
    t.row(0, kind, start, end, launch_id=launch_id, name="kernel", **columns)


def three_steps() -> Timeline:
    t = Timeline()
    for number, (start, end) in enumerate(((0, 100), (100, 200), (200, 1000))):
        t.step(start, end, number)
    return t


def spans(t: Timeline) -> list[tuple[object, int, int]]:
    found = windows(t.run(), 0)
    return list(zip(found.steps, found.start_ns.tolist(), found.end_ns.tolist(), strict=True))


def test_with_launches_a_step_begins_with_its_first_kernel() -> None:
    t = three_steps()
    kernel(t, 1, 50, 50, 400)
    kernel(t, 2, 150, 400, 700)
    kernel(t, 3, 250, 700, 1000)
    found = windows(t.run(), 0)
    assert found.step_ns.tolist() == [350, 300, 300]
    assert found.flags == [(), (), ("open_end",)]
    assert found.cpu_step_ns.tolist() == [100, 100, 800]


@pytest.mark.parametrize("base", [-600, -100])
def test_stamps_before_0_are_as_good_as_others(base: int) -> None:
    t = Timeline()
    for number, (start, end) in enumerate(((0, 100), (100, 200), (200, 1000))):
        t.step(base + start, base + end, number)
    for launch, call, start, end in ((1, 50, 50, 400), (2, 150, 400, 700), (3, 250, 700, 1000)):
        kernel(t, launch, base + call, base + start, base + end)
    assert spans(t) == [(0, base + 50, base + 400), (1, base + 400, base + 700), (2, base + 700, base + 1000)]


def test_stamps_before_0_without_launches() -> None:
    t = Timeline()
    t.step(-100, 0, 1)
    t.step(0, 100, 2)
    t.row(0, "compute", -90, -80)
    t.row(0, "compute", 10, 20)
    assert spans(t) == [(1, -100, 0), (2, 0, 100)]


def test_copies_and_side_streams_of_the_next_step_move_nothing() -> None:
    t = three_steps()
    kernel(t, 1, 50, 50, 400)
    kernel(t, 4, 150, 380, 390, stream="side")  # less compute time than the main stream: launched early by step 1
    kernel(t, 5, 150, 300, 310, kind="memcpy", stream="copies")
    kernel(t, 2, 150, 400, 700)
    kernel(t, 3, 250, 700, 1000)
    assert spans(t) == [(0, 50, 400), (1, 400, 700), (2, 700, 1000)]


def test_the_first_window_opens_at_a_kernel_of_any_stream_and_the_last_closes_at_any_row() -> None:
    t = three_steps()
    kernel(t, 9, 10, 20, 30, kind="memcpy", stream="copies")
    kernel(t, 8, 10, 40, 60, kind="comm", collective="all_reduce", stream="nccl")
    kernel(t, 1, 50, 50, 400)
    kernel(t, 3, 250, 700, 1000)
    kernel(t, 7, 260, 1000, 1200, kind="memcpy", stream="copies")
    found = spans(t)
    assert found[0] == (0, 40, 700) and found[-1] == (2, 700, 1200)


def test_a_step_without_a_main_stream_kernel_joins_the_next() -> None:
    t = three_steps()
    kernel(t, 1, 50, 50, 400)
    kernel(t, 2, 150, 420, 430, kind="memcpy", stream="copies")
    kernel(t, 3, 250, 700, 1000)
    run = t.run()
    found = windows(run, 0)
    assert spans(t) == [(0, 50, 700), (2, 700, 1000)]
    assert "joined" in found.flags[1]
    assert [item.code for item in run.health.items] == ["joined_steps"]


def test_a_last_step_without_a_main_stream_kernel_joins_the_one_before() -> None:
    t = three_steps()
    kernel(t, 1, 50, 50, 400)
    kernel(t, 2, 150, 400, 700)
    kernel(t, 3, 250, 700, 720, kind="memcpy", stream="copies")
    assert spans(t) == [(0, 50, 400), (1, 400, 720)]


def test_device_data_in_two_of_four_steps() -> None:
    t = Timeline()
    for number in range(4):
        t.step(number * 100, number * 100 + 90, number)
    kernel(t, 1, 10, 20, 120)
    kernel(t, 2, 110, 120, 220)
    run = t.run()
    found = decompose(run)
    assert found.ledger["flags"].tolist() == [(), ("open_end",), ("empty",), ("empty",)]
    assert found.steps["in_means"].tolist() == [True, True, False, False]
    assert any("device data in 2 of 4 steps" in item.text for item in run.health.items)


def test_ten_kernels_of_one_graph_launch_and_a_launch_from_another_thread() -> None:
    t = three_steps()
    t.launch(0, 150, 77)
    for i in range(10):
        t.compute(0, 300 + 10 * i, 310 + 10 * i, launch_id=77)
    t.row(0, "host", 50, 51, launch_id=1, name="cudaLaunchKernel", stream="autograd thread")
    t.compute(0, 60, 300, launch_id=1)
    found = windows(t.run(), 0)
    assert spans(t)[:2] == [(0, 60, 300), (1, 300, 400)]
    assert sorted(found.launched.tolist()) == [0] + [1] * 10


def test_rows_without_launch_outside_and_spilling_are_totalled() -> None:
    t = three_steps()
    kernel(t, 1, 50, 50, 400)
    kernel(t, 2, 150, 400, 700)
    kernel(t, 3, 160, 690, 730, stream="side")  # of step 1, runs 30 past its window
    kernel(t, 4, 250, 700, 1000)
    t.compute(0, 0, 20, stream="side")  # before the first step, nobody launched it
    run = t.run()
    windows(run, 0)
    said = {item.code: item.text for item in run.health.items}
    assert "1 device rows run 30 ns past" in said["spill"]
    assert "1 of 5 device rows (20 ns) have no launch" in said["no_launch"]
    assert "1 device rows lie 20 ns outside" in said["outside"]


def test_a_graph_replayed_by_many_ids_far_apart_is_found_too() -> None:
    """Correlation ids too far apart for a table."""
    t = three_steps()
    kernel(t, 1, 50, 50, 400)
    kernel(t, 1 << 40, 150, 400, 700)
    kernel(t, (1 << 60) + 1, 250, 700, 1000)
    assert [step for step, _, _ in spans(t)] == [0, 1, 2]


def test_without_launches_steps_lie_between_annotations() -> None:
    t = Timeline()
    t.step(10, 90, 4)
    t.step(100, 195, 5)
    t.compute(0, 0, 120)
    t.compute(0, 190, 230)
    found = decompose(t.run())
    assert spans(t) == [(4, 10, 100), (5, 100, 195)]
    assert [terms(row) for _, row in found.ledger.iterrows()] == [{"compute": 90}, {"compute": 25, "idle": 70}]


def test_without_annotation_the_trace_is_one_step() -> None:
    t = Timeline()
    t.compute(0, 5, 40)
    t.memcpy(0, 50, 60)
    assert spans(t) == [("all", 5, 60)]
    assert decompose(t.run()).ledger["step"].tolist() == ["all"]


def test_annotations_that_a_profiler_repeats_on_a_device_stream_do_not_count() -> None:
    t = Timeline()
    t.step(10, 90, 0)
    t.row(0, "host", 30, 200, name="ProfilerStep#0", stream="stream 7 annotations")
    t.compute(0, 20, 80)
    assert spans(t) == [(0, 10, 90)]


def test_a_slow_first_step_is_flagged_and_left_out() -> None:
    t = Timeline()
    for number, start in enumerate((0, 230, 330, 430)):
        t.step(start, start + 95, number)
    t.compute(0, 0, 525)
    found = decompose(t.run())
    assert found.ledger["flags"].tolist() == [("slow_first",), (), (), ()]
    assert found.steps["in_means"].tolist() == [False, True, True, True]


@pytest.mark.parametrize(("first", "slow"), [(200, False), (201, True)])
def test_slow_means_more_than_twice_the_median(first: int, slow: bool) -> None:
    flags = mark_steps(np.array([first, 90, 100, 110]), [set(), set(), set(), set()])
    assert ("slow_first" in flags[0]) is slow


def test_a_shortened_open_end_stays_out_of_means() -> None:
    assert whole_steps([100, 104, 99], [(), (), ("open_end",)]).tolist() == [True, True, False]
    assert whole_steps([100, 104, 103], [(), (), ("open_end",)]).tolist() == [True, True, True]
    assert whole_steps([50], [("open_end",)]).tolist() == [True]
    assert whole_steps([50, 60, 70], [("partial",), ("empty",), ()]).tolist() == [False, False, True]


def test_a_step_that_the_files_end_cuts_is_partial() -> None:
    t = Timeline()
    t.step(0, 90, 0)
    t.step(100, 150, 1, flags=FLAG_PARTIAL)
    t.compute(0, 0, 150)
    found = decompose(t.run())
    assert found.ledger["flags"].tolist() == [(), ("partial",)]
    assert found.steps["in_means"].tolist() == [True, False]


def test_a_rank_without_rows_has_no_row() -> None:
    t = Timeline(world=2)
    t.step(0, 90, ranks=(0,))
    t.compute(0, 0, 50)
    assert decompose(t.run()).ledger["rank"].tolist() == [0]


def test_zero_length_rows_cover_nothing() -> None:
    t = Timeline()
    t.step(0, 10)
    t.compute(0, 4, 4)
    t.comm(0, 5, 5)
    t.memcpy(0, 6, 6)
    assert terms(decompose(t.run()).ledger.iloc[0]) == {"idle": 10}
