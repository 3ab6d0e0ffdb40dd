"""Interleaved and zero-bubble pipelines in the report: named, measured, beside theory and plan, to the last digit.

Runs in virtual time, made from the tables that the runtime would follow: equal parts and free messages, so that measured,
planned and textbook bubble are one number.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import Timeline

from stepscope.analysis.causes.actions import actions
from stepscope.analysis.causes.pipeline import observed_tables, recognise, theory
from stepscope.analysis.causes.plan import Slot, replay
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.report import analyze
from stepscope.analysis.run import Run
from stepscope.parallel_runtime.pp.schedules import Place, source_of
from stepscope.parallel_runtime.pp.validator import Timed, plan, simulate
from stepscope.tracer.schema import ActionMeta

THIRDS = dict.fromkeys(("forward", "backward", "weight_grad"), 1)


def timed_of(schedule: str, stages: int, microbatches: int, chunks: int, times: dict[str, int]) -> list[list[Timed]]:
    return simulate(plan(schedule, stages, microbatches, chunks), times, chunks=chunks)


def recorded(
    schedule: str, stages: int, microbatches: int, chunks: int = 1, times: dict[str, int] = THIRDS, given: bool = True
) -> Run:
    """One step of a pipeline as rows, closed by a barrier of the pipeline; `given`: run.json has schedule and table."""
    timed = timed_of(schedule, stages, microbatches, chunks, times)
    end = int(max(stage[-1].end for stage in timed))
    line = Timeline(world=stages, mesh={"pp": stages}, origin=10**18)
    line.group("pp", "pp", *range(stages))
    for stage, rows in enumerate(timed):
        before = 0
        for number, row in enumerate(rows):
            start, close, where = int(row.start), int(row.end), row.action
            if start > before:
                source = source_of(where.phase, Place(stage, where.chunk), stages, chunks)
                assert source is not None
                words = {"seq": 1000 * stage + number, "stream": f"pp.{where.phase}", "op_id": number + 1, "bytes": 64}
                line.message((start, start), (before, start), source.stage, stage, "pp", **words)
            place = {"phase": where.phase, "stage": stage, "chunk": where.chunk, "microbatch": where.microbatch}
            line.compute(stage, start, close, name="block", **place)
            before = close
    parts = {stage: (int(rows[-1].end), end) for stage, rows in enumerate(timed)}
    line.collective("pp", 99999, parts, "barrier", stream="end", axis="pp")
    line.step(0, end)
    run = line.run()
    if given:
        tables = tuple(tuple(ActionMeta(*row.action[1:]) for row in rows) for rows in timed)
        parallel = {"pp": stages, "schedule": schedule, "chunks": chunks}
        run.meta = replace(run.meta, pipeline_table=tables, parallel=parallel, train={"microbatches": microbatches})
    return run


@pytest.mark.parametrize("given", [True, False], ids=["run.json says", "recognised"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "times", "bubble", "work"),
    [
        ("interleaved", 2, {"forward": 1, "backward": 2}, 9, 48),  # chunks of half the size: 1F1B has 18 of these units
        ("interleaved", 3, {"forward": 1, "backward": 2}, 9, 72),
        ("zb-h1", 1, THIRDS, 3, 24),  # a third of the 9 that 1F1B has
        ("zb-h1", 1, {"forward": 2, "backward": 2, "weight_grad": 1}, 9, 40),
    ],
)
def test_measured_planned_and_textbook_are_one_number(
    schedule: str, chunks: int, times: dict[str, int], bubble: int, work: int, given: bool
) -> None:
    found = analyze(recorded(schedule, 4, 8, chunks, times, given)).pipeline
    assert (found.schedule, found.stages, found.microbatches) == (schedule, 4, 8)
    assert found.bubble_of_step == bubble / (bubble + work)
    assert found.bubble_of_work == bubble / work
    assert found.theory_of_step == found.bubble_of_step
    assert found.theory_of_work == found.bubble_of_work
    assert found.planned_of_step == (found.bubble_of_step if given else None)


def test_actions_carry_chunks_and_weight_gradients() -> None:
    run = recorded("interleaved", 2, 2, 2, {"forward": 1, "backward": 2})
    rows = actions(run, decompose(run).windows)
    first = observed_tables(rows, 0)[0]
    assert first == [
        Slot(*row.action[1:]) for row in timed_of("interleaved", 2, 2, 2, {"forward": 1, "backward": 2})[0]
    ]
    assert {slot.chunk for slot in first} == {0, 1}
    split = recorded("zb-h1", 2, 3)
    rows = actions(split, decompose(split).windows)
    assert set(rows["phase"]) == {"forward", "backward", "weight_grad"}
    assert recognise(observed_tables(rows, 0)) == "zb-h1"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["interleaved", "zb-h1"]),
    st.integers(2, 5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_the_replay_of_a_plan_is_the_simulation_and_the_textbook(
    schedule: str, stages: int, groups: int, chunks: int, forward: int, backward: int, weight: int
) -> None:
    """Both virtual times are written apart; fewer microbatches than stages included; W no longer than F or B."""
    microbatches, chunks = (groups * stages, chunks) if schedule == "interleaved" else (groups, 1)
    times = {"forward": max(forward, weight), "backward": max(backward, weight), "weight_grad": weight}
    timed = timed_of(schedule, stages, microbatches, chunks, times)
    tables = {stage: [Slot(*row.action[1:]) for row in rows] for stage, rows in enumerate(timed)}
    exact = {name: Fraction(time) for name, time in times.items()}
    played = replay(tables, {name: np.array([time], object) for name, time in exact.items()})
    assert played is not None
    assert played.makespan[0] == max(rows[-1].end for rows in timed)
    of_step, of_work = theory(schedule, stages, microbatches, chunks, exact)
    work = played.work[0][0]
    bubble = played.makespan[0] - work
    assert (bubble / played.makespan[0], bubble / work) == (of_step, of_work)
