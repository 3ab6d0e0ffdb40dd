"""Checks a pipeline's tables before a run: order, messages, deadlock (by simulation) and activation peak.

The simulation is exact about what matters for a hang: sends are a rendezvous (they occupy their queue until the receive
is posted), queues are FIFO without tags, and the training thread waits only for the input of a compute action.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from stepscope.parallel_runtime.pp.schedules import (
    SCHEDULES,
    Action,
    Place,
    Table,
    compute_tables,
    destination_of,
    source_of,
    with_communication,
    wraps_round,
)


class ScheduleError(ValueError):
    """A table that would compute something else, hang, or hold more activations than it promises."""


@lru_cache(maxsize=64)
def plan(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[Table, ...]:
    """The complete, validated tables of all stages. ValueError (also ScheduleError) says what is wrong."""
    computing = compute_tables(schedule, stages, microbatches, chunks)
    tables = tuple(with_communication(table, stage, stages, chunks) for stage, table in enumerate(computing))
    validate(tables, microbatches, chunks)
    for stage, table in enumerate(tables):
        peak = activation_peak(table)
        promised = SCHEDULES[schedule].activation_peak(stage, stages, microbatches, chunks)
        if peak != promised:
            raise ScheduleError(f"{schedule}: stage {stage} holds {peak} microbatches at once, promised {promised}")
    return tables


def validate(tables: Sequence[Table], microbatches: int, chunks: int = 1) -> None:
    """Raise ScheduleError unless the tables compute each microbatch once, in order, and can be run to the end."""
    for stage, table in enumerate(tables):
        _check_order(stage, table, microbatches, chunks)
        _check_messages(stage, table, len(tables), chunks)
    simulate(tables, chunks=chunks)


def _check_order(stage: int, table: Table, microbatches: int, chunks: int) -> None:
    """Each chunk and microbatch: one forward, one backward, and one weight gradient if any is deferred, in this order."""
    computing = [action for action in table if action.kind == "compute"]
    deferred = any(action.phase == "weight_grad" for action in computing)
    wanted = ["forward", "backward"] + ["weight_grad"] * deferred
    phases: dict[tuple[int, int], list[str]] = {(c, m): [] for c in range(chunks) for m in range(microbatches)}
    for action in computing:
        if (action.chunk, action.microbatch) not in phases:
            raise ScheduleError(f"stage {stage}: {describe(action)} does not exist")
        phases[action.chunk, action.microbatch].append(action.phase)
    for (chunk, microbatch), found in phases.items():
        if found != wanted:
            instead = ", ".join(found) or "nothing"
            raise ScheduleError(
                f"stage {stage}, chunk {chunk}, microbatch {microbatch}: {instead} instead of {', '.join(wanted)}"
            )


def _check_messages(stage: int, table: Table, stages: int, chunks: int) -> None:
    """Each input from another stage is received once, before its use; each output for another sent once, after it."""
    index = {action: position for position, action in enumerate(table)}
    for action, times in Counter(table).items():
        if times > 1:
            raise ScheduleError(f"stage {stage} has {times} times {describe(action)}")
    expected = set()
    for action in table:
        if action.kind != "compute":
            continue
        here = Place(stage, action.chunk)
        source = source_of(action.phase, here, stages, chunks)
        destination = destination_of(action.phase, here, stages, chunks)
        if source is not None and source.stage != stage:
            receive = action._replace(kind="receive")
            expected.add(receive)
            if index.get(receive, len(table)) > index[action]:
                raise ScheduleError(f"stage {stage}: no receive before {describe(action)}")
        if destination is not None and destination.stage != stage:
            send = action._replace(kind="send")
            expected.add(send)
            if index.get(send, -1) < index[action]:
                raise ScheduleError(f"stage {stage}: no send after {describe(action)}")
    for action in table:
        if action.kind != "compute" and action not in expected:
            raise ScheduleError(f"stage {stage}: {describe(action)} belongs to no computation")


def activation_peak(table: Table) -> int:
    """Most (chunk, microbatch) pairs whose activations are alive at once.

    They live from the forward to the backward, or to the weight gradient where it is deferred.
    """
    deferred = any(action.phase == "weight_grad" for action in table)
    last = "weight_grad" if deferred else "backward"
    alive = peak = 0
    for action in table:
        if action.kind == "compute":
            alive += (action.phase == "forward") - (action.phase == last)
            peak = max(peak, alive)
    return peak


def describe(action: Action) -> str:
    """For messages: `send forward of microbatch 3 (chunk 0)`."""
    return f"{action.kind} {action.phase} of microbatch {action.microbatch} (chunk {action.chunk})"


# -- simulation --------------------------------------------------------------------------------------------------------


Time = float | Fraction
"""In any unit; whole numbers and fractions stay exact."""


class Timed(NamedTuple):
    """An action with its virtual times: a computation, or a message from when its queue took it up to when it was done."""

    action: Action
    start: Time
    end: Time


@dataclass
class Played:
    """What one stage did: its computations and its messages, each in the order in which they ran."""

    computing: list[Timed] = field(default_factory=list)
    messages: list[Timed] = field(default_factory=list)


QueueOf = Callable[[Action, bool], Hashable]
"""(action, whether its message goes round from the last stage to the first or back) -> queue."""


def queue_by_role(action: Action, wraps: bool) -> Hashable:
    """The runtime's queues (executor.stream_of): one for each direction and role, messages that go round apart."""
    return action.kind, action.phase, wraps


SENDS_OUT = Action("sends out", "other", -1, -1)
"""The training thread waits until all its sends are out, as the executor does at the end of a step."""


