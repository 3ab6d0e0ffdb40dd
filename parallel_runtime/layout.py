"""Which dimension of every parameter is cut over which axis of the mesh: the only place that knows.

Initial shards, gathering, the gradient norm and the reductions after backward all ask this table. A parameter that is not
in it is refused, so that a new one cannot be replicated, or counted twice, by accident.

Matrices are (out, in). A matrix cut by columns (of its transpose, as the papers write it) has its dimension 0 cut, one cut
by rows its dimension 1; the bias of the latter is added after the sum over ranks and so is whole on each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.mesh import Mesh

EMBEDDING = "embedding.weight"
"""A tied embedding lives on the first and on the last stage, under this one name."""


class Cut(NamedTuple):
    """Dimension `dim` is cut into equal parts over the ranks of `axis`, in order of their place in the group."""

    dim: int
    axis: str


WHOLE: tuple[Cut, ...] = ()
BY_COLUMNS = (Cut(0, "tp"),)
BY_ROWS = (Cut(1, "tp"),)
BY_EXPERTS = (Cut(0, "ep"),)

TABLE: dict[str, tuple[Cut, ...]] = {
    EMBEDDING: BY_COLUMNS,  # the vocabulary
    "layers.*.attention_norm.weight": WHOLE,
    "layers.*.attention_norm.bias": WHOLE,
    "layers.*.attention.query.weight": BY_COLUMNS,  # heads
    "layers.*.attention.query.bias": BY_COLUMNS,
    "layers.*.attention.key.weight": BY_COLUMNS,  # key and value heads
    "layers.*.attention.key.bias": BY_COLUMNS,
    "layers.*.attention.value.weight": BY_COLUMNS,
    "layers.*.attention.value.bias": BY_COLUMNS,
    "layers.*.attention.output.weight": BY_ROWS,
    "layers.*.attention.output.bias": WHOLE,
    "layers.*.feed_forward_norm.weight": WHOLE,
    "layers.*.feed_forward_norm.bias": WHOLE,
    "layers.*.feed_forward.gate.weight": BY_COLUMNS,  # the inner width
    "layers.*.feed_forward.gate.bias": BY_COLUMNS,
    "layers.*.feed_forward.up.weight": BY_COLUMNS,
    "layers.*.feed_forward.up.bias": BY_COLUMNS,
    "layers.*.feed_forward.down.weight": BY_ROWS,
    "layers.*.feed_forward.down.bias": WHOLE,
    "layers.*.feed_forward.router.weight": WHOLE,
    "layers.*.feed_forward.experts.gate.weight": BY_EXPERTS,  # whole experts: tp does not cut them
    "layers.*.feed_forward.experts.gate.bias": BY_EXPERTS,
    "layers.*.feed_forward.experts.up.weight": BY_EXPERTS,
    "layers.*.feed_forward.experts.up.bias": BY_EXPERTS,
    "layers.*.feed_forward.experts.down.weight": BY_EXPERTS,
    "layers.*.feed_forward.experts.down.bias": BY_EXPERTS,
    "norm.weight": WHOLE,
    "norm.bias": WHOLE,
    "head.weight": BY_COLUMNS,  # the vocabulary
}
"""Global name, any layer's number written `*` -> its cuts, applied one after the other."""


def cuts_of(name: str) -> tuple[Cut, ...]:
    """The cuts of the parameter called `name`; KeyError for a name that the table does not hold."""
    return TABLE[re.sub(r"^layers\.\d+\.", "layers.*.", name)]


def is_cut(name: str, axis: str) -> bool:
    """Whether the ranks of `axis` hold different parts of the parameter; else each holds the same."""
    return any(cut.axis == axis for cut in cuts_of(name))


def is_whole(name: str) -> bool:
    """Whether every rank that has the parameter at all has all of it."""
    return not cuts_of(name)


def of_experts(name: str) -> bool:
    """Whether the parameter belongs to experts: its gradient is summed over `edp`, the ranks that hold the same ones."""
    return is_cut(name, "ep")


def replicas(name: str) -> str:
    """The mesh view whose ranks hold the same values of the parameter and saw other tokens."""
    return "edp" if of_experts(name) else "dp_cp"


def shard(name: str, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """The part of a whole parameter (or of its gradient) that `rank` holds, a view. Every cut must divide."""
    part = whole
    for dim, axis in cuts_of(name):
        ranks = mesh.size(axis)
        assert part.shape[dim] % ranks == 0, f"{name} {tuple(whole.shape)} does not divide by {axis} {ranks}"
        part = part.chunk(ranks, dim)[mesh.index(axis, rank)]
    return part


def shard_shape(name: str, whole: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Shape of each rank's part."""
    shape = list(whole)
    for dim, axis in cuts_of(name):
        shape[dim] //= mesh.size(axis)
    return tuple(shape)


def gather(name: str, parts: Mapping[int, Tensor], mesh: Mesh, rank: int) -> Tensor:
    """The whole parameter from the parts of the ranks around `rank` (its replica); the inverse of `shard`."""

    def join(peer: int, cuts: tuple[Cut, ...]) -> Tensor:
        if not cuts:
            return parts[peer]
        first, *rest = cuts
        return torch.cat([join(other, tuple(rest)) for other in mesh.group(first.axis, peer)], first.dim)

    return join(rank, cuts_of(name))


def counts_once(name: str, mesh: Mesh, rank: int) -> bool:
    """Whether `rank` counts this parameter in a sum over its model's ranks (pp and tp): every element then counts once.

    What all ranks of tp hold belongs to the first of them, a tied embedding's second copy to the first stage. Experts count
    everywhere: which ranks hold the same ones is a matter of `replicas`.
    """
    where = mesh.coordinates(rank)
    if name == EMBEDDING and where["pp"] > 0:
        return False
    return is_cut(name, "tp") or of_experts(name) or where["tp"] == 0


def local_sequence(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Positions of an activation between layers and stages, on each rank: cp cuts the sequence, and sp its part again."""
    return model.seq // parallel.cp // (parallel.tp if parallel.sp else 1)
