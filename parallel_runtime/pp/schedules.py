"""Pipeline schedules as data: a pure function makes each stage's table of actions, a pass inserts sends and receives.

A schedule never runs anything: `validator.py` checks a table, `executor.py` runs it, a picture can draw it before a run.

Words: a *stage* is a physical pipeline rank; a *chunk* is one of the slices of layers that it holds (one, except in
interleaved schedules). Chunk c of stage s is place c * stages + s of the way that a microbatch takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Action(NamedTuple):
    """One entry of a table.

    `kind` is compute, send or receive; `phase` is forward, backward or weight_grad (the deferred half of a backward that
    was split). A send carries the chunk that made the tensor, a receive the chunk that will use it.
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


def naive(stage: int, stages: int, microbatches: int) -> Table:
    """One microbatch at a time: forward through all stages and back before the next one starts. Bubble 1 - 1/P."""
    return tuple(compute(phase, m) for m in range(microbatches) for phase in ("forward", "backward"))


def gpipe(stage: int, stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards (Huang et al. 2019). Bubble (P-1)/(M+P-1), M microbatches alive."""
    return tuple(compute(phase, m) for phase in ("forward", "backward") for m in range(microbatches))


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Table:
    """Warm up, then alternate (Narayanan et al. 2019, "1F1B" with a flush). GPipe's bubble, min(P - stage, M) alive."""
    warm = min(stages - stage - 1, microbatches)
    actions = [compute("forward", m) for m in range(warm)]
    for m in range(microbatches - warm):
        actions += [compute("forward", warm + m), compute("backward", m)]
    actions += [compute("backward", m) for m in range(microbatches - warm, microbatches)]
    return tuple(actions)


class Schedule(NamedTuple):
    """A table maker and the promise that the validator holds it to."""

    table: Callable[[int, int, int], Table]
    """(stage, stages, microbatches) -> the stage's compute actions."""
    activation_peak: Callable[[int, int, int], int]
    """(stage, stages, microbatches) -> microbatches whose activations are alive at once, at most."""


SCHEDULES = {
    "naive": Schedule(naive, lambda stage, stages, microbatches: 1),
    "gpipe": Schedule(gpipe, lambda stage, stages, microbatches: microbatches),
    "1f1b": Schedule(one_forward_one_backward, lambda stage, stages, microbatches: min(stages - stage, microbatches)),
}


def compute_tables(schedule: str, stages: int, microbatches: int) -> tuple[Table, ...]:
    """Each stage's compute actions. ValueError for an unknown schedule or degrees below one."""
    if schedule not in SCHEDULES:
        raise ValueError(f"no pipeline schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if stages < 1 or microbatches < 1:
        raise ValueError(f"{stages} pipeline stages and {microbatches} microbatches: both must be at least 1")
    return tuple(SCHEDULES[schedule].table(stage, stages, microbatches) for stage in range(stages))


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
