"""How a straggler behaves over the steps, and what stragglers cost by host and by pipeline stage.

Definitions: definitions.md (Stragglers). What counts in a step is the longest time that one rank waited for the
straggler: about what that step would have been shorter by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from stepscope.analysis.causes.blame import Blame

if TYPE_CHECKING:
    from stepscope.analysis.causes.stragglers import Straggler

PERSISTENT, DRIFTING, ONE_OFF, OCCASIONAL = "persistent", "drifting", "one-off", "occasional"
PATTERNS = (PERSISTENT, DRIFTING, ONE_OFF, OCCASIONAL)

LATE = 0.02
"""A step counts as late where somebody waited for the straggler for at least this share of the mean step."""

MOST_STEPS = 0.75
"""Persistent: late in at least this share of the steps."""

FEWEST_FOR_ONE_OFF = 3
"""Of fewer steps one says nothing about the others."""

CERTAIN = 1.96
"""Mann-Kendall's z from which a trend is no accident (95 %, two-sided); fewer than five steps never reach it."""

MOST_PAIRED = 1000
"""A trend looks at every pair of steps: of more than these, so many are taken, evenly."""

CAUSE_SHARE = 0.75
"""A host or stage has the cause that stands behind at least this share of its cost."""


def pattern(waits: Sequence[int], step_ns: float) -> str | None:
    """The pattern of the longest waits for one rank, one a step in order, ns; None where no step or too few tell."""
    least = LATE * step_ns
    late = sum(wait >= least for wait in waits)
    if len(waits) < 2 or step_ns <= 0 or not late:
        return None
    if drifts(waits, least):
        return DRIFTING
    if late >= MOST_STEPS * len(waits):
        return PERSISTENT
    return ONE_OFF if late == 1 and len(waits) >= FEWEST_FOR_ONE_OFF else OCCASIONAL


def drifts(waits: Sequence[int], least: float) -> bool:
    """Whether the waits rise (or fall) from step to step, by at least `least` ns and half their median in all.

    The trend must be certain (Mann-Kendall), its size is Theil-Sen's slope times the steps between first and last.
    """
    if len(waits) < 2:
        return False
    place = np.arange(len(waits))
    if len(waits) > MOST_PAIRED:
        place = np.linspace(0, len(waits) - 1, MOST_PAIRED).round().astype(np.int64)
    values, count = np.asarray(waits, np.float64)[place], len(place)
    rank = np.unique(values, return_inverse=True)[1].astype(np.int16)
    larger = np.greater.outer(rank, rank)  # [i, j]: the wait of place i is longer than that of place j
    falls = int(np.count_nonzero(np.triu(larger)))
    signs = int(np.count_nonzero(larger)) - 2 * falls  # rises less falls
    deviation = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    if (abs(signs) - 1) / deviation < CERTAIN:
        return False
    first, second = np.triu_indices(count, 1)
    change = abs(float(np.median((values[second] - values[first]) / (place[second] - place[first])))) * (len(waits) - 1)
    return change >= max(least, median(waits) / 2)


@dataclass(frozen=True)
class StragglerGroup:
    """What the ranks of one host or one pipeline stage made others wait together; the fields of the public JSON."""

    by: str  # host | stage
    name: str
    ranks: tuple[int, ...]
    last_arrivals: int
    cost_ns_per_step: int  # sum over its ranks
    dearest_rank: int
    dearest_cost_ns_per_step: int  # as much as the group's: it is that rank, not the host or stage
    cause: str | None
    pattern: str | None


def straggler_groups(
    late: Sequence[Straggler],
    blame: Blame,
    ranks: Sequence[int],
    steps: Sequence[int | str],
    step_ns: float,
    places: Mapping[str, Mapping[int, str]],
) -> tuple[StragglerGroup, ...]:
    """Stragglers by every way of grouping in `places` (`host`, `stage`: rank -> name) with two groups or more.

    Dearest first within each. A group without a straggler is not listed.
    """
    of_rank = {one.rank: one for one in late}
    found: list[StragglerGroup] = []
    for by, names in places.items():
        members: dict[str, list[int]] = {}
        for rank in ranks:
            if rank in names:
                members.setdefault(names[rank], []).append(rank)
        if len(members) < 2:
            continue
        made = [
            _group(by, name, of, [of_rank[rank] for rank in of if rank in of_rank], blame, steps, step_ns)
            for name, of in members.items()
            if any(rank in of_rank for rank in of)
        ]
        found += sorted(made, key=lambda one: (-one.cost_ns_per_step, -one.last_arrivals, one.ranks))
    return tuple(found)


def _group(
    by: str,
    name: str,
    ranks: Sequence[int],
    late: Sequence[Straggler],
    blame: Blame,
    steps: Sequence[int | str],
    step_ns: float,
) -> StragglerGroup:
    cost = sum(one.cost_ns_per_step for one in late)
    dearest = max(late, key=lambda one: (one.cost_ns_per_step, one.last_arrivals, -one.rank))
    causes: Counter[str] = Counter()
    for one in late:
        if one.cause is not None:
            causes[one.cause] += one.cost_ns_per_step
    first = causes.most_common(1)
    longest = [max(waits) for waits in zip(*(blame.longest_waits_for(rank, steps) for rank in ranks), strict=True)]
    return StragglerGroup(
        by=by,
        name=name,
        ranks=tuple(ranks),
        last_arrivals=sum(one.last_arrivals for one in late),
        cost_ns_per_step=cost,
        dearest_rank=dearest.rank,
        dearest_cost_ns_per_step=dearest.cost_ns_per_step,
        cause=first[0][0] if first and cost and first[0][1] >= CAUSE_SHARE * cost else None,
        pattern=pattern(longest, step_ns),
    )
