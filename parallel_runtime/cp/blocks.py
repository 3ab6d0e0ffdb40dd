"""Attention block by block: a softmax over keys that are never all there at once. No communication.

Each block gives the attention over its own keys and the logarithm of its sum of exponentials (*lse*), by which it is
weighted against the others (Milakov and Gimelshein 2018; Liu et al. 2023). Backward needs no more than the output and the
final lse, which make each block's true weights, exp(score - lse), again (Dao et al. 2022).

Shapes: B batch, N query heads, K key and value heads (K divides N), G = N / K, Q queries, T keys, D features of a head;
keys and values travel as one tensor (2, B, K, T, D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepscope.parallel_runtime.cp.layouts import Block

FUSED = ("cpu", "meta")
"""Devices whose fused kernel gives and takes the lse in every type, with fewer key than query heads."""


class OnlineAttention:
    """Attention of this rank's queries over the blocks added so far; the first must be its own, in which all see a key."""

    def __init__(self, q_BNQD: Tensor) -> None:
        self._query = q_BNQD
        self._output: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, key_value: Tensor, block: Block | None) -> None:
        """Take in the keys and values of one rank."""
        if block is None:
            return
        (first, last), (lowest, highest), causal = block
        key, value = key_value[..., lowest:highest, :]
        part, lse = attend_block(self._query[:, :, first:last], key, value, causal)
        if self._output is None or self._lse is None:
            assert causal, "the first block is the rank's own"
            self._output, self._lse = part.to(lse.dtype), lse
        else:
            merge(self._output[:, :, first:last], self._lse[:, :, first:last], part, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output (B, N, Q, D) in the queries' type, and lse (B, N, Q), at least in float32."""
        assert self._output is not None and self._lse is not None, "no block was added"
        return self._output.to(self._query.dtype), self._lse


class OnlineGradients:
    """Backward of `OnlineAttention`: `query` gives the queries' gradient when all blocks have been added."""

    def __init__(self, gradient_BNQD: Tensor, q_BNQD: Tensor, output_BNQD: Tensor, lse_BNQ: Tensor) -> None:
        self._gradient, self._query, self._output, self._lse = gradient_BNQD, q_BNQD, output_BNQD, lse_BNQ
        self._d_query = torch.zeros_like(q_BNQD, dtype=lse_BNQ.dtype)

    def add(self, key_value: Tensor, block: Block | None) -> Tensor | None:
        """Take in the same block again: its gradients of the keys and values that were seen, (2, B, K, T, D)."""
        if block is None:
            return None
        (first, last), (lowest, highest), causal = block
        key, value = key_value[..., lowest:highest, :]
        gradient, query, output = (x[:, :, first:last] for x in (self._gradient, self._query, self._output))
        lse = self._lse[:, :, first:last]
        d_query, d_key, d_value = attend_block_backward(gradient, query, key, value, output, lse, causal)
        self._d_query[:, :, first:last] += d_query
        return torch.stack((d_key, d_value))

    def query(self) -> Tensor:
        """(B, N, Q, D), in the queries' type."""
        return self._d_query.to(self._query.dtype)


def collect(total: Tensor, part: Tensor | None, block: Block | None) -> None:
    """In place: add a block's gradients of keys and values to those of all keys and values of a rank."""
    if part is not None and block is not None:
        total[..., slice(*block.keys), :] += part


def merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """In place: attention over two sets of keys from attention over each, (B, N, Q, D), weighted by their lse, (B, N, Q)."""
    both = torch.logaddexp(lse, part_lse)
    output.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(part.to(lse.dtype), (part_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


# -- one block ---------------------------------------------------------------------------------------------------------


def attend_block(q_BNQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q k / sqrt(D)) v, (B, N, Q, D), and lse, (B, N, Q), over these keys alone; `causal`: Q = T, by index."""
    if q_BNQD.device.type in FUSED:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BNQD, k_BKTD, v_BKTD, 0.0, causal)
    scores = _scores(q_BNQD, k_BKTD, causal)
    lse = scores.logsumexp(-1)
    output = (scores - lse.unsqueeze(-1)).exp_().flatten(2, 3) @ v_BKTD.to(scores.dtype)
    return output.view_as(q_BNQD).to(q_BNQD.dtype), lse.flatten(1, 2)


def attend_block_backward(
    gradient_BNQD: Tensor,
    q_BNQD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    output_BNQD: Tensor,
    lse_BNQ: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v; output and lse are those over *all* keys."""
    if q_BNQD.device.type in FUSED:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BNQD, q_BNQD, k_BKTD, v_BKTD, output_BNQD, lse_BNQ, 0.0, causal
        )
    scores = _scores(q_BNQD, k_BKTD, causal)
    grouped = (k_BKTD.shape[1], -1)
    wide = [x.to(scores.dtype) for x in (gradient_BNQD, q_BNQD, k_BKTD, v_BKTD, output_BNQD)]
    gradient, query, output = (wide[i].unflatten(1, grouped).flatten(2, 3) for i in (0, 1, 4))
    key, value = wide[2], wide[3]
    weights = (scores - lse_BNQ.unflatten(1, grouped).unsqueeze(-1)).exp_().flatten(2, 3)
    rows = (gradient * output).sum(-1, keepdim=True)
    d_scores = weights * (gradient @ value.mT - rows) * q_BNQD.shape[-1] ** -0.5
    d_query = (d_scores @ key).view_as(q_BNQD)
    d_key, d_value = d_scores.mT @ query, weights.mT @ gradient
    return d_query.to(q_BNQD.dtype), d_key.to(k_BKTD.dtype), d_value.to(v_BKTD.dtype)


def _scores(q_BNQD: Tensor, k_BKTD: Tensor, causal: bool) -> Tensor:
    """(B, K, G, Q, T), at least in float32; -inf where a key comes after its query."""
    query = q_BNQD.unflatten(1, (k_BKTD.shape[1], -1))
    dtype = torch.promote_types(query.dtype, torch.float32)
    flat = query.to(dtype).flatten(2, 3) @ k_BKTD.to(dtype).mT * q_BNQD.shape[-1] ** -0.5
    scores = flat.unflatten(2, query.shape[2:4])
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores
