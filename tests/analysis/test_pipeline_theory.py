"""The pipeline's bubble: textbook fractions, the plan replayed, and what was measured beside them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import PipelineRun, order_of, pipeline_run
from timelines import Timeline

from stepscope.analysis.causes.actions import actions
from stepscope.analysis.causes.pipeline import pipeline, recognise, theory
from stepscope.analysis.causes.plan import PlanReplay, Slot, replay
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.report import analyze
from stepscope.analysis.run import Run

ONE_TWO = {"forward": Fraction(1), "backward": Fraction(2)}


def played_once(tables: dict[int, list[Slot]], durations: dict[str, Fraction]) -> PlanReplay | None:
    """One step, with exact durations."""
    return replay(tables, {phase: np.array([one], object) for phase, one in durations.items()})


def tables(schedule: str, stages: int, microbatches: int) -> dict[int, list[Slot]]:
    return {
        stage: [Slot(phase, 0, m) for phase, m in order_of(schedule, stage, stages, microbatches)]
        for stage in range(stages)
    }


def test_the_worked_example() -> None:
    # definitions: 1F1B, P 4, M 8, forward 1, backward 2: step 33, bubble 9 a stage, 27.3 % of the step, 37.5 % of the work
    played = played_once(tables("1f1b", 4, 8), ONE_TWO)
    assert played is not None
    assert played.makespan.tolist() == [33]
    assert [work.tolist() for work in played.work.values()] == [[24]] * 4
    _, stage, start, end, _ = played.waits
    assert [sum((end - start)[stage == one]) for one in range(4)] == [9, 9, 9, 9]
    assert theory("1f1b", 4, 8, 1, {}) == (Fraction(9, 33), Fraction(9, 24))


@settings(deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from(["naive", "gpipe", "1f1b"]),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_equal_stages_and_free_communication_give_exactly_the_textbook(
    p: int, m: int, schedule: str, f: int, b: int
) -> None:
    played = played_once(tables(schedule, p, m), {"forward": Fraction(f), "backward": Fraction(b)})
    assert played is not None
    of_step, of_work = theory(schedule, p, m, 1, {})
    work = m * (f + b)
    bubble = played.makespan[0] - work
    assert bubble / played.makespan[0] == of_step
    assert bubble / Fraction(work) == of_work


@pytest.mark.parametrize(
    ("schedule", "chunks", "of_step", "of_work"),
    [
        ("naive", 1, Fraction(3, 4), Fraction(3)),
        ("gpipe", 1, Fraction(3, 11), Fraction(3, 8)),
        ("interleaved", 2, Fraction(3, 19), Fraction(3, 16)),
        ("zb-h1", 1, Fraction(3, 27), Fraction(3, 24)),  # F = B = W = 1: a third of 1F1B's 9 units, work 24
        (None, 1, None, None),
        ("something else", 1, None, None),
    ],
)
def test_theory_of_four_stages_and_eight_microbatches(
    schedule: str | None, chunks: int, of_step: Fraction | None, of_work: Fraction | None
) -> None:
    thirds = dict.fromkeys(("forward", "backward", "weight_grad"), Fraction(1))
    assert theory(schedule, 4, 8, chunks, thirds) == (of_step, of_work)


def test_an_interleaved_table_runs_over_virtual_stages() -> None:
    # 2 stages, 2 chunks, 2 microbatches, all forwards, then all backwards in reverse
    forwards = [Slot("forward", c, m) for c in range(2) for m in range(2)]
    backwards = [Slot("backward", c, m) for c in (1, 0) for m in range(2)]
    played = played_once({0: forwards + backwards, 1: forwards + backwards}, dict.fromkeys(ONE_TWO, Fraction(1)))
    assert played is not None
    # (P-1)/v of a stage's forward and backward: 1 + 1 beside 8 of work
    assert played.makespan.tolist() == [10]


def test_a_table_that_cannot_run_is_not_guessed() -> None:
    assert played_once({0: [Slot("backward", 0, 0), Slot("forward", 0, 0)], 1: []}, ONE_TWO) is None


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(2, 9), st.sampled_from(["naive", "gpipe", "1f1b"]))
def test_schedules_are_recognised_by_their_rows(p: int, m: int, schedule: str) -> None:
    assert recognise(tables(schedule, p, m)) == schedule


def test_what_is_no_known_schedule_stays_unnamed() -> None:
    odd = tables("1f1b", 2, 3)
    odd[1] = odd[1][::-1]
    assert recognise(odd) is None
    assert recognise({}) is None


def one_pipeline_step() -> Run:
    """The worked example as rows: one step of 33 on each of 4 stages, a pipeline barrier closing it."""
    made = PipelineRun(4, 8, unit=1)
    made._pipeline(0, 0, {}, {"forward": 1, "backward": 2})
    line: Timeline = made.line
    line.group("pp", "pp", 0, 1, 2, 3)
    line.collective("pp", 0, {rank: (end, 33) for rank, end in made.clock.items()}, "barrier", stream="end", axis="pp")
    line.step(0, 33)
    return line.run()


def test_the_measured_bubble_of_the_worked_example() -> None:
    run = one_pipeline_step()
    run.meta = replace(run.meta, pipeline_table=PipelineRun(4, 8).table())
    result = analyze(run).pipeline
    assert (result.schedule, result.stages, result.microbatches) == ("1f1b", 4, 8)
    assert result.bubble_of_step == 9 / 33
    assert result.bubble_of_work == 9 / 24
    assert result.theory_of_step == 9 / 33
    assert result.theory_of_work == 9 / 24
    assert result.planned_of_step == 9 / 33


def test_actions_are_the_microbatches_of_each_step() -> None:
    run = pipeline_run(2, 3, steps=2)
    rows = actions(run, decompose(run).windows)
    assert len(rows) == 2 * 2 * 3 * 2
    assert set(rows[rows["phase"] == "backward"]["compute_ns"]) == {2_000_000}
    first = rows[(rows["rank"] == 0) & (rows["step"] == 1)]
    assert list(first["phase"]) == ["forward", "forward", "backward", "forward", "backward", "backward"]


def test_without_stages_there_is_no_pipeline() -> None:
    line = Timeline(world=2, mesh={"dp": 2})
    line.step(0, 10)
    line.compute(0, 0, 5)
    run = line.run()
    found = decompose(run)
    result = pipeline(run.meta, found.ledger, actions(run, found.windows))
    assert result.to_json() == {
        "schedule": None,
        "stages": 1,
        "microbatches": None,
        "bubble_of_step": None,
        "bubble_of_work": None,
        "theory_of_step": None,
        "theory_of_work": None,
        "planned_of_step": None,
    }


def test_messages_that_take_time_are_no_waits() -> None:
    """Forward 2, backward 4, messages 1: stage 0 computes 0-2 and 10-14, stage 1 from 3 to 9; 2-3 and 9-10 are transfer."""
    times = {name: np.array([2 * ns], np.int64) for name, ns in (("forward", 1), ("backward", 2))}
    played = replay(tables("1f1b", 2, 1), times, np.array([1], np.int64))
    assert played is not None and played.makespan.tolist() == [14]
    waits = played.waits
    found = zip(waits.stage.tolist(), waits.start.tolist(), waits.end.tolist(), waits.on.tolist(), strict=True)
    assert sorted(found) == [(0, 2, 9, 1), (1, 0, 2, 0), (1, 9, 14, 0)]
