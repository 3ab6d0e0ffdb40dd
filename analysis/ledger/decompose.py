"""The ledger: every nanosecond of every step of every rank belongs to one of six terms (docs/definitions.md).

`decompose(run)` classifies each instant from intervals that are measured, never as a remainder, and checks that the
terms of every row add up to the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.direct import direct_times
from stepscope.analysis.ledger.inferred import can_infer, inferred_times
from stepscope.analysis.ledger.match import Matches, match_summaries
from stepscope.analysis.ledger.steps import Windows, tell, uncommon_steps, whole_steps
from stepscope.analysis.ledger.summary import RankSummary, summaries
from stepscope.analysis.ledger.times import RankTime, rebalance
from stepscope.analysis.records import LEDGER_COLUMNS, TERMS
from stepscope.analysis.run import Columns, Run

if TYPE_CHECKING:
    import pandas as pd  # where a frame is made: importing it costs as much as reading half a million events

METHODS = ("direct", "inferred", "balanced")

NONBLOCKING_SHARE = 100
"""A row is flagged `nonblocking` when that is at least one part in so many of its step."""


@dataclass
class Decomposition:
    """The ledger (records.LEDGER_COLUMNS, one row a rank and step), what it rests on, and the partition itself.

    `columns` and `beside` hold it as arrays, `ledger` and `steps` as frames. `steps`: one row a rank and step beside the
    ledger: window (own clock), cpu_step_ns, op_wait_ns (waiting of operations, hidden or not, clipped to the window),
    nonblocking_ns (exposed waits on which no computation depended), blocking_comm_ns (visible communication that a recorded
    wait names; NaN where no waits are recorded), in_means.
    """

    columns: Columns
    beside: Columns
    matches: Matches
    windows: dict[int, Windows]
    method: str
    time: dict[int, RankTime] = field(default_factory=dict, repr=False)

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """The ledger as a frame, records.LEDGER_COLUMNS."""
        import pandas as pd

        return pd.DataFrame(self.columns, columns=list(LEDGER_COLUMNS)).astype(LEDGER_COLUMNS)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """What stands beside the ledger, as a frame."""
        import pandas as pd

        return pd.DataFrame(self.beside)

    def segments(self, rank: int) -> pd.DataFrame:
        """The partition of one rank: step, start_ns, end_ns, term; sorted, tiling every window, in the rank's own clock."""
        import pandas as pd

        windows, time = self.windows[rank], self.time[rank]
        pieces = []
        for code, term in enumerate(TERMS):
            which, at = intervals.pairs(time.terms[term], windows.intervals)
            low = np.maximum(time.terms[term][0][which], windows.intervals[0][at])
            high = np.minimum(time.terms[term][1][which], windows.intervals[1][at])
            pieces.append((low, high, np.full(len(at), code, np.int8), at))
        start, end, kind, window = (np.concatenate([piece[i] for piece in pieces]) for i in range(4))
        order = np.argsort(start, kind="stable")
        steps = step_column(windows.steps)[windows.step_ns > 0]
        return pd.DataFrame(
            {
                "step": steps[window[order]],
                "start_ns": start[order],
                "end_ns": end[order],
                "term": pd.Series(pd.Categorical.from_codes(kind[order], categories=pd.Index(TERMS))),
            }
        )


def step_column(steps: Sequence[int | str]) -> np.ndarray:
    """Steps as an object array (numbers, or `all`)."""
    column = np.empty(len(steps), object)
    column[:] = steps
    return column


