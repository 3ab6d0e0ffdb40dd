"""Links, stage balance, operation classes, matching and clocks in the report, remarks: answers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import pipeline_run
from timelines import Timeline

from stepscope.analysis.causes.audit import remarks
from stepscope.analysis.causes.explanations import off_theory
from stepscope.analysis.causes.memory import STATE_COLUMNS, Memory
from stepscope.analysis.causes.volumes import VOLUME_COLUMNS
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import Report, analyze
from stepscope.tracer.schema import GroupMeta, RunMeta


def links_of(report: Report) -> dict[tuple[int, int], dict[str, object]]:
    return {(row["source"], row["target"]): row for row in report.links.to_dict("records")}


# -- links -------------------------------------------------------------------------------------------------------------


def crossed(forward: int, backward: int, steps: int = 4) -> Timeline:
    """Two stages; in each step one message there takes `forward`, one back `backward`, nothing computes meanwhile."""
    line = Timeline(world=2, mesh={"pp": 2})
    line.group("pp", "pp", 0, 1)
    length = 100 + forward + backward
    for k in range(steps):
        at = k * length
        line.step(at, at + length, k)
        line.compute(0, at, at + 50)
        there = (at + 50, at + 50 + forward)
        line.message(there, (at, there[1]), 0, 1, "pp", k, stream="there", bytes=64, op_id=2 * k)
        line.compute(1, there[1], there[1] + 50)
        back = (there[1] + 50, there[1] + 50 + backward)
        line.message(back, (there[1], back[1]), 1, 0, "pp", 1000 + k, stream="back", bytes=64, op_id=2 * k + 1)
    return line


def test_a_slow_link_is_named_with_both_stages_and_its_cost() -> None:
    """24 a step where the other link takes 6: 4 times, 18 beyond its pace; the exposed transfers are not told again."""
    report = analyze(crossed(24, 6).run())
    found = links_of(report)
    assert {key: (row["median_transfer_ns"], row["relative"]) for key, row in found.items()} == {
        (0, 1): (24, 4.0),
        (1, 0): (6, 0.25),
    }
    first = found[0, 1]
    assert (first["source_stage"], first["target_stage"], first["messages_per_step"]) == (0, 1, 1)
    assert (first["target_exposed_ns_per_step"], first["source_exposed_ns_per_step"]) == (24, 24)
    finding = report.findings[0]
    assert finding.text.startswith(
        "The pp link from rank 0 to rank 1 (stage 0 to stage 1) is slow: a message of 64 B takes 24 ns, 4 times"
    )
    assert (finding.cost_ns_per_step, finding.rank, finding.op_id) == (18, 1, 0)
    assert finding.start_ns is not None and finding.end_ns == finding.start_ns + 24
    # what is left of the exposed receive, (24 + 6) / 2 on the mean rank less 18 / 2, is below 5 % of the step of 130
    assert not any("is exposed" in one.text.partition(";")[0] for one in report.findings)


@pytest.mark.parametrize(("forward", "backward"), [(6, 6), (12, 6), (6, 12)])
def test_links_of_about_the_same_pace_are_no_finding(forward: int, backward: int) -> None:
    assert not any("link" in one.text for one in analyze(crossed(forward, backward).run()).findings)


def test_a_hidden_slow_link_costs_nothing() -> None:
    line = crossed(24, 6)
    for rank in (0, 1):
        line.compute(rank, 0, 4 * 130, stream="other")
    assert not any("link" in one.text for one in analyze(line.run()).findings)


def test_around_a_ring_the_link_and_not_its_neighbours() -> None:
    """0 -> 1 takes 40: rank 0 and rank 1 are both in their shift for 40, rank 2 for 4; 2 -> 0 took no longer than 4."""
    line = Timeline(world=3, mesh={"cp": 3})
    line.group("cp", "cp", 0, 1, 2)
    for k in range(3):
        at = 100 * k
        line.step(at, at + 100, k)
        for rank, end in ((0, 90), (1, 90), (2, 54)):
            line.compute(rank, at, at + 50)
            words = {"group": "cp", "seq": k, "axis": "cp", "peer": (rank + 1) % 3, "peer_from": (rank - 1) % 3}
            line.comm(rank, at + 50, at + end, "ring_shift", bytes=8, stream="cp", **words)
    report = analyze(line.run())
    assert {key: row["median_transfer_ns"] for key, row in links_of(report).items()} == {
        (0, 1): 40,
        (1, 2): 4,
        (2, 0): 4,
    }
    assert report.findings[0].text.startswith(
        "The cp link from rank 0 to rank 1 is slow: a message of 8 B takes 40 ns, 10"
    )


def test_a_message_that_was_recorded_at_one_end_tells_no_link() -> None:
    line = crossed(24, 6)
    line.present = (1,)
    assert analyze(line.run()).links.empty


# -- stages ------------------------------------------------------------------------------------------------------------


def test_stage_balance() -> None:
    """Of two stages one computes 5 ms more in each step of 24 and 29."""
    rows = analyze(pipeline_run(2, 8, 1, slow={1: 5})).stages.to_dict("records")
    assert [(row["stage"], row["ranks"]) for row in rows] == [(0, (0,)), (1, (1,))]
    computed = [row["compute_ns_per_step"] for row in rows]
    assert [round(ns / 1e6, 6) for ns in computed] == [24, 29]
    assert [row["relative_compute"] for row in rows] == [pytest.approx(24 / 26.5), pytest.approx(29 / 26.5)]
    assert analyze(pipeline_run(1, 4, 4)).stages.empty


def test_head_of_line_waits_are_counted() -> None:
    """Rank 0 waits hidden for rank 2 in the first operation; that delays its second, in which rank 1 waits 55 for it."""
    line = Timeline(world=3, mesh={"pp": 3})
    line.group("a", "pp", 0, 2)
    line.group("b", "pp", 0, 1)
    line.step(0, 200)
    line.compute(0, 0, 110)
    line.compute(1, 0, 50)
    line.compute(2, 0, 95)
    line.collective("a", 0, {0: (0, 105), 2: (95, 105)}, axis="pp", stream="s", issue_ns=0)
    line.collective("b", 0, {0: (105, 120), 1: (50, 120)}, axis="pp", stream="s", issue_ns=1)
    rows = {row["stage"]: row["head_of_line_ns_per_step"] for row in analyze(line.run()).stages.to_dict("records")}
    assert rows == {0: 0, 1: 55, 2: 0}


# -- classes, matching, clocks -----------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6))
def test_classes_of_a_term_sum_to_it(stages: int, dp: int, slow: int, late: int) -> None:
    report = analyze(pipeline_run(stages, 4, dp, slow={0: slow}, late={stages * dp - 1: late}))
    for term in TERMS[:4]:
        of = report.class_means[report.class_means["term"] == term]
        assert of["ns_per_step"].sum() == pytest.approx(float(report.means.values[f"{term}_ns"]))
        assert of["share"].sum() == pytest.approx(
            float(report.means.values[f"{term}_ns"] / report.means.values["step_ns"])
        )


def test_classes_tell_phase_axis_and_collective() -> None:
    rows = analyze(crossed(24, 6).run()).class_means.to_dict("records")
    told = {(row["term"], row["phase"], row["axis"], row["collective"]): row["ns_per_step"] for row in rows}
    assert told["visible_comm", "", "pp", "receive"] == 15  # 24 on rank 1, 6 on rank 0
    assert told["visible_comm", "", "pp", "send"] == 15
    assert told["bubble", "", "pp", "receive"] == 50
    assert told["compute", "other", "", ""] == 50


def test_matching_and_clocks_are_told_with_their_evidence() -> None:
    line = crossed(24, 6)
    line.comm(0, 530, 540, "all_reduce", group="lonely", seq=0, axis="dp")
    report = analyze(line.run())
    rates = {row["group"]: row for row in report.matching.to_dict("records")}
    assert (rates["pp"]["method"], rates["pp"]["operations"], rates["pp"]["rate"]) == ("seq", 8, 1.0)
    clocks = report.clocks.to_dict("records")
    assert [(row["rank"], row["source"], row["offset_ns"], row["violations"]) for row in clocks] == [
        (0, "host", 0, 0),
        (1, "host", 0, 0),
    ]


# -- remarks -----------------------------------------------------------------------------------------------------------


def audit(verdict: str) -> pd.DataFrame:
    row = {"stage": 1, "axis": "dp", "strategy": "zero1", "collective": "all_gather", "verdict": verdict}
    return pd.DataFrame([{name: row.get(name) for name in VOLUME_COLUMNS}])


def kept(verdict: str) -> Memory:
    row = {"rank": 3, "kind": "optimizer", "bytes": 2, "theory_bytes": 1.0, "verdict": verdict}
    return Memory(pd.DataFrame([row], columns=list(STATE_COLUMNS)), pd.DataFrame())


def test_what_differs_from_theory_is_remarked_and_touches_nothing() -> None:
    meta = RunMeta(run_id="r", name="r", source="measured")
    assert remarks(meta, audit("as predicted"), kept("as predicted")) == []
    volume, memory = remarks(meta, audit("64 bytes more than predicted (50.0%)"), kept("100.0% more than predicted"))
    assert volume.text.endswith("stage 1 zero1 all-gather: 64 bytes more than predicted (50.0%)")
    assert memory.text.endswith("rank 3 optimizer: 100.0% more than predicted")
    assert volume.touches == memory.touches == ()


def test_a_finding_on_exposed_communication_says_when_theory_differs() -> None:
    assert off_theory(audit("as predicted"), "dp", "all_gather") == ""
    assert off_theory(audit("12 operations instead of 6"), "tp", "all_gather") == ""
    words = off_theory(audit("12 operations instead of 6"), "dp", "all_gather")
    assert words == "; not what theory predicts for zero1: 12 operations instead of 6"


def test_tensor_parallel_groups_across_hosts_are_remarked() -> None:
    groups = (GroupMeta("tp_0", "tp", (0, 1)), GroupMeta("tp_1", "tp", (2, 3)), GroupMeta("dp_0", "dp", (0, 2)))
    meta = RunMeta(run_id="r", name="r", source="measured", groups=groups, hosts=("a", "a", "a", "b"))
    (found,) = remarks(meta, audit("as predicted"), kept(""))
    assert (found.code, found.touches) == ("tp_across_hosts", ())
    assert "1 tp group spans hosts (tp_1)" in found.text
    assert remarks(replace(meta, hosts=()), audit(""), kept("")) == []
