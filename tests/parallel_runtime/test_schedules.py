"""Pipeline tables: worked by hand first, then laws over all small pipelines, then torch's own 1F1B."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.pp.schedules import (
    SCHEDULES,
    Action,
    Place,
    compute_tables,
    destination_of,
    source_of,
    with_communication,
)
from stepscope.parallel_runtime.pp.validator import (
    ScheduleError,
    activation_peak,
    plan,
    queue_by_role,
    simulate,
    validate,
)

LETTERS = {"compute": "", "send": "s", "receive": "r"}


def brief(table):
    """`sF0` is the send of microbatch 0's forward, `B1` the backward of microbatch 1."""
    return " ".join(f"{LETTERS[a.kind]}{a.phase[0].upper()}{a.microbatch}" for a in table)


def makespan(timed):
    return max(stage[-1].end for stage in timed)


def test_tables_by_hand():
    assert [brief(t) for t in compute_tables("naive", 2, 2)] == ["F0 B0 F1 B1"] * 2
    assert [brief(t) for t in compute_tables("gpipe", 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [brief(t) for t in compute_tables("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_communication_by_hand():
    """Receives stand one compute action before their use, sends right after their tensor is made."""
    first, middle, last = (with_communication(t, s, 3) for s, t in enumerate(compute_tables("1f1b", 3, 2)))
    assert brief(first) == "F0 sF0 rB0 F1 sF1 rB1 B0 B1"
    assert brief(middle) == "rF0 rF1 F0 sF0 rB0 F1 sF1 rB1 B0 sB0 B1 sB1"
    assert brief(last) == "rF0 F0 rF1 B0 sB0 F1 B1 sB1"


def test_textbook_bubble():
    """P=4, M=8, forward 1, backward 2: step 33, bubble 9 a stage (27.3 % of the step, 37.5 % of the ideal work)."""
    for schedule in ("1f1b", "gpipe"):
        timed = simulate(plan(schedule, 4, 8), {"forward": 1, "backward": 2})
        assert makespan(timed) == 33
        assert [33 - sum(row.end - row.start for row in stage) for stage in timed] == [9] * 4
    assert makespan(simulate(plan("naive", 4, 8), {"forward": 1, "backward": 2})) == 4 * 8 * 3


def test_a_message_takes_its_time():
    """Two stages, one microbatch: forward 1, message 5, forward 1, backward 2, message 5, backward 2."""
    timed = simulate(plan("gpipe", 2, 1), {"forward": 1, "backward": 2}, transfer=5)
    assert [(row.start, row.end) for row in timed[0]] == [(0, 1), (14, 16)]
    assert [(row.start, row.end) for row in timed[1]] == [(6, 7), (7, 9)]


def test_places_of_two_chunks():
    """Chunk c of stage s is place c * stages + s: the last stage hands over to the first one's next chunk."""
    assert destination_of("forward", Place(1, 0), 2, 2) == Place(0, 1)
    assert source_of("forward", Place(0, 1), 2, 2) == Place(1, 0)
    assert destination_of("backward", Place(0, 1), 2, 2) == Place(1, 0)
    assert destination_of("forward", Place(1, 1), 2, 2) is None
    assert source_of("forward", Place(0, 0), 2, 2) is None
    assert source_of("weight_grad", Place(0, 1), 2, 2) is None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_laws(schedule, stages, microbatches, forward, backward):
    """Every plan is valid, takes the textbook time and holds no more activations than it promises."""
    tables = plan(schedule, stages, microbatches)
    timed = simulate(tables, {"forward": forward, "backward": backward})
    slots = stages * microbatches if schedule == "naive" else microbatches + stages - 1
    assert makespan(timed) == slots * (forward + backward)
    peaks = [activation_peak(table) for table in tables]
    expected = {
        "naive": [1] * stages,
        "gpipe": [microbatches] * stages,
        "1f1b": [min(stages - stage, microbatches) for stage in range(stages)],
    }
    assert peaks == expected[schedule]
    messages = 2 * microbatches * (stages - 1)
    for kind in ("send", "receive"):
        assert sum(action.kind == kind for table in tables for action in table) == messages


def test_one_queue_for_sends_and_receives_hangs():
    """The reason for four queues: with a rendezvous send, 1F1B on one queue a stage can never finish."""
    tables = plan("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(tables, queue_of=lambda action: "one")
    simulate(tables, queue_of=queue_by_role)


def mutated(stage, change, schedule="1f1b", stages=3, microbatches=4):
    """Complete tables in which `change` edits the list of one stage's actions."""
    tables = [list(table) for table in plan(schedule, stages, microbatches)]
    change(tables[stage])
    return [tuple(table) for table in tables]


def swap(first, second):
    def change(table):
        i, j = table.index(first), table.index(second)
        table[i], table[j] = table[j], table[i]

    return change


def drop(*actions):
    def change(table):
        for action in actions:
            table.remove(action)

    return change


F, B = "forward", "backward"


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (1, drop(Action("receive", F, 0, 2)), "no receive before compute forward of microbatch 2"),
        (1, drop(Action("send", F, 0, 2)), "no send after compute forward of microbatch 2"),
        (0, drop(Action("compute", B, 0, 3)), "microbatch 3: forward instead of forward, backward"),
        (2, swap(Action("compute", F, 0, 1), Action("compute", B, 0, 1)), "backward, forward instead of"),
        (2, lambda table: table.append(Action("send", B, 0, 0)), "2 times send backward of microbatch 0"),
        (2, lambda table: table.append(Action("send", F, 0, 0)), "belongs to no computation"),
        (0, lambda table: table.append(Action("compute", F, 1, 0)), "does not exist"),
        (1, swap(Action("receive", F, 0, 0), Action("receive", F, 0, 1)), "expects receive forward of microbatch 1"),
    ],
)
def test_broken_tables_are_refused(stage, change, message):
    tables = mutated(stage, change)
    with pytest.raises(ScheduleError, match=message):
        validate(tables, 4)


def test_a_cycle_of_waits_is_a_deadlock():
    """Stage 0 wants its backward before it has sent the forward that stage 1 needs for it."""
    tables = mutated(0, swap(Action("compute", F, 0, 1), Action("compute", B, 0, 1)), stages=2, microbatches=2)
    with pytest.raises(ScheduleError, match="deadlock: stage 0 never runs compute backward of microbatch 1"):
        simulate(tables)


def test_deferred_weight_gradients_are_understood():
    """A split backward: activations live until the weight gradient, which moves no message."""
    computing = [Action("compute", phase, 0, m) for phase in (F, B, "weight_grad") for m in range(2)]
    tables = [with_communication(tuple(computing), stage, 2) for stage in range(2)]
    validate(tables, 2)
    assert brief(tables[1]).split()[-2:] == ["W0", "W1"]
    assert activation_peak(tables[0]) == 2
    with pytest.raises(ScheduleError, match="instead of forward, backward, weight_grad"):
        validate([table[:-1] for table in tables], 2)


def test_two_chunks_run_through():
    """All forwards of both chunks, then all backwards: the messages wrap round from the last stage to the first."""
    computing = tuple(Action("compute", F, c, m) for c in (0, 1) for m in range(3))
    computing += tuple(Action("compute", B, c, m) for c in (1, 0) for m in range(3))
    tables = [with_communication(computing, stage, 2, chunks=2) for stage in range(2)]
    validate(tables, 3, chunks=2)
    assert makespan(simulate(tables, chunks=2)) == 2 * (2 * 3 + 1)
    alone = with_communication(computing, 0, 1, chunks=2)
    assert all(action.kind == "compute" for action in alone)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2), "choose one of naive, gpipe, 1f1b"),
        (("1f1b", 0, 2), "at least 1"),
        (("1f1b", 2, 0), "least 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments)
