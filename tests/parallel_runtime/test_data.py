"""The language, the global batch and its slices."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import (
    IGNORED,
    PADDING,
    SURPRISE,
    best_loss,
    local_batch,
    sequence,
    sequences,
    valid_length,
    valid_tokens,
)


def test_rule_by_hand():
    """V = 9: the factor is 5 (coprime with 9), the shift 4: 2 -> 14 mod 9 = 5 -> 29 mod 9 = 2, a cycle of two."""
    tokens = sequence(9, 4000, seed=0, step=0, number=0).tolist()
    followers = {b for a, b in itertools.pairwise(tokens) if a == 2}
    kept = sum(b == (5 * a + 4) % 9 for a, b in itertools.pairwise(tokens)) / 3999
    assert followers == set(range(9)), "surprises reach every token"
    assert abs(kept - (1 - SURPRISE + SURPRISE / 9)) < 0.02


def test_best_loss_by_hand():
    """Two tokens: the rule's one comes with 0.95, the other with 0.05."""
    assert math.isclose(best_loss(2), -(0.95 * math.log(0.95) + 0.05 * math.log(0.05)))
    assert best_loss(256) < 0.2 * math.log(256)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_sequences_are_functions_of_their_number(vocab, length, seed, step, number):
    tokens = sequence(vocab, length, seed, step, number)
    assert tokens.shape == (length,) and tokens.dtype == torch.int64
    assert tokens.min() >= 0 and tokens.max() < vocab
    assert torch.equal(tokens, sequence(vocab, length, seed, step, number))


def test_sequences_differ_by_seed_step_and_number():
    base = sequence(256, 64, 0, 0, 0)
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(base, sequence(256, 64, *other))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.5, 0.95]), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_slices_make_the_global_batch(dp, microbatches, size, padding, step):
    """The ranks' microbatches in order are the global batch's sequences, and all ranks know its valid tokens."""
    model = ModelConfig(seq=16)
    train = TrainConfig(microbatch_size=size, microbatches=microbatches, padding=padding)
    tokens_GS, targets_GS = sequences(model, train, step, range(dp * microbatches * size))
    batches = [local_batch(model, train, dp, index, step) for index in range(dp)]
    joined = [torch.cat([m[field].t() for b in batches for m in b.microbatches]) for field in (0, 1)]
    assert torch.equal(joined[0], tokens_GS) and torch.equal(joined[1], targets_GS)
    valid = int((targets_GS != IGNORED).sum())
    assert {batch.valid_tokens for batch in batches} == {valid} == {valid_tokens(model, train, dp, step)}
    assert all(torch.equal(m.positions_S, torch.arange(16)) for b in batches for m in b.microbatches)


def test_padding_stands_at_the_end_and_is_unequal():
    model, train = ModelConfig(seq=32), TrainConfig(padding=0.5, microbatches=4)
    tokens_GS, targets_GS = sequences(model, train, 0, range(8))
    plain_tokens, plain_targets = sequences(model, TrainConfig(microbatches=4), 0, range(8))
    lengths = [valid_length(32, 0.5, train.seed, 0, number) for number in range(8)]
    assert len(set(lengths)) > 3 and min(lengths) >= 16 and max(lengths) <= 32
    for row, valid in enumerate(lengths):
        assert torch.equal(tokens_GS[row, :valid], plain_tokens[row, :valid])
        assert torch.equal(targets_GS[row, :valid], plain_targets[row, :valid])
        assert (tokens_GS[row, valid:] == PADDING).all() and (targets_GS[row, valid:] == IGNORED).all()


def test_at_least_one_token_counts():
    assert min(valid_length(4, 0.99, 0, 0, number) for number in range(200)) == 1
