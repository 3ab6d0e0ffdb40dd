"""The matrix of injected causes on exact timelines: who is named first, what grows, what stays; and its page."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from injected_timelines import MATRIX, Injected

from stepscope.analysis.compare import compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "injected_causes.md"
WITHIN = Fraction(5, 100)


@pytest.fixture(scope="module", params=MATRIX, ids=lambda make: make.__name__)
def injected(request: pytest.FixtureRequest) -> Injected:
    make: Callable[[], Injected] = request.param
    return make()


def test_the_right_terms_grow_by_what_was_injected_and_the_others_stay(injected: Injected) -> None:
    (pair,) = compare([injected.base, injected.run]).pairs
    assert abs(pair.step.delta_ns - injected.injected_ns) <= WITHIN * injected.injected_ns
    for term in pair.terms:
        expected = injected.grows.get(term.name.removesuffix("_ns"), Fraction(0)) * injected.injected_ns
        assert abs(term.delta_ns - expected) <= WITHIN * injected.injected_ns, term.name


def test_the_cause_is_named_first(injected: Injected) -> None:
    comparison = compare([injected.base, injected.run])
    before, after = comparison.reports
    assert after.findings[0].text.startswith(injected.finding)
    assert not any(one.text.startswith(injected.finding) for one in before.findings)
    if injected.straggler_cause is None:
        assert sum(one.cost_ns_per_step for one in after.stragglers) == 0  # nobody is to blame
        return
    assert (after.stragglers[0].cause, after.stragglers[0].pattern) == (injected.straggler_cause, "persistent")
    if injected.rank is not None:
        assert after.stragglers[0].rank == after.findings[0].rank == injected.rank
    if injected.stage is not None:
        first = after.straggler_groups[0]
        assert (first.by, first.name, first.cause) == ("stage", str(injected.stage), injected.straggler_cause)


def test_the_axis_changes_most(injected: Injected) -> None:
    (pair,) = compare([injected.base, injected.run]).pairs
    axis = next(delta.name for delta in pair.classes if not delta.name.startswith("compute "))
    assert axis.partition(" ")[2] == injected.axis


def test_the_page_is_what_the_command_makes() -> None:
    spec = importlib.util.spec_from_file_location("injected_causes_page", PAGE.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = PAGE.read_text(encoding="utf-8")
    assert page == made.rewritten(page), "run: python docs/injected_causes.py"
