"""Tokens per second and MFU, worked by hand."""

from __future__ import annotations

from fractions import Fraction

from stepscope.analysis.causes.throughput import flops_per_token, matmul_parameters, throughput, tokens_per_step
from stepscope.tracer.schema import RunMeta

MODEL = {
    "layers": 2,
    "hidden": 8,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 16,
    "vocab": 32,
    "seq": 10,
    "activation": "swiglu",
    "experts": 0,
}


def meta(**changes: object) -> RunMeta:
    values: dict[str, object] = {"model": MODEL, "train": {"global_batch": 6}, "world_size": 4, **changes}
    return RunMeta("id", "run", **values)  # type: ignore[arg-type]


def test_tokens_of_a_step_and_per_second() -> None:
    assert tokens_per_step(meta()) == 60
    # 60 tokens in 3 ms
    assert throughput(meta(), Fraction(3_000_000)).tokens_per_s == 20_000
    assert (
        tokens_per_step(meta(train={"microbatch_size": 2, "microbatches": 3}, mesh={"pp": 2, "dp": 2}))
        == 2 * 3 * 2 * 10
    )


def test_parameters_that_multiply() -> None:
    # a layer: q and o 8x8 each, k and v 8x4 each, three matrices of 8x16; then the head 32x8
    assert matmul_parameters(MODEL) == 2 * (2 * 64 + 2 * 32 + 3 * 128) + 256
    assert matmul_parameters({**MODEL, "activation": "gelu"}) == 2 * (2 * 64 + 2 * 32 + 2 * 128) + 256
    # a mixture: the router 4x8, and two of four experts of 8x6; the first layer has none
    mixture = {**MODEL, "experts": 4, "experts_per_token": 2, "expert_ffn": 6, "dense_layers": 1}
    assert matmul_parameters(mixture) == 2 * (2 * 64 + 2 * 32) + 3 * 128 + (32 + 2 * 3 * 48) + 256
    # 6 per parameter, and causal attention: 6 L H S
    assert flops_per_token(MODEL) == 6 * 1408 + 6 * 2 * 8 * 10


def test_mfu_needs_model_and_peak() -> None:
    step = Fraction(3_000_000)
    assert throughput(meta(), step).mfu is None
    rate = 20_000 * (6 * 1408 + 960)
    assert throughput(meta(), step, peak_flops=1e9).mfu == rate / (4 * 1e9)
    assert throughput(meta(train={"global_batch": 6, "peak_flops": 1e9}), step).mfu == rate / (4 * 1e9)
    assert throughput(meta(model={"seq": 10}), step, peak_flops=1e9).mfu is None


def test_undefined_is_none_and_never_zero() -> None:
    assert throughput(meta(model={}), Fraction(1)).tokens_per_s is None
    assert throughput(meta(), None).tokens_per_s is None
    assert throughput(meta(train={}), Fraction(1)).tokens_per_step is None
