"""The counts of a planned routing (model/planned_routing.py), as the ranks of ep see them: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.model.planned_routing import capacity, planned_counts


def tokens_of(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> int:
    """Tokens of a microbatch that one rank routes: its positions (cp, tp with or without sp) of its sequences."""
    return model.seq // parallel.cp // parallel.tp * train.microbatch_size


def sent_of(model: ModelConfig, tokens: int) -> list[int]:
    """Tokens that a rank with `tokens` sends to each expert; even where no skew is given."""
    counts = planned_counts(tokens, model.experts_per_token, model.experts, model.routing_skew or 0.0)
    if model.balance == "capacity":
        most = capacity(tokens, model.experts_per_token, model.experts, model.capacity_factor)
        counts = tuple(min(count, most) for count in counts)
    return list(counts)


def received_of(sent: Sequence[int], ranks: int, index: int) -> list[int]:
    """What rank `index` of ep receives, from each rank in turn for each of its experts: all ranks send alike."""
    each = len(sent) // ranks
    return list(sent[index * each : (index + 1) * each]) * ranks
