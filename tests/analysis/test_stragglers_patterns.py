"""How stragglers behave over the steps, by host and stage, and what stands behind them: answers worked out by hand."""

from __future__ import annotations

import pandas as pd
import pytest
from injected_timelines import with_tokens
from pipeline_runs import MS, PipelineRun
from timelines import Timeline

from stepscope.analysis.causes.patterns import pattern
from stepscope.analysis.causes.reasons import bases
from stepscope.analysis.causes.stragglers import Excess
from stepscope.analysis.report import Report, analyze
from stepscope.analysis.report.view import group_lines

STEP = 100  # 2 % of it: 2


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ([5, 5, 0, 5], "persistent"),  # 3 of 4
        ([5, 5], "persistent"),
        ([2, 2, 2, 1], "persistent"),  # 2 is just late, 1 is not
        ([0, 0, 30, 0], "one-off"),
        ([0, 0, 0, 0, 0, 0, 0, 30], "one-off"),  # z = 6 / 8.08: no trend
        ([0, 5, 0, 5], "occasional"),
        ([0, 5], "occasional"),  # of two steps nobody can say which is the rule
        ([2, 4, 6, 8, 10], "drifting"),  # z = 9 / 4.08 = 2.2; 8 from first to last
        ([10, 8, 6, 4, 2], "drifting"),
        ([2, 4, 6, 8], "persistent"),  # four steps: z = 5 / 2.94 = 1.7
        ([50, 51, 52, 53, 54], "persistent"),  # 4 is little beside 52
        ([0, 0, 0, 1, 1], None),
        ([0, 0, 0], None),
        ([30], None),
        ([], None),
    ],
)
def test_the_pattern_of_the_longest_waits(waits: list[int], found: str | None) -> None:
    assert pattern(waits, STEP) == found


def slow_by(units: list[int], stages: int = 1, dp: int = 4, rank: int = 2, hosts: tuple[str, ...] = ()) -> Report:
    """One rank computes longer by so many ms in each step."""
    made = PipelineRun(stages, 8, dp)
    for number, more in enumerate(units):
        made.step(number, slow={rank: more} if more else {})
    made.line.hosts = hosts
    return analyze(made.run())


@pytest.mark.parametrize(
    ("units", "found"),
    [([5, 5, 5, 5], "persistent"), ([0, 0, 9, 0, 0], "one-off"), ([1, 3, 5, 7, 9, 11], "drifting")],
)
def test_a_straggler_of_a_run_has_its_pattern(units: list[int], found: str) -> None:
    (only,) = slow_by(units).stragglers
    assert (only.rank, only.pattern) == (2, found)


def test_stages_sum_over_their_ranks_and_name_the_dearest() -> None:
    # 2 stages x 2 replicas, rank 1 (stage 0) 6 ms slower: its replica's stage 1, and at the reductions the others wait
    report = slow_by([6, 6, 6], stages=2, dp=2, rank=1)
    first = report.straggler_groups[0]
    assert (first.by, first.name, first.ranks, first.dearest_rank) == ("stage", "0", (0, 1), 1)
    assert (first.cause, first.pattern) == ("slower compute", "persistent")
    of_ranks = sum(one.cost_ns_per_step for one in report.stragglers if one.rank in (0, 1))
    assert first.cost_ns_per_step == of_ranks > 0
    assert group_lines(report)[0].startswith("stage 0 (ranks 0–1): ")
    assert all(one.by == "stage" for one in report.straggler_groups)  # no host is known


def test_hosts_sum_over_their_ranks() -> None:
    # 4 replicas on two hosts; rank 2 makes three others wait 5 ms
    report = slow_by([5, 5, 5], hosts=("a", "a", "b", "b"))
    (only,) = report.straggler_groups
    assert (only.by, only.name, only.ranks) == ("host", "b", (2, 3))
    assert only.cost_ns_per_step == only.dearest_cost_ns_per_step == 15 * MS
    assert report.to_json()["straggler_groups"][0]["ranks"] == [2, 3]


def test_one_host_and_one_stage_are_no_groups() -> None:
    assert slow_by([5, 5], hosts=("a",) * 4).straggler_groups == ()


