"""Matching of communications across ranks: `match(run) -> Matches`, with waits, clocks and evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from stepscope.analysis.ledger import clocks as clock
from stepscope.analysis.ledger import keys
from stepscope.analysis.ledger.parts import Parts, collect
from stepscope.analysis.ledger.steps import tell
from stepscope.analysis.ledger.summary import RankSummary, summaries
from stepscope.analysis.ledger.waits import Waits, reckon
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Run
from stepscope.tracer.schema import AXES, COLLECTIVES, STRATEGIES, RunMeta

TOUCHED = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "unsplit_ns", "stragglers")


@dataclass
class Matches:
    """All communications of a run, matched.

    `parts`: one row a (match, rank), PARTS columns; arrival, end and last arrival in the common clock (a rank's own time
    minus its offset), everything ns, missing -1. `clocks`: one row a rank. `rates`: one row a group, how many of its
    communications were recorded on all their ranks.
    """

    parts: pd.DataFrame
    clocks: pd.DataFrame
    rates: pd.DataFrame
    health: list[HealthItem] = field(default_factory=list)
    table: Parts | None = None  # the same as arrays, for the ledger
    match_of_part: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    waits: Waits | None = None
    clock: clock.Clocks | None = None


def match(run: Run, axes: Mapping[str, str] | None = None) -> Matches:
    """Match the communications of all ranks; health items go to `run.health`.

    `axes` maps names of process groups to mesh axes where the trace does not tell (docs/definitions.md, Matching).
    """
    return match_summaries(run, summaries(run), axes)


def match_summaries(run: Run, found: Sequence[RankSummary], axes: Mapping[str, str] | None = None) -> Matches:
    """The same from summaries that are already at hand."""
    parts = collect(run.meta, found, axes)
    matched = keys.Matched.nothing(len(parts)) if parts.columns else keys.Matched.nothing(0)
    if not parts.columns:
        return Matches(pd.DataFrame(columns=list(PARTS)), pd.DataFrame(), pd.DataFrame())
    clocks = _match_all(run.meta, parts, matched, np.array([not one.host for one in found], bool))
    waits = reckon(parts, matched, run.meta.world_size, clocks.bound_ns)
    lanes = [one.streams for one in found]
    result = Matches(
        _frame(parts, matched, waits, lanes),
        _clock_frame(parts, clocks, waits),
        _rates(parts, matched, waits),
        table=parts,
        match_of_part=matched.match,
        waits=waits,
        clock=clocks,
    )
    result.health = _health(run, parts, matched, waits, clocks, found)
    tell(run.health, result.health)
    return result


def _match_all(meta: RunMeta, parts: Parts, matched: keys.Matched, on_device: np.ndarray) -> clock.Clocks:
    """Keys and clocks need each other: numbers need no clock, order and time do."""
    clocks = clock.recorded(meta, parts)
    clocks.correct(parts)
    keys.by_sequence(parts, matched)
    if meta.source == "imported":
        keys.doubt_messages(parts, matched)
    if clock.needs_estimate(meta, parts):
        clocks = clock.estimate(meta, parts, matched)
    numbered = matched.method == keys.SEQ
    keys.by_order(parts, matched)
    if clock.needs_estimate(meta, parts) and not numbered.all():
        clocks.correct(parts)
        clocks = clock.estimate(meta, parts, matched)
    keys.by_time(parts, matched, on_device)  # a foreign gloo trace has one name for all groups: refused
    alone = np.flatnonzero(matched.match < 0)
    matched.match[alone] = np.arange(len(alone)) + int(matched.match.max(initial=-1)) + 1
    return clocks


# -- frames ------------------------------------------------------------------------------------------------------------

PARTS = (
    "match_id",
    "rank",
    "row",
    "group",
    "axis",
    "strategy",
    "collective",
    "seq",
    "bytes",
    "stream",
    "op_id",
    "arrival_ns",
    "end_ns",
    "last_arrival_ns",
    "wait_ns",
    "transfer_ns",
    "last_rank",
    "straggler",
    "method",
    "partial",
    "unmatched",
    "violation",
    "estimated_wait_ns",
    "impossible",
)
"""`row`: index into the rank's events. `last_rank`: who arrived last among those this part depends on, -1 where nobody
led by more than the clocks' uncertainty; `straggler`: the same, after whom it had queued behind (head of line).
Unmatched parts have no last arrival, wait or transfer (-1)."""


def _frame(parts: Parts, matched: keys.Matched, waits: Waits, lanes: Sequence[tuple[str, ...]]) -> pd.DataFrame:
    order = np.lexsort((parts["rank"], matched.match))
    ranks = np.array([*parts.ranks, -1], np.int64)
    unmatched = waits.unmatched

    def told(values: np.ndarray) -> np.ndarray:
        return np.where(unmatched, -1, values)[order]

    wait = waits.wait_end - parts["arrival"]
    columns = {
        "match_id": matched.match[order],
        "rank": ranks[parts["rank"][order]],
        "row": parts["row"][order],
        "group": _words([*parts.groups.names, ""], parts["group"][order]),
        "axis": _words([*AXES, ""], parts["axis"][order]),
        "strategy": _words([*STRATEGIES, ""], parts["strategy"][order]),
        "collective": _words([*COLLECTIVES, ""], parts["collective"][order]),
        "seq": parts["seq"][order],
        "bytes": parts["bytes"][order],
        "stream": _streams(parts, lanes)[order],
        "op_id": parts["op_id"][order],
        "arrival_ns": parts["arrival"][order],
        "end_ns": parts["end"][order],
        "last_arrival_ns": told(waits.last_arrival),
        "wait_ns": told(wait),
        "transfer_ns": told(parts["end"] - waits.wait_end),
        "last_rank": ranks[waits.leader[order]],
        "straggler": ranks[waits.straggler[order]],
        "method": _words([*keys.METHODS, ""], np.where(waits.present > 1, matched.method, -1)[order]),
        "partial": waits.partial[order],
        "unmatched": unmatched[order],
        "violation": waits.violation[order],
        "estimated_wait_ns": waits.estimate[order],
        "impossible": parts["impossible"][order],
    }
    return pd.DataFrame(columns)


def _words(words: Sequence[str], codes: np.ndarray) -> np.ndarray:
    """Text column of codes; -1 is the last of `words`, the empty one."""
    return np.array(words, object)[codes]


def _streams(parts: Parts, lanes: Sequence[tuple[str, ...]]) -> np.ndarray:
    names = np.array([name for lane in lanes for name in lane] or [""], object)
    base = np.concatenate(([0], np.cumsum([len(lane) for lane in lanes])))[:-1]
    return names[base[parts["rank"]] + parts["lane"]]


def _clock_frame(parts: Parts, clocks: clock.Clocks, waits: Waits) -> pd.DataFrame:
    violations = np.bincount(parts["rank"][waits.violation], minlength=len(parts.ranks))
    return pd.DataFrame(
        {
            "rank": np.array(parts.ranks, np.int64),
            "offset_ns": clocks.offset_ns,
            "drift_ppm": clocks.drift_ppm,
            "residual_ns": clocks.residual_ns,
            "bound_ns": clocks.bound_ns,
            "samples": clocks.samples,
            "violations": violations,
            "source": clocks.source,
        }
    )


def _rates(parts: Parts, matched: keys.Matched, waits: Waits) -> pd.DataFrame:
    """Per group and method of matching: communications, those seen on all their ranks, on some, on one."""
    _, one = np.unique(matched.match, return_index=True)
    frame = pd.DataFrame(
        {
            "group": np.array([*parts.groups.names, ""], object)[parts["group"][one]],
            "method": np.array([*keys.METHODS, ""], object)[matched.method[one]],
            "operations": 1,
            "matched": waits.split[one].astype(np.int64),
            "partial": waits.partial[one].astype(np.int64),
            "unmatched": waits.unmatched[one].astype(np.int64),
        }
    )
    rates = frame.groupby(["group", "method"], as_index=False, sort=True).sum()
    rates["rate"] = rates["matched"] / rates["operations"]
    return rates


# -- health ------------------------------------------------------------------------------------------------------------


def _health(
    run: Run,
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
        text = f"{partial} of {len(one)} communications were recorded on some of their ranks only: their waits are lower bounds"
        items.append(HealthItem("partial_match", text, touches=TOUCHED))
    inferred = int(((matched.method[one] == keys.INFERRED) & (waits.present[one] > 1)).sum())
    if inferred:
        text = (
            f"{inferred} communications name no group: paired by kind, stream and time "
            f"(ends within {keys.TOLERANCE_NS / 1e6:g} ms, intervals overlapping)"
        )
        items.append(HealthItem("inferred_match", text, touches=("bubble_ns", "imbalance_ns")))
    items += _unequal_counts(parts) + _disagreeing(parts, matched)
    host = [summary.rank for summary in found if summary.host and len(summary.comm["row"])]
    nameless = host and bool((parts["group"] < 0).any())
    if nameless and len(found) > 1:
        text = "host communications name no group: they are not paired across ranks by the order of their names"
        items.append(HealthItem("group_unknown", text, touches=TOUCHED))
    violations = int(waits.violation.sum())
    if violations:
        text = f"{violations} parts of communications end before the last one they depend on arrived: their clocks disagree"
        items.append(HealthItem("clock_violation", text, touches=("bubble_ns", "imbalance_ns", "stragglers")))
    for place, source in enumerate(clocks.source):
        if source == "estimated":
            text = (
                f"clock of rank {parts.ranks[place]}: estimated {int(clocks.offset_ns[place])} ns ahead from "
                f"{int(clocks.samples[place])} communications, residual {int(clocks.residual_ns[place])} ns"
            )
            items.append(HealthItem("clock_estimated", text, rank=parts.ranks[place]))
    return items


def _unmatched_item(parts: Parts, waits: Waits, count: int, total: int) -> HealthItem:
    """Names a few of them: a communication whose partners never came is where a hang shows."""
    shown = "; ".join(_described(parts, row) for row in np.flatnonzero(waits.unmatched)[:3].tolist())
    more = f"; and {count - 3} more" if count > 3 else ""
    text = f"{count} of {total} communications were recorded on one rank only ({shown}{more}): not split"
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
    text = f"{int(differs.sum())} communications are different operations on their ranks: the ranks have come apart"
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
        f"{len(unequal)} groups have unequal numbers of communications on their ranks "
        f"(first: {parts.groups.names[g]}, {int(used.min())} to {int(used.max())})"
    )
    return [HealthItem("unequal_counts", text, touches=TOUCHED)]
