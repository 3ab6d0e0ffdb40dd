"""From marks to rows: timelines worked by hand, then any sequence of calls."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_reading import EPOCH, HandClock, ListSink, all_reduce_site

from stepscope.tracer import rows as marks
from stepscope.tracer.recorder import CommSite, NullRecorder, Recorder
from stepscope.tracer.rows import ComputeRow, Deriver, HostRow, WaitRow
from stepscope.tracer.schema import Operation, plan_of


def recorder_at(clock: HandClock, **options: object) -> Recorder:
    return Recorder(0, clock=clock.clock(), **options)  # type: ignore[arg-type]


def one_step(clock: HandClock) -> Recorder:
    """0-10 embedding, issue at 10, returned at 12, layer.0 until 30, waits 30-50 for the all-reduce (15-50), 50-60."""
    recorder = recorder_at(clock)
    site = all_reduce_site()
    recorder.begin_step(3)
    recorder.place(phase="forward", stage=1, chunk=0, microbatch=4)
    recorder.block("embedding")
    clock.now = 10
    op_id = recorder.issue(site, 7)
    clock.now = 12
    recorder.resume()
    recorder.block("layer.0", layer=0)
    clock.now = 30
    recorder.wait(op_id)
    recorder.communicated(op_id, 15, 50)
    clock.now = 50
    recorder.resume()
    clock.now = 60
    recorder.end_step()
    return recorder


def times(operation: Operation) -> tuple[str, str, int, int]:
    return operation.kind, operation.name, operation.start_ns - EPOCH, operation.end_ns - EPOCH


def test_rows_of_a_step_worked_by_hand() -> None:
    operations = one_step(HandClock()).operations(3)
    assert [times(operation) for operation in operations] == [
        ("compute", "step", 0, 0),  # empty rows follow the structure: place and block cut at the same instant
        ("compute", "forward", 0, 0),
        ("compute", "embedding", 0, 10),
        ("comm", "all_reduce", 15, 50),
        ("compute", "embedding", 12, 12),
        ("compute", "layer.0", 12, 30),
        ("wait", "wait all_reduce", 30, 50),
        ("compute", "layer.0", 50, 60),
    ]
    comm = operations[3]
    assert (comm.issue_ns - EPOCH, comm.seq, comm.op_id, comm.stream) == (10, 7, 1, "dp")
    assert (comm.collective, comm.axis, comm.strategy, comm.group, comm.ranks) == (
        "all_reduce",
        "dp",
        "dp",
        "mesh_dp_0",
        (0, 1),
    )
    assert (comm.dtype, comm.in_elements, comm.out_elements, comm.bytes) == ("float32", 4, 4, 16)
    assert operations[6].op_id == comm.op_id
    place = {(o.phase, o.stage, o.chunk, o.microbatch) for o in operations[1:]}
    assert place == {("forward", 1, 0, 4)}
    assert [o.layer for o in operations] == [-1, -1, -1, -1, -1, 0, 0, 0]


def test_rows_follow_structure_and_never_time() -> None:
    assert plan_of(one_step(HandClock()).operations()) == plan_of(one_step(HandClock(tick=3)).operations())


def test_a_place_that_does_not_change_cuts_nothing_and_one_that_does_forgets_the_block() -> None:
    clock = HandClock()
    recorder = recorder_at(clock)
    recorder.begin_step(0)
    recorder.place(phase="forward", microbatch=0)
    recorder.block("layer.1", layer=1)
    recorder.place(phase="forward", microbatch=0)
    recorder.place(microbatch=1)
    recorder.block("loss", phase="other")
    recorder.end_step()
    rows = [(o.name, o.phase, o.layer, o.microbatch) for o in recorder.operations()]
    assert rows == [
        ("step", "other", -1, -1),
        ("forward", "forward", -1, 0),
        ("layer.1", "forward", 1, 0),
        ("forward", "forward", -1, 1),
        ("loss", "other", -1, 1),
    ]


def test_host_work_and_a_pause_have_no_compute_row_under_them() -> None:
    clock = HandClock()
    recorder = recorder_at(clock)
    recorder.begin_step(0)
    clock.now = 10
    with recorder.host("data"):
        clock.now = 25
        recorder.resume()  # of a communication inside host work: still host
        clock.now = 30
    clock.now = 40
    recorder.pause()
    clock.now = 70
    recorder.resume()
    clock.now = 80
    recorder.end_step()
    assert [times(o) for o in recorder.operations()] == [
        ("compute", "step", 0, 10),
        ("host", "data", 10, 30),
        ("compute", "step", 30, 40),
        ("compute", "step", 70, 80),
    ]


def test_a_copy_is_a_row_without_compute_under_it() -> None:
    clock = HandClock()
    recorder = recorder_at(clock)
    recorder.begin_step(0)
    recorder.block("optimizer", "optimizer")
    clock.now = 10
    with recorder.memcpy("Memcpy DtoH", 4096):
        clock.now = 25
    clock.now = 30
    recorder.end_step()
    rows = recorder.operations()
    assert [times(o) for o in rows] == [
        ("compute", "step", 0, 0),
        ("compute", "optimizer", 0, 10),
        ("memcpy", "Memcpy DtoH", 10, 25),
        ("compute", "optimizer", 25, 30),
    ]
    assert (rows[2].bytes, rows[2].phase, rows[2].stream) == (4096, "optimizer", "compute")


def test_no_compute_row_outside_a_step() -> None:
    clock = HandClock(tick=1)
    recorder = recorder_at(clock)
    recorder.block("before")
    recorder.wait(recorder.issue(all_reduce_site(), 0))
    recorder.resume()
    assert [o.kind for o in recorder.operations()] == ["comm", "wait"]
    recorder.begin_step(0)
    recorder.end_step()
    recorder.resume()
    assert [(o.kind, o.name) for o in recorder.operations()] == [("compute", "step")]


def test_only_the_last_step_is_kept() -> None:
    clock = HandClock(tick=1)
    recorder = recorder_at(clock)
    for step in range(3):
        recorder.begin_step(step)
        op_id = recorder.issue(all_reduce_site(), step)
        recorder.communicated(op_id, 1, 2)
        recorder.end_step()
    assert [o.seq for o in recorder.operations(2) if o.kind == "comm"] == [2]
    assert [o.end_ns - EPOCH for o in recorder.operations() if o.kind == "comm"] == [2]
    with pytest.raises(ValueError, match="step 1 is not kept"):
        recorder.operations(1)
    assert list(recorder._times) == [3]  # a long run does not grow


def test_begin_without_end_ends_the_step_before() -> None:
    clock = HandClock(tick=10)
    recorder = recorder_at(clock)
    recorder.begin_step(0)
    recorder.begin_step(1)
    assert [times(o) for o in recorder.operations(0)] == [("compute", "step", 0, 10)]


def test_off_has_the_same_surface_and_numbers_communications() -> None:
    surface = {name for name in dir(Recorder) if not name.startswith("_")}
    assert surface == {name for name in dir(NullRecorder) if not name.startswith("_")}
    recorder = NullRecorder(1)
    recorder.begin_step(0)
    recorder.place(phase="forward")
    recorder.block("layer.0", layer=0)
    assert [recorder.issue(all_reduce_site(), 0) for _ in range(3)] == [1, 2, 3]
    recorder.communicated(1, 0, 1)
    recorder.wait(1)
    recorder.resume()
    recorder.pause()
    recorder.counter("parameter_bytes", 1)
    with recorder.host("data"), recorder.host("nested"):
        pass
    recorder.end_step()
    assert recorder.operations() == []
    recorder.close()
    assert recorder.summary() == {"level": "off", "overhead": 0.0, "dropped": 0}


def test_overhead_is_measured_from_marks_and_step_time() -> None:
    clock = HandClock()
    recorder = recorder_at(clock)
    assert recorder.summary()["overhead"] is None  # undefined, not 0
    recorder.begin_step(0)
    recorder.block("layer.0")
    clock.now = 1_000_000_000
    recorder.end_step()
    summary = recorder.summary()
    assert summary["marks_per_step"] == 3
    assert summary["mark_ns"] > 0
    assert summary["overhead"] == pytest.approx(3 * summary["mark_ns"] / 1e9)


# -- any sequence of calls ---------------------------------------------------------------------------------------------

CALLS = st.one_of(
    st.just(("begin",)),
    st.just(("end",)),
    st.tuples(st.just("place"), st.sampled_from(["forward", "backward"]), st.integers(0, 1)),
    st.tuples(st.just("block"), st.sampled_from(["layer.0", "layer.1"])),
    st.just(("issue",)),
    st.just(("resume",)),
    st.tuples(st.just("wait"), st.integers(1, 5)),
    st.just(("pause",)),
    st.just(("host_begin",)),
    st.just(("host_end",)),
    st.just(("counter",)),
)


def play(recorder: Recorder, clock: HandClock, calls: list[tuple[int, tuple]]) -> None:
    """Make the calls, each some time after the one before."""
    hosts = []
    for pause, call in calls:
        clock.now += pause
        match call:
            case ("begin",):
                recorder.begin_step(0)
            case ("end",):
                recorder.end_step()
            case ("place", phase, microbatch):
                recorder.place(phase=phase, microbatch=microbatch)
            case ("block", name):
                recorder.block(name)
            case ("issue",):
                recorder.issue(all_reduce_site(), 0)
            case ("resume",):
                recorder.resume()
            case ("wait", op_id):
                recorder.wait(op_id)
            case ("pause",):
                recorder.pause()
            case ("host_begin",):
                hosts.append(recorder.host("host"))
                hosts[-1].__enter__()
            case ("host_end",):
                if hosts:
                    hosts.pop().__exit__(None, None, None)
            case ("counter",):
                recorder.counter("parameter_bytes", 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), CALLS), max_size=60))
def test_compute_rows_overlap_neither_each_other_nor_a_wait_nor_host_work(calls: list[tuple[int, tuple]]) -> None:
    clock, sink = HandClock(), ListSink()
    recorder = recorder_at(clock, writer=sink)
    play(recorder, clock, calls)
    recorder.close()
    lane = [row for row in sink.rows if isinstance(row, ComputeRow | WaitRow)]
    for before, after in itertools.pairwise(lane):
        assert before.start_ns <= before.end_ns <= after.start_ns
    computes = [row for row in lane if isinstance(row, ComputeRow)]
    hosts = [row for row in sink.rows if isinstance(row, HostRow)]
    steps = [row for row in sink.rows if isinstance(row, marks.StepRow)]
    for compute in computes:
        for host in hosts:
            assert min(compute.end_ns, host.end_ns) <= max(compute.start_ns, host.start_ns)
        assert any(step.start_ns <= compute.start_ns and compute.end_ns <= step.end_ns for step in steps)
    issued = [call for _, call in calls if call == ("issue",)]
    assert len([row for row in sink.rows if isinstance(row, marks.CommRow)]) == len(issued)


def test_a_slow_communication_appears_when_it_has_run() -> None:
    """Its row comes with the step in which it ends; nothing is written twice or lost."""
    times_of: dict[int, tuple[int, int]] = {}
    deriver = Deriver(times_of)
    site = all_reduce_site()
    rows = list(deriver.rows([(0, marks.ISSUE, site, 1, 0, marks.NOWHERE)]))
    assert (rows[0].start_ns, rows[0].end_ns) == (-1, -1)
    times_of[1] = (5, 9)
    assert deriver.timed(rows[0])[4:7] == (0, 5, 9)


def test_a_wait_of_the_next_step_still_knows_the_name() -> None:
    deriver = Deriver({})
    list(deriver.rows([(0, marks.ISSUE, all_reduce_site(), 1, 0, marks.NOWHERE)]))
    rows = list(deriver.rows([(1, marks.WAIT, 1, marks.NOWHERE), (2, marks.PAUSE)]))
    assert rows == [WaitRow(marks.NOWHERE, 1, "all_reduce", 1, 2)]


def test_a_site_without_a_name_is_called_after_its_collective() -> None:
    assert CommSite("send", "pp", "pp", "mesh_pp_0", (0, 1), "pp.forward.send").label == "send"
