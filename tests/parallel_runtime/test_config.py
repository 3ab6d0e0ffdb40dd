"""Configurations: what is refused, and that every refusal names the way out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.parallel_runtime.config import (
    PRESETS,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    as_dictionaries,
    check,
    check_global_batch,
    global_batch,
    preset,
)
from stepscope.parallel_runtime.naming import claim, claim_below, layout_name, run_name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers 0 must be at least 1: take 1"),
        ({"heads": 5}, "heads 5 must divide hidden 64: take 4"),
        ({"kv_heads": 3}, "kv_heads 3 must divide heads 4: take 2"),
        ({"hidden": 12, "heads": 4, "kv_heads": 4}, "is odd.*: take hidden 16"),
        ({"norm": "batchnorm"}, "norm 'batchnorm' is unknown: take one of rmsnorm, layernorm"),
        ({"activation": "relu"}, "take one of swiglu, gelu"),
        ({"dropout": 1.0}, r"dropout 1.0 must lie in \[0, 1\)"),
        ({"rope_theta": 0.0}, "must be positive"),
        ({"experts": -1}, "experts -1 must be at least 0"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token 3 of 2 experts: take experts_per_token 2"),
        (
            {"experts": 8, "dense_layers": 4},
            "leaves none of 4 layers to the experts: take dense_layers 3, or experts 0",
        ),
        ({"experts": 8, "router": "hash"}, "take one of softmax, sigmoid"),
        ({"experts": 8, "balance": "luck"}, "take one of bias, aux, capacity, none"),
        ({"capacity_factor": 0.0}, "capacity_factor 0.0 must be positive: 1.25 is usual"),
        ({"aux_weight": -1.0}, "aux_weight -1.0 must not be negative: 0 turns it off"),
        ({"experts": 8, "routing_skew": -1.0}, "routing_skew -1.0 must not be negative: 0 plans an even routing"),
        ({"routing_skew": 1.0}, "there are none: take experts 8"),
    ],
)
def test_illegal_models(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp 0 must be at least 1: take 1"),
        ({"recompute": "all"}, "take one of none, selective, full"),
        ({"cp_mode": "star"}, "cp_mode 'star' is unknown: take one of ring, ulysses, allgather"),
        ({"cp_layout": "striped"}, "take one of contiguous, zigzag"),
        ({"sp": True}, "tp is 1: take tp 2, or leave sp out"),
        ({"zero": 1}, "cuts the model state over dp, and dp is 1: take dp 2, or zero 0"),
        ({"dp": 2, "replicate": 2}, "zero is 0: take replicate 1"),
        ({"dp": 4, "zero": 3, "replicate": 3}, "replicate 3 must divide dp 4 .*: take replicate 2"),
        ({"dp": 4, "zero": 3, "replicate": 4}, "at least 2 ranks to cut the state over: take replicate 2"),
        ({"dp": 2, "zero": 2, "reshard": False}, "zero 2 cuts none: take zero 3"),
        ({"dp": 2, "zero": 3, "prefetch": -1}, "prefetch -1 must be at least 0"),
        ({"offload": "disk"}, "take one of none, cpu"),
        ({"zero": 4}, "zero 4 must be 0, 1, 2 or 3"),
        ({"pp": 2, "chunks": 2}, "schedule 1f1b runs one chunk a stage: take schedule interleaved, or chunks 1"),
        ({"chunks": 2, "schedule": "interleaved"}, "pp is 1: take pp 2, or chunks 1"),
        (
            {"pp": 2, "chunks": 2, "schedule": "interleaved", "split": (2, 2)},
            r"split \(2, 2\) must name pp 2 x chunks 2 = 4 parts",
        ),
        ({"schedule": "1b1f"}, "take one of naive, gpipe, 1f1b"),
        ({"bucket_mb": 0.0}, "bucket_mb 0.0 must be positive"),
        ({"pp": 2, "split": (4,)}, r"split \(4,\) must name 2 stages"),
        ({"pp": 2, "split": (4, 0)}, "at least one layer each"),
    ],
)
def test_illegal_layouts(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatches": 0}, "microbatches 0 must be at least 1"),
        ({"dtype": "int8"}, "take one of float32, float64, bfloat16, float16"),
        ({"optimizer": "lion"}, "take one of sgd, adamw"),
        ({"lr": 0.0}, "lr 0.0 must be positive"),
        ({"clip": -1.0}, "clip -1.0 must not be negative: 0 turns it off"),
        ({"padding": 1.0}, r"padding 1.0 must lie in \[0, 1\)"),
        ({"timeout_s": 0.0}, "timeout_s 0.0 must be positive"),
        ({"slow_rank": 1}, "slow_rank and slow_ms belong together: got rank 1 and 0.0 ms"),
        ({"late_ms": 5.0}, "late_rank and late_ms belong together"),
    ],
)
def test_illegal_training(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**arguments)


@pytest.mark.parametrize(
    ("parallel", "train", "message"),
    [
        (ParallelConfig(pp=5), TrainConfig(), "the model has 4: take pp 4"),
        (ParallelConfig(pp=2, split=(1, 2)), TrainConfig(), r"has 3 layers, the model has 4: take split \(1, 3\)"),
        (ParallelConfig(pp=2, split=(5, 2)), TrainConfig(), "has 7 layers, the model has 4: leave split out"),
        (ParallelConfig(dp=2), TrainConfig(slow_rank=2, slow_ms=1.0), "not among the 2 ranks: take 0 to 1"),
        (ParallelConfig(tp=4), TrainConfig(), "tp 4 must divide kv_heads 2: take tp 2"),
        (ParallelConfig(dp=2), TrainConfig(late_rank=7, late_ms=1.0), "late_rank 7 is not among"),
    ],
)
def test_illegal_together(parallel: ParallelConfig, train: TrainConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(ModelConfig(), parallel, train)


@pytest.mark.parametrize(
    ("model", "tp", "sp", "message"),
    [
        (ModelConfig(kv_heads=4, ffn=130), 4, False, "tp 4 must divide ffn 130: take tp 2"),
        (ModelConfig(kv_heads=4, vocab=255), 4, False, "tp 4 must divide vocab 255: take tp 1"),
        (ModelConfig(kv_heads=4), 3, False, "tp 3 must divide kv_heads 4: take tp 2"),
        (ModelConfig(kv_heads=4, seq=63), 4, True, "sp cuts sequences of 63 tokens into 4 equal parts: take seq 64"),
    ],
)
def test_illegal_cuts(model: ModelConfig, tp: int, sp: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(model, ParallelConfig(tp=tp, sp=sp), TrainConfig())


CP = ParallelConfig


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        (CP(cp=2), {"seq": 66}, "zigzag layout cuts a sequence into 4 equal pieces, and seq is 66: take seq 68"),
        (CP(cp=2), {"seq": 66}, "or cp_layout contiguous$"),
        (CP(cp=3), {"seq": 64}, "into 6 equal pieces, and seq is 64: take seq 66 or cp 2$"),
        (CP(cp=3, cp_layout="contiguous"), {"seq": 64}, "into 3 equal pieces, and seq is 64: take seq 66 or cp 2$"),
        (CP(cp=4, cp_mode="ulysses"), {}, "cp 4 in mode ulysses must divide kv_heads 2: take cp 2, or cp_mode ring"),
        (CP(cp=2, tp=2, cp_mode="ulysses"), {}, "must divide kv_heads 2 / tp 2 = 1: take cp 1, or cp_mode ring"),
        (CP(cp=2, tp=2, sp=True), {"seq": 66}, "sp cuts sequences of 66 tokens into 4 equal parts: take seq 68"),
    ],
)
def test_illegal_context_parallelism(parallel: ParallelConfig, model: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(ModelConfig(**model), parallel, TrainConfig())


EXPERTS = {"experts": 6}


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        (CP(dp=2, ep=2), {}, "ep 2 cuts the experts, and the model has none: take ep 1, or experts 8"),
        (CP(dp=4, ep=4), EXPERTS, "ep 4 must divide experts 6 and dp x cp x tp = 4, the ranks of one stage: take ep 2"),
        (CP(dp=2, ep=3), EXPERTS, "ep 3 must divide experts 6 and dp x cp x tp = 2, .*: take ep 2"),
        (CP(dp=6, ep=6, zero=1, replicate=2), EXPERTS, "replicate 2 leaves 3 ranks .* ep 6 .*: take replicate 1"),
        (CP(dp=8, tp=2, ep=6, zero=1), EXPERTS, "ep 6 must divide experts 6 and dp x cp x tp = 16"),
        (CP(dp=12, ep=6, zero=1, replicate=6), EXPERTS, "replicate 6 leaves 2 ranks .* ep 6 .*: take replicate 2"),
        (CP(tp=2), {**EXPERTS, "seq": 63}, "each of 2 ranks of cp x tp routes an equal part .* 63 .*: take seq 64"),
    ],
)
def test_illegal_expert_parallel(parallel: ParallelConfig, model: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(ModelConfig(**model), parallel, TrainConfig())


def test_a_sequence_that_cp_does_not_cut_may_be_odd() -> None:
    check(ModelConfig(seq=9), ParallelConfig(dp=2), TrainConfig())


def test_layers_of_each_stage() -> None:
    layers = [list(ParallelConfig(pp=3).layers_of(stage, 8)) for stage in range(3)]
    assert layers == [[0, 1, 2], [3, 4, 5], [6, 7]]
    uneven = ParallelConfig(pp=2, split=(1, 3))
    assert [list(uneven.layers_of(stage, 4)) for stage in range(2)] == [[0], [1, 2, 3]]


def test_layers_of_each_chunk() -> None:
    """Chunk c of stage s is place 2 c + s of the way through the model."""
    two = ParallelConfig(pp=2, schedule="interleaved", chunks=2)
    assert [[list(two.chunk_layers(stage, chunk, 6)) for chunk in range(2)] for stage in range(2)] == [
        [[0, 1], [4]],
        [[2, 3], [5]],
    ]
    assert [two.layers_of(stage, 6) for stage in range(2)] == [(0, 1, 4), (2, 3, 5)]
    uneven = dataclasses.replace(two, split=(1, 1, 1, 2))
    assert [uneven.layers_of(stage, 5) for stage in range(2)] == [(0, 2), (1, 3, 4)]


@pytest.mark.parametrize(
    ("parallel", "model", "train", "message"),
    [
        (
            {"chunks": 3},
            {"layers": 4},
            {},
            "pp 2 x chunks 3 = 6 parts need a layer each, .* 4: take chunks 2, or layers 6",
        ),
        ({"chunks": 2}, {}, {"microbatches": 5}, "groups of pp 2, and 5 is no multiple: take microbatches 6"),
        ({}, {}, {"microbatches": 1}, "1 is no multiple: take microbatches 2"),
        ({"chunks": 2, "split": (1, 1, 1, 2)}, {"layers": 4}, {}, "has 5 layers, the model has 4"),
    ],
)
def test_illegal_interleaving(parallel: dict, model: dict, train: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(ModelConfig(**model), ParallelConfig(pp=2, schedule="interleaved", **parallel), TrainConfig(**train))


@given(st.integers(1, 8), st.integers(1, 40))
def test_stages_tile_the_layers(pp: int, layers: int) -> None:
    parts = [ParallelConfig(pp=pp).layers_of(stage, layers) for stage in range(pp)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_global_batch_is_microbatch_size_times_microbatches_times_dp() -> None:
    assert global_batch(ParallelConfig(dp=3, pp=2), TrainConfig(microbatch_size=2, microbatches=5)) == 30


def test_a_wanted_global_batch_is_checked() -> None:
    parallel, train = ParallelConfig(dp=3), TrainConfig(microbatch_size=2, microbatches=5)
    check_global_batch(None, parallel, train)
    check_global_batch(30, parallel, train)
    with pytest.raises(ValueError, match=r"global batch 47 is not .* = 30: take microbatches 8, which gives 48"):
        check_global_batch(47, parallel, train)


def test_dictionaries_are_json_with_the_derived_numbers() -> None:
    model, parallel, train = as_dictionaries(ModelConfig(), ParallelConfig(dp=2, pp=2), TrainConfig())
    json.dumps([model, parallel, train], allow_nan=False)
    assert set(model) == {field.name for field in dataclasses.fields(ModelConfig)}
    assert parallel["world_size"] == 4
    assert train["global_batch"] == 2 * 4 * 2


def test_presets() -> None:
    assert preset("tiny").model == PRESETS["tiny"].model
    with pytest.raises(ValueError, match="take one of tiny, small, tiny-moe"):
        preset("huge")


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().layers = 3  # type: ignore[misc]


# -- names and directories ---------------------------------------------------------------------------------------------


def test_names_come_from_the_layout() -> None:
    assert layout_name(ParallelConfig()) == "single"
    assert layout_name(ParallelConfig(dp=2, pp=2, schedule="gpipe")) == "dp2-pp2-gpipe"
    assert layout_name(ParallelConfig(dp=4, overlap=False)) == "dp4-no-overlap"
    assert layout_name(ParallelConfig(cp=2, pp=2)) == "cp2-pp2-ring-zigzag-1f1b"
    assert layout_name(ParallelConfig(tp=2, sp=True, recompute="full")) == "tp2-sp-full-recompute"
    train = TrainConfig(microbatches=8, slow_rank=1, slow_ms=30.0)
    assert run_name("tiny", ModelConfig(), ParallelConfig(dp=4), train) == "dp4-m8-tiny-slow1"
    skewed = ModelConfig(experts=8, routing_skew=1.5)
    assert run_name("tiny-moe", skewed, ParallelConfig(dp=2, ep=2), TrainConfig()) == "dp2-ep2-m4-tiny-moe-skew1.5"


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    names = [claim_below(tmp_path / "runs", "dp2").name for _ in range(3)]
    assert names == ["dp2", "dp2-2", "dp2-3"]
    mine = claim(tmp_path / "deep" / "a")
    assert claim(mine) == mine  # still empty: nothing to lose
    (mine / "run.json").write_text("{}")
    claim(tmp_path / "deep" / "a-2")
    with pytest.raises(ValueError, match=r"a exists already.*never overwritten.*--out .*a-3"):
        claim(mine)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="exists already"):
        claim(file)
