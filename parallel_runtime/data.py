"""A deterministic language that can be learned, and each rank's part of a global batch.

The language: after token t comes (a t + c) mod V, except that one token in ten is drawn anew. A model that has learned
it reaches `best_loss`; one that knows nothing has log(V). Every sequence is a function of (seed, step, its number in the
global batch) alone, so that any layout trains on the same data, and no rank needs another to know it.

Shapes: G sequences, S positions, B sequences of one microbatch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig

IGNORED = -100
"""Target of a padding token: it counts in no loss."""

PADDING = 0
"""Input token at a padded position."""

SURPRISE = 0.1
"""Share of tokens that are drawn anew."""


class Microbatch(NamedTuple):
    """What one microbatch computes on; every stage knows it, each uses its part."""

    tokens_SB: Tensor
    targets_SB: Tensor
    positions_S: Tensor  # place of each token in its whole sequence
    numbers_SB: Tensor  # of each token in the whole training run: no other token has it, whatever the layout


class Batch(NamedTuple):
    """One rank's part of a step."""

    microbatches: tuple[Microbatch, ...]
    valid_tokens: int | Tensor  # targets that count, in the whole global batch


def best_loss(vocab: int) -> float:
    """Entropy of the next token given the one before, in nats: what a perfect model reaches on unpadded data."""
    expected = 1 - SURPRISE + SURPRISE / vocab  # the rule's token, or by chance the same
    other = SURPRISE / vocab
    return -(expected * math.log(expected) + (vocab - 1) * other * math.log(other))


@lru_cache(maxsize=8)
def _powers(vocab: int, length: int) -> tuple[Tensor, Tensor]:
    """a_k and c_k such that applying the rule k times gives (a_k t + c_k) mod V, for k < length."""
    factor = next(a for a in range(5, vocab + 6) if math.gcd(a, vocab) == 1)
    shift = vocab // 3 + 1
    a, c, factors, shifts = 1 % vocab, 0, [], []
    for _ in range(length):
        factors.append(a)
        shifts.append(c)
        a, c = a * factor % vocab, (c * factor + shift) % vocab
    return torch.tensor(factors), torch.tensor(shifts)


def sequence(vocab: int, length: int, seed: int, step: int, number: int) -> Tensor:
    """`length` tokens of sequence `number` of the global batch of `step`, int64."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"sequence {seed}/{step}/{number}".encode()))
    drawn = torch.randint(vocab, (length,), generator=generator)
    surprise = torch.rand(length, generator=generator) < SURPRISE
    surprise[0] = True
    place = torch.arange(length)
    last_drawn = torch.where(surprise, place, 0).cummax(0).values
    factors, shifts = _powers(vocab, length)
    applied = place - last_drawn
    return (factors[applied] * drawn[last_drawn] + shifts[applied]) % vocab


def valid_length(seq: int, padding: float, seed: int, step: int, number: int) -> int:
    """Targets of sequence `number` that count, between seq - floor(padding seq) and seq: at least one.

    An integer computed on the host: the global count is known everywhere without reading a tensor.
    """
    most = min(int(padding * seq), seq - 1)
    return seq - zlib.crc32(f"length {seed}/{step}/{number}".encode()) % (most + 1)


def sequences(model: ModelConfig, train: TrainConfig, step: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (G, S) each, of the global batch's sequences `numbers`."""
    rows = [sequence(model.vocab, model.seq + 1, train.seed, step, number) for number in numbers]
    whole = torch.stack(rows)
    tokens_GS, targets_GS = whole[:, :-1].clone(), whole[:, 1:].clone()
    if train.padding > 0:
        for row, number in enumerate(numbers):
            valid = valid_length(model.seq, train.padding, train.seed, step, number)
            tokens_GS[row, valid:] = PADDING
            targets_GS[row, valid:] = IGNORED
    return tokens_GS, targets_GS


def token_numbers(model: ModelConfig, train: TrainConfig, dp: int, step: int, numbers: Sequence[int]) -> Tensor:
    """(G, S): the count of each token of the sequences `numbers` since the training began, int64."""
    first = step * dp * train.microbatches * train.microbatch_size * model.seq
    return first + torch.tensor(list(numbers))[:, None] * model.seq + torch.arange(model.seq)


def valid_tokens(model: ModelConfig, train: TrainConfig, dp: int, step: int) -> int:
    """Targets that count in the whole global batch of `step`."""
    total = dp * train.microbatches * train.microbatch_size
    if train.padding == 0:
        return total * model.seq
    return sum(valid_length(model.seq, train.padding, train.seed, step, number) for number in range(total))


def local_batch(
    model: ModelConfig,
    train: TrainConfig,
    dp: int,
    dp_index: int,
    step: int,
    device: torch.device | str = "cpu",
    positions: Sequence[int] | None = None,
) -> Batch:
    """The microbatches of data parallel rank `dp_index`: a contiguous part of the global batch.

    `positions`: those of each sequence that a rank of cp holds (cp/layouts.py); None: all.
    """
    size, count = train.microbatch_size, train.microbatches
    first = dp_index * size * count
    tokens_GS, targets_GS = sequences(model, train, step, range(first, first + size * count))
    numbers_GS = token_numbers(model, train, dp, step, range(first, first + size * count))
    held_S = torch.arange(model.seq)
    if positions is not None:
        held_S = torch.tensor(positions)
        tokens_GS, targets_GS, numbers_GS = (whole[:, held_S] for whole in (tokens_GS, targets_GS, numbers_GS))
    parts = [part.t() for whole in (tokens_GS, targets_GS, numbers_GS) for part in whole.split(size)]
    positions_S, *rest = _handed_over([held_S, *parts], torch.device(device))
    tokens, targets, numbers = (rest[start : start + count] for start in (0, count, 2 * count))
    microbatches = tuple(
        Microbatch(tokens_SB, targets_SB, positions_S, numbers_SB)
        for tokens_SB, targets_SB, numbers_SB in zip(tokens, targets, numbers, strict=True)
    )
    return Batch(microbatches, valid_tokens(model, train, dp, step))


def _handed_over(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same integers on `device`, each contiguous: one copy in all, for which the host does not wait.

    From memory that is not pinned it would, until the device had done all that it was given before.
    """
    if device.type == "cpu":
        return [tensor.contiguous() for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()
    there = flat.to(device, non_blocking=True)
    parts = there.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
