"""Every parameter's global name, whole shape and initial value: what all ranks and all layouts agree on.

A value is a pure function of (seed, name, shape), so any layout, and a plain model on one process, starts from the same
point without communication. Biases and norm weights are random too: a gradient that is zero hides a missing reduction.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Global name -> whole shape, in the order in which a forward pass uses them. Matrices are (out, in)."""
    shapes: dict[str, Shape] = {"embedding.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        for name, shape in _layer_shapes(config, config.has_experts(layer)).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes |= _norm_shapes("norm", config)
    if not config.tied:
        shapes["head.weight"] = (config.vocab, config.hidden)
    return shapes


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def stage_shapes(config: ModelConfig, layers: Iterable[int], first: bool, last: bool) -> dict[str, Shape]:
    """The same of one slice of the model (stage.Stage), in no particular order; a tied embedding is on both ends."""
    numbers = set(layers)

    def here(name: str) -> bool:
        if name.startswith("layers."):
            return int(name.split(".")[1]) in numbers
        if name == "embedding.weight":
            return first or (last and config.tied)
        return last

    return {name: shape for name, shape in parameter_shapes(config).items() if here(name)}


def _layer_shapes(config: ModelConfig, mixture: bool) -> dict[str, Shape]:
    hidden, key_value = config.hidden, config.kv_heads * config.head_size
    matrices = {
        "attention.query": (hidden, hidden, config.qkv_bias),
        "attention.key": (key_value, hidden, config.qkv_bias),
        "attention.value": (key_value, hidden, config.qkv_bias),
        "attention.output": (hidden, hidden, config.output_bias),
    }
    width = config.expert_width if mixture else config.ffn
    feed_forward = {
        "gate": (width, hidden, config.ffn_bias),
        "up": (width, hidden, config.ffn_bias),
        "down": (hidden, width, config.ffn_bias),
    }
    if config.activation != "swiglu":
        del feed_forward["gate"]
    shapes = (
        _norm_shapes("attention_norm", config) | _matrix_shapes(matrices) | _norm_shapes("feed_forward_norm", config)
    )
    parts = _matrix_shapes(feed_forward)
    if not mixture:
        return shapes | {f"feed_forward.{name}": shape for name, shape in parts.items()}
    shapes["feed_forward.router.weight"] = (config.experts, hidden)
    return shapes | {f"feed_forward.experts.{name}": (config.experts, *shape) for name, shape in parts.items()}


def _norm_shapes(name: str, config: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (config.hidden,)}
    if config.norm == "layernorm":
        shapes[f"{name}.bias"] = (config.hidden,)
    return shapes


def _matrix_shapes(matrices: dict[str, tuple[int, int, bool]]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def initial_value(name: str, shape: Shape, seed: int) -> Tensor:
    """The whole parameter `name` in float64: matrices N(0, 1/fan_in), norm weights N(1, 0.01), biases N(0, 0.0025)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("bias"):
        return noise * 0.05
    return noise * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * noise


def _whole(name: str, value: Tensor) -> Tensor:
    return value


def initialise(
    module: nn.Module, config: ModelConfig, seed: int, shard: Callable[[str, Tensor], Tensor] = _whole
) -> None:
    """Give each parameter of `module` (global names) its initial value; `shard` cuts this rank's part from the whole."""
    shapes = parameter_shapes(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(shard(name, initial_value(name, shapes[name], seed)))
