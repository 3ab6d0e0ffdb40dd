"""The parts of a decoder layer, in plain torch.

Shapes: S sequence, B batch, H hidden, N heads, K key and value heads, D features of a head, F feed-forward width.
The sequence stands first outside attention, so that a strategy can cut it with one contiguous slice.
Attributes are named so that `named_parameters` gives the global names of `initial.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.parallel_runtime.config import ModelConfig
from stepscope.parallel_runtime.model.attention import Rotation, rotate
from stepscope.parallel_runtime.model.blocks import begin_block, end_block
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.tracer.recorder import NullRecorder, Recorder


class Table(nn.Module):
    """A bare (rows, columns) matrix: embedding or head."""

    def __init__(self, rows: int, columns: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, **where))


class Linear(nn.Module):
    """x W^T + b. The bias can be added apart: under a cut by rows it comes after the sum over ranks."""

    def __init__(self, inputs: int, outputs: int, bias: bool, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return F.linear(x, self.weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x W^T alone."""
        return F.linear(x, self.weight)

    def add_bias(self, y: Tensor) -> Tensor:
        """y + b."""
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the hidden dimension."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.epsilon = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden, **where))
        self.bias = nn.Parameter(torch.empty(config.hidden, **where)) if config.norm == "layernorm" else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        if self.bias is None:
            return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(x_SBH, self.weight.shape, self.weight, self.bias, self.epsilon)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; key and value heads may be fewer than query heads."""

    def __init__(self, config: ModelConfig, seams: Seams, **where: Any) -> None:
        super().__init__()
        self.head_size, self.seams = config.head_size, seams
        queries = config.hidden // seams.tensor_parallel
        keys = config.kv_heads * config.head_size // seams.tensor_parallel
        self.query = Linear(config.hidden, queries, config.qkv_bias, **where)
        self.key = Linear(config.hidden, keys, config.qkv_bias, **where)
        self.value = Linear(config.hidden, keys, config.qkv_bias, **where)
        self.output = Linear(queries, config.hidden, config.output_bias, **where)

    def forward(self, x_SBH: Tensor, rotation: Rotation) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        x = self.seams.enter(x_SBH)
        q_BNSD = rotate(self._heads(self.query(x)), rotation)
        k_BKSD = rotate(self._heads(self.key(x)), rotation)
        y_BNSD = self.seams.attend(q_BNSD, k_BKSD, self._heads(self.value(x)))
        y = y_BNSD.permute(2, 0, 1, 3).flatten(2)
        return self.output.add_bias(self.seams.leave(self.output.product(y)))

    def _heads(self, x: Tensor) -> Tensor:
        """(S, B, N D) -> (B, N, S, D)."""
        return x.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)


class FeedForward(nn.Module):
    """SwiGLU (down(silu(gate x) * up x), Shazeer 2020) or GELU (down(gelu(up x)))."""

    def __init__(self, config: ModelConfig, seams: Seams, **where: Any) -> None:
        super().__init__()
        self.seams = seams
        width = config.ffn // seams.tensor_parallel
        gated = config.activation == "swiglu"
        self.gate = Linear(config.hidden, width, config.ffn_bias, **where) if gated else None
        self.up = Linear(config.hidden, width, config.ffn_bias, **where)
        self.down = Linear(width, config.hidden, config.ffn_bias, **where)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        x = self.seams.enter(x_SBH)
        y_SBF = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down.add_bias(self.seams.leave(self.down.product(y_SBF)))


class Layer(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + feed_forward(norm(x)). One block of the trace."""

    def __init__(
        self, config: ModelConfig, recorder: Recorder | NullRecorder, index: int, seams: Seams, **where: Any
    ) -> None:
        super().__init__()
        self.index, self.recorder = index, recorder
        self.attention_norm = Norm(config, **where)
        self.attention = Attention(config, seams, **where)
        self.feed_forward_norm = Norm(config, **where)
        self.feed_forward = FeedForward(config, seams, **where)

    def forward(self, x_SBH: Tensor, rotation: Rotation) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        name = f"layer.{self.index}"
        begin_block(self.recorder, name, self.index)
        x = x_SBH + self.attention(self.attention_norm(x_SBH), rotation)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return end_block(x, self.recorder, name, self.index)
