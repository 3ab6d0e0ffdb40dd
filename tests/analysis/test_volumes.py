"""The volume audit: what was recorded beside what the configuration predicts, differences in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from timelines import Timeline

from stepscope.analysis.causes.volumes import (
    AGREEING,
    AS_PREDICTED,
    BYTES_ALONE,
    NONE_RECORDED,
    NOT_PREDICTED,
    OPERATIONS_ALONE,
    Volume,
    verdict,
)
from stepscope.analysis.ingest import open_run
from stepscope.analysis.report import analyze
from stepscope.analysis.run import Run

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
MODEL = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": 32, "seq": 4}
TRAIN = {"microbatch_size": 1, "microbatches": 3, "dtype": "float32"}
SIZE = 4 * 8 * 4  # S H b


def two_stages(sends: int, size: int = SIZE, **more: Any) -> Run:
    """Two stages, one step: `sends` activations forward, as many gradients back."""
    line = Timeline(world=2, mesh={"pp": 2})
    line.group("forward", "pp", 0, 1)
    line.group("backward", "pp", 0, 1)
    for number in range(sends):
        at = 100 * number
        line.message((at, at + 5), (at, at + 5), 0, 1, "forward", number, strategy="pp", bytes=size)
        line.message((at + 50, at + 55), (at + 50, at + 55), 1, 0, "backward", number, strategy="pp", bytes=size)
    line.step(0, 1000)
    run = line.run()
    run.meta = replace(run.meta, model=MODEL, train=TRAIN, parallel={"pp": 2, **more})
    return run


def row_of(frame: pd.DataFrame, stage: int, strategy: str, collective: str) -> dict[str, Any]:
    keys = (frame["stage"] == stage) & (frame["strategy"] == strategy) & (frame["collective"] == collective)
    (row,) = frame[keys].to_dict("records")
    return dict(row)


def test_what_is_as_predicted():
    frame = analyze(two_stages(3)).volumes
    row = row_of(frame, 0, "pp", "send")
    assert (row["operations"], row["operations_theory"]) == (3, 3)
    assert row["bytes"] == row["bytes_theory"] == row["sent_bytes"] == row["sent_bytes_theory"] == 3 * SIZE
    assert row_of(frame, 1, "pp", "receive")["sent_bytes"] == 0
    assert set(frame["verdict"]) == {AS_PREDICTED}


def test_a_missing_operation_and_wrong_bytes_are_named():
    assert row_of(analyze(two_stages(2)).volumes, 0, "pp", "send")["verdict"] == (
        "2 operations instead of 3; 128 bytes less than predicted (33.3%)"
    )
    assert row_of(analyze(two_stages(3, SIZE // 2)).volumes, 1, "pp", "send")["verdict"] == (
        "192 bytes less than predicted (50.0%)"
    )


def test_what_is_not_predicted_and_what_was_not_recorded():
    frame = analyze(two_stages(3, tp=2)).volumes  # the run says tp 2 and has no such rows
    assert row_of(frame, 0, "tp", "all_reduce")["verdict"] == NONE_RECORDED
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 100)
    line.collective("dp", 0, {0: (0, 10), 1: (0, 10)}, "broadcast", axis="dp", strategy="clip", bytes=8)
    run = line.run()
    run.meta = replace(run.meta, model=MODEL, train=TRAIN, parallel={"dp": 2})
    row = row_of(analyze(run).volumes, 0, "clip", "broadcast")
    assert (row["verdict"], row["operations_theory"]) == (NOT_PREDICTED, None) or pd.isna(row["operations_theory"])
    assert pd.isna(row["sent_bytes"])  # what a rank sends depends on the root


def test_a_run_that_does_not_say_its_model_gets_no_verdict():
    run = two_stages(3)
    run.meta = replace(run.meta, model={})
    row = row_of(analyze(run).volumes, 0, "pp", "send")
    assert (row["operations"], row["verdict"]) == (3, "")
    assert pd.isna(row["operations_theory"])


def test_of_an_unknown_strategy_each_axis_is_apart():
    """As in traces of other programs: two all-reduces over dp and one over tp in the step, of 64 and 16 bytes."""
    line = Timeline(world=4, mesh={"dp": 2, "tp": 2})
    line.group("data", "dp", 0, 2)
    line.group("model", "tp", 0, 1)
    for seq, (group, ranks, size) in enumerate((("data", (0, 2), 64), ("model", (0, 1), 16), ("data", (0, 2), 64))):
        at = dict.fromkeys(ranks, (100 * seq, 100 * seq + 9))
        line.collective(group, seq, at, bytes=size, axis={"data": "dp", "model": "tp"}[group])
    for rank in range(4):
        line.compute(rank, 500, 900)
    line.step(0, 1000)
    frame = analyze(line.run()).volumes
    found = frame[["axis", "strategy", "collective", "operations", "bytes"]].values.tolist()
    # means of a rank: four ranks, of which two take part in each
    assert found == [["dp", "", "all_reduce", 1.0, 64.0], ["tp", "", "all_reduce", 0.5, 8.0]]


def test_words():
    one = Volume(Fraction(2), Fraction(10), Fraction(5))
    assert verdict(one, one) == AS_PREDICTED
    assert verdict(None, one) == NONE_RECORDED and verdict(one, None) == NOT_PREDICTED
    assert verdict(one, Volume(None, Fraction(8), None)) == "2 bytes more than predicted (25.0%)"
    assert verdict(one, Volume(None, None, None)) == ""
    assert verdict(one, Volume(Fraction(2), None, None)) == OPERATIONS_ALONE  # theory knows no size
    assert verdict(one, Volume(None, Fraction(10), None)) == BYTES_ALONE
    assert verdict(Volume(Fraction(2), None, None), one) == OPERATIONS_ALONE  # sizes were not recorded
    assert verdict(Volume(Fraction(3), None, None), one) == "3 operations instead of 2"


@pytest.fixture
def sample(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(SAMPLES / name, tmp_path / name))


@pytest.mark.parametrize("name", ["dp4", "dp2_pp2_1f1b", "dp2_pp2_gpipe"])
def test_recorded_runs_are_as_predicted(sample: Callable[[str], Path], name: str):
    """All but the number of gradient buckets, which theory does not know."""
    frame = analyze(open_run(sample(name))).volumes
    buckets = (frame["strategy"] == "dp") & (frame["collective"] == "all_reduce")
    assert len(frame) and set(frame.loc[~buckets, "verdict"]) == {AS_PREDICTED}
    assert set(frame.loc[buckets, "verdict"]) <= {BYTES_ALONE} < set(AGREEING)


def test_a_run_whose_configuration_lies_is_found_out(sample: Callable[[str], Path]):
    path = sample("dp4")
    said = json.loads((path / "run.json").read_text())
    said["model"]["layers"] += 1
    (path / "run.json").write_text(json.dumps(said))
    row = row_of(analyze(open_run(path)).volumes, 0, "dp", "all_reduce")
    assert row["verdict"].endswith("%)") and "less than predicted" in row["verdict"]


def test_real_traces_without_a_configuration(corpus: Path):
    frame = analyze(open_run(corpus / "kineto-dlrm-8rank")).volumes
    assert len(frame) and set(frame["verdict"]) == {""}
    assert frame["operations"].sum() > 0
