"""`analyze` and `compare` on every sample and every real trace: they end with their status, in sentences, never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stepscope.__main__ import status_of
from stepscope.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ("dp4", "dp4_slow_rank", "dp2_pp2_1f1b", "dp2_pp2_gpipe", "pp4_slow_stage")
OTHER = {
    "dp4": "dp4_slow_rank",
    "dp4_slow_rank": "dp4",
    "dp2_pp2_1f1b": "dp2_pp2_gpipe",
    "dp2_pp2_gpipe": "dp2_pp2_1f1b",
    "pp4_slow_stage": "dp2_pp2_1f1b",
    "kineto-cpu-only": "kineto-old-schema",
    "kineto-dlrm-8rank": "kineto-sampled-2of128",
    "kineto-mi250": "kineto-mi300-resnet",
    "kineto-mi300-resnet": "kineto-v100-ns",
    "kineto-nccl-a100": "kineto-dlrm-8rank",
    "kineto-old-schema": "kineto-triton",
    "kineto-sampled-2of128": "kineto-nccl-a100",
    "kineto-triton": "kineto-mi250",
    "kineto-v100-ns": "kineto-nccl-a100",
    "ndtimeline-st": "pp-vis-1f1b",
    "nsys-2gpu": "kineto-sampled-2of128",
    "pp-vis-1f1b": "ndtimeline-st",
}
"""Each trace -> another of about its kind, to compare it with."""

WHOLE = {*SAMPLES, "pp-vis-1f1b", "kineto-old-schema", "kineto-triton", "kineto-v100-ns"}
"""Nothing touches the figures of these: `analyze` ends with 0, on the others with 3."""

REPORT = jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "schemas" / "report.schema.json").read_text()))


def place_of(name: str, corpus: Path, tmp_path: Path) -> Path:
    """Where a trace is; samples are copied, for reading makes a store beside them."""
    if name not in SAMPLES:
        return corpus / name
    copy = tmp_path / name
    if not copy.exists():
        shutil.copytree(ROOT / "sample_traces" / name, copy, ignore=shutil.ignore_patterns(".stepscope"))
    return copy


def test_no_trace_is_forgotten(corpus: Path) -> None:
    assert {place.name for place in corpus.iterdir() if place.is_dir()} | set(SAMPLES) == set(OTHER)
    assert {place.parent.name for place in (ROOT / "sample_traces").glob("*/run.json")} == set(SAMPLES)


@pytest.mark.parametrize("name", OTHER)
def test_analyze(name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = place_of(name, corpus, tmp_path)
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    status = status_of(["analyze", str(place), "--html", str(page), "--json", str(data)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert status == (ExitCode.OK if name in WHOLE else ExitCode.TOUCHED), captured.out[:2000]
    assert captured.out.startswith("✓ health ok" if name in WHOLE else "! health")
    for title in ("Where the step went", "By rank", "Findings"):
        assert f"\n{title}\n" in captured.out
    assert page.read_text("utf-8").startswith("<!doctype html>")
    report = json.loads(data.read_text("utf-8"))
    REPORT.validate(report)
    check_sentences(report)


def check_sentences(report: dict[str, Any]) -> None:
    """Findings are few, dearest first, whole sentences without a missing value; none costs more than the step."""
    costs = [finding["cost_ns_per_step"] for finding in report["findings"]]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) <= 5
    for finding in report["findings"]:
        text = finding["text"]
        assert text[0].isupper() and finding["advice"] and finding["confidence"] in ("high", "medium", "low")
        assert not any(word in text for word in ("nan", "None", "inf ", " 0 ns", "–"))
        assert 0 < finding["cost_ns_per_step"] <= report["summary"]["step_ns"]
    for item in report["health"]["items"]:
        assert "nan" not in item["text"] and "None" not in item["text"]


@pytest.mark.parametrize("name", OTHER)
def test_compared_with_itself_nothing_changes(
    name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(place_of(name, corpus, tmp_path))
    assert status_of(["compare", place, place, "--json", "-"]) == ExitCode.OK
    (pair,) = json.loads(capsys.readouterr().out)["comparisons"]
    for row in (pair["step"], *pair["terms"], *pair["classes"]):
        assert (row["delta_ns"], row["low_ns"] or 0, row["high_ns"] or 0) == (0, 0, 0)
    assert (pair["only_in_a"], pair["only_in_b"]) == ([], [])
    judged = status_of(["compare", place, place, "--fail-if-slower", "3%", "--quiet"])
    told = pair["step"]["low_ns"] is not None
    assert judged == (ExitCode.OK if told else ExitCode.UNDECIDED)  # one step has no noise band
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", OTHER)
def test_compared_with_another(name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unequal worlds and numbers of steps: the deltas still sum exactly, and every word is there."""
    paths = [str(place_of(one, corpus, tmp_path)) for one in (name, OTHER[name])]
    page = tmp_path / "comment.md"
    assert status_of(["compare", *paths, "--markdown", str(page)]) == ExitCode.OK
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "nan" not in captured.out.split() and "None" not in captured.out.split()
    assert page.read_text("utf-8").count("|") > 20
    assert status_of(["compare", *paths, "--json", "-"]) == ExitCode.OK
    (pair,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert sum(row["delta_ns"] for row in pair["terms"]) == pair["step"]["delta_ns"]
    assert status_of(["compare", *paths, "--fail-if-slower", "3%", "--quiet"]) in (
        ExitCode.OK,
        ExitCode.SLOWER,
        ExitCode.UNDECIDED,
    )
