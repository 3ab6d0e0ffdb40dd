"""Findings: few, dear, honest."""

from __future__ import annotations

import pytest
from pipeline_runs import MS, PipelineRun, pipeline_run
from timelines import Timeline

from stepscope.analysis.records import Finding
from stepscope.analysis.report import Report, analyze


def about_ranks(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.text.startswith("Rank")]


@pytest.mark.parametrize(("stages", "dp"), [(1, 4), (2, 2), (4, 2), (4, 1)])
def test_a_balanced_run_is_told_of_its_true_limit_only(stages: int, dp: int) -> None:
    # the schedule's own bubble, never more of it than theory has, and nobody's fault
    report = analyze(pipeline_run(stages, 8, dp))
    assert about_ranks(report) == []
    for finding in report.findings:
        assert "bubble" in finding.text
        assert report.pipeline.theory_of_step is not None
        limit = report.pipeline.theory_of_step * float(report.means.values["step_ns"])
        assert finding.cost_ns_per_step <= limit


def test_a_slow_rank_is_named_with_cost_evidence_and_advice() -> None:
    report = analyze(pipeline_run(1, 4, 4, slow={2: 5}))
    (finding,) = about_ranks(report)
    assert finding == report.findings[0]
    assert finding.cost_ns_per_step == 5 * MS
    assert (finding.rank, finding.confidence) == (2, "high")
    assert "slower compute, 5 ms more in forward than its peers" in finding.text
    assert finding.step in (0, 1, 2)
    assert finding.start_ns is not None and finding.end_ns is not None
    assert finding.end_ns - finding.start_ns == 5 * MS
    assert finding.advice


def test_the_slow_rank_s_share_is_not_told_twice_as_bubble() -> None:
    balanced = analyze(pipeline_run(4, 8, 2))
    slow = analyze(pipeline_run(4, 8, 2, slow={1: 6}))
    bubbles = [next(f.cost_ns_per_step for f in one.findings if "bubble" in f.text) for one in (balanced, slow)]
    assert abs(bubbles[1] - bubbles[0]) <= 0.15 * bubbles[0]


def communicating_run(hidden: bool = False, size: int = 1 << 24) -> Timeline:
    """Two ranks, four steps of 100: 60 of compute, then 30 of all-reduce (or hidden under compute)."""
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    for k in range(4):
        low = 100 * k
        line.step(low, low + 100, k)
        for rank in (0, 1):
            line.compute(rank, low, low + (100 if hidden else 65))
        parts = dict.fromkeys((0, 1), (low + 65, low + 95))
        line.collective("dp", k, parts, stream="dp", axis="dp", strategy="dp", bytes=size, op_id=k)
        if not hidden:
            for rank in (0, 1):
                line.compute(rank, low + 95, low + 100)
    return line


def test_exposed_communication_is_named_by_axis_with_its_operation() -> None:
    (finding,) = analyze(communicating_run().run()).findings
    assert finding.cost_ns_per_step == 30
    assert "dp all-reduce is exposed" in finding.text
    assert "16.78 MB" in finding.text
    assert (finding.op_id, finding.end_ns - finding.start_ns) == (0, 30)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        ("all_reduce", "The all-reduce of an unknown axis"),
        ("", "The communication of an unknown kind of an unknown axis"),
    ],
)
def test_exposed_communication_of_an_unknown_axis_has_its_evidence_too(collective: str, text: str) -> None:
    line = Timeline(world=2)
    line.group("pg", "", 0, 1)
    for k in range(3):
        low = 100 * k
        line.step(low, low + 100, k)
        for rank in (0, 1):
            line.compute(rank, low, low + 65)
        line.collective("pg", k, dict.fromkeys((0, 1), (low + 65, low + 100)), collective, bytes=1 << 20)
    (finding,) = analyze(line.run()).findings
    assert finding.text.startswith(f"{text} is exposed for 35 ns a step (1 a step and rank of 1.049 MB)")
    assert finding.rank in (0, 1) and finding.step in (0, 1, 2)
    assert finding.start_ns is not None and finding.end_ns == finding.start_ns + 35


def test_hidden_communication_is_no_finding() -> None:
    assert analyze(communicating_run(hidden=True).run()).findings == ()


def test_small_buckets_and_switched_off_overlap_get_their_own_advice() -> None:
    assert "--bucket-mb" in analyze(communicating_run(size=1000).run()).findings[0].advice
    run = communicating_run().run()
    run.meta.parallel["overlap"] = False
    assert "--no-overlap" in analyze(run).findings[0].advice


def test_a_tensor_parallel_group_across_hosts_is_named() -> None:
    found = []
    for hosts in (("one", "one"), ("one", "two")):
        line = Timeline(world=2, mesh={"tp": 2}, hosts=hosts)
        line.group("tp", "tp", 0, 1)
        line.step(0, 100)
        for rank in (0, 1):
            line.compute(rank, 0, 60)
        line.collective("tp", 0, {0: (60, 100), 1: (60, 100)}, stream="tp", axis="tp", strategy="tp")
        found.append(analyze(line.run()).findings[0])
    assert [finding.text.endswith("its groups span hosts") for finding in found] == [False, True]
    assert "inside one host" in found[1].advice


def test_unsplit_time_carries_no_finding() -> None:
    line = Timeline(world=2, mesh={"dp": 2}, present=(0,))
    line.group("dp", "dp", 0, 1)
    for k in range(4):
        line.step(100 * k, 100 * k + 100, k, ranks=(0,))
        line.compute(0, 100 * k, 100 * k + 60)
        line.collective("dp", k, {0: (100 * k + 60, 100 * k + 100)}, stream="dp", axis="dp")
    report = analyze(line.run())
    assert report.means.values["unsplit_ns"] == 40
    assert report.findings == ()


