"""Dropout whose mask is a function of the token and the feature alone, so that every layout drops the same entries.

A counter-based generator (Salmon et al. 2011, in spirit): the bits of (seed, site, token, feature) are a hash of these
numbers, not the next ones of a stream. Nothing depends on which rank computes an entry, in which order, in which type, or
whether it is computed again in backward; nothing is stored but the mask that autograd keeps.

The hash works on 32 bits held in int64 and multiplies by less than 2^31, so that no product overflows on any device.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIER = 0x45D9F3B  # odd, with good avalanche when applied twice


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every input bit reaches every output bit."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * MULTIPLIER) & WORD
    return x ^ (x >> 16)


def token_keys(numbers_SB: Tensor, seed: int) -> Tensor:
    """A 32-bit key of each token, from its number in the whole training run (data.Microbatch.numbers_SB)."""
    high, low = numbers_SB >> 32, numbers_SB & WORD
    return mix(mix(high ^ zlib.crc32(f"dropout {seed}".encode())) ^ low)


def kept(keys_SB: Tensor, site: str, features: int, rate: float) -> Tensor:
    """(S, B, H) bool: the entries that survive at `site`, the global name of the module whose output is dropped."""
    word = zlib.crc32(site.encode())
    feature_H = mix(torch.arange(features, device=keys_SB.device) ^ word)
    token_SB = mix(keys_SB ^ word)
    return mix(token_SB.unsqueeze(-1) ^ feature_H) >= round(rate * (WORD + 1))


def dropout(x_SBH: Tensor, keys_SB: Tensor | None, site: str, rate: float) -> Tensor:
    """x / (1 - rate) where it is kept, else 0; `x` itself without keys or at rate 0."""
    if keys_SB is None or rate == 0.0:
        return x_SBH
    return torch.where(kept(keys_SB, site, x_SBH.shape[-1], rate), x_SBH / (1.0 - rate), 0.0)