def late_with(name: str | None, host_row: tuple[int, int] = (0, 60)) -> Report:
    """Rank 1 of two computes 60 later than rank 0; its host ran `name` meanwhile."""
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    for number in range(3):
        at = number * 200
        line.step(at, at + 200, number)
        line.compute(0, at, at + 100)
        line.compute(1, at + 60, at + 160)
        if name:
            line.row(1, "host", at + host_row[0], at + host_row[1], name=name, stream="loader")
        parts = {0: (at + 100, at + 200), 1: (at + 160, at + 200)}
        line.collective("dp", number, parts, stream="dp", axis="dp")
    return analyze(line.run())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (None, "late host"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data loading"),
        ("gc.collect", "garbage collection"),
        ("aten::gcd", "late host"),  # no garbage
    ],
)
def test_host_rows_say_what_a_late_host_did(name: str | None, found: str) -> None:
    report = late_with(name)
    assert (report.stragglers[0].rank, report.stragglers[0].cause) == (1, found)
    assert bases(found) == ("late host",)
    (finding,) = [one for one in report.findings if one.rank == 1]
    assert f": {found}, 60 ns more than its peers" in finding.text


def test_a_host_row_that_covers_less_than_half_explains_nothing() -> None:
    assert late_with("gc.collect", (0, 29)).stragglers[0].cause == "late host"
    assert late_with("gc.collect", (0, 30)).stragglers[0].cause == "garbage collection"
    assert late_with("gc.collect", (60, 160)).stragglers[0].cause == "late host"  # beside compute, not in the gap


@pytest.mark.parametrize(
    ("mine", "found"), [(150, "expert load"), (125, "expert load"), (110, "slower compute"), (100, "slower compute")]
)
def test_more_tokens_explain_slower_experts(mine: int, found: str) -> None:
    # each replica computes 8 x 3 + 1 (optimizer) = 25 ms, rank 2 5 ms or 20 % more
    made = PipelineRun(1, 8, 4)
    for number in range(3):
        made.step(number, slow={2: 5})
    report = analyze(with_tokens(made.run(), {0: 100, 1: 100, 2: mine, 3: 100}))
    assert (report.stragglers[0].rank, report.stragglers[0].cause) == (2, found)


@pytest.mark.parametrize(
    ("mine", "ep", "found"),
    [(200, 2, "expert load"), (120, 2, "slower communication"), (200, 1, "slower communication")],
)
def test_more_tokens_explain_longer_exchanges(mine: int, ep: int, found: str) -> None:
    """Rank 0 computes as long as rank 1, and is in transfer for 120 of each step where rank 1 is for 80: 50 % more, so that
    rank 1 waits 40 for it at the end. Without experts that are exchanged tokens explain no transfer."""
    line = Timeline(world=2, mesh={"dp": 2, "ep": ep})
    line.group("ep", "ep", 0, 1)
    line.group("alone", "ep", 0)
    line.group("other", "ep", 1)
    for number in range(3):
        at = number * 300
        line.step(at, at + 300, number)
        for rank in range(2):
            line.compute(rank, at, at + 100)
        line.collective("alone", number, {0: (at + 100, at + 220)}, "all_to_all", axis="ep", strategy="ep")
        line.collective("other", number, {1: (at + 100, at + 180)}, "all_to_all", axis="ep", strategy="ep")
        line.collective("ep", number, {0: (at + 220, at + 260), 1: (at + 180, at + 260)}, "all_reduce", axis="ep")
    report = analyze(with_tokens(line.run(), {0: mine, 1: 100}))
    assert (report.stragglers[0].rank, report.stragglers[0].cause) == (0, found)
    (finding,) = [one for one in report.findings if "keeps others waiting" in one.text]
    assert f": {found}, 40 ns more than its peers" in finding.text


# -- confidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("excess", "steady"),
    [
        ([5, 5, 5], True),
        ([25, 5, 15], False),  # mean 15, deviation 10: t = 2.6, needed 2.92
        ([25, 10, 15], True),  # mean 16.7, deviation 7.6: t = 3.8
        ([-3, 14, 36, 72], False),  # t = 1.8, needed 2.35
        ([10, 30], False),  # t = 2, needed 6.3
        ([7], False),
        ([25, 5, 15, 25, 5, 15, 25, 5, 15], True),  # the same spread over more steps: t = 5.2
    ],
)
def test_a_mean_that_single_steps_do_not_bear_out(excess: list[int], steady: bool) -> None:
    rows = [
        {"rank": rank, "step": step, "ns": 100 + more * rank} for step, more in enumerate(excess) for rank in (0, 1)
    ]
    assert Excess(pd.DataFrame(rows)).steady(1, [0], "ns") is steady
    assert not Excess(pd.DataFrame(rows)).steady(1, [], "ns")


@pytest.mark.parametrize(
    ("units", "confidence"), [([5, 5, 5, 5], "high"), ([1, 12, 2, 3], "medium"), ([5, 5], "medium")]
)
def test_a_rank_that_is_late_by_chance_is_not_named_with_confidence(units: list[int], confidence: str) -> None:
    (finding,) = [one for one in slow_by(units).findings if one.rank == 2]
    assert "Rank 2 (dp2) keeps others waiting" in finding.text
    assert finding.confidence == confidence
