"""Pipeline schedules as data: a pure function makes each stage's table of actions, a pass inserts sends and receives.

A schedule never runs anything: `validator.py` checks a table, `executor.py` runs it, a picture can draw it before a run.

Words: a *stage* is a physical pipeline rank; a *chunk* is one of the slices of layers that it holds (one, except in
interleaved schedules). Chunk c of stage s is place c * stages + s of the way that a microbatch takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stepscope.parallel_runtime.config import check_chunks, check_microbatches


class Action(NamedTuple):
    """One entry of a table.

    `kind` is compute, send or receive; `phase` is forward, backward or weight_grad (the deferred half of a backward that
    was split; the other half, the gradient of the input, is then called backward). A send carries the chunk that made the
    tensor, a receive the chunk that will use it.
    """

    kind: str
    phase: str
    chunk: int
    microbatch: int


Table = tuple[Action, ...]
"""One stage's actions in program order."""


class Place(NamedTuple):
    """Where an action runs."""

    stage: int
    chunk: int


def compute(phase: str, microbatch: int, chunk: int = 0) -> Action:
    """A compute action."""
    return Action("compute", phase, chunk, microbatch)


# -- tables ------------------------------------------------------------------------------------------------------------


def naive(stage: int, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """One microbatch at a time: forward through all stages and back before the next one starts. Bubble 1 - 1/P."""
    return tuple(compute(phase, m) for m in range(microbatches) for phase in ("forward", "backward"))


def gpipe(stage: int, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """All forwards, then all backwards (Huang et al. 2019). Bubble (P-1)/(M+P-1), M microbatches alive."""
    return tuple(compute(phase, m) for phase in ("forward", "backward") for m in range(microbatches))


def one_forward_one_backward(stage: int, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Warm up, then alternate (Narayanan et al. 2019, "1F1B" with a flush). GPipe's bubble, min(P - stage, M) alive."""
    warm = min(stages - stage - 1, microbatches)
    forwards = [compute("forward", m) for m in range(microbatches)]
    backwards = [compute("backward", m) for m in range(microbatches)]
    return _alternating(warm, forwards, backwards)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Table:
    """1F1B over v chunks a stage (Narayanan et al. 2021): bubble (P-1)/(vM+P-1), more alive and v times the messages.

    Microbatches go in groups of P: a group passes the first chunk, then the next one, and so on. M is a multiple of P.
    """
    forwards, backwards = [], []
    for position in range(microbatches * chunks):
        group, place = divmod(position, stages * chunks)
        chunk, member = divmod(place, stages)
        forwards.append(compute("forward", group * stages + member, chunk))
        backwards.append(compute("backward", group * stages + member, chunks - 1 - chunk))
    return _alternating(interleaved_warm_up(stage, stages, microbatches, chunks), forwards, backwards)


def interleaved_warm_up(stage: int, stages: int, microbatches: int, chunks: int) -> int:
    """Forwards before the first backward's own: all chunks but the last of the first group, and two for each stage behind
    this one, so that a gradient is there when its turn comes."""
    return min((chunks - 1) * stages + 2 * (stages - 1 - stage), microbatches * chunks)


def zero_bubble_h1(stage: int, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """ZB-H1 (Qi et al. 2023): 1F1B whose backward sends the input's gradient on at once and computes those of the weights
    later, `stage` microbatches later: so each stage holds as many microbatches as the first one, and has weight gradients
    left to compute where 1F1B would wait. Bubble (P-1)(F+B-W), a third of 1F1B's where F = B = W.
    """
    order = one_forward_one_backward(stage, stages, microbatches)
    actions: list[Action] = []
    for action in order:
        actions.append(action)
        if action.phase == "backward" and action.microbatch >= stage:
            actions.append(compute("weight_grad", action.microbatch - stage))
    actions += [compute("weight_grad", m) for m in range(max(microbatches - stage, 0), microbatches)]
    return tuple(actions)


def _alternating(warm: int, forwards: list[Action], backwards: list[Action]) -> Table:
    """`warm` forwards, then one forward and one backward in turn, then the backwards that are left."""
    steady = len(forwards) - warm
    actions = forwards[:warm]
    for pair in zip(forwards[warm:], backwards[:steady], strict=True):
        actions += pair
    return (*actions, *backwards[steady:])


class Schedule(NamedTuple):
    """A table maker and the promise that the validator holds it to."""

    table: Callable[[int, int, int, int], Table]
    """(stage, stages, microbatches, chunks) -> the stage's compute actions."""
    activation_peak: Callable[[int, int, int, int], int]
    """(stage, stages, microbatches, chunks) -> microbatches of a chunk whose activations are alive at once, at most."""


SCHEDULES = {
    "naive": Schedule(naive, lambda stage, stages, microbatches, chunks: 1),
    "gpipe": Schedule(gpipe, lambda stage, stages, microbatches, chunks: microbatches),
    "1f1b": Schedule(
        one_forward_one_backward, lambda stage, stages, microbatches, chunks: min(stages - stage, microbatches)
    ),
    "interleaved": Schedule(
        interleaved,
        lambda stage, stages, microbatches, chunks: min(
            interleaved_warm_up(stage, stages, microbatches, chunks) + 1, microbatches * chunks
        ),
    ),
    "zb-h1": Schedule(zero_bubble_h1, lambda stage, stages, microbatches, chunks: min(stages, microbatches)),
}


def compute_tables(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[Table, ...]:
    """Each stage's compute actions. ValueError for an unknown schedule, degrees below one, and what it cannot do."""
    if schedule not in SCHEDULES:
        raise ValueError(f"no pipeline schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if stages < 1 or microbatches < 1 or chunks < 1:
        raise ValueError(
            f"{stages} pipeline stages, {microbatches} microbatches and {chunks} chunks: each must be at least 1"
        )
    check_chunks(schedule, stages, chunks)
    check_microbatches(schedule, stages, microbatches)
    return tuple(SCHEDULES[schedule].table(stage, stages, microbatches, chunks) for stage in range(stages))


# -- communication -----------------------------------------------------------------------------------------------------


def source_of(phase: str, place: Place, stages: int, chunks: int) -> Place | None:
    """Where the input of an action comes from; None at the pipeline's ends and for a weight gradient."""
    step = {"forward": -1, "backward": 1, "weight_grad": None}[phase]
    return None if step is None else _place(place, step, stages, chunks)


def destination_of(phase: str, place: Place, stages: int, chunks: int) -> Place | None:
    """Where the output of an action goes; None at the pipeline's ends and for a weight gradient."""
    step = {"forward": 1, "backward": -1, "weight_grad": None}[phase]
    return None if step is None else _place(place, step, stages, chunks)


def _place(place: Place, step: int, stages: int, chunks: int) -> Place | None:
    position = place.chunk * stages + place.stage + step
    return Place(position % stages, position // stages) if 0 <= position < stages * chunks else None


def wraps_round(action: Action, stage: int, stages: int, chunks: int) -> bool:
    """Whether a message goes between the last stage and the first, to or from the next chunk."""
    other = (destination_of if action.kind == "send" else source_of)(
        action.phase, Place(stage, action.chunk), stages, chunks
    )
    return other is not None and other.chunk != action.chunk


def with_communication(table: Table, stage: int, stages: int, chunks: int = 1) -> Table:
    """Insert one send after each action whose output another stage needs, and one receive for each input from another.

    A receive is posted one compute action ahead, so that its message travels while that action computes.
    """
    receives = [_receive(action, stage, stages, chunks) for action in table]
    out = [*receives[0]] if table else []
    for index, action in enumerate(table):
        if index + 1 < len(table):
            out += receives[index + 1]
        out.append(action)
        destination = destination_of(action.phase, Place(stage, action.chunk), stages, chunks)
        if destination is not None and destination.stage != stage:
            out.append(action._replace(kind="send"))
    return tuple(out)


def _receive(action: Action, stage: int, stages: int, chunks: int) -> list[Action]:
    source = source_of(action.phase, Place(stage, action.chunk), stages, chunks)
    return [action._replace(kind="receive")] if source is not None and source.stage != stage else []
