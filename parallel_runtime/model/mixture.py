"""A mixture of experts in place of a feed-forward part: a router, and as many feed-forward parts as there are experts.

    x ──▶ router ──▶ each token to its K experts ──▶ experts ──▶ sum with the router's weights ──▶ y

The model knows no communication: which rank has which experts, and how tokens get there and back, is the seam
`through_experts` (ep/expert_parallel.py). Without it every expert computes every token.

Shapes: S sequence, B batch, H hidden, T = S B tokens, E experts that this rank holds, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.parallel_runtime.config import ModelConfig
from stepscope.parallel_runtime.model.recompute import Recompute
from stepscope.parallel_runtime.model.router import AddLoss, Router, balance_loss, counts_of, counts_of_sequences
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.model.weight_gradients import WeightGradients

Expert = Callable[[Tensor], Tensor]
"""Rows (R, H) -> (R, H); R may be 0."""


class StackedLinear(nn.Module):
    """x W^T + b of each expert: the matrices of all of them in one tensor, so that a cut is one slice."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(experts, outputs, **where)) if bias else None

    def each(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of each expert. `unbind` stacks their gradients once; indexing would make a whole one for each."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind()
        return list(zip(self.weight.unbind(), biases, strict=True))


class Experts(nn.Module):
    """The feed-forward parts that this rank holds (SwiGLU or GELU, as layers.FeedForward)."""

    def __init__(self, config: ModelConfig, experts: int, later: WeightGradients | None = None, **where: Any) -> None:
        """`later`: where backward leaves the gradients of weights, when it is split."""
        super().__init__()
        self.later = later
        width, bias = config.expert_width, config.ffn_bias
        gated = config.activation == "swiglu"
        self.gate = StackedLinear(experts, config.hidden, width, bias, **where) if gated else None
        self.up = StackedLinear(experts, config.hidden, width, bias, **where)
        self.down = StackedLinear(experts, width, config.hidden, bias, **where)

    def each(self) -> list[Expert]:
        """One function an expert, in their order."""
        first = [part for part in (self.gate, self.up) if part is not None]
        products = self._products() if self.later is None else self._leaving(self.later)

        def expert(number: int) -> Expert:
            def run(x: Tensor) -> Tensor:
                inner = products(number, x, *first)
                y = F.gelu(inner[0]) if self.gate is None else F.silu(inner[0]) * inner[1]
                return products(number, y, self.down)[0]

            return run

        return [expert(number) for number in range(len(self.up.weight))]

    def _products(self) -> Callable[..., tuple[Tensor, ...]]:
        """(expert, x, matrices) -> x W^T + b of each."""
        cut = {part: part.each() for part in (self.gate, self.up, self.down) if part is not None}
        return lambda number, x, *parts: tuple(F.linear(x, *cut[part][number]) for part in parts)

    def _leaving(self, later: WeightGradients) -> Callable[..., tuple[Tensor, ...]]:
        """The same, whose weights get their gradients later."""
        return lambda number, x, *parts: later.columns(x, *((p.weight, p.bias) for p in parts), place=number)


class Mixture(nn.Module):
    """The feed-forward part of layer `layer`. `loss_scale`: of an auxiliary loss, one over the sequences of a step."""

    def __init__(
        self,
        config: ModelConfig,
        seams: Seams,
        layer: int,
        loss_scale: float = 1.0,
        again: Recompute | None = None,
        **where: Any,
    ) -> None:
        """`again`: what recomputes this layer in backward, if anything does: nothing is counted twice."""
        super().__init__()
        self.config, self.seams, self.layer, self.loss_scale, self.again = config, seams, layer, loss_scale, again
        self.router = Router(config, seams.rows, **where)
        self.experts = Experts(config, config.experts // seams.expert_parallel, seams.later, **where)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        x = self.seams.routed_positions(x_SBH)
        tokens_TH = x.flatten(0, 1)
        routed = self.router(tokens_TH)
        counting = self.again is None or not self.again.running
        if counting and self.config.balance == "bias":
            self.router.load_E += counts_of(routed.chosen_TK, self.config.experts)
        y = self.seams.through_experts(tokens_TH, routed, self.experts, self.layer, counting).view_as(x)
        if self.config.balance == "aux":
            y = AddLoss.apply(y, self._loss(routed, x.shape[1]), self.config.aux_weight * self.loss_scale)
        return self.seams.all_positions(y)

    def _loss(self, routed: Any, sequences: int) -> Tensor:
        config = self.config
        counts = counts_of_sequences(routed.chosen_TK, config.experts, sequences)
        counts = self.seams.over_sequence(counts)
        return balance_loss(routed.shares_TE, counts, config.seq, config.experts_per_token)
