"""Simulated runs, from the command line to the page: every duration is whole, so every answer is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepscope
from stepscope.__main__ import status_of
from stepscope.analysis.causes.pipeline import theory
from stepscope.analysis.opened import OpenedRun
from stepscope.analysis.records import TERMS
from stepscope.commands import load
from stepscope.dashboard.catalogue import Catalogue
from stepscope.dashboard.router import page_of
from stepscope.exit_codes import ExitCode
from stepscope.tracer.schema import RUN_FILE

MS = 10**6
TERM_COLUMNS = [f"{term}_ns" for term in TERMS]

Simulate = Callable[..., Path]


def simulated(path: Path, *arguments: str) -> Path:
    load("schedule").main(["-q", "--out", str(path), *arguments], standalone_mode=False)
    return path


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Writes the run `name` of these arguments, quietly."""

    def write(name: str, *arguments: str) -> Path:
        path = simulated(tmp_path / name, *arguments)
        capsys.readouterr()
        return path

    return write


def terms_of(opened: OpenedRun, rank: int, step: int = 0) -> dict[str, int]:
    """step, then every term that is not 0, of one row of the ledger, in ms."""
    ledger = opened.report.ledger
    (row,) = ledger[(ledger["rank"] == rank) & (ledger["step"] == step)].to_dict("records")
    assert sum(row[name] for name in TERM_COLUMNS) == row["step_ns"]
    found = {name.removesuffix("_ns"): row[name] / MS for name in ("step_ns", *TERM_COLUMNS)}
    return {name: ms for name, ms in found.items() if ms}


def as_fraction(ledger: pd.DataFrame) -> Fraction:
    return Fraction(int(ledger["bubble_ns"].sum()), int(ledger["step_ns"].sum()))


# -- equal stages, free messages ---------------------------------------------------------------------------------------

TEXTBOOK = {  # 4 stages, 8 microbatches, forward 1 ms, backward 2 ms: step and bubble of every stage, ms
    "naive": (96, 72),  # 8 (P f + P b); 1 - 1/P
    "gpipe": (33, 9),  # (M + P - 1) (f + b)
    "1f1b": (33, 9),
    "interleaved": (28.5, 4.5),  # two chunks: half the bubble
    "zb-h1": (27, 3),  # f = b = w = 1: a third
}


@pytest.mark.parametrize("schedule", TEXTBOOK)
def test_equal_stages_have_the_bubble_of_the_textbook_in_every_step(simulate: Simulate, schedule: str) -> None:
    opened = stepscope.open(simulate("even", "--schedule", schedule))
    step, bubble = TEXTBOOK[schedule]
    for rank in range(4):
        for number in range(4):
            assert terms_of(opened, rank, number) == {"step": step, "compute": 24, "bubble": bubble}
    flow = opened.report.pipeline
    assert (flow.schedule, flow.stages, flow.microbatches) == (schedule, 4, 8)
    assert flow.bubble_of_step == flow.theory_of_step == flow.planned_of_step == bubble / step
    assert flow.bubble_of_work == flow.theory_of_work == bubble / 24
    assert opened.health.status == "ok" and opened.health.items == []
    (finding,) = opened.report.findings
    assert finding.text.startswith("The pipeline bubble") and finding.cost_ns_per_step == bubble * MS
    matching = opened.report.matching
    assert (matching["method"] == "seq").all() and (matching["rate"] == 1).all()


