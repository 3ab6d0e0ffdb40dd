"""The door on CUDA: NCCL, with one CUDA stream and one communicator a stream, ordered by events; the host never waits.

An issue makes its stream wait for what the compute stream holds so far, and runs there between two timed events. A wait
makes the compute stream wait for the second event. Start and end become known once the events have passed: `end_step`
looks at those that have, without synchronising.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from stepscope.parallel_runtime.comm import Comm, CommunicationError, Handle, Job, process_groups_of, stream_of
from stepscope.parallel_runtime.comm_gloo import GroupCache, make_process_groups, run_operation
from stepscope.parallel_runtime.comm_streams import first_messages
from stepscope.parallel_runtime.device import sleep_on_stream
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.device_times import DeviceClock
from stepscope.tracer.recorder import NullRecorder, Recorder

HIGH_PRIORITY = -1
"""A communication that overlaps compute must get its few multiprocessors first, or it ends with the compute."""


class NcclHandle(Handle):
    """Waits on the device: what the compute stream does next comes after the operation.

    The source stays alive until then, so its memory cannot be given to work that runs before the operation has read it.
    """

    __slots__ = ("_cuda", "_end")

    def __init__(self, comm: Comm, job: Job, end: Any, cuda: Any) -> None:
        super().__init__(comm, job.op_id, job.output, job.source)
        self._end, self._cuda = end, cuda

    def _block(self) -> None:
        self._cuda.current_stream().wait_event(self._end)


def open_communicators(
    mesh: Mesh,
    rank: int,
    streams: Iterable[str],
    process_groups: dict[str, dist.ProcessGroup],
    device: torch.device | str,
) -> None:
    """Make every communicator and its connections now, one small operation each, in an order that all ranks follow.

    NCCL makes them on first use, and the *host* waits there for the others of the group. In a step that would stop ranks of
    a pipeline at different operations: one in the first receive of a gradient, the other waiting for an activation that
    the first has yet to send. (Single messages have a communicator for each pair of ranks, apart from the group's.)
    """
    small = torch.zeros(1, device=device)
    for group in process_groups_of(mesh, streams):
        if rank not in group.ranks:
            continue
        process_group, messages = process_groups[group.channel], first_messages(group)
        for source, destination in messages:
            if rank == source:
                dist.send(small, destination, group=process_group)
            elif rank == destination:
                dist.recv(small, source, group=process_group)
        if not messages:
            dist.all_reduce(small, group=process_group)


class NcclComm(Comm):
    """One CUDA stream and one communicator a stream."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        recorder: Recorder | NullRecorder,
        streams: Iterable[str],
        timeout_s: float = 300.0,
        cache: GroupCache | None = None,
        cuda: Any = torch.cuda,
    ) -> None:
        """`cuda` is torch.cuda; tests put a fake in its place."""
        super().__init__(mesh, rank, recorder, streams)
        self._cuda = cuda
        self._process_groups = make_process_groups(mesh, rank, self.streams, "nccl", timeout_s, cache)
        open_communicators(mesh, rank, self.streams, self._process_groups, f"cuda:{cuda.current_device()}")
        self._lanes = {stream: cuda.Stream(priority=HIGH_PRIORITY) for stream in self._groups}
        self._running: deque[tuple[int, Any, Any]] = deque()
        self._clock = DeviceClock(cuda)
        cuda.synchronize()  # once, before the first step: the first anchor needs an idle device
        self._clock.anchor()
        recorder.follow(self._clock)  # compute rows are the device's, too

    def _start(self, job: Job) -> Handle:
        lane = self._lanes[job.site.stream]
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        lane.wait_stream(self._cuda.current_stream())
        try:
            with self._cuda.stream(lane), torch.no_grad():
                start.record(lane)
                if delay_s := self._delay_s(job.site):
                    sleep_on_stream(delay_s * 1e3)
                run_operation(job, self._process_groups[stream_of(job.site.stream).channel])
                end.record(lane)
        except RuntimeError as error:
            raise CommunicationError(self.rank, job.site, job.seq, str(error)) from error
        self._running.append((job.op_id, start, end))
        return NcclHandle(self, job, end, self._cuda)

    def end_step(self) -> None:
        """Hand the times of all operations that have ended to the recorder; the rest follow after a later step."""
        later: deque[tuple[int, Any, Any]] = deque()
        ended = None
        for op_id, start, end in self._running:
            if end.query():
                self.recorder.communicated(op_id, self._clock.ns(start), self._clock.ns(end))
                ended = end
            else:
                later.append((op_id, start, end))
        if not self._clock.anchor() and ended is not None:
            self._clock.rebase(ended)
        self._running = later

    def close(self) -> None:
        """Wait for the device, so that every operation has its times."""
        self._cuda.synchronize()
        self.end_step()
