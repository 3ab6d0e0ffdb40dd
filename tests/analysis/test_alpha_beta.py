"""The alpha-beta model: worked answers first, then properties against plain loops, then real runs."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import Timeline

from stepscope.analysis.causes.alpha_beta import MOST_SAMPLES, bus_factor, fit, hops, theil_sen
from stepscope.analysis.ingest import open_run
from stepscope.analysis.report import analyze

MB = 10**6


def group_of(ranks: int, times: list[tuple[int, int]], collective: str = "all_reduce"):
    """A run of one step in which `ranks` ranks communicate: (bytes, duration in ns); the last rank comes last."""
    line = Timeline(world=ranks, mesh={"dp": ranks})
    line.group("dp", "dp", *range(ranks))
    at = 0
    for seq, (size, duration) in enumerate(times):
        parts = {rank: (at + rank * 7, at + ranks * 7 + duration) for rank in range(ranks - 1)}
        parts[ranks - 1] = (at + ranks * 7, at + ranks * 7 + duration)
        line.collective("dp", seq, parts, collective, axis="dp", strategy="dp", bytes=size)
        at += ranks * 7 + duration + 100
    line.step(0, at)
    return line.run()


WORKED = [(MB, 20_000), (2 * MB, 30_000), (4 * MB, 50_000), (MB, 10_000_000)]


def test_the_worked_example():
    model = analyze(group_of(8, WORKED)).alpha_beta
    (row,) = model.fits.to_dict("records")
    assert (row["status"], row["operations"], row["sizes"], row["outliers"]) == ("fitted", 4, 3, 1)
    assert (row["alpha_ns"], row["alpha_low_ns"], row["alpha_high_ns"]) == (10_000, 10_000, 10_000)
    assert (row["slope_us_per_mb"], row["slope_low_us_per_mb"], row["slope_high_us_per_mb"]) == (10, 10, 10)
    assert (row["algorithm_gb_per_s"], row["bus_gb_per_s"]) == (100, 175)
    assert row["hop_alpha_ns"] == pytest.approx(714.2857, abs=1e-4)
    assert row["hop_slope_us_per_mb"] == pytest.approx(5.7142857)
    assert (row["crossover_bytes"], row["bound"], row["group_size"]) == (MB, "bandwidth", 8)
    (outlier,) = model.outliers.to_dict("records")
    assert (outlier["rank"], outlier["bytes"], outlier["duration_ns"]) == (7, MB, 10_000_000)
    assert (outlier["fitted_ns"], outlier["step"]) == (20_000, 0)
    # alpha N_msg + beta V, for the four operations of the one step
    assert (row["latency_ns_per_step"], row["bandwidth_ns_per_step"]) == (40_000, 80_000)


def test_one_size_is_not_identifiable():
    (row,) = analyze(group_of(4, [(MB, 20_000), (MB, 22_000)])).alpha_beta.fits.to_dict("records")
    assert (row["status"], row["bound"], row["sizes"]) == ("not identifiable", "", 1)
    assert math.isnan(row["alpha_ns"]) and math.isnan(row["bus_gb_per_s"])
    assert row["achieved_gb_per_s"] == pytest.approx((MB / 20_000 + MB / 22_000) / 2)


def test_a_wait_is_no_part_of_the_cost_and_a_partial_one_no_sample():
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 10_000)
    line.collective("dp", 0, {0: (0, 1000), 1: (900, 1000)}, axis="dp", bytes=100)
    line.collective("dp", 1, {0: (2000, 3000), 1: (2850, 3000)}, axis="dp", bytes=200)
    line.collective("dp", 2, {0: (4000, 9000)}, axis="dp", bytes=300)  # its partner was not recorded
    (row,) = analyze(line.run()).alpha_beta.fits.to_dict("records")
    assert (row["operations"], row["alpha_ns"], row["slope_us_per_mb"]) == (2, 50, 500)


def test_a_message_is_one_operation_on_two_ranks():
    line = Timeline(world=2, mesh={"pp": 2})
    line.group("pp", "pp", 0, 1)
    line.step(0, 1000)
    line.message((85, 90), (10, 90), 0, 1, "pp", bytes=10)
    line.message((200, 215), (190, 215), 0, 1, "pp", seq=1, bytes=20)
    (row,) = analyze(line.run()).alpha_beta.fits.to_dict("records")
    assert (row["collective"], row["group_size"], row["operations"]) == ("send_receive", 2, 2)
    assert (row["alpha_ns"], row["slope_us_per_mb"]) == (0, 625)  # 5 ns and 15 ns: below 0 at 0, so time / size alone
    assert row["bus_gb_per_s"] == row["algorithm_gb_per_s"] == pytest.approx(1.6)


def test_nothing_is_negative():
    falling = theil_sen(np.array([1, 2, 3]), np.array([30.0, 20.0, 10.0]))
    assert falling is not None
    assert (falling.alpha, falling.beta, falling.beta_low) == (20, 0, 0)
    assert theil_sen(np.array([5, 5]), np.array([1.0, 2.0])) is None


@pytest.mark.parametrize(
    ("collective", "bus", "steps"),
    [
        ("all_reduce", 1.5, 6),
        ("all_gather", 0.75, 3),
        ("reduce_scatter", 0.75, 3),
        ("all_to_all", 0.75, 3),
        ("ring_shift", 1, 1),
    ],
)
def test_bandwidth_and_hops_of_four_ranks(collective: str, bus: float, steps: int):
    assert (bus_factor(collective, 4), hops(collective, 4)) == (bus, steps)


sizes = st.integers(1, 50)
times = st.integers(1, 1000)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sizes, times), min_size=2, max_size=12))
def test_the_line_is_that_of_plain_loops(points: list[tuple[int, int]]):
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]]
    line = theil_sen(np.array([x for x, _ in points]), np.array([y for _, y in points]))
    if not slopes:
        assert line is None
        return
    assert line is not None
    beta = statistics.median(slopes)
    alpha = statistics.median(y - beta * x for x, y in points)
    if beta <= 0:
        alpha, beta = statistics.median(y for _, y in points), 0.0
    elif alpha < 0:
        alpha, beta = 0.0, statistics.median(y / x for x, y in points)
    assert (line.alpha, line.beta) == (pytest.approx(alpha), pytest.approx(beta))
    assert 0 <= line.alpha_low <= line.alpha <= line.alpha_high
    assert 0 <= line.beta_low <= line.beta <= line.beta_high


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**5),
    st.integers(1, 100),
    st.lists(st.integers(1, 10**6), min_size=6, max_size=40, unique=True),
    st.integers(0, 5),
    st.integers(20, 100),
)
def test_an_exact_line_is_found_whatever_one_outlier_says(
    alpha: int, beta: int, exact: list[int], place: int, factor: int
):
    size = np.array(exact, float)
    time = alpha + beta * size
    time[place] *= factor
    line, outlier = fit(size, time)
    assert line is not None
    assert outlier.tolist() == [i == place for i in range(len(exact))]
    assert (line.alpha, line.beta) == (pytest.approx(alpha, abs=1e-3), pytest.approx(beta))


def test_what_many_do_is_no_outlier():
    """One of eight samples ten times as long is an outlier; three of eight are the spread."""
    size = np.arange(1.0, 9.0) * 1000
    time = 100 + size
    time[1] *= 10
    assert fit(size, time)[1].tolist() == [place == 1 for place in range(8)]
    time[3] *= 10
    time[5] *= 10
    line, outlier = fit(size, time)
    assert line is not None and not outlier.any()


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        size = random.integers(1, 100, 30) * 1000.0
        line, _ = fit(size, 5000 + 0.5 * size + random.normal(0, 2000, 30))
        assert line is not None
        held += line.beta_low <= 0.5 <= line.beta_high
    assert held >= 0.85 * 200


def test_many_samples_are_thinned_over_all_sizes():
    size = np.repeat(np.array([1000.0, 2000.0, 500_000.0]), (20 * MOST_SAMPLES, 10, 500))
    line, outlier = fit(size, 100 + 2 * size)
    assert line is not None and not outlier.any()
    assert (line.alpha, line.beta) == (pytest.approx(100), pytest.approx(2))


def test_a_recorded_run(tmp_path: Path):
    sample = Path(__file__).resolve().parents[2] / "sample_traces" / "dp2_pp2_1f1b"
    model = analyze(open_run(Path(shutil.copytree(sample, tmp_path / "run")))).alpha_beta
    by = {(row["axis"], row["collective"], row["sizes"] > 1): row for row in model.fits.to_dict("records")}
    reduced, sent = by["dp", "all_reduce", True], by["pp", "send_receive", False]
    assert (reduced["status"], sent["status"]) == ("fitted", "not identifiable")
    assert reduced["alpha_ns"] >= 0 and reduced["slope_us_per_mb"] >= 0
    assert sent["achieved_gb_per_s"] > 0
    assert (sent["median_bytes"], sent["operations_per_step"]) == (64 * 2 * 128 * 4, 8)  # S B H b, 8 microbatches


def test_real_traces_without_message_sizes_give_no_sample(corpus: Path):
    model = analyze(open_run(corpus / "kineto-dlrm-8rank")).alpha_beta
    assert model.fits.empty and model.outliers.empty
