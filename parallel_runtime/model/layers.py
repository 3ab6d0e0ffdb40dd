"""The parts of a decoder layer, in plain torch.

Shapes: S sequence, B batch, H hidden, N heads, K key and value heads, D features of a head, F feed-forward width.
The sequence stands first outside attention, so that a strategy can cut it with one contiguous slice.
Attributes are named so that `named_parameters` gives the global names of `initial.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.parallel_runtime.config import ModelConfig
from stepscope.parallel_runtime.model.attention import Rotation, rotate
from stepscope.parallel_runtime.model.blocks import begin_block, end_block
from stepscope.parallel_runtime.model.dropout import dropout
from stepscope.parallel_runtime.model.mixture import Mixture
from stepscope.parallel_runtime.model.recompute import Recompute, keep
from stepscope.parallel_runtime.model.seams import Matrix, Seams
from stepscope.tracer.recorder import NullRecorder, Recorder

Call = Callable[..., Tensor]
"""Calls a function with its inputs, keeping its activations or not."""


class Table(nn.Module):
    """A bare (rows, columns) matrix: embedding or head."""

    def __init__(self, rows: int, columns: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, **where))


class Linear(nn.Module):
    """x W^T + b: cut by columns it goes through `seams.columns`; cut by rows its product goes through `seams.rows`, and its
    bias comes after the sum over ranks."""

    def __init__(self, inputs: int, outputs: int, bias: bool, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    @property
    def matrix(self) -> Matrix:
        """(weight, bias)."""
        return self.weight, self.bias

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

    def __init__(self, config: ModelConfig, seams: Seams, call: Call = keep, **where: Any) -> None:
        """`call` runs the part between the matrices, which selective recomputation computes again."""
        super().__init__()
        self.head_size, self.seams, self.call = config.head_size, seams, call
        queries = config.hidden // seams.tensor_parallel
        keys = config.kv_heads * config.head_size // seams.tensor_parallel
        self.query = Linear(config.hidden, queries, config.qkv_bias, **where)
        self.key = Linear(config.hidden, keys, config.qkv_bias, **where)
        self.value = Linear(config.hidden, keys, config.qkv_bias, **where)
        self.output = Linear(queries, config.hidden, config.output_bias, **where)

    def forward(self, x_SBH: Tensor, rotation: Rotation) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        q, k, v = self.seams.columns(x_SBH, self.query.matrix, self.key.matrix, self.value.matrix)
        y = self.call(self._mix, q, k, v, rotation)
        return self.output.add_bias(self.seams.leave(self.seams.rows(y, self.output.weight)))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        """Rotary positions and attention: (S, B, N D) and twice (S, B, K D) -> (S, B, N D)."""
        q_BNSD = rotate(self._heads(q), rotation)
        k_BKSD = rotate(self._heads(k), rotation)
        y_BNSD = self.seams.attend(q_BNSD, k_BKSD, self._heads(v))
        return y_BNSD.permute(2, 0, 1, 3).flatten(2)

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
        if self.gate is None:
            (up,) = self.seams.columns(x_SBH, self.up.matrix)
            y_SBF = F.gelu(up)
        else:
            gate, up = self.seams.columns(x_SBH, self.gate.matrix, self.up.matrix)
            y_SBF = F.silu(gate) * up
        return self.down.add_bias(self.seams.leave(self.seams.rows(y_SBF, self.down.weight)))


class Layer(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + feed_forward(norm(x)). One block of the trace.

    `recompute` (config.RECOMPUTE): `full` keeps the layer's input only, `selective` all but what attention makes between
    its matrices (Korthikanti et al. 2022), `none` everything.
    """

    def __init__(
        self,
        config: ModelConfig,
        recorder: Recorder | NullRecorder,
        index: int,
        seams: Seams,
        recompute: str = "none",
        loss_scale: float = 1.0,
        **where: Any,
    ) -> None:
        """`loss_scale`: of the mixture's auxiliary loss (mixture.Mixture)."""
        super().__init__()
        self.index, self.name, self.rate = index, f"layer.{index}", config.dropout
        self.recorder, self.seams = recorder, seams
        again = Recompute(recorder, self.name, index)
        self.call: Call = again if recompute == "full" else keep
        self.attention_norm = Norm(config, **where)
        self.attention = Attention(config, seams, again if recompute == "selective" else keep, **where)
        self.feed_forward_norm = Norm(config, **where)
        self.feed_forward: FeedForward | Mixture
        if config.has_experts(index):
            self.feed_forward = Mixture(config, seams, index, loss_scale, again, **where)
        else:
            self.feed_forward = FeedForward(config, seams, **where)

    def forward(self, x_SBH: Tensor, rotation: Rotation, keys_SB: Tensor | None = None) -> Tensor:
        """(S, B, H) -> (S, B, H); `keys_SB`: of dropout, for the same tokens."""
        begin_block(self.recorder, self.seams, self.name, self.index)
        x = self.call(self._body, x_SBH, rotation, keys_SB)
        return end_block(x, self.recorder, self.seams, self.name, self.index)

    def _body(self, x: Tensor, rotation: Rotation, keys_SB: Tensor | None) -> Tensor:
        attended = self.attention(self.attention_norm(x), rotation)
        x = x + dropout(attended, keys_SB, f"layers.{self.index}.attention", self.rate)
        fed = self.feed_forward(self.feed_forward_norm(x))
        return x + dropout(fed, keys_SB, f"layers.{self.index}.feed_forward", self.rate)
