"""Pipeline tables: worked by hand first, then laws over all small pipelines, then torch's own 1F1B."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.pp.schedules import (
    Action,
    Place,
    compute_tables,
    destination_of,
    source_of,
    with_communication,
    wraps_round,
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


def chunked(table):
    """`F0` is a forward of the first chunk, `f0` one of the second."""
    return " ".join(f"{a.phase[0].upper() if a.chunk == 0 else a.phase[0]}{a.microbatch}" for a in table)


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


def test_interleaved_by_hand():
    """Two stages, two chunks (lower case: the second), four microbatches in two groups."""
    assert [chunked(t) for t in compute_tables("interleaved", 2, 4, 2)] == [
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3",
        "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
    ]


def test_zero_bubble_by_hand():
    """1F1B's order; weight gradients follow `stage` microbatches later."""
    assert [brief(t) for t in compute_tables("zb-h1", 3, 4)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_textbook_bubble():
    """P=4, M=8, forward 1, backward 2: step 33, bubble 9 a stage (27.3 % of the step, 37.5 % of the ideal work)."""
    for schedule in ("1f1b", "gpipe"):
        timed = simulate(plan(schedule, 4, 8), {"forward": 1, "backward": 2})
        assert makespan(timed) == 33
        assert [33 - sum(row.end - row.start for row in stage) for stage in timed] == [9] * 4
    assert makespan(simulate(plan("naive", 4, 8), {"forward": 1, "backward": 2})) == 4 * 8 * 3
    timed = simulate(plan("interleaved", 4, 8, 2), {"forward": Fraction(1, 2), "backward": 1}, chunks=2)
    assert makespan(timed) == Fraction(57, 2)  # the same work in two chunks: bubble 4.5, half of 1F1B's
    thirds = dict.fromkeys(("forward", "backward", "weight_grad"), 1)
    assert makespan(simulate(plan("zb-h1", 4, 8), thirds)) == 24 + 3  # a third of the 9 that 1F1B takes for the same


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
    st.sampled_from(["naive", "gpipe", "1f1b"]),
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


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_laws_of_interleaved(stages, groups, chunks, forward, backward):
    """The bubble is exactly (P-1)/v of a stage's forward and backward; v times the messages, and one more of each."""
    microbatches = groups * stages
    tables = plan("interleaved", stages, microbatches, chunks)
    timed = simulate(tables, {"forward": forward, "backward": backward}, chunks=chunks)
    assert makespan(timed) == (chunks * microbatches + stages - 1) * (forward + backward)
    for stage, table in enumerate(tables):
        most = min((chunks - 1) * stages + 2 * (stages - 1 - stage) + 1, chunks * microbatches)
        assert activation_peak(table) == most
    for kind in ("send", "receive"):
        sent = sum(action.kind == kind for table in tables for action in table)
        assert sent == 2 * microbatches * (chunks * stages - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 5), st.integers(0, 4), st.integers(1, 5))
def test_laws_of_zero_bubble(stages, microbatches, forward, more, weight):
    """(P-1)(F+B-W), W no longer than F or B; each microbatch fewer than P costs a W. The memory of 1F1B's first stage."""
    forward, backward = max(forward, weight), weight + more
    tables = plan("zb-h1", stages, microbatches)
    timed = simulate(tables, {"forward": forward, "backward": backward, "weight_grad": weight})
    bubble = (stages - 1) * (forward + backward - weight) + max(stages - microbatches, 0) * weight
    assert makespan(timed) == microbatches * (forward + backward + weight) + bubble
    assert [activation_peak(table) for table in tables] == [min(stages, microbatches)] * stages


@pytest.mark.parametrize("stages", [2, 4])
def test_messages_that_go_round_have_queues_of_their_own(stages):
    """Between two stages both ways of a message are the same pair; on one lane of a device they would block each other."""
    tables = plan("interleaved", stages, 2 * stages, 2)
    for stage, table in enumerate(tables):
        for action in table:
            if action.kind == "compute":
                continue
            other = (destination_of if action.kind == "send" else source_of)(
                action.phase, Place(stage, action.chunk), stages, 2
            )
            assert wraps_round(action, stage, stages, 2) == (
                abs(other.stage - stage) != 1 or other.chunk != action.chunk
            )
    forward = [a for a in tables[0] if a.kind == "receive" and a.phase == "forward"]
    assert forward and all(wraps_round(a, 0, stages, 2) for a in forward)


