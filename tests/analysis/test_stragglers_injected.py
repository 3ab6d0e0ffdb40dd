"""Injected causes on exact timelines: the right rank comes first, with its cost and its cause."""

from __future__ import annotations

import pytest
from pipeline_runs import MS, PipelineRun, pipeline_run
from timelines import Timeline

from stepscope.analysis.causes.stragglers import peers_of
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.report import analyze


@pytest.mark.parametrize(
    ("stages", "dp", "rank"),
    [
        (1, 4, 1),
        (1, 4, 0),
        (2, 2, 0),
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 3),
        (4, 1, 1),
        (4, 1, 2),
        (4, 2, 1),
        (4, 2, 4),
        (3, 3, 5),
    ],
)
def test_a_slow_rank_comes_first_wherever_it_sits(stages: int, dp: int, rank: int) -> None:
    report = analyze(pipeline_run(stages, 8, dp, slow={rank: 6}))
    first = report.stragglers[0]
    assert first.rank == rank
    assert first.cause == "slower compute"
    others = sum(one.cost_ns_per_step for one in report.stragglers[1:])
    assert first.cost_ns_per_step > 3 * others


@pytest.mark.parametrize(("stages", "dp", "rank"), [(1, 4, 2), (2, 2, 0), (2, 2, 3), (4, 2, 2), (4, 1, 0)])
def test_a_late_host_comes_first_and_is_called_so(stages: int, dp: int, rank: int) -> None:
    first = analyze(pipeline_run(stages, 8, dp, late={rank: 6})).stragglers[0]
    assert (first.rank, first.cause) == (rank, "late host")


def test_the_cost_is_what_the_others_waited() -> None:
    # 4 data-parallel ranks: the three others wait 5 ms each in every step
    (only,) = analyze(pipeline_run(1, 4, 4, slow={2: 5})).stragglers
    assert (only.rank, only.cost_ns_per_step, only.last_arrivals) == (2, 15 * MS, 3)


def test_a_balanced_run_has_no_straggler_that_costs_anything() -> None:
    for stages, dp in ((1, 4), (2, 2), (4, 2), (4, 1)):
        report = analyze(pipeline_run(stages, 8, dp))
        assert [one.cost_ns_per_step for one in report.stragglers if one.cost_ns_per_step] == []


def test_a_hidden_wait_is_not_charged() -> None:
    # rank 1 comes late to an all-reduce that rank 0 hides under compute
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 100)
    line.compute(0, 0, 90)
    line.compute(1, 0, 90)
    line.collective("dp", 0, {0: (10, 80), 1: (70, 80)}, stream="dp", axis="dp", op_id=1)
    report = analyze(line.run())
    assert [(one.rank, one.last_arrivals, one.cost_ns_per_step) for one in report.stragglers] == [(1, 1, 0)]


def test_time_that_blocked_nothing_is_not_charged() -> None:
    # rank 0 computes again at 50 while its wait goes on: nothing depended on it
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 100)
    line.compute(0, 0, 40)
    line.compute(0, 50, 90)
    line.compute(1, 0, 90)
    line.collective("dp", 0, {0: (30, 100), 1: (90, 100)}, stream="dp", axis="dp")
    run = line.run()
    assert "nonblocking" in decompose(run).ledger["flags"][0]
    report = analyze(run)
    assert sum(one.cost_ns_per_step for one in report.stragglers) == 0
    assert not [finding for finding in report.findings if finding.rank == 1]


def test_what_could_not_be_split_is_not_charged() -> None:
    # rank 2 of 3 was not recorded: the wait for rank 1 is a lower bound only
    line = Timeline(world=3, mesh={"dp": 3}, present=(0, 1))
    line.group("dp", "dp", 0, 1, 2)
    line.step(0, 100, ranks=(0, 1))
    line.compute(0, 0, 10)
    line.compute(1, 0, 80)
    line.collective("dp", 0, {0: (10, 100), 1: (80, 100)}, stream="dp", axis="dp")
    report = analyze(line.run())
    assert sum(one.cost_ns_per_step for one in report.stragglers) == 0


def test_a_single_slow_step_is_a_one_off() -> None:
    made = PipelineRun(1, 4, 4)
    for number in range(8):
        made.step(number, slow={3: 20} if number == 5 else {})
    report = analyze(made.run())
    assert report.stragglers[0].rank == 3
    (finding,) = [one for one in report.findings if one.rank == 3]
    assert "once, in step 5" in finding.text
    assert finding.step == 5
    assert finding.cost_ns_per_step == round(20 * MS / 8)  # spread over the 8 counted steps


def test_peers_have_the_same_work_where_there_are_any() -> None:
    stage = {0: 0, 1: 0, 2: 1, 3: 2}.__getitem__
    assert peers_of(0, [0, 1, 2, 3], stage) == [1]
    assert peers_of(2, [0, 1, 2, 3], stage) == [0, 1, 3]
    assert peers_of(0, [0], stage) == []
