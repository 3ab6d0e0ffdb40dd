"""A schedule in virtual time: each stage runs its table in order, each action as soon as its inputs are there.

A message between stages takes what it is told to, else nothing. One table is played for many steps at once: what runs after
what is found once, and each time is an array with a value a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stepscope.analysis.causes.summary import ratio

Times = np.ndarray
"""Times or durations in virtual time, one a step: int64, or objects (fractions, which stay exact)."""


class Slot(NamedTuple):
    """One computation of a schedule: `phase` of WORK_PHASES, virtual stage `chunk` of its rank, `microbatch`."""

    phase: str
    chunk: int
    microbatch: int


class PlanWaits(NamedTuple):
    """Waits of stages for each other, one value each, by step and stage, in the order of time; times as of `Times`."""

    step: np.ndarray
    stage: np.ndarray
    start: Times
    end: Times
    on: np.ndarray


@dataclass(frozen=True)
class PlanReplay:
    """Of each step its length, and per stage its work; and all waits. Times have the unit of the durations that went in."""

    makespan: Times
    work: dict[int, Times]
    waits: PlanWaits

    def bubble_of_step(self, step: int) -> float | None:
        """Share of the stages' time that is waiting, in one step (its place)."""
        total = self.makespan[step] * len(self.work)
        work: Any = sum(one[step] for one in self.work.values())
        return ratio(total - work, total)


def replay(
    tables: Mapping[int, Sequence[Slot]], durations: Mapping[str, Times], transfer: Times | None = None
) -> PlanReplay | None:
    """Run each stage's table. `durations`: phase -> time of one action in each step; a phase that is missing takes none.

    `transfer`: time of a message between stages in each step; while it is on its way nobody waits. None for tables that
    cannot run to their end (another placement of chunks, or a deadlock).
    """
    order = _order(tables)
    if order is None:
        return None
    none: Times = next((0 * one for one in durations.values()), np.zeros(1, np.int64))
    done: dict[_Key, tuple[Times, int]] = {}  # -> (its end, its stage)
    message = none if transfer is None else transfer
    clock, work = dict.fromkeys(tables, none), dict.fromkeys(tables, none)
    waits: list[tuple[int, Times, Times, Times]] = []
    for stage, action in order:
        begin = clock[stage]
        if action.needs:
            ends = [done[key] for key in action.needs]
            ready, holder = _latest([(end if of == stage else end + message, of) for end, of in ends])
            waits.append((stage, begin, np.where(holder == stage, ready, ready - message), holder))
            begin = np.maximum(ready, begin)
        length = durations.get(action.key[0], none)
        clock[stage] = begin + length
        work[stage] = work[stage] + length
        done[action.key] = clock[stage], stage
    makespan = none
    for end in clock.values():
        makespan = np.maximum(makespan, end)
    return PlanReplay(makespan, work, _flat(waits + _closing(clock, makespan)))


_Key = tuple[str, int, int]
"""Phase, virtual stage and microbatch of an action."""


class _Action(NamedTuple):
    """An action, and those whose results it needs."""

    key: _Key
    needs: list[_Key]


def _order(tables: Mapping[int, Sequence[Slot]]) -> list[tuple[int, _Action]] | None:
    """All actions with their stages, each after those that it needs; None where that cannot be.

    A forward needs the forward of the virtual stage before it, a backward the one after it (on the last: its own
    forward), a weight gradient its own backward. Virtual stage of chunk c on stage s of P: c P + s.
    """
    place = {stage: number for number, stage in enumerate(sorted(tables))}
    virtual = len(tables) * (1 + max((slot.chunk for table in tables.values() for slot in table), default=0))
    done: set[_Key] = set()
    order: list[tuple[int, _Action]] = []
    position, moved = dict.fromkeys(tables, 0), True
    while moved:
        moved = False
        for stage, table in tables.items():
            for slot in table[position[stage] :]:
                here = slot.chunk * len(tables) + place[stage]
                action = _Action((slot.phase, here, slot.microbatch), _needs(slot, here, virtual))
                if not done.issuperset(action.needs):
                    break
                done.add(action.key)
                order.append((stage, action))
                position[stage] += 1
                moved = True
    return order if all(position[stage] == len(table) for stage, table in tables.items()) else None


def _needs(slot: Slot, here: int, virtual: int) -> list[_Key]:
    """Keys of the actions whose results `slot` on virtual stage `here` needs."""
    if slot.phase == "forward":
        return [("forward", here - 1, slot.microbatch)] if here else []
    if slot.phase == "weight_grad":
        return [("backward", here, slot.microbatch)]
    own = [("forward", here, slot.microbatch)]
    return own if here == virtual - 1 else [*own, ("backward", here + 1, slot.microbatch)]


def _latest(needs: Sequence[tuple[Times, int]]) -> tuple[Times, np.ndarray]:
    """The end of the last of what is needed, and its stage (of equals the highest), in each step."""
    ready, first = needs[0]
    holder = np.full(len(ready), first)
    for end, stage in needs[1:]:
        later = (end > ready) | ((end == ready) & (stage > holder))
        ready, holder = np.where(later, end, ready), np.where(later, stage, holder)
    return ready, holder


def _closing(clock: Mapping[int, Times], end: Times) -> list[tuple[int, Times, Times, np.ndarray]]:
    """After its last action a stage waits for the stage before it: in a row of steps, for its next first forward."""
    stages = sorted(clock)
    return [(stage, clock[stage], end, np.full(len(end), stages[at - 1])) for at, stage in enumerate(stages)]


def _flat(waits: Sequence[tuple[int, Times, Times, np.ndarray]]) -> PlanWaits:
    """Those that last; `waits`: (stage, starts, ends, stages waited for), each stage's in the order of time."""
    if not waits:
        none = np.empty(0, np.int64)
        return PlanWaits(none, none, none, none, none)
    stage = np.array([one[0] for one in waits], np.int64)
    by_stage = np.argsort(stage, kind="stable")
    start, end, on = (np.stack([waits[at][i] for at in by_stage.tolist()], axis=1) for i in (1, 2, 3))
    step, at = np.nonzero(start < end)  # step by step
    return PlanWaits(step, stage[by_stage][at], start[step, at], end[step, at], on[step, at].astype(np.int64))
