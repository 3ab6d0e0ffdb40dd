"""Idle time explained, compute beside communication, contention: answers by hand, then real traces."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import Timeline

from stepscope.analysis.causes.idle import REASONS
from stepscope.analysis.ingest import open_run
from stepscope.analysis.report import Report, analyze

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"


def reasons(report: Report, rank: int = 0) -> dict[str, int]:
    """Idle time of the first step by reason, those that are not 0."""
    row: dict[str, Any] = report.idle[report.idle["rank"] == rank].to_dict("records")[0]
    assert sum(row[f"{reason}_ns"] for reason in REASONS) == row["idle_ns"]
    return {reason: row[f"{reason}_ns"] for reason in REASONS if row[f"{reason}_ns"]}


def launched(*kernels: tuple[int, int, int]) -> Timeline:
    """A device that runs kernels (call, start, end)."""
    line = Timeline()
    line.step(0, 1000)
    for number, (call, start, end) in enumerate(kernels):
        line.launch(0, call, number)
        line.compute(0, start, end, launch_id=number)
    return line


def test_the_host_launches_too_late():
    """30-50: the kernel at 50 was launched at 40, when the device had already run dry; 60-80 it had been launched."""
    assert reasons(analyze(launched((0, 10, 30), (40, 50, 60), (5, 80, 100)).run())) == {
        "launch_bound": 20,
        "device_gap": 20,
    }


def test_a_device_that_begins_late_what_was_launched_in_time_is_held():
    """10 000 between two kernels is what a device needs at most; 10 001 is more."""
    assert reasons(analyze(launched((0, 10, 30), (5, 10_030, 10_040), (6, 20_041, 20_050)).run())) == {
        "device_gap": 10_000,
        "held": 10_001,
    }


def test_a_call_that_waits_for_the_device_stops_the_host():
    line = launched((0, 10, 100), (110, 120, 130))
    line.row(0, "host", 85, 105, name="cudaDeviceSynchronize")
    assert reasons(analyze(line.run())) == {"synchronisation": 20}


def test_without_launches_rows_of_the_host_tell_and_then_the_place_in_the_step():
    line = Timeline()
    line.step(0, 100)
    line.row(0, "host", 5, 15, name="load data")
    line.compute(0, 20, 40)
    line.compute(0, 50, 60)
    assert reasons(analyze(line.run())) == {"host_work": 10, "head": 10, "unexplained": 10, "tail": 40}


def test_a_wait_for_what_has_not_begun():
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 100)
    for rank in (0, 1):
        line.compute(rank, 0, 40)
        line.compute(rank, 80, 100)
        line.wait(rank, 40, 80, 7)
    line.collective("dp", 0, {0: (60, 80), 1: (60, 80)}, axis="dp", op_id=7)
    assert reasons(analyze(line.run())) == {"queued": 20}


def test_from_the_issue_of_a_communication_on_it_is_being_handed_over():
    """40-45 nothing tells; issued at 45, begun at 50, the rank goes on at 52: 45-50 is the hand-over."""
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 100)
    for rank in (0, 1):
        line.compute(rank, 0, 40)
        line.compute(rank, 52, 100)
    line.collective("dp", 0, {0: (50, 60), 1: (50, 60)}, axis="dp", issue_ns=45)
    assert reasons(analyze(line.run())) == {"unexplained": 5, "hand_over": 5}


def test_a_step_without_any_row_is_all_head():
    line = Timeline()
    line.step(0, 50)
    line.step(50, 100, 1)
    line.compute(0, 60, 100)
    found = analyze(line.run()).idle.to_dict("records")
    assert [row["idle_ns"] for row in found] == [50, 10]
    assert [row["head_ns"] for row in found] == [50, 10]


spans = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(spans, spans, spans, st.booleans())
def test_each_idle_instant_has_one_reason(
    work: list[tuple[int, int]], host: list[tuple[int, int]], stops: list[tuple[int, int]], calls: bool
):
    """Instant by instant: idle as the ledger has it; `host_work` only where the host is recorded at work."""
    line = Timeline()
    line.step(0, 60)
    line.step(60, 130, 1)
    for number, (start, length) in enumerate(work):
        line.compute(0, start, start + length, **({"launch_id": number} if calls else {}))
        if calls:
            line.launch(0, max(start - 10, 0), number)
    for start, length in host:
        line.row(0, "host", start, start + length, name="load data")
    for start, length in stops:
        line.row(0, "host", start, start + length, name="cudaStreamSynchronize")
    report = analyze(line.run())
    ledger = {(row["rank"], row["step"]): row["idle_ns"] for row in report.ledger.to_dict("records")}
    for row in report.idle.to_dict("records"):
        assert row["idle_ns"] == ledger[row["rank"], row["step"]]
        assert sum(row[f"{reason}_ns"] for reason in REASONS) == row["idle_ns"]
        if not host:
            assert row["host_work_ns"] == 0
        if not stops:
            assert row["synchronisation_ns"] == 0
        if not calls:
            assert row["launch_bound_ns"] == 0


def test_compute_per_transfer_of_each_axis():
    """60 of compute, 20 transferred on dp beside it and 10 of a pipeline message: 3 and 6; a wait is no transfer."""
    line = Timeline(world=2, mesh={"pp": 2})
    line.group("pp", "pp", 0, 1)
    line.group("dp", "dp", 0, 1)
    line.step(0, 100)
    for rank in (0, 1):
        line.compute(rank, 0, 60)
    line.collective("dp", 0, {0: (10, 50), 1: (30, 50)}, axis="dp")
    line.message((70, 80), (60, 80), 0, 1, "pp")
    rows = analyze(line.run()).ratios.to_dict("records")
    assert rows == [
        {"axis": "dp", "compute_ns_per_step": 60, "transfer_ns_per_step": 20, "ratio": 3},
        {"axis": "pp", "compute_ns_per_step": 60, "transfer_ns_per_step": 10, "ratio": 6},
    ]


def test_contention_is_weighed_over_ranks_and_blocks_are_no_kernels():
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    line.step(0, 1000)
    line.collective("dp", 0, {0: (100, 200), 1: (100, 200)}, axis="dp")
    for rank, inside in ((0, 60), (1, 80)):
        line.compute(rank, 110, 110 + inside)
        line.compute(rank, 300, 320 + 20 * rank)
        line.compute(rank, 195, 205, name="layer.0", phase="forward")
        line.compute(rank, 400, 500, name="layer.0", phase="forward")
    (row,) = analyze(line.run()).contention.to_dict("records")
    assert (row["name"], row["ranks"], row["inside"], row["outside"]) == ("gemm", 2, 2, 2)
    assert (row["inside_ns"], row["outside_ns"], row["contention"]) == (70, 30, pytest.approx(7 / 3))
    assert row["outside_spread"] == pytest.approx(1 / 3)  # alone they run 20 and 40: 10 off a mean of 30
    assert row["extra_ns_per_step"] == 40  # (70 - 30) x 2 kernels on 2 ranks


@pytest.mark.parametrize("trace", ["kineto-dlrm-8rank", "kineto-mi300-resnet", "kineto-cpu-only"])
def test_real_traces(corpus: Path, trace: str):
    report = analyze(open_run(corpus / trace))
    assert (report.idle[[f"{reason}_ns" for reason in REASONS]].sum(axis=1) == report.idle["idle_ns"]).all()
    assert report.idle["idle_ns"].tolist() == report.ledger["idle_ns"].tolist()
    explained = 1 - report.idle["unexplained_ns"].sum() / report.idle["idle_ns"].sum()
    assert explained > 0.95  # they carry launches and host rows


def test_a_recorded_run(tmp_path: Path):
    report = analyze(open_run(Path(shutil.copytree(SAMPLES / "dp2_pp2_1f1b", tmp_path / "run"))))
    assert report.idle["idle_ns"].tolist() == report.ledger["idle_ns"].tolist()
    assert set(report.ratios["axis"]) == {"dp", "pp"} and (report.ratios["ratio"] > 0).all()
