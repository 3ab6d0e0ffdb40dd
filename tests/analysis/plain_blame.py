"""Blame and the plan's replay one wait and one action at a time: slow, and easy to check by reading."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from stepscope.analysis.causes.exposed import WaitTable
from stepscope.analysis.causes.plan import Slot


class Wait(NamedTuple):
    """One exposed wait of one rank; fields as of WaitTable."""

    step: int | str
    start_ns: int
    end_ns: int
    on: int
    structural: bool = False
    match: int = -1


def table_of(waits: Mapping[int, Sequence[Wait]]) -> WaitTable:
    """Waits a rank as columns."""
    place: dict[int | str, int] = {}
    rows = [
        (rank, place.setdefault(one.step, len(place)), one.start_ns, one.end_ns, one.on, one.structural, one.match)
        for rank, line in waits.items()
        for one in line
    ]
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    return WaitTable.joined(list(place), [[*columns[:5], columns[5].astype(bool), columns[6]]])


# -- blame -------------------------------------------------------------------------------------------------------------


class _Lines:
    """The waits of each rank, sorted and disjoint, for look-up by time."""

    def __init__(self, waits: Mapping[int, Sequence[Wait]]) -> None:
        self.waits = {rank: sorted(line, key=attrgetter("start_ns")) for rank, line in waits.items() if line}
        self.starts = {rank: [wait.start_ns for wait in line] for rank, line in self.waits.items()}
        self.ends = {rank: [wait.end_ns for wait in line] for rank, line in self.waits.items()}

    def busy(self, rank: int, start: int, end: int) -> bool:
        """Whether `rank` computes, or does anything but wait, in all of [start, end)."""
        starts = self.starts.get(rank)
        if starts is None:
            return True
        last = bisect_left(starts, end) - 1
        return last < 0 or self.ends[rank][last] <= start

    def overlapping(self, rank: int, start: int, end: int) -> list[Wait]:
        """Waits of `rank` that overlap [start, end), in order."""
        if rank not in self.waits:
            return []
        first, last = bisect_right(self.ends[rank], start), bisect_left(self.starts[rank], end)
        return self.waits[rank][first:last]


def _follow(lines: _Lines, on: int, start: int, end: int, seen: frozenset[int], into: Counter[int]) -> None:
    """Charge [start, end) to `on`, except where `on` waits itself: there to whom it waits for, through no rank twice."""
    position = start
    for wait in lines.overlapping(on, start, end):
        if wait.on in seen or wait.on < 0:
            continue
        begin, stop = max(wait.start_ns, position), min(wait.end_ns, end)
        if stop <= begin:
            continue
        into[on] += begin - position
        _follow(lines, wait.on, begin, stop, seen | {wait.on}, into)
        position = stop
    into[on] += end - position


def plain_holders(waits: Mapping[int, Sequence[Wait]]) -> dict[int, Counter[int]]:
    """Whom each one waits for in the end, in ns, by the same-instant rule alone (no allowance, no history)."""
    lines = _Lines(waits)
    found: dict[int, Counter[int]] = {}
    for rank, line in waits.items():
        held: Counter[int] = Counter()
        for wait in line:
            _follow(lines, wait.on, wait.start_ns, wait.end_ns, frozenset((rank, wait.on)), held)
        held.pop(rank, None)
        found[rank] = +held
    return found


def _shared(total: int, weights: Counter[int]) -> Counter[int]:
    """`total` ns divided in proportion to `weights`, whole ns, sum exact (the largest weight takes what is left)."""
    whole = sum(weights.values())
    parts = Counter({rank: total * weight // whole for rank, weight in weights.items()})
    parts[max(weights, key=lambda rank: (weights[rank], -rank))] += total - sum(parts.values())
    return parts


def plain_blame(
    waits: Mapping[int, Sequence[Wait]],
    allowance: Mapping[int | str, Mapping[tuple[int, int], int]],
    stage_of: Mapping[int, int],
) -> tuple[dict[int | str, dict[int, Counter[int]]], dict[int | str, Counter[int]]]:
    """Per step and waiting rank what it was charged for, by rank at fault; and what it waited beyond the allowance, ns.

    `allowance[step][(stage, stage waited for)]`: structural ns that each rank of the one stage waits for the other.
    """
    lines = _Lines(waits)
    by_step: dict[int | str, list[Row]] = defaultdict(list)
    for rank, line in waits.items():
        for step, start, end, on, structural, _ in line:
            if on >= 0 and on != rank and end > start:
                by_step[step].append((end, start, rank, on, structural))
    charged, beyond = {}, {}
    for step, rows in by_step.items():
        beyond[step] = Counter()
        charged[step] = _charge_step(lines, sorted(rows), allowance.get(step, {}), stage_of, beyond[step])
    return charged, beyond


Row = tuple[int, int, int, int, bool]
"""One wait: end, start, rank, the rank that it waited for, structural."""


def _charge_step(
    lines: _Lines,
    rows: Sequence[Row],
    allowance: Mapping[tuple[int, int], int],
    stage_of: Mapping[int, int],
    beyond: Counter[int],
) -> dict[int, Counter[int]]:
    """One step's waits in the order of their ends: what a rank had waited before is settled when it is needed."""
    charged: dict[int, Counter[int]] = defaultdict(Counter)
    total: dict[int, int] = defaultdict(int)  # what each rank has been charged for so far
    left: dict[tuple[int, int], int] = {}  # (rank, stage waited for) -> structural ns not yet used
    for end, start, rank, on, structural in rows:
        held = ((on, end - start),) if lines.busy(on, start, end) else _holders(lines, rank, on, start, end)
        for holder, ns in held:
            if structural:
                key = (rank, stage_of.get(holder, -1))
                free = left.get(key, -1)
                if free < 0:
                    free = allowance.get((stage_of.get(rank, -1), key[1]), 0)
                left[key] = max(free - ns, 0)
                ns = max(ns - free, 0)
                beyond[rank] += ns
            if ns > 0 and holder != rank:
                _charge(charged, total, rank, holder, ns)
    return {rank: counter for rank, counter in charged.items() if counter}


