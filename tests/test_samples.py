"""The sample traces: each is analysed, and what the analysis says is what its expected.json says."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from stepscope.analysis.ingest import open_run
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import analyze

SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"
MOST_BYTES = 2 << 20


def pinned():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("sample_expectations", SAMPLES / "expected.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=pinned().SAMPLES)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no column store is written beside the sample."""
    source = SAMPLES / request.param
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("sample") / request.param))


def test_a_sample_says_what_it_said(sample: Path):
    assert pinned().expected(sample) == json.loads((sample / "expected.json").read_text("utf-8"))


def test_its_terms_add_up_and_its_command_is_told(sample: Path):
    ledger = analyze(open_run(sample)).ledger
    assert (ledger[[f"{term}_ns" for term in TERMS]].sum(axis=1) == ledger["step_ns"]).all()
    assert (sample / "command.txt").read_text("utf-8").startswith(("stepscope run --dp", "stepscope schedule"))
    assert sum(f.stat().st_size for f in sample.rglob("*") if f.is_file()) < MOST_BYTES


@pytest.mark.parametrize(("name", "rank"), [("dp4_slow_rank", 1), ("pp4_slow_stage", 2)])
def test_the_slow_rank_comes_first_among_the_stragglers(name: str, rank: int):
    first = json.loads((SAMPLES / name / "expected.json").read_text("utf-8"))["first_straggler"]
    assert first["rank"] == rank and first["cause"] == "slower compute"
