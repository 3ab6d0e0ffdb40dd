"""Ring attention (Liu et al. 2023): keys and values go round the ranks of cp while each computes with those it has.

    hop 0      rank 0: KV 0 ──▶ rank 1: KV 1 ──▶ rank 2: KV 2 ──▶ rank 3: KV 3 ──▶ (rank 0)
    hop 1      rank 0: KV 3 ──▶ rank 1: KV 0 ──▶ ...

Forward: n - 1 hops of K and V on the stream cp.kv. Backward: the same again, and n hops of dK and dV on cp.dkv: they ride
one hop behind the keys they belong to, gather each rank's part, and the last hop brings them home. Only the key and value
heads travel, however many query heads use them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.cp.blocks import OnlineAttention, OnlineGradients, collect
from stepscope.parallel_runtime.cp.layouts import block_of


class RingAttention(torch.autograd.Function):
    """q (B, N, S, D), k and v (B, K, S, D) of this rank's positions -> (B, N, S, D), causal over the whole sequence."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, layout: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next keys and values arrive while the current ones are used."""
        ranks, here = comm.size("cp"), comm.index("cp")
        attention = OnlineAttention(q)
        own = key_value = torch.stack((k, v))
        for hop in range(ranks):
            shifting = _shift(comm, key_value, "cp.kv") if hop < ranks - 1 else None
            attention.add(key_value, block_of(layout, ranks, here, (here - hop) % ranks, q.shape[2]))
            if shifting is not None:
                key_value = shifting.wait()
        output, lse = attention.result()
        ctx.comm, ctx.layout = comm, layout
        ctx.save_for_backward(q, own, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """dK and dV of a block arrive while this rank's part of them is computed."""
        q, key_value, output, lse = ctx.saved_tensors
        comm: Comm = ctx.comm
        ranks, here = comm.size("cp"), comm.index("cp")
        gradient = OnlineGradients(gradients[0], q, output, lse)
        arriving = None
        for hop in range(ranks):
            shifting = _shift(comm, key_value, "cp.kv") if hop < ranks - 1 else None
            block = block_of(ctx.layout, ranks, here, (here - hop) % ranks, q.shape[2])
            part = gradient.add(key_value, block)
            if arriving is None:
                total = part
            else:
                total = arriving.wait()
                collect(total, part, block)
            assert total is not None, "hop 0 is the rank's own block"
            arriving = _shift(comm, total, "cp.dkv")
            if shifting is not None:
                key_value = shifting.wait()
        assert arriving is not None
        d_key, d_value = arriving.wait()
        return None, None, gradient.query(), d_key, d_value


def _shift(comm: Comm, tensor: Tensor, stream: str) -> Any:
    return comm.ring_shift(tensor, "cp", strategy="cp", stream=stream)
