"""A schedule in virtual time: many steps at once beside one action after the other."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import pipeline_run
from plain_blame import plain_allowance, plain_replay

from stepscope.analysis.causes.actions import WORK_PHASES, actions, mean_durations, step_durations
from stepscope.analysis.causes.blame import Allowance
from stepscope.analysis.causes.evidence import allowances, structural
from stepscope.analysis.causes.pipeline import alike, observed_tables
from stepscope.analysis.causes.plan import Slot, replay
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.report import analyze

Tables = dict[int, list[Slot]]


def free_at(allowance: Allowance, stage: int, on: int, step: int) -> int:
    """One value."""
    return int(allowance.at(*(np.array([one]) for one in (stage, on, step)))[0])


@st.composite
def schedules(draw: st.DrawFn) -> Tables:
    """Tables of one to four stages with chunks in any order at all: most can run, some not."""
    stages = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    chunks, count = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    phases = WORK_PHASES[: draw(st.integers(1, 3))]
    every = [Slot(phase, chunk, m) for phase in phases for m in range(count) for chunk in range(chunks)]
    usual = draw(st.booleans())
    for_all = every if usual else draw(st.permutations(every))
    return {stage: list(for_all if draw(st.integers(0, 3)) else draw(st.permutations(every))) for stage in stages}


DURATIONS = st.lists(st.fixed_dictionaries({phase: st.integers(0, 5) for phase in WORK_PHASES}), min_size=1, max_size=4)


@settings(deadline=None, max_examples=400)
@given(schedules(), DURATIONS)
def test_many_steps_at_once_are_the_steps_one_by_one(tables: Tables, steps: list[dict[str, int]]) -> None:
    """Whole numbers and fractions; durations of nothing make ties."""
    whole = {phase: np.array([one[phase] for one in steps], np.int64) for phase in WORK_PHASES}
    thirds = {phase: np.array([Fraction(one[phase], 3) for one in steps], object) for phase in WORK_PHASES}
    for played, parts in ((replay(tables, whole), 1), (replay(tables, thirds), 3)):
        for at, durations in enumerate(steps):
            plain = plain_replay(tables, {phase: Fraction(ns, parts) for phase, ns in durations.items()})
            assert (played is None) == (plain is None)
            if played is None or plain is None:
                continue
            assert played.makespan[at] == plain.makespan
            assert {stage: work[at] for stage, work in played.work.items()} == plain.work
            mine = [row[1:] for row in zip(*(column.tolist() for column in played.waits), strict=True) if row[0] == at]
            assert mine == [(stage, *wait) for stage in sorted(plain.waits) for wait in plain.waits[stage]]


@settings(deadline=None, max_examples=200)
@given(schedules(), DURATIONS)
def test_what_a_schedule_needs_is_free_in_every_step(tables: Tables, steps: list[dict[str, int]]) -> None:
    played = replay(tables, {phase: np.array([one[phase] for one in steps], np.int64) for phase in WORK_PHASES})
    if played is None or len(tables) < 2:
        return
    stages = np.array(sorted(tables), np.int64)
    found = Allowance.of(len(steps), *structural(played, stages))
    for at, durations in enumerate(steps):
        plain = plain_allowance(tables, durations)
        pairs = [(one, other) for one in stages.tolist() for other in stages.tolist()]
        assert {pair: ns for pair in pairs if (ns := free_at(found, *pair, at))} == plain


def test_steps_that_ran_alike_are_told_together() -> None:
    decomposition = decompose(run := pipeline_run(2, 3, 2))
    rows = actions(run, decomposition.windows)
    ((tables, places),) = alike(rows)
    assert places.tolist() == [0, 1, 2]
    assert tables == observed_tables(rows, rows["step"].iloc[0])
    order = np.arange(len(rows))  # in the second step rank 2 (stage 1) runs its last two actions the other way round
    last = np.flatnonzero((rows["step"] == rows["step"].unique()[1]) & (rows["rank"] == 2))[-2:]
    order[last] = last[::-1]
    found = alike(rows.iloc[order])
    assert [one.tolist() for _, one in found] == [[0, 2], [1]]
    assert found[1][0][0] == tables[0]
    assert found[1][0][1] == [*tables[1][:-2], tables[1][-1], tables[1][-2]]


def test_the_allowance_of_every_step_is_that_of_the_order_in_which_it_ran() -> None:
    run = pipeline_run(3, 4, 3, slow={1: 5})
    decomposition = decompose(run)
    rows = actions(run, decomposition.windows)
    labels, durations = step_durations(rows)
    found = allowances(run, rows, labels)
    for place, step in enumerate(labels):
        plain = plain_allowance(observed_tables(rows, step), {phase: int(ns[place]) for phase, ns in durations.items()})
        pairs = [(one, other) for one in range(4) for other in range(4)]
        assert {pair: ns for pair in pairs if (ns := free_at(found, *pair, place))} == plain
        assert plain


def test_times_that_cannot_be_overflow_nothing() -> None:
    run = pipeline_run(2, 4)
    rows = actions(run, decompose(run).windows)
    labels, _ = step_durations(rows)
    found = allowances(run, rows.assign(compute_ns=1 << 58), labels, np.full(len(labels), 1 << 62))
    assert (found.ns > 0).all() and len(found.ns)


def test_mean_durations_of_a_step_are_whole_to_the_nearest_even() -> None:
    run = pipeline_run(2, 4, 2)
    rows = actions(run, decompose(run).windows).iloc[:6].copy()
    rows["step"] = [0, 0, 0, 0, 1, 1]
    rows["phase"] = ["forward", "forward", "backward", "backward", "forward", "forward"]
    rows["compute_ns"] = [1, 2, 3, 4, 5, 7]
    labels, durations = step_durations(rows)
    assert labels == [0, 1]
    assert durations["forward"].tolist() == [2, 6]  # 1.5 -> 2
    assert durations["backward"].tolist() == [4, 0]  # 3.5 -> 4; none in the second step
    means = mean_durations(rows[rows["step"] == 0])
    assert {phase: round(one) for phase, one in means.items()} == {"forward": 2, "backward": 4}


def test_a_run_whose_waits_are_all_unknown_has_nobody_to_blame() -> None:
    assert analyze(pipeline_run(1, 2, 2)).stragglers == ()
