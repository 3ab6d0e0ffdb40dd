"""The CUDA door, on a fake device that writes down what it is told: order of streams and events, and times."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from stepscope.parallel_runtime import comm_nccl
from stepscope.parallel_runtime.comm import CommunicationError
from stepscope.parallel_runtime.comm_nccl import HIGH_PRIORITY, DeviceClock, NcclComm
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.recorder import Recorder


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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake device on which an operation takes 2 ms of device time."""
    fake = FakeCuda()

    def run(job: Any, process_group: Any) -> None:
        fake.log.append((fake.current_stream().name, job.site.collective, process_group))
        fake.ms += 2.0

    monkeypatch.setattr(comm_nccl, "run_operation", run)
    monkeypatch.setattr(
        comm_nccl, "make_process_groups", lambda *arguments: {"dp": "group of dp", "shard.gather": "group of gathers"}
    )
    return fake


def door(cuda: FakeCuda, recorder: Recorder) -> NcclComm:
    return NcclComm(Mesh(dp=2), 0, recorder, ("dp", "shard.gather", "tp"), cuda=cuda)


def test_an_operation_runs_on_its_stream_after_the_compute_stream_and_the_host_never_waits(cuda: FakeCuda) -> None:
    recorder = Recorder(0)
    comm = door(cuda, recorder)
    recorder.begin_step(0)
    cuda.log.clear()
    handle = comm.all_reduce(torch.zeros(4), "dp", strategy="dp")
    assert cuda.log == [
        ("lane 0", "waits for stream", "compute"),
        ("lane 0", "records", 2),
        ("lane 0", "all_reduce", "group of dp"),
        ("lane 0", "records", 3),
    ]
    cuda.log.clear()
    handle.wait()
    handle.wait()
    assert cuda.log == [("compute", "waits for event", 3)]


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


def test_a_failing_operation_is_named(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Any, process_group: Any) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    comm = door(cuda, Recorder(0))
    monkeypatch.setattr(comm_nccl, "run_operation", fail)
    with pytest.raises(CommunicationError, match=r"all_reduce number 0 on mesh_dp_0 .*remote process exited"):
        comm.all_reduce(torch.zeros(4), "dp", strategy="dp")
