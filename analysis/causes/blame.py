"""Who made whom wait: from exposed waits to the ranks that they go back to.

Each wait names the rank that it waited for. That rank is rarely the cause in itself, so the charge moves on twice:

* *at the same instant*: while `r` waits for `q` and `q` itself waits for `p`, the instant is charged to `p` (and so on,
  never twice through a rank), the rule of definitions.md for waits inside waits;
* *by its history*: where `q` computes while `r` waits, but is late only because it had waited itself before, for longer
  than `r` had, that much goes to those whom `q` had waited for.

A pipeline's structural waits are nobody's fault: per (waiting stage, stage waited for) the first nanoseconds of a step
are free, as many as the schedule itself needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple


class Wait(NamedTuple):
    """One exposed wait of one rank: half open, absolute integer ns; `on` is the rank that it waited for."""

    step: int | str
    start_ns: int
    end_ns: int
    on: int
    structural: bool = False  # classified as bubble: the schedule's allowance pays for it first
    match: int = -1


@dataclass
class Blame:
    """`charged[step][waiting rank][rank at fault]` in ns: exposed time that the one made the other wait.

    `beyond[step][waiting rank]`: the part of it that the ledger calls bubble, the schedule's allowance being used up.
    """

    charged: dict[int | str, dict[int, Counter[int]]] = field(default_factory=dict)
    beyond: dict[int | str, Counter[int]] = field(default_factory=dict)
    _cache: dict[int | str, tuple[Counter[int], Counter[int]]] = field(default_factory=dict, repr=False, compare=False)

    def cost_of(self, rank: int, step: int | str | None = None) -> int:
        """What `rank` made all others wait, in ns, over all steps or in one."""
        steps = self.charged if step is None else [step]
        return sum(self._totals(one)[0][rank] for one in steps)

    def longest_wait_for(self, rank: int, step: int | str) -> int:
        """The longest time in ns that one rank waited for `rank` in `step`: about what the step would be shorter by."""
        return self._totals(step)[1][rank]

    def _totals(self, step: int | str) -> tuple[Counter[int], Counter[int]]:
        """Per rank at fault in one step: the sum of what the others waited, and the longest of them."""
        if step not in self._cache:
            total: Counter[int] = Counter()
            longest: Counter[int] = Counter()
            for counter in self.charged.get(step, {}).values():
                total.update(counter)
                longest |= counter  # the larger of both
            self._cache[step] = (total, longest)
        return self._cache[step]

    def beyond_of(self, rank: int, step: int | str) -> int:
        """What `rank` waited in `step` for its pipeline beyond the schedule's allowance, ns."""
        return self.beyond[step][rank] if step in self.beyond else 0


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


def holders_of(waits: Mapping[int, Sequence[Wait]]) -> dict[int, Counter[int]]:
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


def blame(
    waits: Mapping[int, Sequence[Wait]],
    allowance: Mapping[int | str, Mapping[tuple[int, int], int]] | None = None,
    stage_of: Mapping[int, int] | None = None,
) -> Blame:
    """Charge every wait to the ranks that caused it.

    `waits`: per rank, disjoint. `allowance[step][(stage, stage waited for)]`: structural ns that each rank of the one
    stage waits for the other in any case. `stage_of`: rank -> stage (-1 where unknown: no allowance).
    """
    lines = _Lines(waits)
    by_step: dict[int | str, list[Row]] = defaultdict(list)
    for rank, line in waits.items():
        for step, start, end, on, structural, _ in line:
            if on >= 0 and on != rank and end > start:
                by_step[step].append((end, start, rank, on, structural))
    result = Blame()
    for step, rows in by_step.items():
        rows.sort()
        beyond: Counter[int] = Counter()
        free = (allowance or {}).get(step, {})
        result.charged[step] = _charge_step(lines, rows, free, stage_of or {}, beyond)
        result.beyond[step] = beyond
    return result


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
