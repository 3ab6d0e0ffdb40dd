"""Who made whom wait: from exposed waits to the ranks that they go back to.

Each wait names the rank that it waited for. That rank is rarely the cause in itself, so the charge moves on twice:

* *at the same instant*: while `r` waits for `q` and `q` itself waits for `p`, the instant is charged to `p` (exposed.py),
  the rule of definitions.md for waits inside waits;
* *by its history*: where `q` computes while `r` waits, but is late only because it had waited itself before, for longer
  than `r` had, that much goes to those whom `q` had waited for.

A pipeline's structural waits are nobody's fault: per (waiting stage, stage waited for) the first nanoseconds of a step
are free, as many as the schedule itself needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.causes.columns import places
from stepscope.analysis.causes.exposed import Held, Step, WaitTable, holders
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ledger.classes import TOO_LONG


@dataclass(frozen=True)
class Allowance:
    """What each pipeline stage waits for each other in the schedule itself, step by step, ns: one value a sorted key."""

    stages: np.ndarray  # sorted
    steps: int
    keys: np.ndarray
    ns: np.ndarray

    @classmethod
    def of(cls, steps: int, stage: np.ndarray, on: np.ndarray, step: np.ndarray, ns: np.ndarray) -> Allowance:
        """Of rows: `stage` waits `ns` for the stage `on` in a step (its place among so many); equal ones are summed."""
        stages = np.unique(np.concatenate((stage, on)))
        key = (places(stage, stages) * len(stages) + places(on, stages)) * steps + step
        keys, which = np.unique(key, return_inverse=True)
        total = np.zeros(len(keys), np.int64)
        np.add.at(total, which, ns)
        return cls(stages, steps, keys, total)

    @classmethod
    def none(cls) -> Allowance:
        """Of a run without pipeline."""
        return cls.of(0, *[np.empty(0, np.int64)] * 4)

    def at(self, stage: np.ndarray, on: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Of each (stage, stage waited for, place of a step) the ns that are free; 0 for stages without schedule."""
        one, other = places(stage, self.stages), places(on, self.stages)
        key = (one * len(self.stages) + other) * self.steps + step
        at = places(np.where((one >= 0) & (other >= 0), key, -1), self.keys)
        return np.append(self.ns, 0)[at]


@dataclass(frozen=True)
class Blame:
    """In a step the rank `waiting` waited `ns` through the fault of the rank `fault`: one row each, exposed time, by step.

    `step` is a place in `steps`, `waiting` and `fault` are places in `ranks`. `beyond[step, rank]`: what a rank waited for
    its pipeline when the schedule's allowance was used up, ns.
    """

    steps: Sequence[Step] = ()
    ranks: Sequence[int] = ()
    step: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    waiting: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    fault: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    ns: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    beyond: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def costs_of(self, rank: int, steps: Iterable[Step]) -> list[int]:
        """What `rank` made all others wait in each of these steps, in ns."""
        return self._picked(self._cost, rank, steps)

    def longest_waits_for(self, rank: int, steps: Iterable[Step]) -> list[int]:
        """The longest time in ns that one rank waited for `rank` in each step: about what it would be shorter by."""
        return self._picked(self._longest, rank, steps)

    def beyond_of(self, rank: int, steps: Iterable[Step]) -> list[int]:
        """What `rank` waited in each step for its pipeline beyond the schedule's allowance, ns."""
        return self._picked(self.beyond, rank, steps)

    def charged_to(self, ranks: Set[int], steps: Iterable[Step]) -> int:
        """What these ranks together made all others wait in these steps, ns."""
        return sum(sum(self.costs_of(rank, steps)) for rank in ranks)

    def _picked(self, table: np.ndarray, rank: int, steps: Iterable[Step]) -> list[int]:
        """One value a step of one rank; 0 where nobody waited."""
        if rank not in self._rank_places:
            return [0 for _ in steps]
        line = [*table[:, self._rank_places[rank]].tolist(), 0]
        return [line[self._step_places.get(step, -1)] for step in steps]

    @cached_property
    def _step_places(self) -> dict[Step, int]:
        return {step: place for place, step in enumerate(self.steps)}

    @cached_property
    def _rank_places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def _cost(self) -> np.ndarray:
        """Per step and rank at fault, what all others waited."""
        table = np.zeros((len(self.steps), len(self.ranks)), np.int64)
        np.add.at(table, (self.step, self.fault), self.ns)
        return table

    @cached_property
    def _longest(self) -> np.ndarray:
        """Per step and rank at fault, what the one waited who waited longest."""
        table = np.zeros((len(self.steps), len(self.ranks)), np.int64)
        np.maximum.at(table, (self.step, self.fault), self.ns)
        return table


