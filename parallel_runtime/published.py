"""Published models and layouts, to plan with: shapes and degrees of others, each with its source.

What a source does not say is ours and stands in `note`, as does what this model or runtime cannot express. docs/presets.md
shows the same tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.parallel_runtime.config import PRESETS as OUR_PRESETS
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, Preset, TrainConfig

LLAMA_3 = "The Llama 3 Herd of Models, arXiv:2407.21783"
DEEPSEEK_V3 = "DeepSeek-V3 Technical Report, arXiv:2412.19437"
BRIDGE = "docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge/bridge.perf_recipes.llama.h100."


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> Preset:
    """Table 3 of LLAMA_3: 8 key-value heads, 128 k words, RoPE with base 500 000; 8 k tokens before the long context."""
    shape = ModelConfig(layers, hidden, heads, 8, ffn, vocab=128256, seq=8192, rope_theta=500000.0)
    return Preset(shape, microbatch_size=1)


PUBLISHED = {
    "llama-3-8b": _llama(32, 4096, 32, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 28672),
    "llama-3-405b": _llama(126, 16384, 128, 53248),
    # DEEPSEEK_V3, section 4.2, and the model's config.json for the vocabulary. An approximation: see APPROXIMATED.
    "deepseek-v3": Preset(
        ModelConfig(
            layers=61,
            hidden=7168,
            heads=128,
            kv_heads=128,
            ffn=18432,
            vocab=129280,
            seq=4096,
            norm_eps=1e-6,
            experts=256,
            experts_per_token=8,
            expert_ffn=2048,
            dense_layers=3,
            router="sigmoid",
        ),
        microbatch_size=1,
    ),
}

APPROXIMATED = {
    "deepseek-v3": (
        "attention is plain multi-head attention of 128 heads of 56 features in place of latent attention (205.5 M in place"
        " of 187.1 M parameters a layer, and fewer features a head, so fewer attention operations); the shared expert of"
        " each of 58 layers (44.0 M parameters) is left out, and with it its computation; routing knows no limit of 4 nodes"
        " a token; no multi-token prediction; no FP8"
    ),
}
"""What is not the published model, in words; a preset that is not named here has the published shape exactly."""

PRESETS = OUR_PRESETS | PUBLISHED


@dataclass(frozen=True)
class Layout:
    """A published layout of one preset: what it sets of the three configurations."""

    preset: str
    source: str
    note: str  # what the source does not say, or what is not expressed
    parallel: dict[str, Any]
    microbatches: int
    model: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"


_META = {"tp": 8, "pp": 16, "split": (7, *(8,) * 14, 7), "zero": 3, "reshard": False}
_META_NOTE = (
    "1F1B in place of their interleaved schedule, whose number of chunks is not published; one layer fewer on the first and"
    " the last stage, as published; microbatches of one sequence are ours"
)
_BRIDGE_NOTE = "1F1B, the ring of cp and optimizer state cut over dp (zero 1) are ours"

LAYOUTS = {
    "nemo-8b-8": Layout(
        "llama-3-8b",
        f"{BRIDGE}llama3.html: llama3_8b_pretrain_8gpu_h100_bf16_config",
        f"{_BRIDGE_NOTE}, as are 32 microbatches",
        {"cp": 2, "dp": 4, "zero": 1},
        microbatches=32,
    ),
    "nemo-70b-64": Layout(
        "llama-3-70b",
        f"{BRIDGE}llama3.html: llama3_70b_pretrain_64gpu_h100_bf16_config",
        f"{_BRIDGE_NOTE}; 256 sequences a step as published",
        {"tp": 4, "pp": 4, "cp": 2, "dp": 2, "zero": 1},
        microbatches=128,
    ),
    "nemo-405b-1024": Layout(
        "llama-3-405b",
        f"{BRIDGE}llama31.html: llama31_405b_pretrain_1024gpu_h100_bf16_config",
        f"{_BRIDGE_NOTE}, as are 64 microbatches",
        {"tp": 8, "pp": 8, "cp": 2, "dp": 8, "zero": 1},
        microbatches=64,
    ),
    "meta-405b-8192": Layout(
        "llama-3-405b", f"{LLAMA_3}, table 4, row 1", _META_NOTE, _META | {"dp": 64}, microbatches=32
    ),
    "meta-405b-16384": Layout(
        "llama-3-405b", f"{LLAMA_3}, table 4, row 2", _META_NOTE, _META | {"dp": 128}, microbatches=16
    ),
    "meta-405b-128k": Layout(
        "llama-3-405b",
        f"{LLAMA_3}, table 4, row 3",
        _META_NOTE,
        _META | {"cp": 16, "dp": 8, "cp_mode": "allgather"},
        microbatches=16,
        model={"seq": 131072},
    ),
    "deepseek-v3-2048": Layout(
        "deepseek-v3",
        f"{DEEPSEEK_V3}, section 3.2, and 4.2 for 15 360 sequences a step",
        "1F1B in place of DualPipe; dp 128 follows from 2048 GPUs; BF16 in place of FP8; microbatches of one sequence are ours",
        {"pp": 16, "dp": 128, "ep": 64, "zero": 1},
        microbatches=120,
    ),
}


def preset(name: str) -> Preset:
    """The preset called `name`, ours or a published model's; ValueError names all of them."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown: take one of {', '.join(PRESETS)}")
    return PRESETS[name]


def layout(name: str) -> Layout:
    """The layout called `name`; ValueError names all of them."""
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is unknown: take one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def laid_out(
    chosen: Layout, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, given: set[str]
) -> tuple[ModelConfig, ParallelConfig, TrainConfig]:
    """The three configurations as the layout has them; fields in `given` stay as they are."""

    def left(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in given}

    trained = {"microbatches": chosen.microbatches, "dtype": chosen.dtype}
    return (
        replace(model, **left(chosen.model)),
        replace(parallel, **left(chosen.parallel)),
        replace(train, **left(trained)),
    )
