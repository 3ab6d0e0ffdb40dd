"""The one door to communication: `comm.all_reduce(tensor, "dp", strategy="dp") -> Handle`, `handle.wait() -> tensor`.

The base class knows groups, peers, sizes and numbering, and records every operation; a backend only runs one. So the rows
of gloo, NCCL and dry runs cannot differ. A group of one rank communicates nothing: ready handle, no row, no thread.

A *stream* is a first-in-first-out lane with a *channel*, a process group of its own (as NCCL has streams and
communicators). Three rules make a deadlock between streams impossible; each was a hang once and is kept as a test:

1. a collective stream serves one group, and all members submit the same sequence to it;
2. pipeline traffic has four streams (forward and backward, send and receive) and two channels: gloo's send is a
   rendezvous at any size, so a send queued before a receive may block it, while both ends of a message must meet on one
   channel;
3. a stream never waits for another stream: only the training thread waits, and only through a Handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from stepscope.parallel_runtime.comm_streams import (
    PIPELINE_STREAMS,
    STREAMS,
    ChannelGroup,
    Stream,
    group_metas,
    group_name,
    process_groups_of,
    stream_of,
)
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.slow_link import SlowLink
from stepscope.tracer.recorder import CommSite, NullRecorder, Recorder

__all__ = [
    "PIPELINE_STREAMS",
    "STREAMS",
    "ChannelGroup",
    "Comm",
    "CommunicationError",
    "DryComm",
    "Handle",
    "Job",
    "Ready",
    "Stream",
    "group_metas",
    "group_name",
    "process_groups_of",
    "stream_of",
]


READ_COUNTS = "read counts"
"""Host row: the training thread needs numbers that the device has."""

SITE_CACHE = 4096  # sites with data-dependent sizes (expert routing) never repeat: forget them all beyond this many


class CommunicationError(RuntimeError):
    """A communication failed: its peer is gone, or did not come in time. Often the echo of another rank's failure."""

    def __init__(self, rank: int, site: CommSite, seq: int, reason: str) -> None:
        self.rank, self.site, self.seq, self.reason = rank, site, seq, reason
        super().__init__(
            f"rank {rank}: {site.collective} number {seq} on {site.group} (ranks {', '.join(map(str, site.ranks))}):"
            f" {reason}"
        )


class Handle:
    """An operation under way; `wait` returns its output tensor. Every handle must be waited for."""

    __slots__ = ("_comm", "_source", "_waited", "op_id", "output")

    def __init__(self, comm: Comm, op_id: int, output: torch.Tensor, source: torch.Tensor | None) -> None:
        self._comm = comm
        self._source = source  # kept alive until the operation is over
        self._waited = False
        self.op_id = op_id
        self.output = output

    def wait(self) -> torch.Tensor:
        """Block until the output may be used; the first call records a wait. Raises CommunicationError."""
        if not self._waited:
            self._comm.recorder.wait(self.op_id)
            self._block()
            self._comm.recorder.resume()
            self._waited, self._source = True, None
        return self.output

    def _block(self) -> None:
        """What waiting means to the backend; nothing where nothing moves."""


class Ready:
    """Handle of an operation over one rank: nothing to wait for, nothing recorded."""

    __slots__ = ("output",)

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output

    def wait(self) -> torch.Tensor:
        """The output, at once."""
        return self.output


class Job(NamedTuple):
    """What a backend needs to run one operation."""

    op_id: int
    seq: int
    site: CommSite
    source: torch.Tensor  # of a receive: its output
    output: torch.Tensor  # of a send: its source
    splits: tuple[list[int], list[int]] | None  # rows sent to, received from each rank of the group (all_to_all)
    reduction: str


