"""All communications of all ranks in one table of arrays: a *part* is one rank's share of one communication.

Text ids become ids that mean the same on every rank, groups are looked up in run.json, the mesh axis of each is settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stepscope.analysis.ledger.summary import RankSummary
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import AXES, COLLECTIVES, MESH_AXES, RunMeta, code_of

SEND, RECEIVE, RING = (code_of(COLLECTIVES, name) for name in ("send", "receive", "ring_shift"))
PIPELINE = code_of(AXES, "pp")

_COPIED = (
    *("row", "lane", "axis", "strategy", "collective", "bytes", "seq", "peer", "peer_from", "op_id", "issue_ns"),
    *("launch_ns", "in_elements", "out_elements", "impossible"),
)


@dataclass
class Groups:
    """The process groups that occur: `names[g]`, `ranks[g]` (empty where unknown) and `axis[g]` (code, -1 unknown)."""

    names: list[str] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    axis: list[int] = field(default_factory=list)


@dataclass
class Parts:
    """Arrays of one length, ordered by (rank, lane, start). Ranks are places in `ranks`; -1 is missing.

    `arrival` and `end` are in the common clock once clocks.py has corrected them; `arrival_own` and `end_own` stay in
    the rank's. `group` points into `groups`, `dtype` and `kernel` into `texts`; `source` and `destination` are the
    global ranks of a point to point.
    """

    ranks: tuple[int, ...]
    groups: Groups
    texts: tuple[str, ...]
    columns: Columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["rank"]) if self.columns else 0

    @cached_property
    def _edges(self) -> list[int]:
        return np.searchsorted(self["rank"], np.arange(len(self.ranks) + 1)).tolist()

    def of_place(self, place: int) -> slice:
        """The parts of one rank place."""
        return slice(self._edges[place], self._edges[place + 1])

    def of_rank(self, rank: int) -> slice:
        """The parts of one rank."""
        return self.of_place(self.ranks.index(rank))

    @property
    def point_to_point(self) -> np.ndarray:
        """A send or a receive (bool)."""
        return (self["collective"] == SEND) | (self["collective"] == RECEIVE)


def collect(meta: RunMeta, found: Sequence[RankSummary], axes: Mapping[str, str] | None = None) -> Parts:
    """One table of all ranks' communications, in their own clocks. `axes`: a user's group name -> mesh axis."""
    texts: dict[str, int] = {}
    groups = Groups()
    ids: dict[tuple[str, tuple[int, ...]], int] = {}
    known = _known_groups(meta)
    pieces: list[Columns] = []
    for place, summary in enumerate(found):
        comm = summary.comm
        local = [texts.setdefault(text, len(texts)) for text in summary.texts]
        piece = {name: comm[name] for name in _COPIED}
        piece["rank"] = np.full(len(comm["row"]), place, np.int64)
        piece["arrival_own"], piece["end_own"] = comm["start"], comm["end"]
        piece["arrival"], piece["end"] = comm["start"], comm["end"]
        for ours, theirs in (("dtype", "dtype_id"), ("kernel", "name_id")):
            piece[ours] = np.array([*local, -1], np.int64)[comm[theirs]]
        used = np.unique(comm["group_id"][comm["group_id"] >= 0]).tolist()
        table = np.full(len(summary.texts) + 1, -1, np.int64)
        for code in used:
            table[code] = _group(summary.texts[code], summary.rank, known, groups, ids)
        piece["group"] = table[comm["group_id"]]
        pieces.append(piece)
    names = pieces[0].keys() if pieces else ()
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in names}
    parts = Parts(tuple(summary.rank for summary in found), groups, tuple(texts), columns)
    if pieces:
        _settle_axes(meta, parts, axes or {})
        _direction(parts)
    return parts


def _known_groups(meta: RunMeta) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    known: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for group in meta.groups:
        known.setdefault(group.name, []).append((tuple(group.ranks), group.axis))
    return known


def _group(
    name: str,
    rank: int,
    known: Mapping[str, list[tuple[tuple[int, ...], str]]],
    groups: Groups,
    ids: dict[tuple[str, tuple[int, ...]], int],
) -> int:
    """Id of the group called `name` on `rank`: one name may stand for different groups on different ranks."""
    if not name:
        return -1
    listed = known.get(name, [])
    ranks, axis = next((one for one in listed if rank in one[0]), ((), listed[0][1] if listed else ""))
    key = (name, ranks)
    if key not in ids:
        ids[key] = len(ids)
        groups.names.append(name)
        groups.ranks.append(ranks)
        groups.axis.append(code_of(AXES, axis))
    return ids[key]


def _settle_axes(meta: RunMeta, parts: Parts, told: Mapping[str, str]) -> None:
    """The axis of every part: as recorded, else by the mesh, else by the group's description, else as the user says."""
    for g, name in enumerate(parts.groups.names):
        by_mesh = mesh_axis(meta, parts.groups.ranks[g])
        if by_mesh >= 0:
            parts.groups.axis[g] = by_mesh
        elif parts.groups.axis[g] < 0:
            parts.groups.axis[g] = code_of(AXES, told.get(name, ""))
    by_group = np.array([*parts.groups.axis, -1], np.int64)[parts["group"]]
    parts.columns["axis"] = np.where(parts["axis"] >= 0, parts["axis"], by_group)


