"""Which experts a token goes to, and with which weights: the arithmetic of a mixture's router, on the tokens of one rank.

    scores     softmax or sigmoid of x W^T
    choice     the k largest scores; with balance `bias`, of score + offset (the offset takes no part in the weights)
    weights    scores of the chosen, divided by their sum (k = 1: the score itself, or the router would have no gradient)
    capacity   with balance `capacity` an expert takes no more than its share of the rank's tokens, those with the largest
               weights; the others are dropped: the residual connection alone carries them on

Shapes: T tokens, E experts, K experts of a token, H hidden; B sequences of a microbatch, of which a rank holds some
positions. All shapes are known without data. Sources: Shazeer et al. 2017 (top-k), Fedus et al. 2022 (auxiliary loss,
capacity), DeepSeek-AI 2024 (sigmoid scores, loss per sequence), Wang et al. 2024 (offsets in place of a loss).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.parallel_runtime.config import ModelConfig
from stepscope.parallel_runtime.model.planned_routing import capacity, planned_choices


class Routed(NamedTuple):
    """The router's answer. A dropped choice has weight 0 and the expert number E, which nobody has."""

    weights_TK: Tensor
    experts_TK: Tensor
    counts_E: Tensor  # tokens of each expert, dropped ones not
    chosen_TK: Tensor  # before any is dropped
    shares_TE: Tensor  # scores as shares of 1: what an auxiliary loss moves


class Router(nn.Module):
    """Scores tokens. `offset_E` and `load_E` belong to balance `bias`: no gradient reaches them (ep/balance.py)."""

    offset_E: Tensor
    load_E: Tensor

    def __init__(
        self, config: ModelConfig, product: Callable[[Tensor, Tensor], Tensor] = F.linear, **where: Any
    ) -> None:
        """`product`: x W^T (seams.rows)."""
        super().__init__()
        self.config, self.product = config, product
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden, **where))
        precision = torch.promote_types(self.weight.dtype, torch.float32)
        device = self.weight.device
        self.register_buffer("offset_E", torch.zeros(config.experts, dtype=precision, device=device), persistent=False)
        self.register_buffer("load_E", torch.zeros(config.experts, dtype=torch.int64, device=device), persistent=False)

    def forward(self, x_TH: Tensor) -> Routed:
        """Route the tokens; at least in float32."""
        config = self.config
        logits = self.product(x_TH, self.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores_TE = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        chosen = self._choose(scores_TE.detach())
        picked = scores_TE.gather(-1, chosen)
        weights = picked / picked.sum(-1, keepdim=True) if config.experts_per_token > 1 else picked
        experts = chosen
        if config.balance == "capacity":
            most = capacity(len(x_TH), config.experts_per_token, config.experts, config.capacity_factor)
            kept = within_capacity(weights.detach(), chosen, config.experts, most)
            experts = chosen.masked_fill(~kept, config.experts)
            weights = weights.masked_fill(~kept, 0.0)
        shares = scores_TE / scores_TE.sum(-1, keepdim=True)
        return Routed(weights, experts, counts_of(experts, config.experts), chosen, shares)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """(T, K): the best experts of each token, or the planned ones."""
        config = self.config
        if config.routing_skew is not None:
            plan = (len(scores_TE), config.experts_per_token, config.experts, config.routing_skew)
            return planned(*plan, scores_TE.device)
        if config.balance == "bias":
            scores_TE = scores_TE + self.offset_E
        return scores_TE.topk(config.experts_per_token, -1).indices


@lru_cache(maxsize=16)
def planned(tokens: int, per_token: int, experts: int, skew: float, device: torch.device) -> Tensor:
    """(T, K): the planned choices, made and brought to the device once, so that following a plan costs a step nothing."""
    return torch.tensor(planned_choices(tokens, per_token, experts, skew), device=device)


def counts_of(experts_TK: Tensor, experts: int) -> Tensor:
    """(E,): how often each expert stands there; the number E (dropped) counts nowhere."""
    flat = experts_TK.flatten()
    counts = torch.zeros(experts + 1, dtype=flat.dtype, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]


def within_capacity(weights_TK: Tensor, chosen_TK: Tensor, experts: int, most: int) -> Tensor:
    """(T, K) bool: the choices that are among the `most` of their expert with the largest weights; earlier tokens first."""
    chosen = chosen_TK.flatten()
    by_weight = weights_TK.flatten().argsort(descending=True, stable=True)
    order = by_weight[chosen[by_weight].argsort(stable=True)]  # by expert, within one by weight
    counts = counts_of(chosen_TK, experts)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=order.device) - first[chosen[order]]
    return torch.empty_like(order, dtype=torch.bool).scatter(0, order, place < most).view_as(chosen_TK)


# -- the auxiliary loss ------------------------------------------------------------------------------------------------


def counts_of_sequences(chosen_TK: Tensor, experts: int, sequences: int) -> Tensor:
    """(B, E): how often the tokens of each sequence chose each expert; token t belongs to sequence t mod B."""
    tokens = torch.arange(len(chosen_TK), device=chosen_TK.device) % sequences
    place = (tokens.unsqueeze(-1) * experts + chosen_TK).flatten()
    counts = torch.zeros(sequences * experts, dtype=place.dtype, device=place.device)
    return counts.scatter_add_(0, place, torch.ones_like(place)).view(sequences, experts)


def balance_loss(shares_TE: Tensor, counts_BE: Tensor, length: int, per_token: int) -> Tensor:
    """Sum over sequences of sum_e f_e P_e, this rank's part: 1 a sequence when balanced (DeepSeek-AI 2024, eq. 17-20).

    f_e = E / (K length) x choices of expert e in the *whole* sequence, P_e the mean share of e over its `length` tokens.
    f is a count and has no gradient, so the loss is a sum over tokens: parts of ranks add up.
    """
    sequences, experts = counts_BE.shape
    frequency_BE = counts_BE.to(shares_TE.dtype) * (experts / (per_token * length))
    shares_BE = shares_TE.unflatten(0, (-1, sequences)).sum(0) / length
    return (frequency_BE * shares_BE).sum()


class AddLoss(torch.autograd.Function):
    """`y` as it is; in backward `loss` has gradient `scale`, as if scale x loss had been added to the model's loss.

    So a layer of any pipeline stage can have a loss of its own, and no stage sends it anywhere.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float) -> Tensor:
        """The loss itself is not looked at."""
        ctx.scale, ctx.of = scale, (loss.dtype, loss.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of `y` passes."""
        dtype, device = ctx.of
        return gradients[0], torch.full((), ctx.scale, dtype=dtype, device=device), None
