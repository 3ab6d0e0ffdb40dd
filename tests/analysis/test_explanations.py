"""What the models add to findings: latency or bytes, the busiest rank, why a device is idle."""

from __future__ import annotations

import pandas as pd
from timelines import Timeline

from stepscope.analysis.causes.alpha_beta import alpha_beta, samples
from stepscope.analysis.causes.experts import Experts
from stepscope.analysis.causes.explanations import NOTHING, bound_by, busiest, why_idle
from stepscope.analysis.report import analyze

SIZES = (100, 200, 400, 800, 1600, 3200)


def exposed(alpha: int, ns_per_byte: float) -> Timeline:
    """Two tp ranks that compute for 1000 and then all-reduce messages of several sizes, each step."""
    line = Timeline(world=2, mesh={"tp": 2})
    line.group("tp", "tp", 0, 1)
    at = 0
    for step in range(4):
        begin = at
        for rank in (0, 1):
            line.compute(rank, at, at + 1000)
        at += 1000
        for number, size in enumerate(SIZES):
            length = alpha + round(ns_per_byte * size)
            both = (at, at + length)
            line.collective("tp", step * 10 + number, {0: both, 1: both}, axis="tp", strategy="tp", bytes=size)
            at += length
        line.step(begin, at, step)
    return line


def told(line: Timeline) -> tuple[str, str]:
    report = analyze(line.run())
    (finding,) = [one for one in report.findings if "tp all-reduce" in one.text]
    return finding.text, finding.advice


def test_a_latency_bound_axis_is_named_with_what_helps():
    text, advice = told(exposed(5000, 0.01))
    assert "latency bound: 5 µs of the 5.006 µs of one" in text
    assert advice.startswith("a smaller tensor-parallel degree")


def test_a_bandwidth_bound_axis_says_its_rate():
    text, advice = told(exposed(1, 10))
    assert text.endswith("; bandwidth bound at 0.1 GB/s")  # 10 ns a byte; 2 (N-1) / N = 1 on two ranks
    assert "its group inside one host" in advice


def test_what_cannot_be_told_adds_nothing():
    assert alpha_beta(samples(pd.DataFrame()), (0,)).fits.empty
    fits = analyze(exposed(5000, 0.01).run()).alpha_beta.fits
    assert bound_by(fits, "dp", "all_reduce") == NOTHING
    unsure = fits.assign(alpha_low_ns=0.0, slope_low_us_per_mb=0.0)
    assert bound_by(unsure, "tp", "all_reduce") == NOTHING


def test_the_busiest_rank_of_an_exchange():
    ranks = pd.DataFrame({"rank": [3, 0], "relative_load": [1.5, 0.5]})
    text, advice = busiest(Experts(pd.DataFrame(), ranks), "ep", "all_to_all")
    assert text == "; rank 3 takes 1.5 x the mean of the tokens" and "routing" in advice
    assert busiest(Experts(pd.DataFrame(), ranks.assign(relative_load=[1.1, 0.9])), "ep", "all_to_all") == NOTHING
    assert busiest(Experts(pd.DataFrame(), ranks), "dp", "all_reduce") == NOTHING


def test_an_idle_device_that_is_launch_bound():
    line = Timeline()
    line.step(0, 1000)
    for number, (call, start, end) in enumerate(((0, 10, 500), (600, 700, 1000))):
        line.launch(0, call, number)
        line.compute(0, start, end, launch_id=number)
    report = analyze(line.run())
    (finding,) = report.findings
    assert "100 % of that launch bound" in finding.text and "launches them too late" in finding.advice
    assert why_idle(report.idle, [0], [5]) == NOTHING