def lanes(stage, table, stages, chunks, apart):
    """What each pair of stages puts on one lane of a device: (operation, peer) in order of issue, per direction."""
    found = {}
    for action in table:
        if action.kind == "compute":
            continue
        end = destination_of if action.kind == "send" else source_of
        peer = end(action.phase, Place(stage, action.chunk), stages, chunks).stage
        wraps = wraps_round(action, stage, stages, chunks)
        found.setdefault((action.phase, frozenset((stage, peer)), wraps and apart), []).append(action.kind)
    return found


def test_two_stages_on_a_device_need_the_second_channel():
    """There the messages of a pair and channel run in order of issue: a send must meet a receive. Without a channel of
    their own the messages that go round would meet a send."""
    tables = plan("interleaved", 2, 4, 2)
    for apart, fits in ((True, True), (False, False)):
        first, second = (lanes(stage, table, 2, 2, apart) for stage, table in enumerate(tables))
        assert first.keys() == second.keys()
        meets = [{a, b} == {"send", "receive"} for key in first for a, b in zip(first[key], second[key], strict=True)]
        assert all(meets) == fits


def test_one_queue_for_sends_and_receives_hangs():
    """The reason for four queues: with a rendezvous send, 1F1B on one queue a stage can never finish."""
    tables = plan("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(tables, queue_of=lambda action, wraps: "one")
    simulate(tables, queue_of=queue_by_role)


def mutated(stage, change, schedule="1f1b", stages=3, microbatches=4, chunks=1):
    """Complete tables in which `change` edits the list of one stage's actions."""
    tables = [list(table) for table in plan(schedule, stages, microbatches, chunks)]
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


F, B, W = "forward", "backward", "weight_grad"


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


def test_a_dropped_weight_gradient_is_refused():
    tables = mutated(1, drop(Action("compute", W, 0, 2)), "zb-h1")
    with pytest.raises(
        ScheduleError, match="microbatch 2: forward, backward instead of forward, backward, weight_grad"
    ):
        validate(tables, 4)


def test_a_weight_gradient_before_its_backward_is_refused():
    tables = mutated(0, swap(Action("compute", B, 0, 2), Action("compute", W, 0, 2)), "zb-h1")
    with pytest.raises(ScheduleError, match="forward, weight_grad, backward instead of"):
        validate(tables, 4)


@pytest.mark.parametrize("phase", [F, B])
def test_chunks_in_another_order_are_refused(phase):
    """Stage 0 runs a microbatch's second chunk where the first one's turn is."""
    change = swap(Action("compute", phase, 0, 0), Action("compute", phase, 1, 0))
    tables = mutated(0, change, "interleaved", 2, 4, 2)
    with pytest.raises(ScheduleError, match=r"deadlock|no receive before|no send after"):
        validate(tables, 4, 2)


def test_stages_that_order_their_chunks_differently_are_refused():
    """One stage swaps all its first and second chunks of the first group, messages included: the next one expects others."""

    def change(table):
        for place, action in enumerate(table):
            if action.phase == F and action.microbatch < 2:
                table[place] = action._replace(chunk=1 - action.chunk)

    with pytest.raises(ScheduleError):
        validate(mutated(1, change, "interleaved", 3, 6, 2), 6, 2)


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
        (("1f1b", 2, 2, 2), "chunks 2: schedule 1f1b runs one chunk a stage: take schedule interleaved, or chunks 1"),
        (("interleaved", 1, 2, 2), "pp is 1: take pp 2, or chunks 1"),
        (("interleaved", 4, 6, 2), "6 is no multiple: take microbatches 8"),
        (("interleaved", 4, 5), "5 is no multiple: take microbatches 4"),
        (("interleaved", 4, 1), "take microbatches 4"),
        (("interleaved", 2, 2, 0), "at least 1"),
        (("1f1b", 0, 2), "at least 1"),
        (("1f1b", 2, 0), "least 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments)
