"""Context parallelism by all-gather: every rank sees all keys and values, and computes its own queries (Llama 3, 2024).

Forward: one all-gather of K and V, behind the rank's own block, which needs none. Backward: the same again (so that no
rank keeps the keys of the whole sequence), then one reduce-scatter of dK and dV. Fewer and larger messages than the ring,
but only the first block hides them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.cp.blocks import OnlineAttention, OnlineGradients, collect
from stepscope.parallel_runtime.cp.layouts import block_of


class GatheredAttention(torch.autograd.Function):
    """q (B, N, S, D), k and v (B, K, S, D) of this rank's positions -> (B, N, S, D), causal over the whole sequence."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, layout: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The rank's own block, then those of the others in the order of the group."""
        ranks, here, length = comm.size("cp"), comm.index("cp"), q.shape[2]
        own = torch.stack((k, v))
        gathering = comm.all_gather(own, "cp", strategy="cp")
        attention = OnlineAttention(q)
        attention.add(own, block_of(layout, ranks, here, here, length))
        whole = gathering.wait().unflatten(0, (ranks, 2))
        for source in _others(ranks, here):
            attention.add(whole[source], block_of(layout, ranks, here, source, length))
        output, lse = attention.result()
        ctx.comm, ctx.layout = comm, layout
        ctx.save_for_backward(q, own, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank has a part of the gradients of all keys that its queries see."""
        q, own, output, lse = ctx.saved_tensors
        comm: Comm = ctx.comm
        ranks, here, length = comm.size("cp"), comm.index("cp"), q.shape[2]
        gathering = comm.all_gather(own, "cp", strategy="cp")
        gradient = OnlineGradients(gradients[0], q, output, lse)
        parts = own.new_zeros(ranks, *own.shape)
        block = block_of(ctx.layout, ranks, here, here, length)
        collect(parts[here], gradient.add(own, block), block)
        whole = gathering.wait().unflatten(0, (ranks, 2))
        for source in _others(ranks, here):
            block = block_of(ctx.layout, ranks, here, source, length)
            collect(parts[source], gradient.add(whole[source], block), block)
        d_key, d_value = comm.reduce_scatter(parts.flatten(0, 1), "cp", strategy="cp").wait()
        return None, None, gradient.query(), d_key, d_value


def _others(ranks: int, here: int) -> list[int]:
    return [rank for rank in range(ranks) if rank != here]
