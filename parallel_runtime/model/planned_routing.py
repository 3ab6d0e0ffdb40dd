"""A routing of tokens to experts that is planned: known without scores, uneven on purpose, the same on every rank.

Dry runs have no scores, so it tells them how many tokens each expert gets; real runs can be made to follow it
(`ModelConfig.routing_skew`), to inject an imbalance whose size is known. Expert e is as popular as (e + 1)^-skew, Zipf's
law: 0 is even, with 1 expert 0 gets twice the tokens of expert 1.

    counts 4 3 2 1 of 5 tokens, 2 experts each    0 0 0 0 1 | 1 1 2 2 3    token 0: 0 and 1, ... token 4: 1 and 3

Token t takes entries t and t + T of the row in which each expert stands as often as it is to be chosen: no expert stands
there more than T times, so no token takes one twice. Pure Python.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=256)
def planned_counts(tokens: int, per_token: int, experts: int, skew: float) -> tuple[int, ...]:
    """Tokens of each expert: `per_token` x `tokens` in all, none above `tokens`, in proportion to popularity else."""
    popularity = [(expert + 1.0) ** -skew for expert in range(experts)]
    full = 0  # the first so many experts are chosen by every token; popularity falls, so no later one can be
    while full < per_token:
        rest = tokens * (per_token - full) / sum(popularity[full:])
        if rest * popularity[full] <= tokens:
            break
        full += 1
    total = tokens * (per_token - full)
    scale = total / sum(popularity[full:]) if full < experts else 0.0
    exact = [scale * share for share in popularity[full:]]
    counts = [min(int(value), tokens) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    missing = total - sum(counts)
    while missing:  # rounded down above: largest remainders first
        for place in by_remainder:
            if missing and counts[place] < tokens:
                counts[place] += 1
                missing -= 1
    return (*[tokens] * full, *counts)


def planned_choices(tokens: int, per_token: int, experts: int, skew: float) -> list[list[int]]:
    """Experts of each token, which follow `planned_counts`."""
    row = [
        expert for expert, count in enumerate(planned_counts(tokens, per_token, experts, skew)) for _ in range(count)
    ]
    return [row[token::tokens] for token in range(tokens)]


def capacity(tokens: int, per_token: int, experts: int, factor: float) -> int:
    """Tokens that one expert takes of `tokens` (Fedus et al. 2022): `factor` times its even share, rounded up."""
    return -int(-(factor * tokens * per_token) // experts)
