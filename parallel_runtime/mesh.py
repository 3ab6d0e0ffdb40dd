"""Ranks as coordinates: pp, dp, cp, tp, outermost to innermost, and the groups in which they communicate.

tp is innermost, so that the ranks that talk most sit beside each other. Expert parallelism is a second view of the same
ranks: the dp x cp x tp ranks of one pipeline stage are cut into blocks of `ep` neighbours; ranks at the same place of
their blocks form `edp`, expert data parallel. Pure Python: nothing here knows torch.

A *view* names a family of groups that partition the ranks:

    pp dp cp tp          ranks that differ only along that axis
    dp_cp, pp_dp_tp, ... axes joined, in mesh order
    ep edp               the expert view
    shard                ranks among which the model state is cut: dp x cp, or with `replicas` the part of it that is one copy
    replica              ranks that hold the same part of the state, one in each copy
    holders              ranks that hold one copy of all parameters together: pp x shard x tp
    edp_shard            ranks of edp among which the state of experts is cut: those of one copy
    edp_replica          ranks of edp that hold the same part of that state, one in each copy
    world                all ranks
    embedding            first and last stage of each pipeline (they share a tied embedding); middle stages have no group
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from stepscope.parallel_runtime.config import ParallelConfig

DENSE_AXES = ("pp", "dp", "cp", "tp")
"""Outermost to innermost; their sizes multiply to the world."""

EXPERT_VIEWS = ("ep", "edp")

SHARDING_VIEWS = {"shard": ("dp", "cp"), "replica": ("dp",), "holders": ("pp", "dp", "cp", "tp")}
"""View -> the axes along which its ranks differ."""

EXPERT_SHARDING_VIEWS = ("edp_shard", "edp_replica")
"""Parts of `edp`, whose axis they have."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes. `ep` adds no ranks, see above; `replicas` cuts dp into so many blocks of neighbours."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes().items():
            if size < 1:
                raise ValueError(f"mesh axis {axis} has size {size}: take at least 1")
        if self.stage_size % self.ep:
            legal = max(n for n in range(1, self.ep) if self.stage_size % n == 0)
            raise ValueError(
                f"ep {self.ep} must divide dp x cp x tp = {self.stage_size}, the ranks of one stage: take ep {legal}"
            )
        if self.replicas < 1 or self.dp % self.replicas:
            legal = max(n for n in range(1, max(self.replicas, 2)) if self.dp % n == 0)
            raise ValueError(f"{self.replicas} replicas must divide dp {self.dp}: take {legal}")

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Mesh:
        """The mesh of a parallel configuration."""
        return cls(parallel.pp, parallel.dp, parallel.cp, parallel.ep, parallel.tp, parallel.replicate)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first, as run.json has it."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along pp, dp, cp, ep and tp (ep: in the expert view)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not among the {self.world_size} ranks of the mesh")
        rest, found = rank, {}
        for axis in reversed(DENSE_AXES):
            rest, found[axis] = divmod(rest, getattr(self, axis))
        found["ep"] = rank % self.stage_size % self.ep
        return {axis: found[axis] for axis in self.sizes()}

    def rank_of(self, **coordinates: int) -> int:
        """The rank at these dense coordinates; an axis not named is at 0."""
        rank = 0
        for axis in DENSE_AXES:
            rank = rank * getattr(self, axis) + coordinates.get(axis, 0)
        return rank

    def axis_of(self, view: str) -> str:
        """The schema's name of a view's axis: `embedding` runs along pp, `dp_cp` along dp where cp has one rank."""
        if view == "embedding":
            return "pp"
        if view in EXPERT_SHARDING_VIEWS:
            return "edp"
        axes = SHARDING_VIEWS.get(view, tuple(view.split("_")))
        wide = [axis for axis in axes if axis in DENSE_AXES and getattr(self, axis) > 1]
        if view in ("shard", "holders") and self.dp == self.replicas and len(wide) > 1:
            wide.remove("dp")  # each copy lies within one place of dp
        return "_".join(wide) or SHARDING_VIEWS.get(view, (view,))[0]

    def group(self, view: str, rank: int) -> tuple[int, ...]:
        """Ranks of the group of `view` that holds `rank`, ascending; empty when it is in none (`embedding` only)."""
        return _group(self, view, rank)

    def all_groups(self, view: str) -> list[tuple[int, ...]]:
        """All groups of `view`, in order of their first rank."""
        return sorted({group for rank in range(self.world_size) if (group := self.group(view, rank))})

    def size(self, view: str) -> int:
        """Ranks in one group of `view`."""
        return len(self.group(view, 0))

    def index(self, view: str, rank: int) -> int:
        """Place of `rank` in its group of `view`."""
        return self.group(view, rank).index(rank)


@lru_cache(maxsize=65536)
def _group(mesh: Mesh, view: str, rank: int) -> tuple[int, ...]:
    here = mesh.coordinates(rank)
    if view == "world":
        return tuple(range(mesh.world_size))
    if view in EXPERT_VIEWS:
        first = rank - rank % mesh.stage_size  # of this stage
        if view == "ep":
            start = rank - (rank - first) % mesh.ep
            return tuple(range(start, start + mesh.ep))
        return tuple(range(first + here["ep"], first + mesh.stage_size, mesh.ep))
    if view in SHARDING_VIEWS:
        return _sharding_group(mesh, view, rank)
    if view in EXPERT_SHARDING_VIEWS:
        size = mesh.stage_size // mesh.replicas  # ranks of a stage that hold one copy: neighbours, as blocks of ep are
        place = (rank % mesh.stage_size) % size
        peers = mesh.group("edp", rank)
        if view == "edp_replica":
            return tuple(peer for peer in peers if peer % mesh.stage_size % size == place)
        copy = rank // size
        return tuple(peer for peer in peers if peer // size == copy)
    if view == "embedding":
        ends = {0, mesh.pp - 1}
        if here["pp"] not in ends:
            return ()
        return tuple(mesh.rank_of(**{**here, "pp": stage}) for stage in sorted(ends))
    axes = view.split("_")
    if any(axis not in DENSE_AXES for axis in axes) or axes != [axis for axis in DENSE_AXES if axis in axes]:
        raise ValueError(
            f"unknown view {view!r}: take {', '.join(DENSE_AXES)}, joined ones in this order such as dp_cp,"
            f" {', '.join((*EXPERT_VIEWS, *SHARDING_VIEWS, *EXPERT_SHARDING_VIEWS))}, world or embedding"
        )
    places = itertools.product(*(range(getattr(mesh, axis)) for axis in axes))
    return tuple(mesh.rank_of(**{**here, **dict(zip(axes, place, strict=True))}) for place in places)


def _sharding_group(mesh: Mesh, view: str, rank: int) -> tuple[int, ...]:
    """Ranks that differ from `rank` along the view's axes; along dp, only within its copy, or (`replica`) only between."""
    size = mesh.dp // mesh.replicas  # places of dp that hold one copy
    place = mesh.coordinates(rank)["dp"]
    peers = mesh.group("_".join(SHARDING_VIEWS[view]), rank)
    places = {peer: mesh.coordinates(peer)["dp"] for peer in peers}
    if view == "replica":
        return tuple(peer for peer in peers if places[peer] % size == place % size)
    return tuple(peer for peer in peers if places[peer] // size == place // size)
