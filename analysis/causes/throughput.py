"""Tokens per second and MFU, where the run says model and batch (and, for MFU, the device's peak).

Formulas: theory.md (Batch, time, arithmetic). Undefined is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stepscope.tracer.schema import RunMeta

NS = 10**9


@dataclass(frozen=True)
class Throughput:
    """Work and speed of one mean step. `flops_per_token` of training without recomputation."""

    tokens_per_step: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    flops_per_token: int | None = None
    mfu: float | None = None


def tokens_per_step(meta: RunMeta) -> int | None:
    """Tokens of the global batch (padding included): sequences of one step times their length."""
    seq, train = meta.model.get("seq"), meta.train
    batch = train.get("global_batch")
    if batch is None and train.get("microbatch_size") and train.get("microbatches"):
        batch = train["microbatch_size"] * train["microbatches"] * int(meta.mesh.get("dp", 1))
    return int(batch) * int(seq) if batch and seq else None


def matmul_parameters(model: dict[str, Any]) -> int | None:
    """Parameters that multiply every token: projections, feed-forward (router and active experts only) and output head.

    The embedding table is looked up, not multiplied, and does not count; biases and norms are left out.
    """
    needed = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    if any(not model.get(name) for name in needed):
        return None
    layers, hidden, heads, kv_heads, ffn, vocab = (int(model[name]) for name in needed)
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads
    matrices = 3 if model.get("activation", "swiglu") == "swiglu" else 2
    dense = matrices * hidden * ffn
    if not model.get("experts"):
        return layers * (attention + dense) + vocab * hidden
    active = int(model.get("experts_per_token") or model.get("top_k") or 1)
    mixture = hidden * (active * matrices * int(model.get("expert_ffn") or ffn) + int(model["experts"]))
    first = int(model.get("dense_layers") or 0)
    return layers * attention + first * dense + (layers - first) * mixture + vocab * hidden


def flops_per_token(model: dict[str, Any]) -> int | None:
    """6 x active parameters + 6 L H S: causal attention is half of 12 L H S."""
    parameters, seq = matmul_parameters(model), model.get("seq")
    if parameters is None or not seq:
        return None
    return 6 * parameters + 6 * int(model["layers"]) * int(model["hidden"]) * int(seq)


def throughput(meta: RunMeta, step_ns: Fraction | None, peak_flops: float | None = None) -> Throughput:
    """Speed at a mean step time of `step_ns`; `peak_flops` is one device's peak in FLOP/s (else `train.peak_flops`)."""
    tokens, flops = tokens_per_step(meta), flops_per_token(meta.model)
    peak = peak_flops or meta.train.get("peak_flops")
    if tokens is None or not step_ns:
        return Throughput(tokens, None, None, flops, None)
    rate = float(Fraction(tokens * NS) / step_ns)
    mfu = rate * flops / (float(peak) * meta.world_size) if flops and peak and meta.world_size else None
    return Throughput(tokens, rate, rate / meta.world_size if meta.world_size else None, flops, mfu)