def decompose(
    run: Run,
    method: str = "direct",
    axes: Mapping[str, str] | None = None,
    structural: Mapping[tuple[int, int | str], int] | None = None,
) -> Decomposition:
    """The ledger of a run; health items go to `run.health`.

    `method`: `direct` from recorded communication (a run that recorded none, but stages and microbatches, is `inferred`),
    `inferred`, or `balanced`, which needs `structural`: the wait that is left of each (rank, step), in ns, when the step
    is replayed with equal durations. `axes`: process group name -> mesh axis where the trace does not tell.
    ValueError for an unknown method or missing structural waits, StepscopeError where rows do not say enough.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if method == "balanced" and structural is None:
        raise ValueError("method balanced needs the structural waits of a replay: use direct without one")
    found = summaries(run)
    matches = match_summaries(run, found, axes)
    for summary in found:
        tell(run.health, summary.windows.health)
    tell(run.health, uncommon_steps([summary.windows for summary in found]))
    basis = method
    if method != "inferred":
        basis = "inferred" if can_infer(run, found) else "direct"
    times = inferred_times(run, found) if basis == "inferred" else direct_times(run, found, matches)
    if structural is not None and method == "balanced":
        times = [rebalance(time, _of_rank(structural, time.summary.rank)) for time in times]
        basis = "balanced"
    return assemble(found, matches, times, basis)


def _of_rank(structural: Mapping[tuple[int, int | str], int], rank: int) -> dict[int | str, int]:
    return {step: wait for (of, step), wait in structural.items() if of == rank}


# -- the ledger --------------------------------------------------------------------------------------------------------


def assemble(found: Sequence[RankSummary], matches: Matches, times: Sequence[RankTime], method: str) -> Decomposition:
    """Measure each term in each window; raises AssertionError if a row does not add up to its step."""
    rows: list[Columns] = []
    beside: list[Columns] = []
    for summary, time in zip(found, times, strict=True):
        if summary.windows.steps:
            rows.append(_ledger_rows(summary, time, matches, method))
            beside.append(_step_rows(summary, time, matches))
    return Decomposition(
        stacked(rows),
        stacked(beside),
        matches,
        {summary.rank: summary.windows for summary in found},
        method,
        {time.summary.rank: time for time in times},
    )


def stacked(pieces: Sequence[Columns]) -> Columns:
    """Tables of the same columns, one below the other; no columns without any."""
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}


def _measure(one: Intervals, windows: Windows) -> np.ndarray:
    return intervals.covered(one, windows.start_ns, windows.end_ns)


def _ledger_rows(summary: RankSummary, time: RankTime, matches: Matches, method: str) -> Columns:
    windows = summary.windows
    terms = {term: _measure(time.terms[term], windows) for term in TERMS}
    total = np.sum(list(terms.values()), axis=0)
    if (total != windows.step_ns).any():
        at = int(np.flatnonzero(total != windows.step_ns)[0])
        parts = {term: int(values[at]) for term, values in terms.items()}
        raise AssertionError(
            f"rank {summary.rank} step {windows.steps[at]}: terms {parts} are {int(total[at])} of {int(windows.step_ns[at])} ns"
        )
    hidden = _measure(intervals.intersect(time.transferring, summary.compute), windows)
    both = _measure(intervals.intersect(time.comm, summary.compute), windows)
    comm, transferring = _measure(time.comm, windows), _measure(time.transferring, windows)
    steps = step_column(windows.steps)
    flags = np.empty(len(windows.steps), object)
    flags[:] = _flags(summary, time, matches)
    columns = {"rank": np.full(len(steps), summary.rank), "step": steps, "step_ns": windows.step_ns}
    columns |= {f"{term}_ns": values for term, values in terms.items()}
    columns |= {
        "hidden_comm_ns": hidden,
        "hidden_wait_ns": both - hidden,
        "unsplit_ns": _measure(time.unsplit, windows),
        "overlap_efficiency": ratio(hidden, transferring),
        "comm_overlap": ratio(both, comm),
        "method": np.full(len(steps), method, object),
        "flags": flags,
    }
    return {name: columns[name] for name in LEDGER_COLUMNS}


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where there is nothing."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _flags(summary: RankSummary, time: RankTime, matches: Matches) -> list[tuple[str, ...]]:
    """The windows' flags, and those that the charging adds."""
    windows = summary.windows
    loose = _measure(time.nonblocking, windows)
    loose = (loose > 0) & (loose * NONBLOCKING_SHARE >= windows.step_ns)
    uncertain = _clock_doubt(summary, time, matches)
    return [
        tuple(
            sorted(
                {*flags}
                | ({"host"} if summary.host else set())
                | ({"nonblocking"} if loose[i] else set())
                | ({"clock"} if uncertain[i] else set())
            )
        )
        for i, flags in enumerate(windows.flags)
    ]


