"""Ulysses (Jacobs et al. 2023): around attention, the cut changes from positions to heads.

    some positions, all heads ──▶ [all-to-all of q, k, v] ──▶ all positions, some heads ──▶ attention ──▶ [all-to-all] ──▶

4 all-to-alls forward, 4 backward. Attention itself is that of one device, so the number of ranks must divide the heads,
key and value heads included. DeepSpeed calls this sequence parallelism.

Shapes: B batch, N heads of this rank's model, S the whole sequence, n ranks, h = N / n heads, s = S / n positions, D
features of a head; rows of an all-to-all are (N, s, B, D): h of them come from, or go to, each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.cp.layouts import PIECES, pieces_of


class ScatterHeads(torch.autograd.Function):
    """Tensors (B, N, s, D) of this rank's positions -> (B, h, S, D) of its heads; the inverse in backward."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All are on their way before the first is waited for."""
        ctx.comm, ctx.layout = comm, layout
        return to_heads(comm, layout, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """A permutation of entries over ranks: its transpose is its inverse."""
        return None, None, *to_positions(ctx.comm, ctx.layout, *gradients)


class GatherHeads(torch.autograd.Function):
    """(B, h, S, D) of this rank's heads -> (B, N, s, D) of its positions; the inverse in backward."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, layout: str, y: Tensor) -> Tensor:
        """The output of attention."""
        ctx.comm, ctx.layout = comm, layout
        return to_positions(comm, layout, y)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """As ScatterHeads forward."""
        return None, None, *to_heads(ctx.comm, ctx.layout, *gradients)


def to_heads(comm: Comm, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, N, s, D) -> (B, h, S, D) of each, positions in order whatever the layout."""
    ranks = comm.size("cp")
    handles = [_exchange(comm, x.permute(1, 2, 0, 3)) for x in tensors]
    wholes = []
    for handle in handles:
        rows = handle.wait().unflatten(0, (ranks, -1))  # (n, h, s, B, D)
        whole = rows.new_empty(rows.shape[1], ranks * rows.shape[2], *rows.shape[3:])
        for here, there in _places(layout, ranks, rows.shape[2]):
            whole[:, there] = rows[here[0], :, here[1]]
        wholes.append(whole.permute(2, 0, 1, 3))
    return tuple(wholes)


def to_positions(comm: Comm, layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, h, S, D) -> (B, N, s, D) of each: the inverse of `to_heads`."""
    ranks = comm.size("cp")
    handles = []
    for x in tensors:
        whole = x.permute(1, 2, 0, 3)
        heads, length = whole.shape[0], whole.shape[1] // ranks
        rows = whole.new_empty(ranks, heads, length, *whole.shape[2:])
        for here, there in _places(layout, ranks, length):
            rows[here[0], :, here[1]] = whole[:, there]
        handles.append(_exchange(comm, rows.flatten(0, 1)))
    return tuple(handle.wait().permute(2, 0, 1, 3) for handle in handles)


def _exchange(comm: Comm, rows: Tensor) -> Any:
    each = [rows.shape[0] // comm.size("cp")] * comm.size("cp")
    return comm.all_to_all(rows, "cp", each, each, strategy="cp")


def _places(layout: str, ranks: int, length: int) -> Iterator[tuple[tuple[int, slice], slice]]:
    """((rank, its local positions), the same in the whole sequence) of each piece; `length`: positions of a rank."""
    piece = length // PIECES[layout]
    for rank in range(ranks):
        for place, number in enumerate(pieces_of(layout, ranks, rank)):
            yield (rank, slice(place * piece, (place + 1) * piece)), slice(number * piece, (number + 1) * piece)
