"""Where one rank's time went: what every method of charging returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.classes import Charged
from stepscope.analysis.ledger.summary import RankSummary


@dataclass
class RankTime:
    """One rank, whole trace, the rank's own clock; the six terms (records.TERMS) are disjoint."""

    summary: RankSummary
    terms: dict[str, Intervals]
    comm: Intervals  # in flight
    transferring: Intervals  # transferring, or not to be split
    unsplit: Intervals  # the part of visible_comm in which nothing that could be split was transferring
    charged: Charged  # the exposed waits with their blockers
    nonblocking: Intervals  # exposed waits on which no computation depended


def rebalance(time: RankTime, structural: dict[int | str, int]) -> RankTime:
    """The balanced method: of each step's pipeline waiting the first `structural[step]` ns stay bubble.

    `bubble = min(w, structural)`, the rest of the waiting becomes imbalance (docs/definitions.md). ValueError for a step
    without a structural wait.
    """
    windows, bubble = time.summary.windows, time.terms["bubble"]
    moved = [intervals.EMPTY]
    for i, step in enumerate(windows.steps):
        if step not in structural:
            raise ValueError(f"no structural wait of step {step} on rank {time.summary.rank}: replay that step as well")
        held = intervals.clip(bubble, int(windows.start_ns[i]), int(windows.end_ns[i]))
        moved.append(_after(held, structural[step]))
    rest = intervals.join(*moved)
    terms = dict(time.terms)
    terms["bubble"] = intervals.subtract(bubble, rest)
    terms["imbalance"] = intervals.join(time.terms["imbalance"], rest)
    return replace(time, terms=terms)


def _after(held: Intervals, amount: int) -> Intervals:
    """What is left of a set when its first `amount` ns are taken."""
    past = np.cumsum(held[1] - held[0])
    taken = np.minimum(np.maximum(amount - (past - (held[1] - held[0])), 0), held[1] - held[0])
    start = held[0] + taken
    return intervals.union(start, held[1])