def blame(waits: WaitTable, allowance: Allowance | None = None, stage_of: Mapping[int, int] | None = None) -> Blame:
    """Charge every wait to the ranks that caused it. `stage_of`: rank -> stage (-1 where unknown: no allowance)."""
    ranks = np.unique(np.concatenate((waits.rank, waits.on[waits.on >= 0])))
    held = _held(waits, ranks)
    step, rank = waits.step[held.wait], places(waits.rank, ranks)[held.wait]
    stages = np.array([(stage_of or {}).get(one, -1) for one in ranks.tolist()], np.int64)
    ns, beyond = held.ns.copy(), np.zeros((len(waits.steps), len(ranks)), np.int64)
    bubble = np.flatnonzero(waits.structural[held.wait])
    if len(bubble):
        keys = (step[bubble], rank[bubble], stages[held.holder[bubble]])
        ns[bubble] = _unpaid(ns[bubble], keys, stages, allowance or Allowance.none())
        np.add.at(beyond, keys[:2], ns[bubble])
    some = np.flatnonzero(ns)
    charged = _charge(step[some], rank[some], held.holder[some], ns[some])
    return Blame(list(waits.steps), ranks.tolist(), *charged, beyond)


def _held(waits: WaitTable, ranks: np.ndarray) -> Held:
    """Whom each wait goes back to at the same instants (places in `ranks`), in the order of steps and of the waits' ends."""
    start, end = intervals.together(waits.start, waits.end)
    stretch = int(end.max(initial=0)) + 1
    if stretch * len(ranks) >= 1 << 62:
        raise StepscopeError(TOO_LONG.format(stretch // 10**9))
    lane, on = places(waits.rank, ranks), places(waits.on, ranks)
    held = holders(lane, start, end, on, np.arange(len(ranks), dtype=np.int64) * stretch)
    by_end = np.lexsort((waits.rank, waits.start, waits.end, waits.step))
    turn = np.empty(len(waits), np.int64)
    turn[by_end] = np.arange(len(waits))
    order = np.argsort(turn[held.wait], kind="stable")  # holders of one wait stay in their order
    return Held(held.wait[order], held.holder[order], held.ns[order])


def _unpaid(ns: np.ndarray, keys: tuple[np.ndarray, ...], stages: np.ndarray, allowance: Allowance) -> np.ndarray:
    """What the allowance does not pay of structural waits, in the order in which they end.

    `keys`: of each wait its step, the rank, and the stage waited for, all of which share one allowance.
    """
    step, rank, on = keys
    order = np.lexsort((on, rank, step))
    fresh = np.ones(len(order), bool)
    fresh[1:] = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    first = np.flatnonzero(fresh)
    past = np.cumsum(ns[order]) - ns[order]  # what was waited before
    past -= np.repeat(past[first], np.diff(np.append(first, len(order))))
    free = allowance.at(stages[rank[order]], on[order], step[order])
    answer = np.empty_like(ns)
    answer[order] = ns[order] - np.clip(free - past, 0, ns[order])
    return answer


# -- history -----------------------------------------------------------------------------------------------------------


def _charge(
    step: np.ndarray, rank: np.ndarray, holder: np.ndarray, ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Step, waiting rank, rank at fault and ns of all charges, one row each, by step.

    The rows are what each rank waited for each holder, step after step, in the order in which waits ended: what a rank
    had waited before is settled when it is needed.
    """
    edges = np.append(np.flatnonzero(np.diff(step, prepend=-1)), len(step)).tolist()
    rows, held, amounts = rank.tolist(), holder.tolist(), ns.tolist()
    found: list[tuple[int, int, int, int]] = []
    for low, high in pairwise(edges):
        place = int(step[low])
        charged = _charge_step(zip(rows[low:high], held[low:high], amounts[low:high], strict=True))
        found += [(place, one, fault, part) for one, line in charged.items() for fault, part in line.items()]
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return columns[0], columns[1], columns[2], columns[3]


def _charge_step(rows: Iterable[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """Waiting rank -> rank at fault -> ns of one step. `rows`: waiting rank, whom for, ns.

    Of what a rank waits for a holder, as much as the holder had itself waited more than the rank is passed on.
    """
    charged: dict[int, dict[int, int]] = defaultdict(dict)
    total: dict[int, int] = defaultdict(int)  # what each rank has been charged for so far
    for rank, holder, ns in rows:
        mine, left = charged[rank], ns
        excess = total[holder] - total[rank]
        if excess > 0:
            debts = {other: debt for other, debt in charged[holder].items() if other != rank}
            if debts:
                passed = ns if ns < excess else excess
                for other, part in _shared(passed, debts) if len(debts) > 1 else ((other, passed) for other in debts):
                    if part:
                        mine[other] = mine.get(other, 0) + part
                left -= passed
        if left:
            mine[holder] = mine.get(holder, 0) + left
        total[rank] += ns
    return charged


def _shared(total: int, weights: Mapping[int, int]) -> Iterable[tuple[int, int]]:
    """`total` ns divided in proportion to `weights`, whole ns, sum exact (the largest weight takes what is left)."""
    whole = sum(weights.values())
    parts = {rank: total * weight // whole for rank, weight in weights.items()}
    parts[max(weights, key=lambda rank: (weights[rank], -rank))] += total - sum(parts.values())
    return parts.items()
