"""Stragglers: who arrived last, what it made the others wait, and why as far as the rows tell.

Cost counts exposed waits only (blame.py says whom each goes back to); time that could not be split or that blocked
nothing is not charged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope.analysis.causes.blame import Blame
from stepscope.analysis.causes.patterns import pattern
from stepscope.analysis.causes.reasons import Reasons
from stepscope.analysis.causes.summary import counted_rows

CAUSES = {
    "compute_ns": "slower compute",
    "idle_ns": "late host",
    "visible_comm_ns": "slower communication",
    "memcpy_ns": "memory copies",
    "start_ns": "late host",
}
"""Where a straggler exceeds its peers (a term of its ledger, or when its step began) -> what that is called."""

LEAST_SHARE = 0.25
"""A term explains a straggler when its excess is at least this share of the longest wait that it causes."""

STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Quantile 0.95 of Student's t for 1, 2, ... degrees of freedom; the last serves for more."""

NEGLIGIBLE = 0.001
"""A rank that nobody waits for longer than this share of the step has no cause to name."""


@dataclass(frozen=True)
class Straggler:
    """One rank that made others wait; the fields of the public JSON. Cost: summed over the waiting ranks, ns a step."""

    rank: int
    last_arrivals: int
    cost_ns_per_step: int
    cause: str | None
    pattern: str | None = None  # patterns.PATTERNS


def stragglers(
    ledger: pd.DataFrame,
    starts: pd.DataFrame,
    blame: Blame,
    last_arrivals: Mapping[int, int],
    group_of: Callable[[int], Hashable],
    reasons: Reasons | None = None,
) -> tuple[Straggler, ...]:
    """Every rank that was last somewhere or made others wait, dearest first.

    `starts`: rank, step, start_ns (when each step began, common clock). `last_arrivals`: rank -> number of matched
    communications in counted steps that it was last in. `group_of`: ranks with the same work (those of one pipeline
    stage) share a value: they are each other's peers. `reasons` tells what stands behind a cause, where rows say it.
    """
    rows = counted_rows(ledger).merge(starts, on=["rank", "step"], how="left")
    steps = list(dict.fromkeys(rows["step"]))
    ranks = [int(rank) for rank in rows["rank"].unique()]
    excess, mean_step = Excess(rows), float(rows["step_ns"].mean())
    found = []
    for rank in ranks:
        cost = round(sum(blame.costs_of(rank, steps)) / len(steps))
        last = last_arrivals.get(rank, 0)
        if cost or last:
            waits = blame.longest_waits_for(rank, steps)
            wait, peers, cause = sum(waits) / len(steps), peers_of(rank, ranks, group_of), None
            if wait >= NEGLIGIBLE * mean_step:
                cause, peers = explained(excess, rank, ranks, wait, group_of)
            if cause is not None and reasons is not None:
                column = dearest_column(excess, rank, peers, group_of)
                more, share = excess.of(rank, peers, column), excess.share(rank, peers, column)
                cause = reasons.refine(cause, rank, peers, steps, more, share)
            found.append(Straggler(rank, last, cost, cause, pattern(waits, mean_step)))
    return tuple(sorted(found, key=lambda one: (-one.cost_ns_per_step, -one.last_arrivals, one.rank)))


def peers_of(rank: int, ranks: Sequence[int], group_of: Callable[[int], Hashable]) -> list[int]:
    """The other ranks with the same work; all other ranks where there is none."""
    others = [other for other in ranks if other != rank]
    return [other for other in others if group_of(other) == group_of(rank)] or others


def explained(
    excess: Excess, rank: int, ranks: Sequence[int], wait_ns: float, group_of: Callable[[int], Hashable]
) -> tuple[str | None, list[int]]:
    """(cause, peers that it shows beside): ranks with the same work, else, where a whole stage is slow, all others."""
    peers = peers_of(rank, ranks, group_of)
    cause = cause_of(excess, rank, peers, wait_ns, group_of)
    outside = [other for other in ranks if group_of(other) != group_of(rank)]
    if cause is None and outside:
        beside = cause_of(excess, rank, outside, wait_ns, group_of)
        return (beside, outside) if beside is not None else (None, peers)
    return cause, peers