def _holders(lines: _Lines, rank: int, on: int, start: int, end: int) -> list[tuple[int, int]]:
    """(rank, ns): whom a wait of `rank` for `on` goes back to at the same instants, by rank."""
    holders: Counter[int] = Counter()
    _follow(lines, on, start, end, frozenset((rank, on)), holders)
    return sorted(holders.items())


def _charge(charged: dict[int, Counter[int]], total: dict[int, int], rank: int, holder: int, ns: int) -> None:
    """Divide `ns` that `rank` waited for `holder`: what `holder` had itself waited more than `rank` is passed on."""
    mine, passed = charged[rank], 0
    excess = total[holder] - total[rank]
    if excess > 0:
        debts = Counter({other: debt for other, debt in charged[holder].items() if other != rank and debt > 0})
        passed = min(ns, excess) if debts else 0
        if passed:
            for other, part in _shared(passed, debts).items():
                if part:
                    mine[other] += part
    if ns > passed:
        mine[holder] += ns - passed
    total[rank] += ns


# -- the plan ----------------------------------------------------------------------------------------------------------

Time = Fraction | int
"""A time or duration in virtual time."""


class PlainReplay(NamedTuple):
    """A schedule in virtual time: the step's length, and per stage its work and its waits (start, end, waited-for stage)."""

    makespan: Time
    work: dict[int, Time]
    waits: dict[int, list[tuple[Time, Time, int]]]


def plain_replay(tables: Mapping[int, Sequence[Slot]], durations: Mapping[str, Fraction | int]) -> PlainReplay | None:
    """Run each stage's table in order, each action as soon as its inputs are there; communication is free.

    A forward needs the forward of the virtual stage before it, a backward the one after it (on the last: its own
    forward), a weight gradient its own backward. Virtual stage of chunk c on stage s of P: c P + s. None for a table
    that cannot run to its end (another placement of chunks, or a deadlock).
    """
    order = {stage: list(table) for stage, table in tables.items()}
    place = {stage: number for number, stage in enumerate(sorted(order))}
    virtual = len(order) * (1 + max((slot.chunk for table in order.values() for slot in table), default=0))
    done: dict[tuple[str, int, int], tuple[Time, int]] = {}  # (phase, virtual stage, microbatch) -> (end, stage)
    clock: dict[int, Time] = dict.fromkeys(order, 0)
    work: dict[int, Time] = dict.fromkeys(order, 0)
    waits: dict[int, list[tuple[Time, Time, int]]] = {stage: [] for stage in order}
    position = dict.fromkeys(order, 0)
    moved = True
    while moved:
        moved = False
        for stage, table in order.items():
            while position[stage] < len(table):
                slot = table[position[stage]]
                here = slot.chunk * len(order) + place[stage]
                needs = [done.get(key) for key in _needs(slot, here, virtual)]
                if any(need is None for need in needs):
                    break
                ready, holder = max((need for need in needs if need), default=(clock[stage], stage))
                if ready > clock[stage]:
                    waits[stage].append((clock[stage], ready, holder))
                begin, length = max(ready, clock[stage]), durations.get(slot.phase, 0)
                clock[stage] = begin + length
                work[stage] += length
                done[(slot.phase, here, slot.microbatch)] = (clock[stage], stage)
                position[stage] += 1
                moved = True
    if any(position[stage] < len(order[stage]) for stage in order):
        return None
    makespan = max(clock.values(), default=0)
    _close(waits, clock, makespan)
    return PlainReplay(makespan, work, waits)


def _needs(slot: Slot, here: int, virtual: int) -> list[tuple[str, int, int]]:
    """Keys of the actions whose results `slot` on virtual stage `here` needs."""
    if slot.phase == "forward":
        return [("forward", here - 1, slot.microbatch)] if here else []
    if slot.phase == "weight_grad":
        return [("backward", here, slot.microbatch)]
    own = [("forward", here, slot.microbatch)]
    return own if here == virtual - 1 else [*own, ("backward", here + 1, slot.microbatch)]


def _close(waits: dict[int, list[tuple[Time, Time, int]]], clock: Mapping[int, Time], end: Time) -> None:
    """After its last action a stage waits for the stage before it: in a row of steps, for its next first forward."""
    stages = sorted(clock)
    for number, stage in enumerate(stages):
        if clock[stage] < end:
            waits[stage].append((clock[stage], end, stages[number - 1]))


def plain_allowance(tables: Mapping[int, Sequence[Slot]], durations: Mapping[str, int]) -> dict[tuple[int, int], int]:
    """(stage, stage waited for) -> ns of one step that the schedule itself needs; empty where it cannot run."""
    played = plain_replay(tables, durations) if len(tables) > 1 else None
    if played is None:
        return {}
    lines = {stage: [Wait(0, int(a), int(b), on) for a, b, on in line] for stage, line in played.waits.items()}
    return {(stage, holder): ns for stage, held in plain_holders(lines).items() for holder, ns in held.items()}
