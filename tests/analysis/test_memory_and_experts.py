"""Memory beside ZeRO's arithmetic, peaks by phase, and the load of experts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import Timeline

from stepscope.analysis.causes.memory import optimizer_bytes, theory, verdict
from stepscope.analysis.causes.setup import Setup
from stepscope.analysis.ingest import open_run
from stepscope.analysis.report import analyze
from stepscope.tracer.schema import RunMeta

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
MODEL = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": 32, "seq": 4}
TRAIN = {"microbatch_size": 1, "microbatches": 2, "dtype": "float32", "optimizer": "adamw"}
LAYER = 4 * 64 + 3 * 8 * 16 + 2 * 8
P = 2 * 32 * 8 + 2 * LAYER + 8


def setup(**parallel: Any) -> Setup:
    found = Setup.of(RunMeta("r", "r", model=MODEL, train=TRAIN, parallel=parallel))
    assert found is not None
    return found


def test_seven_billion_parameters_of_the_text():
    """fp32 Adam: 112 GB; on 8 ranks ZeRO-1 63 GB, ZeRO-2 38.5 GB, ZeRO-3 14 GB, as bytes a parameter."""
    each = {zero: sum(theory(setup(dp=8, zero=zero), 0).values()) / P for zero in (0, 1, 2, 3)}  # type: ignore[arg-type]
    assert P % 8 == 0
    assert [7 * each[zero] for zero in (0, 1, 2, 3)] == [112, 63, 38.5, 14]


def test_bytes_of_an_optimizer():
    assert [optimizer_bytes("adamw", dtype) for dtype in ("float32", "float64", "bfloat16")] == [8, 16, 12]
    assert [optimizer_bytes("sgd", dtype) for dtype in ("float32", "float16")] == [0, 4]
    offloaded = [optimizer_bytes("adamw", dtype, "cpu") for dtype in ("float32", "float64", "bfloat16")]
    assert offloaded == [12, 24, 12]  # the copy that the host updates; a 16-bit parameter has one in any case
    assert optimizer_bytes("of tomorrow", "float32") is None


def test_what_does_not_divide_is_padded():
    held = theory(setup(dp=3, zero=3), 0)["parameters"]
    units = (32 * 8, LAYER, LAYER, 32 * 8 + 8)
    assert held == 4 * sum(-(-unit // 3) for unit in units)


def test_the_state_of_experts_is_cut_over_the_ranks_that_hold_the_same_ones():
    """dp 4, ep 2: dense units over 4, experts (half of 8 on each rank) over 2; ep 4: experts are not cut at all."""
    moe = {"experts": 8, "experts_per_token": 2, "expert_ffn": 4}
    expert, router = 3 * 8 * 4, 8 * 8
    dense = (32 * 8, *2 * (4 * 64 + router + 2 * 8,), 32 * 8 + 8)
    for ep, ranks in ((2, 2), (4, 1)):
        found = Setup.of(RunMeta("r", "r", model=MODEL | moe, train=TRAIN, parallel={"dp": 4, "ep": ep, "zero": 1}))
        assert found is not None
        held = sum(dense) + 2 * (8 // ep) * expert
        cut = sum(-(-unit // 4) for unit in dense) + 2 * (8 // ep * expert // ranks)
        assert theory(found, 0) == {"parameters": 4 * held, "gradients": 4 * held, "optimizer": 8 * cut}


@pytest.mark.parametrize(
    ("measured", "expected", "words"),
    [
        (100, 100, "as predicted"),
        (101, 100, "as predicted"),
        (150, 100, "50.0% more than predicted"),
        (25, 100, "75.0% less than predicted"),
        (4, 0, "4 bytes where none are predicted"),
        (4, None, ""),
    ],
)
def test_words(measured: int, expected: int | None, words: str):
    assert verdict(measured, expected) == words


def with_counters() -> Timeline:
    line = Timeline(world=1)
    line.step(0, 100)
    line.compute(0, 0, 20, phase="forward", microbatch=0)
    line.compute(0, 20, 40, phase="backward", microbatch=0)
    line.compute(0, 40, 60, phase="optimizer")
    for at, kept in ((18, 70), (25, 90), (38, 10)):
        line.counter(0, at, "activation_bytes", kept)
    line.counter(0, 99, "parameter_bytes", 4 * P)
    line.counter(0, 99, "gradient_bytes", 2 * P)
    line.counter(0, 99, "optimizer_bytes", 3 * P)
    line.counter(0, 99, "optimizer_bytes", 5 * P, key="host")
    return line


def test_state_and_peaks_of_a_rank():
    run = with_counters().run()
    run.meta = replace(run.meta, model=MODEL, train=TRAIN, mesh={"pp": 1}, coords=({"pp": 0},))
    memory = analyze(run).memory
    state = {
        row["kind"]: (row["bytes"], row["theory_bytes"], row["verdict"]) for row in memory.state.to_dict("records")
    }
    assert state == {
        "parameters": (4 * P, 4 * P, "as predicted"),
        "gradients": (2 * P, 4 * P, "50.0% less than predicted"),
        "optimizer": (8 * P, 8 * P, "as predicted"),
    }
    device = 9 * P  # what lies in the host's memory is no peak of the device
    assert memory.peaks.to_dict("records") == [
        {"rank": 0, "phase": phase, "activation_bytes": kept, "state_bytes": device, "total_bytes": device + kept}
        for phase, kept in (("forward", 70), ("backward", 90), ("optimizer", 10))
    ]


def test_without_a_configuration_there_is_no_theory_and_without_counters_nothing():
    memory = analyze(with_counters().run()).memory
    assert memory.state["theory_bytes"].isna().all() and set(memory.state["verdict"]) == {""}
    bare = analyze(Timeline(world=1).run())
    assert bare.memory.state.empty and bare.memory.peaks.empty and bare.experts.loads.empty
    assert bare.experts.skew is None


@pytest.mark.parametrize("name", ["dp4", "dp2_pp2_1f1b"])
def test_recorded_state_is_as_predicted(tmp_path: Path, name: str):
    memory = analyze(open_run(Path(shutil.copytree(SAMPLES / name, tmp_path / name)))).memory
    assert len(memory.state) == 4 * 3 and set(memory.state["verdict"]) == {"as predicted"}
    assert {"forward", "backward"} <= set(memory.peaks["phase"])


def routed(tokens: Mapping[tuple[int, int], list[int]]) -> Timeline:
    """Two ranks with two experts each of one layer: (rank, expert) -> tokens of each step."""
    line = Timeline(world=2, mesh={"ep": 2})
    line.group("ep", "ep", 0, 1)
    for step in range(2):
        at = 1000 * step
        line.step(at, at + 1000, step)
        line.collective("ep", step, {0: (at, at + 50), 1: (at + 30, at + 50)}, "all_to_all", axis="ep", strategy="ep")
        for (rank, expert), counts in tokens.items():
            line.counter(rank, at + 900, "tokens_per_expert", counts[step], key=f"layer.3 expert.{expert}")
    return line


def test_skew_of_experts_and_ranks_and_what_exchange_costs():
    found = analyze(routed({(0, 0): [6, 6], (0, 1): [2, 2], (1, 2): [1, 3], (1, 3): [2, 2]}).run()).experts
    assert [tuple(row) for row in found.loads.to_numpy()] == [
        (3, 0, (0,), 6, 2),
        (3, 1, (0,), 2, 2 / 3),
        (3, 2, (1,), 2, 2 / 3),
        (3, 3, (1,), 2, 2 / 3),
    ]
    assert (found.skew, found.rank_skew) == (2, 8 / 6)
    assert [tuple(row) for row in found.ranks.to_numpy()] == [(0, 8, 8 / 6, 1, 20, 30), (1, 4, 4 / 6, 1, 20, 0)]


def test_copies_of_an_expert_are_summed():
    found = analyze(routed({(0, 0): [3, 3], (1, 0): [5, 5]}).run()).experts
    (row,) = found.loads.to_dict("records")
    assert (row["ranks"], row["tokens_per_step"], row["relative_load"]) == ((0, 1), 8, 1)


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 1), st.integers(0, 5)), st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1
    )
)
def test_loads_sum_to_the_tokens(tokens: dict[tuple[int, int], list[int]]):
    found = analyze(routed(tokens).run()).experts
    total = sum(sum(counts) for counts in tokens.values()) / 2
    assert found.loads["tokens_per_step"].sum() == found.ranks["tokens_per_step"].sum() == total
    if total:
        assert found.skew is not None and found.skew >= 1