def comparable(rank: int, peers: Sequence[int], group_of: Callable[[int], Hashable]) -> list[str]:
    """The columns of CAUSES in which a rank may be set beside its peers (at least one).

    When a step begins tells something only beside ranks with the same work: stages begin one after the other.
    """
    alike = group_of(peers[0]) == group_of(rank)
    return [column for column in CAUSES if alike or column != "start_ns"]


class Excess:
    """By how much ranks exceed their peers, over the rows of a ledger (or of one operation class): rank, step, columns."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows = rows
        self._step, labels = pd.factorize(rows["step"])
        self._rank, ranks = pd.factorize(rows["rank"])
        self._shape = (len(labels), len(ranks))
        self._place = {int(rank): place for place, rank in enumerate(ranks)}
        self._tables: dict[str, np.ndarray] = {}
        self._usual: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def of(self, rank: int, peers: Sequence[int], column: str) -> float:
        """Mean over steps of a rank's `column` less the median of its peers' in the same step, ns; 0 without peers."""
        each = self.each(rank, peers, column)
        each = each[~np.isnan(each)]
        return float(each.mean()) if len(each) else 0.0

    def each(self, rank: int, peers: Sequence[int], column: str) -> np.ndarray:
        """The same step by step; empty without peers."""
        if not peers or rank not in self._place:
            return np.empty(0)
        return self._table(column)[:, self._place[rank]] - self._others(peers, column)

    def steady(self, rank: int, peers: Sequence[int], column: str) -> bool:
        """Whether the excess of single steps bears its mean out: Student's t, one-sided, at 95 %. One step never does."""
        each = self.each(rank, peers, column)
        each = each[~np.isnan(each)]
        if len(each) < 2:
            return False
        needed = STUDENT[min(len(each) - 1, len(STUDENT)) - 1]
        return float(each.mean()) > needed * float(each.std(ddof=1)) / len(each) ** 0.5

    def share(self, rank: int, peers: Sequence[int], column: str) -> float:
        """`of` as a share of the mean of the peers' medians; infinite where these are 0."""
        others = self._others(peers, column)
        others = others[~np.isnan(others)]
        usual = float(others.mean()) if len(others) else 0.0
        return self.of(rank, peers, column) / usual if usual > 0 else float("inf")

    def _others(self, peers: Sequence[int], column: str) -> np.ndarray:
        """Per step the median of the peers' column."""
        key = (column, tuple(peers))
        if key not in self._usual:
            table = self._table(column)[:, [self._place[peer] for peer in peers]]
            known = ~np.isnan(table)
            some = known.any(axis=1)
            whole = some & known.all(axis=1)
            self._usual[key] = np.full(len(table), np.nan)
            self._usual[key][whole] = np.median(table[whole], axis=1)
            if (some & ~whole).any():
                self._usual[key][some & ~whole] = np.nanmedian(table[some & ~whole], axis=1)
        return self._usual[key]

    def _table(self, column: str) -> np.ndarray:
        """Steps x ranks; NaN where there is no row."""
        if column not in self._tables:
            table, seen = np.zeros(self._shape), np.zeros(self._shape, bool)
            np.add.at(table, (self._step, self._rank), self._rows[column].to_numpy(float))
            seen[self._step, self._rank] = True
            table[~seen] = np.nan
            self._tables[column] = table
        return self._tables[column]


def dearest_column(excess: Excess, rank: int, peers: Sequence[int], group_of: Callable[[int], Hashable]) -> str:
    """The column of CAUSES in which `rank` exceeds its peers most."""
    return max(comparable(rank, peers, group_of), key=lambda column: excess.of(rank, peers, column))


def cause_of(
    excess: Excess, rank: int, peers: Sequence[int], wait_ns: float, group_of: Callable[[int], Hashable]
) -> str | None:
    """Where `rank` exceeds its peers most; None where nothing explains the `wait_ns` that others wait for it."""
    if wait_ns <= 0 or not peers:
        return None
    largest = dearest_column(excess, rank, peers, group_of)
    return CAUSES[largest] if excess.of(rank, peers, largest) >= LEAST_SHARE * wait_ns else None