@pytest.mark.parametrize("gone", ["facts", "run.json"])
@pytest.mark.parametrize("schedule", TEXTBOOK)
def test_the_schedule_is_recognised_where_run_json_does_not_tell_it(
    simulate: Simulate, schedule: str, gone: str
) -> None:
    path = simulate("even", "--schedule", schedule)
    if gone == "facts":
        said = json.loads((path / RUN_FILE).read_text())
        (path / RUN_FILE).write_text(json.dumps({**said, "parallel": {}, "train": {}, "pipeline_table": []}))
    else:
        (path / RUN_FILE).unlink()
    flow = stepscope.open(path).report.pipeline
    step, bubble = TEXTBOOK[schedule]
    assert (flow.schedule, flow.stages, flow.microbatches) == (schedule, 4, 8)
    assert flow.bubble_of_step == flow.theory_of_step == bubble / step


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(TEXTBOOK)), st.integers(2, 5), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
def test_any_equal_pipeline_has_the_bubble_of_the_textbook(
    tmp_path_factory: pytest.TempPathFactory, schedule: str, stages: int, groups: int, forward: int, half: int
) -> None:
    """Backward is 2 `half`, and a gradient of the weights as long as its own half (zb-h1 needs no more than f, b = w)."""
    microbatches = groups * stages
    forward = half if schedule == "zb-h1" else forward
    times = ["--forward", str(2 * forward), "--backward", str(4 * half), "--unit-ms", "0.000001"]
    shape = ["--schedule", schedule, "--pp", str(stages), "--microbatches", str(microbatches)]
    path = simulated(tmp_path_factory.mktemp("any") / "run", *times, *shape, "--steps", "2")
    ledger = stepscope.open(path).report.ledger
    lengths = {"forward": Fraction(2 * forward), "backward": Fraction(2 * half), "weight_grad": Fraction(2 * half)}
    of_step, _ = theory(schedule, stages, microbatches, 2 if schedule == "interleaved" else 1, lengths)
    assert as_fraction(ledger) == of_step
    assert (ledger["compute_ns"] == microbatches * (2 * forward + 4 * half)).all()
    assert (ledger["compute_ns"] + ledger["bubble_ns"] == ledger["step_ns"]).all()


def test_one_stage_has_no_bubble_and_no_communication(simulate: Simulate) -> None:
    opened = stepscope.open(simulate("one", "--pp", "1"))
    assert terms_of(opened, 0) == {"step": 24, "compute": 24}
    assert opened.report.pipeline.stages == 1 and opened.report.overlap["overlap_efficiency"].isna().all()


def test_a_time_that_is_no_whole_number_of_ns_is_rounded_before_anything_runs(simulate: Simulate) -> None:
    # a third of 1 ms three times: 333 333 ns each; of 2 ms: 666 667 ns
    run = stepscope.open(simulate("thirds", "--pp", "2", "--schedule", "interleaved", "--chunks", "3", "--steps", "1"))
    compute = 8 * 3 * (333_333 + 666_667)
    assert run.report.ledger["compute_ns"].tolist() == [compute, compute]
    # (P - 1) / (v M): one forward and one backward of a chunk
    assert run.report.ledger["bubble_ns"].tolist() == [1_000_000, 1_000_000]


# -- messages that take time ---------------------------------------------------------------------------------------------


