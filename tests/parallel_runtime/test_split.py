"""Layers of each part of the pipeline by estimated cost: by hand, against all cuts of small models, and what is typed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.config import ModelConfig
from stepscope.parallel_runtime.pp.split import balanced, costs_of, ends_cost, layer_cost, parse_split

MODEL = ModelConfig(layers=8, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, seq=64)


def test_costs_by_hand():
    """Entries: query and output 2 x 64 x 64, key and value 2 x 64 x 32, gate, up and down 3 x 64 x 128."""
    matrices = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert layer_cost(MODEL, 0) == 2 * matrices + 2 * 64 * 64
    assert layer_cost(replace(MODEL, activation="gelu"), 0) == layer_cost(MODEL, 0) - 2 * 64 * 128
    assert ends_cost(MODEL) == (64, 2 * 256 * 64 + 5 * 256)
    mixture = replace(MODEL, experts=8, expert_ffn=32, dense_layers=1)
    assert layer_cost(mixture, 0) == layer_cost(MODEL, 0)
    assert layer_cost(mixture, 1) == layer_cost(MODEL, 0) + 2 * (3 * 64 * 32 * 2 + 64 * 8 - 3 * 64 * 128)


def test_a_wide_vocabulary_takes_layers_from_the_last_part():
    wide = replace(MODEL, vocab=2048)  # the head costs as much as three layers
    assert round(ends_cost(wide)[1] / layer_cost(wide, 0), 1) == 3.3
    assert balanced(wide, 2) == (6, 2)
    assert balanced(wide, 4) == (2, 3, 2, 1)  # the first part has the embedding as well
    assert sum(costs_of(wide, (6, 2))) == sum(costs_of(wide, (4, 4)))
    assert balanced(replace(MODEL, vocab=8), 4) == (2, 2, 2, 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([8, 512, 2048, 8192]), st.integers(0, 4))
def test_no_cut_is_better(parts, layers, vocab, dense):
    """The smallest largest part of all cuts, and of those the smallest sum of squares."""
    model = replace(MODEL, layers=layers, vocab=vocab, experts=4, dense_layers=min(dense, layers - 1))
    if parts > layers:
        with pytest.raises(ValueError, match=f"take layers {parts}"):
            balanced(model, parts)
        return
    found = balanced(model, parts)
    assert len(found) == parts and sum(found) == layers and min(found) >= 1

    def rating(sizes):
        costs = costs_of(model, sizes)
        return max(costs), sum(cost**2 for cost in costs)

    bounds = ((0, *inner, layers) for inner in combinations(range(1, layers), parts - 1))
    cuts = [tuple(b - a for a, b in pairwise(bound)) for bound in bounds]
    assert rating(found) == min(map(rating, cuts))


def test_what_is_typed():
    assert parse_split("equal", MODEL, 4) == ()
    assert parse_split("balanced", MODEL, 2) == balanced(MODEL, 2)
    assert parse_split("2,1,1", MODEL, 3) == (2, 1, 1)
    with pytest.raises(ValueError, match=r"split 'even' is unknown: take equal, balanced, or layers of each part"):
        parse_split("even", MODEL, 2)