def _clock_doubt(summary: RankSummary, time: RankTime, matches: Matches) -> np.ndarray:
    """Steps whose exposed wait is less than the clocks' uncertainty over its waits, or in which causality is violated."""
    windows, table, waits, clocks = summary.windows, matches.table, matches.waits, matches.clock
    doubt = np.zeros(len(windows.steps), bool)
    if table is None or waits is None or clocks is None:
        return doubt
    charged = time.charged
    bound = clocks.bound_ns[table["rank"][charged.part]] + clocks.bound_ns[table["rank"][waits.last[charged.part]]]
    place = np.searchsorted(windows.start_ns, charged.start, "right") - 1
    inside = place >= 0
    exposed, uncertain = np.zeros(len(doubt), np.int64), np.zeros(len(doubt), np.int64)
    np.add.at(exposed, place[inside], (charged.end - charged.start)[inside])
    fresh = np.ones(len(place), bool)
    fresh[1:] = (charged.part[1:] != charged.part[:-1]) | (place[1:] != place[:-1])
    np.add.at(uncertain, place[inside & fresh], bound[inside & fresh])
    mine = table.of_rank(summary.rank)
    broken = table["arrival_own"][mine][waits.violation[mine]]
    at = np.searchsorted(windows.start_ns, broken, "right") - 1
    doubt[at[at >= 0]] = True
    return doubt | ((exposed > 0) & (exposed < uncertain))


def _step_rows(summary: RankSummary, time: RankTime, matches: Matches) -> Columns:
    windows = summary.windows
    steps = step_column(windows.steps)
    return {
        "rank": np.full(len(steps), summary.rank),
        "step": steps,
        "start_ns": windows.start_ns,
        "end_ns": windows.end_ns,
        "cpu_step_ns": windows.cpu_step_ns,
        "op_wait_ns": _op_wait(summary, matches),
        "nonblocking_ns": _measure(time.nonblocking, windows),
        "blocking_comm_ns": _blocking(summary, time),
        "in_means": whole_steps(windows.step_ns.tolist(), windows.flags),
    }


def _op_wait(summary: RankSummary, matches: Matches) -> np.ndarray:
    """Waiting of all operations of the rank, clipped to each window, ns."""
    windows, table, waits = summary.windows, matches.table, matches.waits
    total = np.zeros(len(windows.steps), np.int64)
    if table is None or waits is None or len(total) == 0:
        return total
    mine = table.of_rank(summary.rank)
    start = table["arrival_own"][mine]
    end = start + (waits.wait_end - table["arrival"])[mine]
    full = np.flatnonzero(windows.step_ns > 0)
    part, at = intervals.pairs((start, end), windows.intervals)
    clipped = np.minimum(end[part], windows.intervals[1][at]) - np.maximum(start[part], windows.intervals[0][at])
    np.add.at(total, full[at], clipped)
    return total


def _blocking(summary: RankSummary, time: RankTime) -> np.ndarray:
    """Visible communication while a wait row names an operation that is then in flight, ns; NaN without wait rows."""
    windows, waits, comm = summary.windows, summary.waits, summary.comm
    if len(waits["start"]) == 0:
        return np.full(len(windows.steps), np.nan)
    order = np.argsort(comm["op_id"], kind="stable")
    if len(order) == 0:
        return np.zeros(len(windows.steps))
    at = order[np.minimum(np.searchsorted(comm["op_id"][order], waits["op_id"]), len(order) - 1)]
    same = (comm["op_id"][at] == waits["op_id"]) & (waits["op_id"] >= 0)
    start = np.maximum(waits["start"], comm["start"][at])[same]
    end = np.minimum(waits["end"], comm["end"][at])[same]
    named = intervals.union(start, end)
    return _measure(intervals.intersect(named, time.terms["visible_comm"]), windows).astype(float)
