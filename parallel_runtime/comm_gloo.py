"""The door on CPU: gloo, with one worker thread a stream that runs synchronous calls in the order of submission.

gloo's own asynchronous works are not first in, first out, and carry no start or end; a thread of our own gives both,
42 us from submission to start. It costs the training thread nothing while it waits: gloo releases the GIL.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stepscope.parallel_runtime.comm import Comm, CommunicationError, Handle, Job, process_groups_of, stream_of
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.recorder import NullRecorder, Recorder

GroupCache = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
"""(group name, ranks) -> process group; a long-lived test worker keeps its groups over many meshes."""

JOIN_S = 5.0  # an idle worker ends at once; one stuck in a failed operation is left to die with the process


def make_process_groups(
    mesh: Mesh,
    rank: int,
    streams: Iterable[str],
    backend: str,
    timeout_s: float,
    cache: GroupCache | None = None,
) -> dict[str, dist.ProcessGroup]:
    """Channel -> process group of this rank.

    Making a group is itself collective over the world: every rank makes every group in the same order, also those that it
    is no member of (and a rank outside the mesh, too).
    """
    cache = {} if cache is None else cache
    mine = {}
    for group in process_groups_of(mesh, streams):
        key = (group.name, group.ranks)
        if key not in cache:
            description = f"mesh_{mesh.axis_of(group.view)}"
            timeout = timedelta(seconds=timeout_s)
            cache[key] = dist.new_group(
                list(group.ranks), timeout, backend, _options(backend, timeout), group_desc=description
            )
        if rank in group.ranks:
            mine[group.channel] = cache[key]
    return mine


def _options(backend: str, timeout: timedelta) -> Any:
    """NCCL runs some calls (messages) on a stream of its own: that one shall have high priority, too."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options


class GlooHandle(Handle):
    """Waits for the worker thread; a lock that the worker releases wakes up faster than an Event."""

    __slots__ = ("done", "error")

    def __init__(self, comm: Comm, job: Job) -> None:
        super().__init__(comm, job.op_id, job.output, job.source)
        self.done = threading.Lock()
        self.done.acquire()
        self.error: CommunicationError | None = None

    def _block(self) -> None:
        self.done.acquire()
        if self.error is not None:
            raise self.error


class GlooComm(Comm):
    """One worker thread and one process group a stream; threads start on first use."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        recorder: Recorder | NullRecorder,
        streams: Iterable[str],
        timeout_s: float = 300.0,
        cache: GroupCache | None = None,
    ) -> None:
        super().__init__(mesh, rank, recorder, streams)
        self._process_groups = make_process_groups(mesh, rank, self.streams, "gloo", timeout_s, cache)
        self._queues: dict[str, queue.SimpleQueue[tuple[Job, GlooHandle] | None]] = {}
        self._threads: list[threading.Thread] = []

    def _start(self, job: Job) -> Handle:
        handle = GlooHandle(self, job)
        jobs = self._queues.get(job.site.stream)
        if jobs is None:
            jobs = self._queues[job.site.stream] = self._new_worker(job.site.stream)
        jobs.put((job, handle))
        return handle

    def _new_worker(self, stream: str) -> queue.SimpleQueue[tuple[Job, GlooHandle] | None]:
        jobs: queue.SimpleQueue[tuple[Job, GlooHandle] | None] = queue.SimpleQueue()
        process_group = self._process_groups[stream_of(stream).channel]
        thread = threading.Thread(target=self._serve, args=(jobs, process_group), name=f"stream {stream}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return jobs

    @torch.no_grad()  # grad mode belongs to the thread
    def _serve(self, jobs: queue.SimpleQueue[tuple[Job, GlooHandle] | None], process_group: dist.ProcessGroup) -> None:
        while (item := jobs.get()) is not None:
            job, handle = item
            start = time.perf_counter_ns()
            try:
                run_operation(job, process_group, self._delay_s(job.site))
            except Exception as error:  # whatever it is, it must reach the training thread, at wait()
                handle.error = CommunicationError(self.rank, job.site, job.seq, str(error))
                handle.error.__cause__ = error
            else:  # one that failed stays unfinished in the trace
                self.recorder.communicated(job.op_id, start, time.perf_counter_ns())
            handle.done.release()
            del item, job, handle  # tensors must not live on until the next job comes

    def close(self) -> None:
        """End the worker threads."""
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
        self._queues.clear()
        self._threads.clear()


# -- one operation, synchronous on the current thread or stream ----------------------------------------------------------


def run_operation(job: Job, process_group: dist.ProcessGroup, delay_s: float = 0.0) -> None:
    """Run one operation through torch.distributed (any backend), blocking as a plain call does.

    `delay_s`: what this rank gives comes so much later (an injected slow link).
    """
    site, source, output = job.site, job.source, job.output
    if delay_s and site.collective == "ring_shift":
        _delayed_shift(job, process_group, delay_s)
        return
    if delay_s:
        time.sleep(delay_s)
    if site.collective == "all_reduce":
        dist.all_reduce(output, REDUCTIONS[job.reduction], group=process_group)
    elif site.collective == "all_gather":
        _all_gather(output, source, group=process_group)
    elif site.collective == "reduce_scatter":
        _reduce_scatter(output, source, group=process_group)
    elif site.collective == "all_to_all":
        assert job.splits is not None
        send_rows, receive_rows = job.splits
        dist.all_to_all_single(output, source, receive_rows, send_rows, group=process_group)
    elif site.collective == "broadcast":
        dist.broadcast(output, site.peer, group=process_group)
    elif site.collective == "send":
        dist.send(source, site.peer, group=process_group)
    elif site.collective == "receive":
        dist.recv(output, site.peer, group=process_group)
    elif site.collective == "ring_shift":
        exchange = [
            dist.P2POp(dist.isend, source, site.peer, process_group),
            dist.P2POp(dist.irecv, output, site.peer_from, process_group),
        ]
        for work in dist.batch_isend_irecv(exchange):  # one work on NCCL, one an operation on gloo
            work.wait()
    else:
        raise AssertionError(f"no backend call for {site.collective}")


def _delayed_shift(job: Job, process_group: dist.ProcessGroup, delay_s: float) -> None:
    """Only what goes out is late: the receive is there at once, or the previous rank of the ring would be held up too."""
    incoming = dist.irecv(job.output, job.site.peer_from, group=process_group)
    assert incoming is not None, "this rank is no member of the group"
    time.sleep(delay_s)
    dist.send(job.source, job.site.peer, group=process_group)
    incoming.wait()


REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
