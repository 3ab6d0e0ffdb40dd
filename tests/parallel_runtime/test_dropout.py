"""Dropout by token and feature: its hash against plain integers, its statistics, and that layouts cannot change it."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.model.dropout import dropout, kept, mix, token_keys

SITE = "layers.3.attention"


def mixed(x: int) -> int:
    """The same hash on Python's integers, which cannot overflow."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B % 2**32
    return (x >> 16) ^ x


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_hash_is_one_of_32_bits(x: int) -> None:
    assert mix(torch.tensor(x)).item() == mixed(x)
    flipped = mixed(x ^ 1) ^ mixed(x)
    assert flipped != 0


@given(st.integers(0, 2**45), st.integers(0, 9), st.sampled_from(["embedding", SITE]), st.integers(1, 64))
@settings(deadline=None, max_examples=50)
def test_an_entry_depends_on_seed_site_token_and_feature(number: int, seed: int, site: str, features: int) -> None:
    key = mixed(mixed((number >> 32) ^ zlib.crc32(f"dropout {seed}".encode())) ^ (number % 2**32))
    word = zlib.crc32(site.encode())
    expected = [mixed(mixed(key ^ word) ^ mixed(feature ^ word)) >= round(0.3 * 2**32) for feature in range(features)]
    keys = token_keys(torch.tensor([[number]]), seed)
    assert kept(keys, site, features, 0.3).tolist() == [[expected]]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(rate: float) -> None:
    """Of 2^20 entries within four standard deviations; so are tokens, features and their neighbours' products."""
    keys = token_keys(torch.arange(4096).view(1024, 4), 0)
    mask = kept(keys, SITE, 256, rate).flatten(0, 1).double()
    spread = math.sqrt(rate * (1 - rate))
    assert abs(mask.mean() - (1 - rate)) < 4 * spread / 2**10
    assert (mask.mean(0) - (1 - rate)).abs().max() < 5 * spread / math.sqrt(4096)
    assert (mask.mean(1) - (1 - rate)).abs().max() < 5 * spread / math.sqrt(256)
    centred = (mask - (1 - rate)) / spread
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1))):
        assert abs((centred * other).mean()) < 4 / 2**10
    again = (kept(keys, "layers.4.attention", 256, rate).flatten(0, 1).double() - (1 - rate)) / spread
    assert abs((centred * again).mean()) < 4 / 2**10, "another site drops other entries"


def test_values_by_hand() -> None:
    keys = token_keys(torch.arange(6).view(3, 2), 0)
    x = torch.ones(3, 2, 8, dtype=torch.float64, requires_grad=True)
    y = dropout(x, keys, SITE, 0.2)
    assert set(y.flatten().tolist()) == {0.0, 1.25}
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "what is kept grows, forward and backward"
    assert dropout(x, keys, SITE, 0.0) is x and dropout(x, None, SITE, 0.2) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_type_drops_nothing_else(dtype: torch.dtype) -> None:
    keys = token_keys(torch.arange(24).view(12, 2), 1)
    y = dropout(torch.ones(12, 2, 16, dtype=dtype), keys, SITE, 0.4)
    assert y.dtype == dtype
    assert torch.equal(y != 0, kept(keys, SITE, 16, 0.4))


def test_it_runs_where_nothing_is_computed() -> None:
    keys = token_keys(torch.empty(12, 2, dtype=torch.int64, device="meta"), 1)
    assert dropout(torch.empty(12, 2, 16, device="meta"), keys, SITE, 0.4).shape == (12, 2, 16)


def test_tokens_have_their_number_in_every_layout() -> None:
    """Two replicas of two microbatches, and one of four: the same numbers; every step goes on where the last ended."""
    model, train = ModelConfig(seq=8), TrainConfig(microbatches=2, microbatch_size=2)
    two = [m.numbers_SB for index in (0, 1) for m in local_batch(model, train, 2, index, 3).microbatches]
    one = [
        m.numbers_SB for m in local_batch(model, TrainConfig(microbatches=4, microbatch_size=2), 1, 0, 3).microbatches
    ]
    assert all(torch.equal(a, b) for a, b in zip(two, one, strict=True))
    first = 3 * 8 * 8
    assert two[0].tolist() == [[first + s, first + 8 + s] for s in range(8)]
    assert torch.cat(two, 1).flatten().sort().values.tolist() == list(range(first, first + 64))