def mesh_axis(meta: RunMeta, ranks: Sequence[int]) -> int:
    """Code of the mesh axis (or joined axes) along which these ranks differ; -1 without a mesh."""
    if len(ranks) < 2 or not meta.coords or max(ranks) >= len(meta.coords):
        return -1
    coords = [meta.coords[rank] for rank in ranks]
    differing = [axis for axis in MESH_AXES if len({one.get(axis, 0) for one in coords}) > 1]
    if len(differing) > 1 and len(ranks) == meta.world_size:
        return code_of(AXES, "world")
    return code_of(AXES, "_".join(differing))


def _direction(parts: Parts) -> None:
    """Source and destination of each point to point whose peer is recorded."""
    here = np.array(parts.ranks, np.int64)[parts["rank"]]
    directed = parts.point_to_point & (parts["peer"] >= 0)
    sends = parts["collective"] == SEND
    peer = parts["peer"].astype(np.int64)
    parts.columns["source"] = np.where(directed, np.where(sends, here, peer), -1)
    parts.columns["destination"] = np.where(directed, np.where(sends, peer, here), -1)


def own_pipeline_last(meta: RunMeta, parts: Parts, match: np.ndarray) -> np.ndarray:
    """Of each part in a collective that joins several stages: the last arrival of the ranks of its own pipeline.

    Elsewhere the part's own arrival. A pipeline: the ranks whose mesh coordinates differ along `pp` only.
    """
    answer = parts["arrival"].copy()
    if not meta.coords or max(parts.ranks) >= len(meta.coords):
        return answer
    stage = np.array([meta.coords[rank].get("pp", 0) for rank in parts.ranks], np.int64)
    others = [tuple(sorted((a, i) for a, i in meta.coords[rank].items() if a != "pp")) for rank in parts.ranks]
    pipeline = np.unique(np.array([str(one) for one in others]), return_inverse=True)[1]
    rows = np.flatnonzero(~parts.point_to_point & (parts["axis"] != PIPELINE))
    if len(rows) == 0 or len(set(stage.tolist())) == 1:
        return answer
    size = int(match.max()) + 1
    low, high = np.full(size, 1 << 30), np.full(size, -1)
    np.minimum.at(low, match[rows], stage[parts["rank"][rows]])
    np.maximum.at(high, match[rows], stage[parts["rank"][rows]])
    rows = rows[(low < high)[match[rows]]]
    code = match[rows] * (int(pipeline.max()) + 1) + pipeline[parts["rank"][rows]]
    _, inverse = np.unique(code, return_inverse=True)
    last = np.full(int(inverse.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, inverse, parts["arrival"][rows])
    answer[rows] = last[inverse]
    return answer
