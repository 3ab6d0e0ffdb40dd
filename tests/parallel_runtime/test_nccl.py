"""The CUDA door, on a fake device that writes down what it is told: order of streams and events, and times."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import COMM_TIMEOUT_S, GROUPS

from stepscope.parallel_runtime import comm_nccl
from stepscope.parallel_runtime.comm import CommunicationError, process_groups_of
from stepscope.parallel_runtime.comm_gloo import make_process_groups
from stepscope.parallel_runtime.comm_nccl import HIGH_PRIORITY, NcclComm, open_communicators
from stepscope.parallel_runtime.comm_streams import first_messages, pipeline_streams
from stepscope.parallel_runtime.compose import streams_of
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer import device_times
from stepscope.tracer.device_times import DeviceClock
from stepscope.tracer.recorder import NullRecorder, Recorder


class FakeStream:
    def __init__(self, device: FakeCuda, name: str) -> None:
        self.device, self.name, self.idle = device, name, True

    def wait_stream(self, other: FakeStream) -> None:
        self.device.log.append((self.name, "waits for stream", other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self.device.log.append((self.name, "waits for event", event.number))

    def query(self) -> bool:
        return self.idle


class FakeEvent:
    def __init__(self, device: FakeCuda) -> None:
        self.device, self.passed, self.ms = device, False, 0.0
        self.number = device.events = device.events + 1

    def record(self, stream: FakeStream | None = None) -> None:
        lane = stream or self.device.current_stream()
        self.passed = lane.idle
        self.ms = self.device.ms
        self.device.log.append((lane.name, "records", self.number))

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        assert self.passed, "only an event on an idle stream may be waited for"

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.ms - self.ms


class FakeCuda:
    """The part of torch.cuda that the door uses; `ms` is the device's own clock."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.events, self.ms = 0, 0.0
        self.compute = FakeStream(self, "compute")
        self.lanes: list[FakeStream] = []
        self.priorities: list[int] = []
        self._current = self.compute

    def Stream(self, priority: int) -> FakeStream:
        self.priorities.append(priority)
        self.lanes.append(FakeStream(self, f"lane {len(self.lanes)}"))
        return self.lanes[-1]

    def Event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self._current = self._current, stream
        yield
        self._current = before

    def synchronize(self) -> None:
        self.log.append(("host", "synchronises"))

    def current_device(self) -> int:
        return 3

    def set_device(self, index: int) -> None:
        self.log.append(("host", "turns to device", index))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake device on which an operation takes 2 ms of device time."""
    fake = FakeCuda()

    def run(job: Any, process_group: Any) -> None:
        fake.log.append((fake.current_stream().name, job.site.collective, process_group))
        fake.ms += 2.0

    monkeypatch.setattr(comm_nccl, "run_operation", run)
    monkeypatch.setattr(
        comm_nccl, "open_communicators", lambda *arguments: fake.log.append(("host", "opens", *arguments))
    )
    monkeypatch.setattr(
        comm_nccl, "make_process_groups", lambda *arguments: {"dp": "group of dp", "shard.gather": "group of gathers"}
    )
    return fake


def door(cuda: FakeCuda, recorder: Recorder) -> NcclComm:
    return NcclComm(Mesh(dp=2), 0, recorder, ("dp", "shard.gather", "tp"), cuda=cuda)


def without_marks(log: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What happened beside the recorder's own events on the compute stream."""
    return [entry for entry in log if entry[:2] != ("compute", "records")]


def test_an_operation_runs_on_its_stream_after_the_compute_stream_and_the_host_never_waits(cuda: FakeCuda) -> None:
    recorder = Recorder(0)
    comm = door(cuda, recorder)
    recorder.begin_step(0)
    cuda.log.clear()
    handle = comm.all_reduce(torch.zeros(4), "dp", strategy="dp")
    waits, start, runs, end = without_marks(cuda.log)
    assert waits == ("lane 0", "waits for stream", "compute")
    assert runs == ("lane 0", "all_reduce", "group of dp")
    assert start[:2] == end[:2] == ("lane 0", "records")
    cuda.log.clear()
    handle.wait()
    handle.wait()
    assert without_marks(cuda.log) == [("compute", "waits for event", end[2])]


def test_streams_have_lanes_of_high_priority_and_an_axis_of_one_rank_has_none(cuda: FakeCuda) -> None:
    comm = door(cuda, Recorder(0))
    assert cuda.priorities == [HIGH_PRIORITY, HIGH_PRIORITY]
    comm.all_gather(torch.zeros(2), "shard", strategy="zero3", stream="shard.gather").wait()
    assert ("lane 1", "all_gather", "group of gathers") in cuda.log