class Comm:
    """The vocabulary of communication. `axis` is a view of the mesh (mesh.py); the default stream is the one of its name."""

    def __init__(self, mesh: Mesh, rank: int, recorder: Recorder | NullRecorder, streams: Iterable[str]) -> None:
        """`streams`: all that the program will use, the same on all ranks (compose.streams_of)."""
        self.mesh, self.rank, self.recorder = mesh, rank, recorder
        self.streams = tuple(dict.fromkeys(streams))
        self.slow_link: SlowLink | None = None  # injected on purpose
        self._groups = {
            stream: self._group_of(stream)
            for stream in self.streams
            if len(mesh.group(stream_of(stream).view, rank)) > 1
        }
        self._sites: dict[tuple[Any, ...], CommSite] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}

    def _group_of(self, stream: str) -> tuple[str, tuple[int, ...]]:
        view, channel = stream_of(stream)
        ranks = self.mesh.group(view, self.rank)
        return group_name(channel, self.mesh.all_groups(view).index(ranks)), ranks

    # -- where this rank stands --------------------------------------------------------------------------------------

    def size(self, axis: str) -> int:
        """Ranks in this rank's group of `axis`."""
        return len(self.mesh.group(axis, self.rank))

    def index(self, axis: str) -> int:
        """This rank's place in its group of `axis`."""
        return self.mesh.index(axis, self.rank)

    # -- the vocabulary ----------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: torch.Tensor, axis: str, *, strategy: str, stream: str | None = None, reduction: str = "sum"
    ) -> Handle | Ready:
        """Reduce (`sum` or `max`) over the group, in place: the output is `tensor` itself, which must be contiguous."""
        if self.size(axis) == 1:
            return Ready(tensor)
        return self._issue("all_reduce", axis, strategy, stream, tensor, tensor, reduction=reduction)

    def all_gather(
        self,
        tensor: torch.Tensor,
        axis: str,
        *,
        strategy: str,
        stream: str | None = None,
        output: torch.Tensor | None = None,
    ) -> Handle | Ready:
        """The parts of all ranks, concatenated along dim 0; into `output` when given."""
        ranks = self.size(axis)
        if output is None:
            if ranks == 1:
                return Ready(tensor)
            output = tensor.new_empty((tensor.shape[0] * ranks, *tensor.shape[1:]))
        if ranks == 1:
            return Ready(output.copy_(tensor))
        return self._issue("all_gather", axis, strategy, stream, tensor.contiguous(), output)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        axis: str,
        *,
        strategy: str,
        stream: str | None = None,
        output: torch.Tensor | None = None,
    ) -> Handle | Ready:
        """The sum over the group, of which this rank gets its slice of dim 0 (which the group's size must divide)."""
        ranks = self.size(axis)
        assert tensor.shape[0] % ranks == 0, f"dim 0 of {tuple(tensor.shape)} does not divide by {ranks} ranks"
        if output is None:
            if ranks == 1:
                return Ready(tensor)
            output = tensor.new_empty((tensor.shape[0] // ranks, *tensor.shape[1:]))
        if ranks == 1:
            return Ready(output.copy_(tensor))
        return self._issue("reduce_scatter", axis, strategy, stream, tensor.contiguous(), output)

    def all_to_all(
        self,
        tensor: torch.Tensor,
        axis: str,
        send_rows: list[int],
        receive_rows: list[int],
        *,
        strategy: str,
        stream: str | None = None,
    ) -> Handle | Ready:
        """Rows of dim 0 go to the ranks of the group: `send_rows[i]` to rank i, `receive_rows[i]` come from it."""
        if self.size(axis) == 1:
            return Ready(tensor)
        output = tensor.new_empty((sum(receive_rows), *tensor.shape[1:]))
        splits = (send_rows, receive_rows)
        return self._issue("all_to_all", axis, strategy, stream, tensor.contiguous(), output, splits=splits)

    def broadcast(
        self, tensor: torch.Tensor, axis: str, root: int, *, strategy: str, stream: str | None = None
    ) -> Handle | Ready:
        """The tensor of the rank at place `root` of the group, in place on the others."""
        if self.size(axis) == 1:
            return Ready(tensor)
        return self._issue("broadcast", axis, strategy, stream, tensor, tensor, peer=root)

    def ring_shift(
        self, tensor: torch.Tensor, axis: str, *, strategy: str, stream: str | None = None
    ) -> Handle | Ready:
        """Send to the next rank of the ring while receiving from the previous one: one full-duplex operation."""
        ranks, here = self.size(axis), self.index(axis)
        if ranks == 1:
            return Ready(tensor)
        around = ((here + 1) % ranks, (here - 1) % ranks)
        return self._issue("ring_shift", axis, strategy, stream, tensor.contiguous(), torch.empty_like(tensor), *around)

    def send(self, tensor: torch.Tensor, axis: str, peer: int, *, strategy: str, stream: str) -> Handle | Ready:
        """Send to the rank at place `peer` of the group; the wait tells that `tensor` may be written again."""
        tensor = tensor.contiguous()
        return self._issue("send", axis, strategy, stream, tensor, tensor, peer)

    def receive(self, output: torch.Tensor, axis: str, peer: int, *, strategy: str, stream: str) -> Handle | Ready:
        """Receive into `output` from the rank at place `peer` of the group."""
        return self._issue("receive", axis, strategy, stream, output, output, peer)

    def read_counts(self, counts: torch.Tensor, routing: Callable[[], list[int]] | None = None) -> list[int]:
        """Host integers of a device tensor: the only data-dependent read of the program. `routing` answers in dry runs.

        The host waits for the device here, and the device then for the host: a row of its own.
        """
        with self.recorder.host(READ_COUNTS):
            return counts.tolist()

    def end_step(self) -> None:
        """Called once a step, when all handles of the step have been waited for."""

    def close(self) -> None:
        """End what the backend started; the process groups stay."""

    # -- issue -------------------------------------------------------------------------------------------------------

    def _issue(
        self,
        collective: str,
        axis: str,
        strategy: str,
        stream: str | None,
        source: torch.Tensor,
        output: torch.Tensor,
        peer: int = -1,
        peer_from: int = -1,
        splits: tuple[list[int], list[int]] | None = None,
        reduction: str = "sum",
    ) -> Handle:
        site = self._site(collective, axis, strategy, stream or axis, source, output, peer, peer_from)
        seq = self._number(site)
        op_id = self.recorder.issue(site, seq)
        handle = self._start(Job(op_id, seq, site, source, output, splits, reduction))
        self.recorder.resume()
        return handle

    def _start(self, job: Job) -> Handle:
        """Hand one operation to its stream; returns at once."""
        raise NotImplementedError

    def _delay_s(self, site: CommSite) -> float:
        """By how many seconds an injected slow link holds up this operation."""
        return 0.0 if self.slow_link is None else self.slow_link.delay_of(site, self.rank)

    def _site(
        self,
        collective: str,
        axis: str,
        strategy: str,
        stream: str,
        source: torch.Tensor,
        output: torch.Tensor,
        peer: int,
        peer_from: int,
    ) -> CommSite:
        """The static facts of a call, built once per distinct call."""
        sizes = (source.numel(), output.numel())
        key = (collective, axis, strategy, stream, source.dtype, sizes, peer, peer_from)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= SITE_CACHE:
                self._sites.clear()
            site = self._sites[key] = self._new_site(collective, axis, strategy, stream, source, sizes, peer, peer_from)
        return site

    def _new_site(
        self,
        collective: str,
        axis: str,
        strategy: str,
        stream: str,
        source: torch.Tensor,
        sizes: tuple[int, int],
        peer: int,
        peer_from: int,
    ) -> CommSite:
        assert stream in self._groups, f"stream {stream} was not declared for rank {self.rank}: it has {self.streams}"
        assert stream_of(stream).view == axis, f"stream {stream} does not serve axis {axis}"
        group, ranks = self._groups[stream]
        elements = sizes[1] if collective == "all_gather" else sizes[0]
        return CommSite(
            collective=collective,
            axis=self.mesh.axis_of(axis),
            strategy=strategy,
            group=group,
            ranks=ranks,
            stream=stream,
            dtype=str(source.dtype).removeprefix("torch."),
            in_elements=sizes[0],
            out_elements=sizes[1],
            bytes=elements * source.element_size(),
            peer=ranks[peer] if peer >= 0 else -1,
            peer_from=ranks[peer_from] if peer_from >= 0 else -1,
            name=collective,
        )

    def _number(self, site: CommSite) -> int:
        """Counted per (group, source, destination) for point to point, else per group: equal on all partners."""
        key: tuple[Any, ...] = (site.group,)
        if site.collective == "send":
            key = (site.group, self.rank, site.peer)
        elif site.collective == "receive":
            key = (site.group, site.peer, self.rank)
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        return number


class DryComm(Comm):
    """Nothing moves: outputs have their shapes, rows their facts."""

    def _start(self, job: Job) -> Handle:
        return Handle(self, job.op_id, job.output, job.source)

    def read_counts(self, counts: torch.Tensor, routing: Callable[[], list[int]] | None = None) -> list[int]:
        """What the routing model says, for there are no data."""
        assert routing is not None, "a dry run needs a routing model to know the counts"
        with self.recorder.host(READ_COUNTS):
            return routing()
