"""Small models to train at once, by name. Large ones, for planning: published.py."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.parallel_runtime.config.model import ModelConfig
from stepscope.parallel_runtime.config.values import one_of


@dataclass(frozen=True)
class Preset:
    """A named model with the microbatch size that suits it."""

    model: ModelConfig
    microbatch_size: int


PRESETS = {
    "tiny": Preset(ModelConfig(hidden=128, ffn=256), microbatch_size=2),
    "small": Preset(ModelConfig(layers=8, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=1024, seq=256), 2),
    "tiny-moe": Preset(ModelConfig(hidden=128, ffn=256, experts=8, expert_ffn=128), microbatch_size=2),
}


def preset(name: str) -> Preset:
    """The preset called `name`; ValueError names all of them."""
    one_of("preset", name, tuple(PRESETS))
    return PRESETS[name]
