"""What matching has to say about a trace: what is missing, inferred or inconsistent, and which numbers it touches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.analysis.ledger import clocks as clock
from stepscope.analysis.ledger import keys
from stepscope.analysis.ledger.parts import Parts
from stepscope.analysis.ledger.summary import RankSummary
from stepscope.analysis.ledger.waits import Waits
from stepscope.analysis.records import HealthItem
from stepscope.analysis.units import counted
from stepscope.tracer.schema import COLLECTIVES

SPLIT = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "stragglers")
"""What rests on where waiting ends and transferring begins."""

TOUCHED = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "unsplit_ns", "stragglers")


def match_health(
    parts: Parts,
    matched: keys.Matched,
    waits: Waits,
    clocks: clock.Clocks,
    found: Sequence[RankSummary],
) -> list[HealthItem]:
    items: list[HealthItem] = []
    _, one = np.unique(matched.match, return_index=True)
    unmatched, partial = int(waits.unmatched[one].sum()), int(waits.partial[one].sum())
    if unmatched:
        items.append(_unmatched_item(parts, waits, unmatched, len(one)))
    if partial:
        of = counted(len(one), "communication was", "communications were")
        text = f"{partial} of {of} recorded on some of their ranks only: their waits are lower bounds"
        items.append(HealthItem("partial_match", text, touches=TOUCHED))
    inferred = int(((matched.method[one] == keys.INFERRED) & (waits.present[one] > 1)).sum())
    if inferred:
        text = (
            f"{counted(inferred, 'communication names', 'communications name')} no group: paired by kind, stream and time "
            f"(ends within {keys.TOLERANCE_NS / 1e6:g} ms, intervals overlapping)"
        )
        items.append(HealthItem("inferred_match", text, touches=SPLIT))
    items += _unequal_counts(parts) + _disagreeing(parts, matched)
    host = [summary.rank for summary in found if summary.host and len(summary.comm["row"])]
    nameless = host and bool((parts["group"] < 0).any())
    if nameless and len(found) > 1:
        text = "host communications name no group: they are not paired across ranks by the order of their names"
        items.append(HealthItem("group_unknown", text, touches=TOUCHED))
    violations = int(waits.violation.sum())
    if violations:
        ends = counted(violations, "part of a communication ends", "parts of communications end")
        text = f"{ends} before the last one they depend on arrived: their clocks disagree"
        items.append(HealthItem("clock_violation", text, touches=SPLIT))
    for place, source in enumerate(clocks.source):
        if source == "estimated":
            text = (
                f"clock of rank {parts.ranks[place]}: estimated {int(clocks.offset_ns[place])} ns ahead from "
                f"{counted(int(clocks.samples[place]), 'communication')}, residual {int(clocks.residual_ns[place])} ns"
            )
            items.append(HealthItem("clock_estimated", text, rank=parts.ranks[place]))
    return items


def _unmatched_item(parts: Parts, waits: Waits, count: int, total: int) -> HealthItem:
    """Names a few of them: a communication whose partners never came is where a hang shows."""
    shown = "; ".join(_described(parts, row) for row in np.flatnonzero(waits.unmatched)[:3].tolist())
    more = f"; and {count - 3} more" if count > 3 else ""
    text = f"{count} of {counted(total, 'communication was', 'communications were')} recorded on one rank only ({shown}{more}): not split"
    return HealthItem("unmatched", text, touches=TOUCHED)


def _described(parts: Parts, row: int) -> str:
    """One part in words."""
    kind = [*COLLECTIVES, "operation"][parts["collective"][row]]
    number = f" number {int(parts['seq'][row])}" if parts["seq"][row] >= 0 else ""
    group = f" of {parts.groups.names[parts['group'][row]]}" if parts["group"][row] >= 0 else ""
    return f"{kind}{number}{group} on rank {parts.ranks[parts['rank'][row]]}"


def _disagreeing(parts: Parts, matched: keys.Matched) -> list[HealthItem]:
    """Communications with one group and number that are different operations on different ranks."""
    rows = np.flatnonzero(~parts.point_to_point & (parts["collective"] >= 0) & (matched.method == keys.SEQ))
    rows = rows[np.argsort(matched.match[rows], kind="stable")]
    differs = (np.diff(matched.match[rows]) == 0) & (np.diff(parts["collective"][rows]) != 0)
    if not differs.any():
        return []
    first = rows[np.flatnonzero(differs)[0]], rows[np.flatnonzero(differs)[0] + 1]
    many = counted(
        int(differs.sum()), "communication is a different operation", "communications are different operations"
    )
    text = f"{many} on their ranks: the ranks have come apart"
    named = " against ".join(_described(parts, int(row)) for row in first)
    return [HealthItem("mismatched", f"{text} (first: {named})", touches=TOUCHED)]


def _unequal_counts(parts: Parts) -> list[HealthItem]:
    """Groups in which the ranks recorded different numbers of collectives."""
    rows = np.flatnonzero((parts["group"] >= 0) & ~parts.point_to_point)
    if len(rows) == 0:
        return []
    count = np.zeros((len(parts.groups.names), len(parts.ranks)), np.int64)
    np.add.at(count, (parts["group"][rows], parts["rank"][rows]), 1)
    unequal = [
        (g, used) for g, used in enumerate(row[row > 0] for row in count) if len(used) > 1 and used.min() != used.max()
    ]
    if not unequal:
        return []
    g, used = unequal[0]
    text = (
        f"{counted(len(unequal), 'group has', 'groups have')} unequal numbers of communications on their ranks "
        f"(first: {parts.groups.names[g]}, {int(used.min())} to {int(used.max())})"
    )
    return [HealthItem("unequal_counts", text, touches=TOUCHED)]