def test_messages_are_split_into_waiting_and_transferring(simulate: Simulate) -> None:
    """Two stages, one microbatch, messages of 0.5 ms, in ms from where stage 0 begins a step:

    stage 0   F 0-1                     B 5-7      sends 1-1.5, its receive (posted at 0) has its sender at 4.5
    stage 1           F 1.5-2.5 B 2.5-4.5          sends 4.5-5 and waits for that: its step is from 5 to 12
    """
    opened = stepscope.open(simulate("slow", "--pp", "2", "--microbatches", "1", "--transfer", "0.5"))
    for rank in (0, 1):
        assert terms_of(opened, rank) == {"step": 7, "compute": 3, "visible_comm": 1, "bubble": 3}
    messages = opened.collectives()
    assert (messages["collective"] == "send_receive").all() and (messages["bytes"] == 1 << 20).all()
    assert set(messages["transfer_ns"]) == {MS // 2}


@pytest.mark.parametrize("transfer", ["0.1", "0.25"])
@pytest.mark.parametrize("schedule", TEXTBOOK)
def test_messages_make_no_stragglers_of_equal_stages(simulate: Simulate, schedule: str, transfer: str) -> None:
    """What messages add to the waits is the schedule's with such messages, nobody's fault."""
    report = stepscope.open(simulate("slow", "--schedule", schedule, "--transfer", transfer)).report
    assert report.health.status == "ok" and report.findings[0].text.startswith("The pipeline bubble takes")
    assert not any("keeps others waiting" in one.text or "late ranks" in one.text for one in report.findings)
    assert all(one.cost_ns_per_step <= float(transfer) * MS for one in report.stragglers)  # at most one message a step


# -- uneven stages -------------------------------------------------------------------------------------------------------


def test_a_slow_stage_costs_what_it_must(simulate: Simulate) -> None:
    """1F1B, two stages, four microbatches, forward 1, backward 2 ms; stage 1 takes twice as long.

    stage 0   F 0-1 F 1-2       B 7-9 F 9-10    B 13-15 F 15-16    B 19-21    B 25-27     work 12, waits 5 + 3 + 3 + 4 = 15
    stage 1   F 1-3 B 3-7 F 7-9 B 9-13 F 13-15 B 15-19 F 19-21 B 21-25                   work 24, waits 25 - 28: 3

    Step k + 1 of stage 0 begins at 27. Equal stages: step 15, work 12, bubble 3.
    """
    shape = ("--pp", "2", "--microbatches", "4")
    even, uneven = simulate("even", *shape), simulate("uneven", *shape, "--slow-stage", "1")
    opened = stepscope.open(uneven)
    assert terms_of(opened, 0) == {"step": 27, "compute": 12, "bubble": 15}
    assert terms_of(opened, 1) == {"step": 27, "compute": 24, "bubble": 3}
    first, second = opened.report.findings
    # with mean durations (1.5 and 3 ms) stage 0 would wait 3 + 1.5 for stage 1 in any case: 10.5 are beyond that
    assert (first.rank, first.cost_ns_per_step) == (
        1,
        10_500_000,
    ) and "slower compute, 12 ms more (8 ms of it in backward) than the other stages" in first.text
    # 9 ms of mean bubble, of which late ranks add 10.5 / 2
    assert second.text.startswith("The pipeline bubble takes 3.75 ms") and "lengthen it by 5.25 ms" in second.text
    assert opened.report.stragglers[0].rank == 1 and opened.report.stragglers[0].cause == "slower compute"
    balance = opened.report.stages.set_index("stage")["relative_compute"]
    assert balance.tolist() == [12 / 18, 24 / 18]

    compared = stepscope.open(even).compare(opened)
    change = compared.set_index("name")["delta_ns_per_step"].to_dict()
    assert change.pop("step") == 12 * MS == sum(change.values())
    assert {term: ns for term, ns in change.items() if ns} == {"compute": 6 * MS, "bubble": 6 * MS}


def test_a_rank_that_is_only_delayed_is_told_with_the_one_that_delays_it(simulate: Simulate) -> None:
    report = stepscope.open(simulate("slow", "--schedule", "interleaved", "--slow-stage", "1")).report
    assert "; rank 0 (pp0), which it delays, passes on " in report.findings[0].text
    delayed = {one.rank: one for one in report.stragglers}[0]
    assert delayed.cause is None and 0 < delayed.cost_ns_per_step < report.findings[0].cost_ns_per_step


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("stage", range(4))
def test_the_slow_stage_comes_first(simulate: Simulate, schedule: str, stage: int) -> None:
    report = stepscope.open(simulate("slow", "--schedule", schedule, "--slow-stage", str(stage))).report
    first, *others = report.findings
    assert first.rank == stage and "slower compute, 24 ms more" in first.text
    assert not any("keeps others waiting" in one.text for one in others)  # no other rank does anything longer
    assert (report.ledger[TERM_COLUMNS].sum(axis=1) == report.ledger["step_ns"]).all()
    compute = report.ledger.groupby("rank")["compute_ns"].max()
    assert compute.tolist() == [48 * MS if rank == stage else 24 * MS for rank in range(4)]
    assert (report.ledger[["imbalance_ns", "idle_ns", "visible_comm_ns"]] == 0).all(axis=None)


def test_a_slow_link_is_named_with_what_it_costs(simulate: Simulate) -> None:
    """One microbatch at a time: each of 8 crosses the link once forwards, and everybody waits for it: 8 x 1 ms."""
    shape = ("--schedule", "naive", "--transfer", "0.25")
    even, uneven = simulate("even", *shape), simulate("uneven", *shape, "--slow-link", "1-2")
    opened = stepscope.open(uneven)
    (link,) = [one for one in opened.report.findings if "link" in one.text]
    assert "from rank 1 to rank 2" in link.text and "takes 1.25 ms, 5 times" in link.text
    assert link.cost_ns_per_step == 8 * MS
    change = stepscope.open(even).compare(opened).set_index("name")["delta_ns_per_step"]
    assert change["step"] == 8 * MS and change.drop("step").sum() == 8 * MS and change["compute"] == 0


# -- like any other run --------------------------------------------------------------------------------------------------


def test_every_command_and_the_page_take_it(
    simulate: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    even, uneven = simulate("even", "--steps", "2"), simulate("uneven", "--steps", "2", "--slow-stage", "2")
    json_file, html_file = tmp_path / "r.json", tmp_path / "r.html"
    for arguments in (
        ["analyze", str(even), "--json", str(json_file), "--html", str(html_file)],
        ["doctor", str(even)],
        ["compare", str(even), str(uneven)],
    ):
        assert status_of(arguments) == ExitCode.OK
        assert "simulated" in capsys.readouterr().out or arguments[0] == "compare"
    said = json.loads(json_file.read_text())
    assert said["run"]["source"] == "simulated" and said["run"]["mesh"]["pp"] == 4 and said["health"]["status"] == "ok"
    assert "simulated" in html_file.read_text()
    catalogue = Catalogue(tmp_path)
    assert str(page_of(catalogue, "/", "")).count("ss-source-simulated") == 2
    opening = catalogue.open("uneven")
    assert opening is not None and opening.done.wait(60) and opening.loaded is not None, opening
    page, crumbs, _ = page_of(catalogue, "/run/uneven", "")
    assert "ss-source-simulated" in str(crumbs) and "This run cannot be shown" not in str(page)
    assert "simulated" in str(page_of(catalogue, "/compare", "?runs=even,uneven")[0])


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert status_of(["schedule", "--out", str(out), "--steps", "1"]) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"simulated run of 1 step in {out}"
    assert printed.err == f"Next: stepscope analyze {out}\n"
    assert status_of(["schedule", "--out", str(out)]) == ExitCode.USAGE  # no recorded run is ever overwritten
    assert len(stepscope.open(out).report.ledger) == 4


REFUSED: list[tuple[list[str], str]] = [
    (["--slow-stage", "4"], "slow-stage 4 is not among the 4 stages: take 0 to 3"),
    (["--slow-stage", "-1"], "slow-stage -1 is not among the 4 stages: take 0 to 3"),
    (["--slow-stage", "1", "--slow-factor", "0"], "take a positive factor"),
    (["--slow-link", "0-4"], "slow-link 4 is not among the 4 stages"),
    (["--slow-link", "0-2"], "slow-link 0-2: stage 0 sends nothing to stage 2"),
    (["--slow-link", "0"], "link '0' is not two ranks"),
    (["--out", "run", "--steps", "0"], "0 steps"),
    (["--out", "run", "--steps", "1000"], "take 1 to 256"),
    (["--out", "run", "--unit-ms", "-1"], "cannot be recorded: take a longer unit"),
    (["--out", "run", "--unit-ms", "0"], "cannot be recorded: take a longer unit"),
    (["--out", "run", "--unit-ms", "0.0000001"], "cannot be recorded: take a longer unit"),
    (["--out", "run", "--message-bytes", "6"], "take a multiple of 4"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match=message):
        load("schedule").main(["-q", *arguments], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_writes_the_same_rows(simulate: Simulate) -> None:
    files: list[dict[str, Any]] = []
    for name in ("a", "b"):
        path = simulate(name, "--steps", "2", "--transfer", "0.1")
        files.append({file.name: file.read_bytes() for file in path.glob("rank_*")})
    assert files[0] == files[1] and len(files[0]) == 4
