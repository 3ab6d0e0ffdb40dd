"""Which streams and process groups a program has: pure arithmetic on the mesh.

A *stream* is a first-in-first-out lane of communications; its *channel* is the process group that it runs on (comm.py
says why some streams share one).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.schema import GroupMeta


class Stream(NamedTuple):
    """A stream serves the groups of one mesh view, through a channel that it may share with the other end of a message."""

    view: str
    channel: str


STREAMS = {
    "pp.forward.send": Stream("pp", "pp.forward"),
    "pp.forward.receive": Stream("pp", "pp.forward"),
    "pp.backward.send": Stream("pp", "pp.backward"),
    "pp.backward.receive": Stream("pp", "pp.backward"),
    "pp.forward.wrap.send": Stream(
        "pp", "pp.forward.wrap"
    ),  # from the last stage to the first one's next chunk: with two
    "pp.forward.wrap.receive": Stream("pp", "pp.forward.wrap"),  # stages the other way than all other forward messages
    "pp.backward.wrap.send": Stream("pp", "pp.backward.wrap"),
    "pp.backward.wrap.receive": Stream("pp", "pp.backward.wrap"),
    "shard.gather": Stream("shard", "shard.gather"),  # parameter gathers never queue behind gradient reductions ...
    "shard.reduce": Stream("shard", "shard.reduce"),
    "edp.gather": Stream("edp_shard", "edp.gather"),  # the same for experts
    "edp.reduce": Stream("edp_shard", "edp.reduce"),
    "replica.reduce": Stream("replica", "replica.reduce"),  # ... nor do these behind those of another group
    "edp.replica.reduce": Stream("edp_replica", "edp.replica.reduce"),
    "loss": Stream("dp_cp", "loss"),  # the reported loss never queues behind gradients
    "clip": Stream("pp_tp", "clip"),  # ranks that hold different parameters of one replica ...
    "clip.sharded": Stream("holders", "clip.sharded"),  # ... and those of a sharded one
    "clip.world": Stream("world", "clip.world"),  # ... and those of one with experts, which lie across replicas
    "ep.counts": Stream("ep", "ep.counts"),  # how many tokens a dispatch will bring: before each, and small
    "ep.sequence": Stream("cp_tp", "ep.sequence"),  # choices in a sequence that several ranks hold
    "ep.load": Stream("dp_cp_tp", "ep.load"),  # tokens of each expert in a step
    "cp.kv": Stream("cp", "cp.kv"),  # keys and values round the ring ...
    "cp.dkv": Stream("cp", "cp.dkv"),  # ... and their gradients, which travel at the same time
}
"""Streams whose name is not simply a view of the mesh; every view has a stream of its own name."""

_MESSAGE_STREAMS = tuple(name for name in STREAMS if name.endswith((".send", ".receive")))

PIPELINE_STREAMS = ("pp.forward.send", "pp.forward.receive", "pp.backward.send", "pp.backward.receive")


def pipeline_stream(phase: str, role: str, wraps: bool) -> str:
    """The stream of a pipeline message: `role` is send or receive; `wraps`: it goes between the last stage and the first."""
    return f"pp.{phase}.wrap.{role}" if wraps else f"pp.{phase}.{role}"


def pipeline_streams(chunks: int) -> tuple[str, ...]:
    """The streams of a pipeline; only with several chunks a stage do messages go round."""
    around = tuple(pipeline_stream(p, role, True) for p in ("forward", "backward") for role in ("send", "receive"))
    return (*PIPELINE_STREAMS, *around) if chunks > 1 else PIPELINE_STREAMS


def stream_of(name: str) -> Stream:
    """View and channel of the stream called `name`."""
    return STREAMS.get(name) or Stream(name, name)


def group_name(channel: str, index: int) -> str:
    """Name of the `index`-th process group of a channel, the same on all ranks."""
    return f"mesh_{channel}_{index}"


class ChannelGroup(NamedTuple):
    """One process group of a channel."""

    name: str
    channel: str
    view: str
    ranks: tuple[int, ...]


def process_groups_of(mesh: Mesh, streams: Iterable[str]) -> list[ChannelGroup]:
    """All process groups that these streams need, in the order in which every rank makes them."""
    channels = sorted({(channel, view) for view, channel in map(stream_of, streams) if mesh.size(view) > 1})
    return [
        ChannelGroup(group_name(channel, index), channel, view, ranks)
        for channel, view in channels
        for index, ranks in enumerate(mesh.all_groups(view))
    ]


def first_messages(group: ChannelGroup) -> list[tuple[int, int]]:
    """(source, destination) of every pair that the pipeline channel `group` will ever join, in an order that every rank can
    follow; none for a channel of collectives."""
    if not any(stream.channel == group.channel for stream in map(stream_of, _MESSAGE_STREAMS)):
        return []
    along = [(group.ranks[-1], group.ranks[0])]
    if ".wrap" not in group.channel:
        along = list(pairwise(group.ranks))
    return along if group.channel.startswith("pp.forward") else [(high, low) for low, high in along]


def group_metas(mesh: Mesh, streams: Iterable[str]) -> tuple[GroupMeta, ...]:
    """The same as run.json has it."""
    return tuple(
        GroupMeta(group.name, mesh.axis_of(group.view), group.ranks) for group in process_groups_of(mesh, streams)
    )
