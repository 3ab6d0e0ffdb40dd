"""The matrix of injected causes in real training: the right rank, axis or stage is named first. No time is asserted.

The cases are those of benchmarks/injected_causes.py, which measures by how much each term grows.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stepscope.analysis.causes.ground import MOST
from stepscope.analysis.compare import compare_reports
from stepscope.analysis.report import Report

STEPS = 4
FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "injected_causes.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("injected_causes_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BENCHMARK = load()
CASES = {case.cause: case for case in BENCHMARK.CASES}


def trained(place: Path, cause: str, injected: bool) -> Report:
    case = CASES[cause]
    more = case.injected if injected else case.without
    return BENCHMARK.train(place / ("with" if injected else "without"), [*case.options, *more], STEPS)  # type: ignore[no-any-return]


def test_the_matrix_is_whole() -> None:
    assert list(CASES) == [
        *("slow rank", "slow stage", "slow link", "late host", "skewed experts", "tiny buckets", "no overlap")
    ]


@pytest.mark.parametrize("cause", ["slow rank", "slow stage", "late host", "skewed experts"])
def test_a_late_rank_is_named_first_with_its_cause(tmp_path: Path, cause: str) -> None:
    case, report = CASES[cause], trained(tmp_path, cause, True)
    first = report.findings[0]
    assert first.text.startswith(case.first), first.text
    assert case.cause_named in first.text
    assert (first.rank, report.stragglers[0].rank, report.stragglers[0].cause) == (
        case.rank,
        case.rank,
        case.cause_named,
    )
    if cause == "slow stage":
        group = report.straggler_groups[0]
        assert (group.by, group.name) == ("stage", "1")


def test_a_slow_link_is_named_first_with_both_its_stages(tmp_path: Path) -> None:
    case, report = CASES["slow link"], trained(tmp_path, "slow link", True)
    assert report.findings[0].text.startswith(case.first), report.findings[0].text
    link = report.links.iloc[0]
    assert (link["axis"], link["source"], link["target"]) == ("pp", 0, 1)
    assert (link["source_stage"], link["target_stage"]) == (0, 1)


@pytest.mark.parametrize("cause", ["tiny buckets", "no overlap"])
def test_exposed_reductions_are_named_first_and_the_comparison_names_axis_and_term(tmp_path: Path, cause: str) -> None:
    case = CASES[cause]
    without, injected = trained(tmp_path, cause, False), trained(tmp_path, cause, True)
    first = injected.findings[0]
    assert first.text.startswith(case.first), first.text
    assert case.cause_named in first.text
    assert len(injected.findings) <= MOST
    (pair,) = compare_reports([without, injected]).pairs
    noise = ("compute", "imbalance")  # of ranks that share their cores
    dearest = next(delta for delta in pair.classes if not delta.name.startswith(noise))
    assert dearest.name == f"{case.term} {case.axis}"
    assert dearest.delta_ns > 0
    terms = [term for term in pair.terms if not term.name.startswith(noise)]
    assert max(terms, key=lambda term: term.delta_ns).name == f"{case.term}_ns"
