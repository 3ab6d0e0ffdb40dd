"""The mixture of experts of the reference (reference.py): every expert computes every token, a mask says who counts.

Choices are made token by token in plain Python. With the runtime it shares the configuration and the planned routing
(which expert a token is given when its scores are not asked, as it shares which entries dropout keeps).

Shapes: B sequences of the whole global batch, S sequence, H hidden, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.model.planned_routing import planned_choices

Token = tuple[int, int]
"""(sequence, position)."""


class ReferenceMixture:
    """Which expert counts for which token, what that costs in balance, and the offsets that move with the loads."""

    def __init__(self, config: ModelConfig, train: TrainConfig, shares: Sequence[Sequence[int]] | None = None) -> None:
        """`shares`: positions that one rank routes together; planned routing and capacity look at one such part of one
        microbatch at a time, so the layout shows there, and nowhere else. None: all positions."""
        self.config, self.train = config, train
        self.shares = [list(range(config.seq))] if shares is None else [list(share) for share in shares]
        self.offsets = {layer: [0.0] * config.experts for layer in range(config.layers)}
        self.loads: dict[int, list[int]] = {}
        self.dropped = 0
        self.loss: Tensor | float = 0.0

    def begin_step(self) -> None:
        """Forget what the step before counted."""
        self.loads, self.dropped, self.loss = {}, 0, 0.0

    def end_step(self) -> None:
        """Offsets move against the loads."""
        if self.config.balance != "bias":
            return
        for layer, load in self.loads.items():
            for expert, tokens in enumerate(load):
                ahead = sum(load) - tokens * len(load)  # of the mean, times the number of experts
                self.offsets[layer][expert] += self.config.balance_rate * ((ahead > 0) - (ahead < 0))

    def weights(self, layer: int, logits_BSE: Tensor) -> Tensor:
        """(B, S, E): with what weight each expert counts for each token; 0 for those that it did not choose."""
        config, powers = self.config, logits_BSE.exp()
        scores = powers / (powers.sum(-1, keepdim=True) if config.router == "softmax" else 1 + powers)
        chosen = torch.zeros_like(scores)
        for group in self._groups(len(scores)):
            for (sequence, position), experts in self._choices(layer, group, scores).items():
                chosen[sequence, position, experts] = 1.0
        self.loads[layer] = chosen.sum((0, 1)).long().tolist()
        if config.balance == "aux":
            self.loss = self.loss + self._auxiliary(scores, chosen)
        weights = scores * chosen
        if config.experts_per_token > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        if config.balance == "capacity":
            weights = weights * self._kept(weights.detach())
        return weights

    def _groups(self, sequences: int) -> list[list[Token]]:
        """Tokens that are routed together, in their order."""
        size = self.train.microbatch_size
        return [
            [(sequence, position) for position in share for sequence in range(first, first + size)]
            for first in range(0, sequences, size)
            for share in self.shares
        ]

    def _choices(self, layer: int, group: list[Token], scores: Tensor) -> dict[Token, list[int]]:
        config = self.config
        if config.routing_skew is not None:
            plan = planned_choices(len(group), config.experts_per_token, config.experts, config.routing_skew)
            return dict(zip(group, plan, strict=True))
        found = {}
        for sequence, position in group:
            score = scores[sequence, position].tolist()
            ranked = sorted(range(config.experts), key=lambda e: score[e] + self.offsets[layer][e], reverse=True)
            found[sequence, position] = ranked[: config.experts_per_token]
        return found

    def _kept(self, weights: Tensor) -> Tensor:
        """Ones for the choices that their expert has room for: those with the largest weights."""
        config, kept = self.config, torch.zeros_like(weights)
        for group in self._groups(len(weights)):
            room = math.ceil(config.capacity_factor * len(group) * config.experts_per_token / config.experts)
            for expert in range(config.experts):
                asking = [token for token in group if weights[(*token, expert)] > 0]
                asking.sort(key=lambda token: weights[(*token, expert)].item(), reverse=True)
                for token in asking[:room]:
                    kept[(*token, expert)] = 1.0
                self.dropped += len(asking[room:])
        return kept

    def _auxiliary(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Mean over sequences of sum_e f_e P_e, times its weight."""
        config, total = self.config, torch.zeros((), dtype=scores.dtype)
        for score, choice in zip(scores, chosen, strict=True):
            share = (score / score.sum(-1, keepdim=True)).mean(0)
            frequency = choice.mean(0) * config.experts / config.experts_per_token
            total = total + (frequency * share).sum()
        return config.aux_weight * total / len(scores)
