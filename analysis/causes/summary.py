"""Means over whole steps: which rows count, and sums that come out exactly.

A mean is first over ranks, then over steps. It is kept as a fraction, so that the six terms of a mean sum to the mean
step exactly; for JSON the terms are written as multiples of 1/1024 ns, whose sums are exact in binary floating point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from stepscope.analysis.ledger.steps import OUT_OF_MEANS, whole_steps
from stepscope.analysis.records import TERMS

TERM_COLUMNS = tuple(f"{term}_ns" for term in TERMS)
BESIDE_COLUMNS = ("hidden_comm_ns", "hidden_wait_ns", "unsplit_ns")
"""Measured beside the partition, not part of it."""

MEAN_COLUMNS = (*TERM_COLUMNS, *BESIDE_COLUMNS)

OUT = frozenset(OUT_OF_MEANS)

GRAIN = 1024
"""Means are written in multiples of 1/GRAIN ns (a power of two): 53 bits hold that exactly for steps up to two hours."""


@dataclass(frozen=True)
class Means:
    """Means of the ledger over ranks and steps, in ns, exact.

    `by_step` holds, per step, the means over ranks; `values` their means over steps. Both map MEAN_COLUMNS and
    `step_ns`. `ranks` and `steps` are those that count; `counted`: which ranks do in each step (all of them, unless no
    step is whole on all ranks); `sums`: by column, the sum over them in each step.
    """

    ranks: tuple[int, ...]
    steps: tuple[int | str, ...]
    values: dict[str, Fraction]
    counted: Mapping[int | str, frozenset[int]] = field(default_factory=dict)
    sums: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def by_step(self) -> tuple[dict[str, Fraction], ...]:
        """Exact means of every step."""
        numbers = [len(self.counted[step]) for step in self.steps]
        return tuple(
            {name: Fraction(column[at], number) for name, column in self.sums.items()}
            for at, number in enumerate(numbers)
        )

    @property
    def step_lengths(self) -> list[float]:
        """Mean time of each step, ns."""
        return [ns / len(self.counted[step]) for step, ns in zip(self.steps, self.sums["step_ns"], strict=True)]

    @property
    def step_ns(self) -> Fraction | None:
        """Mean step time; None where no whole step was recorded."""
        return self.values.get("step_ns")


def _whole(ledger: pd.DataFrame) -> np.ndarray:
    """Which rows enter means (bool), as steps.whole_steps has it; that is asked only of ranks with an open end."""
    flags = ledger["flags"].tolist()
    kinds: dict[tuple[str, ...], int] = {}  # there are few
    kind = np.array([kinds.setdefault(one, len(kinds)) for one in flags], np.int64)
    keep = np.array([OUT.isdisjoint(one) for one in kinds], bool)[kind]
    opened = np.array(["open_end" in one for one in kinds], bool)[kind]
    rank = ledger["rank"].to_numpy()
    for one in np.unique(rank[opened]).tolist():  # one that is shorter for its open end is not whole
        rows = np.flatnonzero(rank == one)
        keep[rows] = whole_steps(ledger["step_ns"].to_numpy()[rows].tolist(), [flags[row] for row in rows.tolist()])
    return keep


def counted_rows(ledger: pd.DataFrame) -> pd.DataFrame:
    """Whole rows of the steps that every rank (with any whole step at all) has whole: each mean is over equal ranks.

    Where no step is whole on all of them, all whole rows count.
    """
    whole = _whole(ledger)
    if not whole.any():
        return ledger[whole]
    step = pd.factorize(ledger["step"])[0]
    ranks = len(np.unique(ledger["rank"].to_numpy()[whole]))
    common = np.bincount(step[whole], minlength=int(step.max()) + 1) == ranks  # one row a rank and step
    return ledger[whole & common[step]] if common.any() else ledger[whole]


def step_key(step: Any) -> int | str:
    """A step as a frame holds it (numpy integer, or `all`) as the plain value that JSON and dictionaries use."""
    return step if isinstance(step, str) else int(step)


def _step_order(step: int | str) -> tuple[int, str]:
    return (step, "") if isinstance(step, int) else (-1, str(step))


def means(ledger: pd.DataFrame) -> Means:
    """Exact means of every term over the counted rows; empty `values` where there is none."""
    rows = counted_rows(ledger)
    if rows.empty:
        return Means((), (), {})
    code, labels = pd.factorize(rows["step"])
    keys = [step_key(label) for label in labels]
    order = sorted(range(len(keys)), key=lambda at: _step_order(keys[at]))
    sums = {}
    for name in ("step_ns", *MEAN_COLUMNS):
        total = _summed(code, rows[name].to_numpy(), len(labels))
        sums[name] = [total[at] for at in order]
    ranks: list[list[int]] = [[] for _ in keys]
    for at, rank in zip(code.tolist(), rows["rank"].tolist(), strict=True):
        ranks[at].append(rank)
    steps = tuple(keys[at] for at in order)
    counted = {keys[at]: frozenset(ranks[at]) for at in order}
    numbers = [len(counted[step]) for step in steps]
    if len(set(numbers)) == 1:  # on equal ranks in each step, as nearly always
        values = {name: Fraction(sum(column), numbers[0] * len(steps)) for name, column in sums.items()}
    else:
        each = {name: map(Fraction, column, numbers) for name, column in sums.items()}
        values = {name: sum(column, Fraction(0)) / len(steps) for name, column in each.items()}
    return Means(tuple(sorted({int(rank) for rank in rows["rank"]})), steps, values, counted, sums)


def _summed(code: np.ndarray, values: np.ndarray, size: int) -> list[int]:
    """Exact sums of integer values by code."""
    total = np.zeros(size, np.int64)
    np.add.at(total, code, values)
    return [int(value) for value in total]


def grained(value: Fraction) -> float:
    """`value` to the nearest 1/GRAIN: a float that adds without rounding."""
    return round(value * GRAIN) / GRAIN


def number(value: float) -> int | float:
    """An integer where the value is one, so that whole nanoseconds are written without a point."""
    return int(value) if value == int(value) else value


def written(values: Mapping[str, Fraction]) -> dict[str, int | float]:
    """Means as JSON numbers: terms grained, and `step_ns` their exact sum."""
    terms = {name: grained(values[name]) for name in MEAN_COLUMNS}
    step = sum(terms[name] for name in TERM_COLUMNS)
    return {name: number(value) for name, value in {"step_ns": step, **terms}.items()}


def ratio(part: float | Fraction, whole: float | Fraction) -> float | None:
    """part / whole, None where the whole is 0: undefined is never 0."""
    return float(part / whole) if whole else None


def overlap_of(ledger: pd.DataFrame) -> tuple[float | None, float | None]:
    """(overlap efficiency, comm overlap) of all counted rows together, by total time; None without communication.

    Formulas: definitions.md, Overlap. Only rows whose waits were recorded (method direct or balanced) can say how long
    communication was in flight; `comm_overlap` is of those.
    """
    rows = counted_rows(ledger)
    hidden, visible = int(rows["hidden_comm_ns"].sum()), int(rows["visible_comm_ns"].sum())
    recorded = rows[rows["method"] != "inferred"]
    covered = int(recorded["hidden_comm_ns"].sum() + recorded["hidden_wait_ns"].sum())
    exposed = int(recorded[["visible_comm_ns", "bubble_ns", "imbalance_ns"]].to_numpy().sum())
    return ratio(hidden, hidden + visible), ratio(covered, covered + exposed)