@dataclass
class _Stage:
    """What the simulation knows of one stage."""

    table: Table
    position: int = 0
    now: Time = 0
    queues: dict[Hashable, deque[tuple[Action, Time]]] = field(default_factory=dict)  # posted, not yet done
    free: dict[Hashable, Time] = field(default_factory=dict)  # when the queue's last message was done
    arrived: dict[Action, Time] = field(default_factory=dict)
    sent: Time = 0  # when the last send was out
    played: Played = field(default_factory=Played)

    @property
    def sending(self) -> bool:
        """Whether a send is still on its way."""
        return any(action.kind == "send" for queue in self.queues.values() for action, _ in queue)

    def done(self, key: Hashable, end: Time) -> None:
        """The message at the head of queue `key` is done at `end`."""
        action, posted = self.queues[key].popleft()
        self.played.messages.append(Timed(action, max(posted, self.free.get(key, 0)), end))
        self.free[key] = end
        if action.kind == "send":
            self.sent = max(self.sent, end)
        else:
            self.arrived[action] = end


def simulate(
    tables: Sequence[Table],
    durations: Mapping[str, Time] | None = None,
    transfer: Time = 0,
    chunks: int = 1,
    queue_of: QueueOf = queue_by_role,
) -> list[list[Timed]]:
    """Run the tables in virtual time; each stage's compute actions with start and end.

    `durations` gives the time of an action by phase (1 each by default), `transfer` that of a message, in one unit.
    Raises ScheduleError on a deadlock and where a receive would meet another message than its own.
    """
    by_phase = durations or {}
    played = play(tables, lambda _, action: by_phase.get(action.phase, 1), lambda _, __: transfer, chunks, queue_of)
    return [stage.computing for stage in played]


@dataclass(frozen=True)
class _World:
    """What holds for all stages of a simulation."""

    duration_of: Callable[[int, Action], Time]
    transfer_of: Callable[[int, int], Time]
    chunks: int
    queue_of: QueueOf


def play(
    tables: Sequence[Table],
    duration_of: Callable[[int, Action], Time],
    transfer_of: Callable[[int, int], Time],
    chunks: int = 1,
    queue_of: QueueOf = queue_by_role,
) -> list[Played]:
    """Run the tables in virtual time: what each stage computes and sends, where stages and links may differ.

    `duration_of(stage, action)` is the time of a computation, `transfer_of(source stage, destination stage)` that of a
    message, in one unit. A table may hold SENDS_OUT. A message that takes no time does not hold its sender until the
    receive is posted. Raises ScheduleError as `simulate` does.
    """
    world = _World(duration_of, transfer_of, chunks, queue_of)
    stages = [_Stage(table) for table in tables]
    moving = True
    while moving:
        advanced = [_advance(number, stages, world) for number in range(len(stages))]
        delivered = [_deliver(number, stages, world) for number in range(len(stages))]
        moving = any(advanced) or any(delivered)
    for number, stage in enumerate(stages):
        waiting = [action for queue in stage.queues.values() for action, _ in queue]
        if stage.position < len(stage.table):
            raise ScheduleError(f"deadlock: stage {number} never runs {describe(stage.table[stage.position])}")
        if waiting:
            raise ScheduleError(f"deadlock: stage {number} never completes {describe(waiting[0])}")
    return [stage.played for stage in stages]


def _advance(number: int, stages: Sequence[_Stage], world: _World) -> bool:
    """Run the training thread of one stage until it waits; whether it got anywhere."""
    stage = stages[number]
    begin = stage.position
    while stage.position < len(stage.table):
        action = stage.table[stage.position]
        if action == SENDS_OUT:
            if stage.sending:
                break
            stage.now = max(stage.now, stage.sent)
        elif action.kind != "compute":
            key = world.queue_of(action, wraps_round(action, number, len(stages), world.chunks))
            stage.queues.setdefault(key, deque()).append((action, stage.now))
        else:
            source = source_of(action.phase, Place(number, action.chunk), len(stages), world.chunks)
            receive = action._replace(kind="receive")
            if source is not None and source.stage != number:
                if receive not in stage.arrived:
                    break
                stage.now = max(stage.now, stage.arrived[receive])
            start = stage.now
            stage.now += world.duration_of(number, action)
            stage.played.computing.append(Timed(action, start, stage.now))
        stage.position += 1
    return stage.position > begin


def _deliver(number: int, stages: Sequence[_Stage], world: _World) -> bool:
    """Complete the sends of one stage whose receive stands at the head of its queue; whether any did."""
    sender, delivered = stages[number], False
    for key, queue in sender.queues.items():
        while queue and queue[0][0].kind == "send":
            action, posted = queue[0]
            there = destination_of(action.phase, Place(number, action.chunk), len(stages), world.chunks)
            if there is None:
                raise ScheduleError(f"stage {number}: {describe(action)} has no destination")
            receive = action._replace(kind="receive", chunk=there.chunk)
            receiver, other = stages[there.stage], world.queue_of(receive, there.chunk != action.chunk)
            if not receiver.queues.get(other):
                break
            head, ready = receiver.queues[other][0]
            if head != receive:
                if (head.kind, head.phase) == (receive.kind, receive.phase):
                    raise ScheduleError(
                        f"stage {there.stage} expects {describe(head)} where stage {number} does {describe(action)}"
                    )
                break
            begin = max(posted, ready, sender.free.get(key, 0), receiver.free.get(other, 0))
            transfer = world.transfer_of(number, there.stage)
            # a free message is over for its sender at once, as in the textbook: it would hold it up and carry nothing
            sender.done(key, begin + transfer if transfer else max(posted, sender.free.get(key, 0)))
            receiver.done(other, begin + transfer)
            delivered = True
    return delivered