def test_a_finding_on_touched_numbers_says_so() -> None:
    run = communicating_run().run()
    run.health.add("clock_violation", "clocks disagree", touches=("visible_comm_ns",))
    (finding,) = analyze(run).findings
    assert finding.confidence == "low"
    assert finding.text.endswith("(rests on touched data: clock_violation)")


def test_a_cut_step_is_in_no_mean_so_findings_do_not_rest_on_it() -> None:
    run = communicating_run().run()
    run.health.add("cut_file", "the file ends early", touches=("ledger", "summary"))
    run.health.add("unmatched", "one was recorded on one rank only", touches=("visible_comm_ns", "unsplit_ns"))
    (finding,) = analyze(run).findings
    assert finding.confidence == "high"


def test_idle_and_copies() -> None:
    line = Timeline()
    for k in range(3):
        line.step(100 * k, 100 * k + 100, k)
        line.compute(0, 100 * k, 100 * k + 50)
        line.memcpy(0, 100 * k + 50, 100 * k + 60)
    found = analyze(line.run()).findings
    assert [one.cost_ns_per_step for one in found] == [40, 10]
    assert "nothing is in flight" in found[0].text.lower()
    assert (found[0].rank, found[0].step, found[0].start_ns, found[0].end_ns) == (0, 0, 60, 100)
    assert "memory copies" in found[1].text.lower()


def test_several_late_ranks_with_one_cause_are_one_sentence() -> None:
    """Three of the four ranks of stage 1 compute 6 ms longer, as two of them would be told one by one."""
    (finding,) = about(analyze(pipeline_run(2, 8, 4, slow={4: 6, 5: 6, 6: 6})), "ranks of stage")
    assert finding.text.startswith("3 ranks of stage 1 (4, 5, 6) each keep others waiting, for up to 5.719 ms a step")
    assert "slower compute, 6 ms more in forward than the other stages" in finding.text
    assert (finding.rank, finding.cost_ns_per_step) == (4, 5_718_750)
    two = analyze(pipeline_run(2, 8, 4, slow={4: 6, 5: 6}))
    assert not about(two, "ranks of stage") and [one.rank for one in about_ranks(two)] == [4, 5]


def test_of_many_late_ranks_the_first_are_named() -> None:
    """Ten of the twelve ranks of stage 1 are late: eight by number, the other two counted."""
    late = dict.fromkeys(range(12, 22), 6)
    (finding,) = about(analyze(pipeline_run(2, 8, 12, slow=late)), "ranks of stage")
    assert finding.text.startswith(
        "10 ranks of stage 1 (12, 13, 14, 15, 16, 17, 18, 19 and 2 more) each keep others waiting"
    )


def about(report: Report, words: str) -> list[Finding]:
    return [finding for finding in report.findings if words in finding.text]


def test_ranks_that_take_turns_are_not_blamed_one_by_one() -> None:
    made = PipelineRun(1, 4, 4)
    for number in range(8):
        made.step(number, slow={number % 4: 4})
    report = analyze(made.run())
    assert about_ranks(report)[0].text.startswith("Ranks wait 3 ms a step for each other by turns")
    assert len(about_ranks(report)) == 1


def test_every_finding_has_its_evidence() -> None:
    """Bubble, turns, idle time and copies point at their longest stretch: rank, step, interval."""
    made = PipelineRun(2, 4, 2)
    for number in range(8):
        made.step(number, slow={number % 4: 4}, late={(number + 1) % 4: 2})
    line = Timeline()
    for k in range(3):
        line.step(100 * k, 100 * k + 100, k)
        line.compute(0, 100 * k, 100 * k + 50)
        line.memcpy(0, 100 * k + 50, 100 * k + 60 + k)
    seen = []
    for run in (made.run(), pipeline_run(4, 8, 2), communicating_run().run(), line.run()):
        report = analyze(run)
        for one in report.findings:
            assert one.rank is not None and one.step in report.means.steps, one.text
            assert one.start_ns is not None and one.end_ns is not None and one.end_ns > one.start_ns, one.text
            seen.append(one.text.split()[0] + " " + one.text.split()[1])
    assert {"The pipeline", "Ranks wait", "Nothing is", "Memory copies", "The dp"} <= set(seen)
    copies = next(one for one in analyze(line.run()).findings if "copies" in one.text)
    assert (copies.step, copies.start_ns, copies.end_ns) == (2, 250, 262)


def test_at_most_five_dearest_first() -> None:
    report = analyze(pipeline_run(4, 4, 2, slow={1: 9, 4: 5}, late={6: 8}))
    costs = [finding.cost_ns_per_step for finding in report.findings]
    assert len(costs) <= 5
    assert costs == sorted(costs, reverse=True)


def test_no_whole_step_no_finding() -> None:
    assert analyze(Timeline(world=1).run()).findings == ()


def test_ranks_without_a_step_in_common_are_said_to_be_so() -> None:
    line = Timeline(world=2)
    for rank in (0, 1):
        line.step(0, 100, 4 + rank, ranks=(rank,))
        line.compute(rank, 0, 60)
    report = analyze(line.run())
    assert [item.code for item in report.health.items] == ["uncommon_steps"]
    assert report.findings
    assert all("rests on touched data: uncommon_steps" in finding.text for finding in report.findings)


def test_where_waiting_ends_rests_on_the_clocks() -> None:
    line = communicating_run()
    line.collective("dp", 9, {0: (370, 371), 1: (396, 399)}, stream="dp", axis="dp", strategy="dp", bytes=8)
    report = analyze(line.run())
    assert "clock_violation" in {item.code for item in report.health.items}
    (finding,) = report.findings
    assert "exposed" in finding.text and finding.text.endswith("(rests on touched data: clock_violation)")
    assert finding.confidence == "low"