def test_times_of_the_device_become_times_of_the_host(cuda: FakeCuda) -> None:
    recorder = Recorder(0)
    comm = door(cuda, recorder)
    recorder.begin_step(0)
    for _ in range(2):
        comm.all_reduce(torch.zeros(4), "dp", strategy="dp").wait()
    recorder.end_step()
    comm.end_step()
    first, second = (row for row in recorder.operations() if row.kind == "comm")
    assert first.end_ns - first.start_ns == second.end_ns - second.start_ns == 2_000_000
    assert second.start_ns == first.end_ns
    assert ("host", "synchronises") in cuda.log
    assert cuda.log.count(("host", "synchronises")) == 1  # once at the start, never in a step


def test_what_has_not_ended_yet_is_asked_again_later(cuda: FakeCuda) -> None:
    recorder = Recorder(0)
    comm = door(cuda, recorder)
    recorder.begin_step(0)
    cuda.lanes[0].idle = False  # its events have not passed
    comm.all_reduce(torch.zeros(4), "dp", strategy="dp").wait()
    recorder.end_step()
    comm.end_step()
    assert [row.end_ns for row in recorder.operations() if row.kind == "comm"] == [-1]
    _, _, end = comm._running[0]
    end.passed = True
    comm.end_step()
    assert not comm._running
    assert all(row.end_ns > 0 for row in recorder.operations() if row.kind == "comm")


def test_a_busy_device_keeps_its_old_anchor(cuda: FakeCuda) -> None:
    clock = DeviceClock(cuda)
    assert clock.anchor()
    event = cuda.Event(enable_timing=True)
    event.ms = 1.5
    at = clock.ns(event)
    cuda.compute.idle = False
    assert not clock.anchor()
    assert clock.ns(event) == at


def test_a_new_anchor_counts_once_its_event_has_passed(cuda: FakeCuda) -> None:
    """The time between two events cannot be asked before both have passed, and the writing thread asks at any moment."""
    clock = DeviceClock(cuda)
    clock.anchor()
    first = clock._anchor
    cuda.ms = 4.0
    at = clock.ns(stamp := FakeEvent(cuda))
    assert clock.anchor() and clock._next is not None
    clock._next[0].passed = False
    assert clock.ns(stamp) == at and clock._anchor is first
    clock._next[0].passed = True
    clock.ns(stamp)
    assert clock._anchor is not first and clock._next is None


def test_the_first_anchor_is_waited_for_and_no_later_one(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: waited.append(event.number))
    clock = DeviceClock(cuda)
    assert clock.anchor() and len(waited) == 1
    assert clock.anchor() and len(waited) == 1


def test_the_writing_thread_asks_on_the_ranks_own_device(cuda: FakeCuda) -> None:
    """A thread starts on GPU 0, where every rank would otherwise open a context."""
    clock = DeviceClock(cuda)
    clock.anchor()
    clock.settle([(clock.stamp(),)])
    assert ("host", "turns to device", 3) in cuda.log


# -- communicators before the first step -------------------------------------------------------------------------------


def channels(mesh: Mesh, *streams: str) -> dict[str, list[list[tuple[int, int]]]]:
    found: dict[str, list[list[tuple[int, int]]]] = {}
    for group in process_groups_of(mesh, streams):
        found.setdefault(group.channel, []).append(first_messages(group))
    return found


def test_first_messages_by_hand() -> None:
    """Pipelines of ranks 0 2 4 and 1 3 5: neighbours in the direction of the channel, round from the last to the first."""
    found = channels(Mesh(pp=3, dp=2), *pipeline_streams(2), "dp")
    assert found["pp.forward"] == [[(0, 2), (2, 4)], [(1, 3), (3, 5)]]
    assert found["pp.backward"] == [[(2, 0), (4, 2)], [(3, 1), (5, 3)]]
    assert found["pp.forward.wrap"] == [[(4, 0)], [(5, 1)]]
    assert found["pp.backward.wrap"] == [[(0, 4)], [(1, 5)]]
    assert found["dp"] == [[], [], []]  # an operation of all


LAYOUTS = [
    ParallelConfig(pp=4, schedule="interleaved"),
    ParallelConfig(pp=2, dp=2, schedule="interleaved", chunks=2),
    ParallelConfig(pp=2, cp=2, zero=1),
    ParallelConfig(dp=2, tp=2, zero=3),
]


def opened_on_rank(rank: int, parallel: ParallelConfig) -> list[tuple[str, int]]:
    """What the backend is asked for, by this rank."""
    mesh = Mesh.of(parallel)
    streams = streams_of(ModelConfig(), parallel, TrainConfig())
    groups = make_process_groups(mesh, rank, streams, "gloo", COMM_TIMEOUT_S, GROUPS)
    asked: list[tuple[str, int]] = []
    plain = {name: getattr(dist, name) for name in ("send", "recv", "all_reduce")}

    def noted(name: str) -> Any:
        def call(tensor: torch.Tensor, *peer: int, group: Any) -> Any:
            asked.append((name, *peer))
            return plain[name](tensor, *peer, group=group)

        return call

    try:
        for name in plain:
            setattr(dist, name, noted(name))
        open_communicators(mesh, rank, streams, groups, "cpu")
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return asked


