"""The same model and training step, written again for one process and for reading: what every layout must agree with.

It shares with the runtime only the configuration, the initial value of each name and which entries dropout keeps; no
module, no fused operation, no communication. All layouts are compared with it: loss, every gathered gradient and
parameter (protocol: CONTRIBUTING.md).

Shapes: B sequences of the whole global batch, S sequence, H hidden, N query heads, K key and value heads, D head size,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.model.dropout import kept, token_keys
from stepscope.parallel_runtime.model.initial import initial_value, parameter_shapes
from stepscope.parallel_runtime.reference_mixture import ReferenceMixture

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


class Reference:
    """Parameters by global name, their gradients after a step, and the optimizer."""

    def __init__(self, config: ModelConfig, train: TrainConfig, shares: Sequence[Sequence[int]] | None = None) -> None:
        """`shares`: of a mixture of experts (reference_mixture.py)."""
        self.config, self.train, self.steps = config, train, 0
        self.mixture = ReferenceMixture(config, train, shares)
        dtype = getattr(torch, train.dtype)
        self.parameters = {
            name: initial_value(name, shape, train.seed).to(dtype).requires_grad_()
            for name, shape in parameter_shapes(config).items()
        }
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.parameters.items()}

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[float, dict[str, Tensor]]:
        """One training step on the global batch: (loss, gradient of each parameter). Negative targets do not count.

        The loss is that of the targets; gradients are those of it and of the mixture's auxiliary loss.
        """
        self.mixture.begin_step()
        loss = self.loss(tokens_BS, targets_BS)
        whole = loss + self.mixture.loss
        gradients = dict(zip(self.parameters, torch.autograd.grad(whole, list(self.parameters.values())), strict=True))
        self.mixture.end_step()
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self._update(name, parameter, gradients[name])
        return loss.item(), gradients

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean of -log p(target) over the targets that count."""
        log_probability = self.logits(tokens_BS).log_softmax(-1)
        counts = targets_BS >= 0
        chosen = log_probability.gather(-1, targets_BS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(chosen * counts).sum() / counts.sum()

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """(B, S, V)."""
        p, config = self.parameters, self.config
        x = self._drop("embedding", p["embedding.weight"][tokens_BS])
        for layer in range(config.layers):
            name = f"layers.{layer}"
            for part, function in (("attention", self._attention), ("feed_forward", self._feed_forward)):
                x = x + self._drop(f"{name}.{part}", function(f"{name}.{part}", self._norm(f"{name}.{part}_norm", x)))
        head = p["embedding.weight" if config.tied else "head.weight"]
        return self._norm("norm", x) @ head.T

    def _drop(self, name: str, x_BSH: Tensor) -> Tensor:
        """Dropout of a module's output. Tokens are counted since training began, in the order of the batch."""
        rate = self.config.dropout
        if rate == 0.0:
            return x_BSH
        B, S, H = x_BSH.shape
        numbers_BS = torch.arange(B * S).view(B, S) + self.steps * B * S
        return x_BSH * kept(token_keys(numbers_BS, self.train.seed), name, H, rate) / (1 - rate)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.parameters[f"{name}.weight"].T
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, epsilon = self.parameters[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return centred / spread * weight + self.parameters[f"{name}.bias"]

    def _attention(self, name: str, x_BSH: Tensor) -> Tensor:
        B, S, _ = x_BSH.shape
        D, sharing = self.config.head_size, self.config.heads // self.config.kv_heads
        q = self._rotate(self._linear(f"{name}.query", x_BSH).view(B, S, -1, D))
        k = self._rotate(self._linear(f"{name}.key", x_BSH).view(B, S, -1, D))
        v = self._linear(f"{name}.value", x_BSH).view(B, S, -1, D)
        k, v = (t.repeat_interleave(sharing, dim=2) for t in (k, v))
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(D)
        future = torch.ones(S, S, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = torch.einsum("bnqk,bknd->bqnd", weights, v)
        return self._linear(f"{name}.output", mixed.reshape(B, S, -1))

    def _rotate(self, x_BSND: Tensor) -> Tensor:
        """Features i and i + D/2 are one complex number, turned by position * theta^(-2i/D)."""
        half = self.config.head_size // 2
        pair = torch.arange(half, dtype=x_BSND.dtype)
        angle = torch.arange(x_BSND.shape[1], dtype=x_BSND.dtype)[:, None] * self.config.rope_theta ** (-pair / half)
        number = torch.complex(x_BSND[..., :half], x_BSND[..., half:])
        turned = number * torch.polar(torch.ones_like(angle), angle)[:, None, :]
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        layer = int(name.split(".")[1])
        if not self.config.has_experts(layer):
            return self._two_matrices({part: self._matrix(f"{name}.{part}") for part in ("gate", "up", "down")}, x)
        weights = self.mixture.weights(layer, self._linear(f"{name}.router", x))
        total = torch.zeros_like(x)
        for expert in range(self.config.experts):
            parts = {part: self._matrix(f"{name}.experts.{part}", expert) for part in ("gate", "up", "down")}
            total = total + weights[..., expert, None] * self._two_matrices(parts, x)
        return total

    def _matrix(self, name: str, expert: int | None = None) -> tuple[Tensor | None, Tensor | float]:
        """Weight and bias, of one expert where a layer has several; None and 0.0 where there is none."""
        weight, bias = self.parameters.get(f"{name}.weight"), self.parameters.get(f"{name}.bias")
        if expert is not None:
            weight, bias = (None if whole is None else whole[expert] for whole in (weight, bias))
        return weight, 0.0 if bias is None else bias

    def _two_matrices(self, parts: dict[str, tuple[Tensor | None, Tensor | float]], x: Tensor) -> Tensor:
        def of(part: str, x: Tensor) -> Tensor:
            weight, bias = parts[part]
            assert weight is not None
            return x @ weight.T + bias

        up = of("up", x)
        if self.config.activation == "gelu":
            return of("down", up * (1 + torch.erf(up / math.sqrt(2))) / 2)
        gate = of("gate", x)
        return of("down", gate * torch.sigmoid(gate) * up)

    def _update(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """SGD, or AdamW (Loshchilov and Hutter 2019)."""
        rate, decay = self.train.lr, self.train.weight_decay
        if self.train.optimizer == "sgd":
            parameter -= rate * (gradient + decay * parameter)
            return
        first, second = self.moments[name]
        first.lerp_(gradient, 1 - ADAM_BETAS[0])
        second.lerp_(gradient.square(), 1 - ADAM_BETAS[1])
        mean = first / (1 - ADAM_BETAS[0] ** self.steps)
        variance = second / (1 - ADAM_BETAS[1] ** self.steps)
        parameter -= rate * (mean / (variance.sqrt() + ADAM_EPSILON) + decay * parameter)
