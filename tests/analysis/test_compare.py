"""Comparing runs: deltas that sum exactly, noise bands, verdicts, shapes that differ."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import pipeline_run
from timelines import Timeline

from stepscope.analysis.causes.summary import TERM_COLUMNS, means, written
from stepscope.analysis.compare import (
    NOT_SLOWER,
    SLOWER,
    UNDECIDED,
    Delta,
    Pair,
    compare,
    compare_reports,
    noise_band,
    verdict,
)
from stepscope.analysis.records import LEDGER_COLUMNS
from stepscope.analysis.report import Report, analyze, dumps
from stepscope.analysis.run import Run

OTHERS = {
    "hidden_comm_ns": 0,
    "hidden_wait_ns": 0,
    "unsplit_ns": 0,
    "overlap_efficiency": np.nan,
    "comm_overlap": np.nan,
}


def ledger(
    rows: list[tuple[int, int, list[int]]], flags: dict[tuple[int, int], tuple[str, ...]] | None = None
) -> pd.DataFrame:
    """(rank, step, six terms) -> ledger rows."""
    found = [
        {"rank": rank, "step": step, "step_ns": sum(terms), **dict(zip(TERM_COLUMNS, terms, strict=True)), **OTHERS}
        | {"method": "direct", "flags": (flags or {}).get((rank, step), ())}
        for rank, step, terms in rows
    ]
    return pd.DataFrame(found, columns=list(LEDGER_COLUMNS))


def plain_run(steps: list[int], world: int = 1, name: str = "gemm") -> Run:
    """Steps of these lengths, all compute but for a tenth of idle."""
    line, at = Timeline(world=world), 0
    for number, length in enumerate(steps):
        line.step(at, at + length, number)
        for rank in range(world):
            line.compute(rank, at, at + length - length // 10, name=name)
        at += length
    return line.run()


# -- means -------------------------------------------------------------------------------------------------------------

NUMBERS = st.lists(st.integers(0, 10**12), min_size=6, max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), NUMBERS), min_size=1, unique_by=lambda row: row[:2]))
def test_means_of_terms_sum_to_the_mean_step_exactly(rows: list[tuple[int, int, list[int]]]) -> None:
    found = means(ledger(rows))
    assert sum(found.values[name] for name in TERM_COLUMNS) == found.values["step_ns"]
    json = written(found.values)
    assert sum(json[name] for name in TERM_COLUMNS) == json["step_ns"]  # floats, and still exact
    assert abs(json["step_ns"] - found.values["step_ns"]) <= Fraction(6, 2048)


def test_only_steps_that_every_rank_has_whole_count() -> None:
    one = [10, 0, 0, 0, 0, 0]
    rows = [(rank, step, [n * (step + 1) for n in one]) for rank in (0, 1) for step in range(4)]
    flags = {(1, 2): ("partial",), (0, 0): ("slow_first",)}
    found = means(ledger(rows, flags))
    assert found.steps == (1, 3)
    assert found.values["step_ns"] == Fraction(20 + 40, 2)


def test_a_rank_without_any_whole_step_does_not_empty_the_means() -> None:
    rows = [(0, 0, [5, 0, 0, 0, 0, 0]), (1, 0, [7, 0, 0, 0, 0, 0])]
    found = means(ledger(rows, {(1, 0): ("partial",)}))
    assert (found.ranks, found.values["step_ns"]) == ((0,), 5)
    assert means(ledger(rows, {(0, 0): ("empty",), (1, 0): ("partial",)})).values == {}


# -- deltas ------------------------------------------------------------------------------------------------------------


def test_a_run_against_itself_is_zero_everywhere() -> None:
    run = pipeline_run(2, 4, 2, slow={1: 3})
    (pair,) = compare([run, run]).pairs
    for delta in (pair.step, *pair.terms, *pair.classes):
        assert delta.delta_ns == 0
        assert (delta.low_ns, delta.high_ns) == (0, 0)
        assert delta.beyond_noise is False
    assert (pair.only_in_a, pair.only_in_b) == ((), ())
    assert verdict(pair, 0.0) != SLOWER


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_deltas_sum_to_the_step_s_delta_exactly(data: st.DataObject) -> None:
    sides = []
    for _ in range(2):
        ranks, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
        rows = [(rank, step, data.draw(NUMBERS)) for rank in range(ranks) for step in range(steps)]
        report = analyze(plain_run([100, 100]))
        report.ledger = ledger(rows)
        report.means = means(report.ledger)
        sides.append(report)
    comparison = compare_reports(sides)
    (pair,) = comparison.pairs
    assert sum((term.delta_ns for term in pair.terms), Fraction(0)) == pair.step.delta_ns
    json = comparison.to_json()["comparisons"][0]
    assert sum(term["delta_ns"] for term in json["terms"]) == json["step"]["delta_ns"]
    assert json["step"]["b_ns"] - json["step"]["a_ns"] == json["step"]["delta_ns"]


def test_unequal_worlds_and_lengths_compare_by_the_mean_over_ranks() -> None:
    (pair,) = compare([plain_run([100] * 3, world=2), plain_run([130] * 5, world=4)]).pairs
    assert (pair.step.a_ns, pair.step.b_ns, pair.step.delta_ns) == (100, 130, 30)
    assert [term.delta_ns for term in pair.terms] == [27, 0, 0, 0, 0, 3]
    assert pair.per_token == ()


def test_per_token_where_both_say_their_batch() -> None:
    sides = []
    for batch, length in ((10, 1000), (20, 1500)):
        run = plain_run([length] * 3)
        run.meta.model["seq"] = 10
        run.meta.train["global_batch"] = batch
        sides.append(analyze(run))
    (pair,) = compare_reports(sides).pairs
    # 1000 ns for 100 tokens, 1500 ns for 200: slower by the step, faster by the token
    assert pair.step.delta_ns == 500
    assert (pair.per_token[0].a_ns, pair.per_token[0].b_ns) == (10, Fraction(15, 2))
    assert sum((term.delta_ns for term in pair.per_token[1:]), Fraction(0)) == pair.per_token[0].delta_ns


def test_names_that_only_one_side_has() -> None:
    (pair,) = compare([plain_run([100, 100], name="gemm"), plain_run([100, 100], name="<b>renamed</b>")]).pairs
    assert (pair.only_in_a, pair.only_in_b) == (("gemm",), ("<b>renamed</b>",))
    assert pair.step.delta_ns == 0


def test_classes_say_where_the_change_is() -> None:
    (pair,) = compare([pipeline_run(1, 4, 2), pipeline_run(1, 4, 2, slow={1: 6})]).pairs
    changes = {delta.name: delta.delta_ns for delta in pair.classes}
    # one of two ranks computes 6 ms longer, the other waits for it
    assert changes["compute forward"] == 3_000_000
    assert changes["imbalance dp all_reduce"] == 3_000_000
    assert changes["compute backward"] == 0
    assert pair.classes[0].name in ("compute forward", "imbalance dp all_reduce")


def test_too_few_runs_and_empty_runs_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="two runs or more"):
        compare([plain_run([100])])
    with pytest.raises(ValueError, match="no whole step"):
        compare([plain_run([100]), Timeline().run()])


# -- noise -------------------------------------------------------------------------------------------------------------


def test_the_band_is_the_same_every_time_and_holds_the_delta() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(100, 5, (12, 2)), rng.normal(104, 5, (9, 2))
    first, second = noise_band(a, b), noise_band(a, b)
    assert first is not None and second is not None
    assert np.array_equal(first, second)
    middle = b.mean(axis=0) - a.mean(axis=0)
    assert (first[0] < middle).all() and (middle < first[1]).all()
    # about 1.96 standard errors on either side
    error = np.sqrt(a.var(axis=0, ddof=1) / 12 + b.var(axis=0, ddof=1) / 9)
    assert np.allclose((first[1] - first[0]) / 2, 1.96 * error, rtol=0.15)


def test_one_step_gives_no_band() -> None:
    assert noise_band(np.ones((1, 3)), np.ones((5, 3))) is None
    (pair,) = compare([plain_run([100]), plain_run([120])]).pairs
    assert (pair.step.low_ns, pair.step.beyond_noise) == (None, None)
    assert verdict(pair, 0.03) == UNDECIDED


def test_equal_runs_are_rarely_called_different() -> None:
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(100):
        low, high = noise_band(rng.normal(100, 5, (10, 1)), rng.normal(100, 5, (12, 1)))  # type: ignore[misc]
        wrong += int(low[0] > 0 or high[0] < 0)
    assert wrong <= 15  # 5 expected of a 95 % band, a few more with so few steps


def pair_of(a: int, b: int, low: float | None, high: float | None) -> Pair:
    return Pair("a", "b", Delta("step_ns", Fraction(a), Fraction(b), low, high), (), (), (), (), ())


@pytest.mark.parametrize(
    ("b", "low", "high", "found"),
    [
        (1100, 60, 140, SLOWER),  # beyond the noise and beyond the limit
        (1100, -20, 220, UNDECIDED),  # too noisy to tell
        (1010, 5, 15, NOT_SLOWER),  # certainly slower, but by less than the limit
        (1010, -20, 40, UNDECIDED),  # may be slower by more than the limit
        (900, -120, -80, NOT_SLOWER),
        (1000, 0, 0, NOT_SLOWER),
        (1100, None, None, UNDECIDED),
    ],
)
def test_the_verdict_for_a_limit_of_three_per_cent(b: int, low: float | None, high: float | None, found: str) -> None:
    assert verdict(pair_of(1000, b, low, high), 0.03) == found


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_json_is_strict_and_carries_health() -> None:
    touched = plain_run([100, 110])
    touched.health.add("cut_file", "the file ends early", touches=("ledger",))
    comparison = compare([plain_run([100, 100]), touched, plain_run([90, 95])])
    json = comparison.to_json()
    dumps(json)
    assert [run["health"]["status"] for run in json["runs"]] == ["ok", "touched", "ok"]
    assert len(json["comparisons"]) == 2
    assert {term["name"] for term in json["comparisons"][0]["terms"]} == {
        "compute",
        "visible_comm",
        "bubble",
        "imbalance",
        "memcpy",
        "idle",
    }


def test_reports_are_not_changed_by_comparing_them() -> None:
    report: Report = analyze(plain_run([100, 120]))
    before = report.to_json()
    compare_reports([report, report])
    assert report.to_json() == before