@pytest.mark.parametrize("parallel", LAYOUTS, ids=["pp4", "pp2 v2 dp2", "pp2 cp2", "dp2 tp2"])
def test_every_rank_can_follow_the_order_of_opening(pool, parallel: ParallelConfig) -> None:
    """With gloo, whose messages wait for each other as the making of communicators does: no rank stops for ever."""
    ranks = pool.run(opened_on_rank, parallel)
    sent = sorted(
        (rank, peer) for rank, asked in enumerate(ranks) for name, *peers in asked for peer in peers if name == "send"
    )
    received = sorted(
        (peer, rank) for rank, asked in enumerate(ranks) for name, *peers in asked for peer in peers if name == "recv"
    )
    assert sent == received and bool(sent) == (parallel.pp > 1)


def test_communicators_are_opened_before_the_first_anchor(cuda: FakeCuda) -> None:
    door(cuda, Recorder(0))
    words = [entry[1] for entry in cuda.log if entry[0] == "host"]
    assert words[:2] == ["opens", "synchronises"]


def test_a_failing_operation_is_named(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Any, process_group: Any) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    comm = door(cuda, Recorder(0))
    monkeypatch.setattr(comm_nccl, "run_operation", fail)
    with pytest.raises(CommunicationError, match=r"all_reduce number 0 on mesh_dp_0 .*remote process exited"):
        comm.all_reduce(torch.zeros(4), "dp", strategy="dp")


# -- compute rows by the device's clock --------------------------------------------------------------------------------


def lengths_ms(recorder: Recorder, kind: str) -> list[float]:
    return [(row.end_ns - row.start_ns) / 1e6 for row in recorder.operations() if row.kind == kind]


def test_compute_and_wait_rows_last_as_long_as_on_the_device(cuda: FakeCuda) -> None:
    recorder = Recorder(0)
    comm = door(cuda, recorder)
    recorder.begin_step(0)
    recorder.block("a")
    cuda.ms += 5.0
    handle = comm.all_reduce(torch.zeros(4), "dp", strategy="dp")  # 2 ms on its lane, here as if nothing overlapped
    recorder.block("b")
    cuda.ms += 3.0
    handle.wait()
    recorder.end_step()
    comm.end_step()
    assert [row for row in lengths_ms(recorder, "compute") if row] == [5.0, 3.0]
    assert lengths_ms(recorder, "wait") == [0.0] and lengths_ms(recorder, "comm") == [2.0]
    starts = [row.start_ns for row in recorder.operations() if row.kind == "compute"]
    assert starts == sorted(starts)


def test_the_writing_thread_waits_for_the_device_and_the_training_thread_does_not(cuda: FakeCuda) -> None:
    naps: list[float] = []
    stamps: list[device_times.Stamp] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            stamps[0].event.passed = True

    clock = DeviceClock(cuda, sleep)
    assert clock.anchor()
    cuda.compute.idle = False
    cuda.ms = 7.0
    stamps.append(clock.stamp())
    assert not naps
    ((settled, word), (plain, _)) = clock.settle([(stamps[0], "cut"), (12, "counter")])
    assert len(naps) == 3 and (word, plain) == ("cut", 12)
    assert settled == clock.ns(stamps[0].event) and type(settled) is int


def test_a_device_that_hangs_does_not_hold_up_the_end(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_times, "HURRY_S", 0.0)
    clock = DeviceClock(cuda, lambda seconds: None)
    clock.anchor()
    cuda.compute.idle = False
    stamp = clock.stamp()
    clock.hurry()
    assert clock.settle([(stamp,)]) == [(int(stamp),)]


def test_times_of_marks_never_go_back(cuda: FakeCuda) -> None:
    clock = DeviceClock(cuda)
    clock.anchor()
    cuda.ms = 4.0
    first, second = clock.stamp(), clock.stamp()
    second.event.ms = 3.999  # a new anchor, one microsecond off
    (one,), (two,) = clock.settle([(first,), (second,)])
    assert one == two


def test_a_busy_device_counts_from_its_last_operation(cuda: FakeCuda) -> None:
    comm = door(cuda, NullRecorder(0))
    comm.all_reduce(torch.zeros(4), "dp", strategy="dp").wait()
    _, _, end = comm._running[0]
    at = comm._clock.ns(end)
    cuda.compute.idle = False
    comm.end_step()
    assert comm._clock._anchor == (end, at)


def test_communicators_ask_for_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        is_high_priority_stream = False

    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda *arguments, group_desc: made.append((*arguments, group_desc)))
    make_process_groups(Mesh(dp=2), 0, ("dp", "tp"), "nccl", 30.0)
    make_process_groups(Mesh(dp=2), 0, ("dp",), "gloo", 30.0)
    (ranks, timeout, backend, options, description), gloo = made
    assert (ranks, timeout.total_seconds(), backend, description) == ([0, 1], 30.0, "nccl", "mesh_dp")
    assert options.is_high_priority_stream and options._timeout == timeout and gloo[3] is None
