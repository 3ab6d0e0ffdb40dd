"""Orders and sizes of what travels to the experts and back: pure arithmetic.

A rank sorts its choices by expert, so that what each rank of ep gets lies together, and gets pieces in return:

    sent        | to rank 0: expert 0, 1 | to rank 1: expert 2, 3 |
    received    | from rank 0: my expert 0, 1 | from rank 1: my expert 0, 1 |      (source, expert)
    computed    | my expert 0: from rank 0, 1 | my expert 1: from rank 0, 1 |      (expert, source)

Shapes: T tokens, K experts of a token, H hidden, R rows of one expert; E experts in all, n ranks of ep, E / n of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Splits(NamedTuple):
    """Rows that one rank sends to and receives from each rank of ep, and those received by (source, own expert)."""

    send: list[int]
    receive: list[int]
    pieces: list[int]


def splits_of(sent: Sequence[int], received: Sequence[int], ranks: int) -> Splits:
    """`sent`: tokens for each of the E experts; `received`: from each rank in turn, for each of this rank's experts."""
    each = len(sent) // ranks
    assert len(sent) == len(received) == each * ranks, (len(sent), len(received), ranks)
    parts = [slice(rank * each, (rank + 1) * each) for rank in range(ranks)]
    return Splits([sum(sent[part]) for part in parts], [sum(received[part]) for part in parts], list(received))


def order_of(experts_TK: Tensor) -> Tensor:
    """(T K,): places of the choices in order of their expert, within one in order of tokens; dropped ones last."""
    return experts_TK.flatten().argsort(stable=True)


def permute(tokens_TH: Tensor, order: Tensor, per_token: int) -> Tensor:
    """The token of each choice in `order`."""
    return tokens_TH.index_select(0, order.div(per_token, rounding_mode="floor"))


def combine(rows_RH: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
    """(T, H): what the experts made of each token's choices, in `order`, summed with their weights; dropped ones are 0."""
    tokens, per_token = weights_TK.shape
    parts = rows_RH.new_zeros(tokens * per_token, rows_RH.shape[-1]).index_copy(0, order, rows_RH)
    weights = weights_TK.to(rows_RH.dtype).unsqueeze(1)
    return (weights @ parts.unflatten(0, (tokens, per_token))).squeeze(1)


def by_expert(rows_RH: Tensor, pieces: Sequence[int], ranks: int) -> list[Tensor]:
    """The rows of each of this rank's experts, from all sources; an expert without a token has none."""
    parts = rows_RH.split(list(pieces))
    each = len(pieces) // ranks
    return [torch.cat(parts[expert::each]) for expert in range(each)]


def by_source(made: Sequence[Tensor], pieces: Sequence[int], ranks: int) -> Tensor:
    """The inverse of `by_expert`: all rows again, in order of (source, expert)."""
    each = len(made)
    parts = [rows.split(list(pieces[expert::each])) for expert, rows in enumerate(made)]
    return torch.cat([parts[expert][source] for source in range(ranks) for expert in range(each)])
