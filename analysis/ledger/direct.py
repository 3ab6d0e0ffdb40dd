"""The direct method: every instant classified from recorded communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.blockers import Exposed, RankParts, exposed_waits
from stepscope.analysis.ledger.classes import Charged, follow
from stepscope.analysis.ledger.match import Matches
from stepscope.analysis.ledger.parts import own_pipeline_last
from stepscope.analysis.ledger.summary import RankSummary
from stepscope.analysis.ledger.times import RankTime
from stepscope.analysis.run import Run


def direct_times(run: Run, found: Sequence[RankSummary], matches: Matches) -> list[RankTime]:
    """Classify every instant of every rank from recorded communication."""
    views = _rank_parts(run, found, matches)
    bases = [_basis(summary, view) for summary, view in zip(found, views, strict=True)]
    exposed = [
        exposed_waits(view, base.waiting, summary.compute, summary.waits)
        for summary, view, base in zip(found, views, bases, strict=True)
    ]
    charged = _follow(exposed, matches)
    unsplit = _splittable(matches)
    return [
        _rank_time(summary, view, base, one, unsplit[view.part])
        for summary, view, base, one in zip(found, views, bases, charged, strict=True)
    ]


def _follow(exposed: list[Exposed], matches: Matches) -> list[Charged]:
    table, waits, clocks = matches.table, matches.waits, matches.clock
    if table is None or waits is None or clocks is None:
        return follow(exposed, np.empty(0, np.int64), [(one.start, one.end) for one in exposed])
    common = []
    for place, one in enumerate(exposed):
        places = np.full(len(one.start), place)
        common.append((one.start - clocks.ahead(places, one.start), one.end - clocks.ahead(places, one.end)))
    return follow(exposed, table["rank"][waits.last], common)


def _splittable(matches: Matches) -> np.ndarray:
    """Of each part: can waiting and transferring be told apart (bool)."""
    return matches.waits.split if matches.waits is not None else np.empty(0, bool)


def _rank_parts(run: Run, found: Sequence[RankSummary], matches: Matches) -> list[RankParts]:
    """Each rank's parts, times in its own clock."""
    table, waits = matches.table, matches.waits
    empty = np.empty(0, np.int64)
    if table is None or waits is None:
        return [RankParts(*[empty] * 9) for _ in found]
    shift = table["arrival_own"] - table["arrival"]
    own_last = own_pipeline_last(run.meta, table, matches.match_of_part)
    order = np.where(table["op_id"] >= 0, table["op_id"], table["row"])
    columns = (
        np.arange(len(table)),
        table["arrival_own"],
        table["end_own"],
        np.minimum(waits.wait_end + shift, table["end_own"]),
        own_last + shift,
        table["axis"],
        waits.last_arrival,
        table["op_id"],
        order,
    )
    return [RankParts(*(column[table.of_place(i)] for column in columns)) for i in range(len(found))]


@dataclass
class _Basis:
    """Unions of one rank from which its terms are cut."""

    comm: Intervals
    transferring: Intervals
    waiting: Intervals  # in flight, nothing transferring, nothing computing


def _basis(summary: RankSummary, view: RankParts) -> _Basis:
    comm = intervals.union(view.start, view.end)
    transferring = intervals.union(view.wait_end, view.end)
    waiting = intervals.subtract(intervals.subtract(comm, transferring), summary.compute)
    return _Basis(comm, transferring, waiting)


def _rank_time(summary: RankSummary, view: RankParts, base: _Basis, charged: Charged, split: np.ndarray) -> RankTime:
    visible = intervals.subtract(base.transferring, summary.compute)
    sure = intervals.union(view.wait_end[split], view.end[split])
    bubble, nonblocking = charged.bubble, charged.nonblocking
    terms = {
        "compute": summary.compute,
        "visible_comm": visible,
        "bubble": intervals.union(charged.start[bubble], charged.end[bubble]),
        "imbalance": intervals.union(charged.start[~bubble], charged.end[~bubble]),
        "memcpy": intervals.subtract(intervals.subtract(summary.memcpy, summary.compute), base.comm),
        "idle": summary.idle(summary.compute, base.comm),
    }
    unsplit = intervals.subtract(visible, sure)
    return RankTime(
        summary,
        terms,
        base.comm,
        base.transferring,
        unsplit,
        charged,
        intervals.union(charged.start[nonblocking], charged.end[nonblocking]),
    )
