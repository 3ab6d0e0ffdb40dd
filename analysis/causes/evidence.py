"""From the ledger to who is to blame: each exposed wait with the rank that it waited for, and the pipeline's allowance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.actions import step_durations
from stepscope.analysis.causes.blame import Allowance, Blame, blame
from stepscope.analysis.causes.classes import ahead_of
from stepscope.analysis.causes.columns import firsts
from stepscope.analysis.causes.exposed import WaitTable, holders
from stepscope.analysis.causes.pipeline import alike, planned_tables, stage_of
from stepscope.analysis.causes.plan import PlanReplay, replay
from stepscope.analysis.ledger.decompose import Decomposition, step_column
from stepscope.analysis.ledger.parts import PIPELINE, RECEIVE
from stepscope.analysis.run import Run

LONGEST = 1 << 60
"""No sum of a replayed schedule's times is longer, ns: three decades."""


def stages_of(run: Run, decomposition: Decomposition) -> dict[int, int]:
    """Rank -> pipeline stage: by run.json, else the one stage that the rank's rows name, else -1."""
    found = {}
    for rank, time in decomposition.time.items():
        named = time.summary.stages
        found[rank] = stage_of(run.meta, rank) if run.meta.coords else (named[0] if len(named) == 1 else -1)
    return found


def exposed_waits(decomposition: Decomposition) -> WaitTable:
    """Exposed waits in the common clock; none that blocked nothing, and none that could not be split."""
    matches = decomposition.matches
    table, waits = matches.table, matches.waits
    place = {step: at for at, step in enumerate(_labels(decomposition))}
    if table is None or waits is None:
        return WaitTable.joined(list(place), [])
    ranks = np.array([*table.ranks, -1], np.int64)
    shift = table["arrival"] - table["arrival_own"]
    pieces = []
    for rank, time in decomposition.time.items():
        windows, charged = decomposition.windows[rank], time.charged
        steps = np.array([place[step] for step in windows.steps], np.int64)[windows.step_ns > 0]
        keep = ~charged.nonblocking & waits.split[charged.part]
        start, end, part = charged.start[keep], charged.end[keep], charged.part[keep]
        piece, at = intervals.pairs((start, end), windows.intervals)
        part = part[piece]
        low = np.maximum(start[piece], windows.intervals[0][at]) + shift[part]
        high = np.minimum(end[piece], windows.intervals[1][at]) + shift[part]
        on, match = ranks[waits.straggler[part]], matches.match_of_part[part]
        pieces.append((np.full(len(part), rank), steps[at], low, high, on, charged.bubble[keep][piece], match))
    return WaitTable.joined(list(place), pieces)


def _labels(decomposition: Decomposition) -> list[int | str]:
    """The steps of all ranks."""
    return list(dict.fromkeys(step for windows in decomposition.windows.values() for step in windows.steps))


def allowances(
    run: Run, rows: pd.DataFrame, steps: Sequence[int | str], transfer: np.ndarray | None = None
) -> Allowance:
    """What each stage waits for each other in the schedule itself: each of `steps` replayed with its mean durations.

    `transfer`: what a message between stages takes in each of them (free unless given). The schedule is the planned one of
    run.json, else the order in which the step ran. `rows`: pipeline.actions(run).
    """
    planned, place = planned_tables(run.meta), {step: at for at, step in enumerate(steps)}
    labels, durations = step_durations(rows)
    found = []
    for tables, chosen in [(planned, np.arange(len(labels)))] if planned else alike(rows):
        at = np.array([place[labels[one]] for one in chosen.tolist()], np.int64)
        message = None if transfer is None else transfer[at]
        means = {phase: ns[chosen] for phase, ns in durations.items()}
        if len(tables) < 2 or not len(chosen):
            continue
        longest = LONGEST // (len(tables) * len(chosen) * sum(map(len, tables.values())))  # so that no sum overflows
        means = {phase: np.minimum(ns, longest) for phase, ns in means.items()}
        played = replay(tables, means, None if message is None else np.minimum(message, longest))
        if played is not None:
            stage, on, step, ns = structural(played, np.array(sorted(tables), np.int64))
            found.append((stage, on, at[step], ns))
    if not found:
        return Allowance.none()
    stage, on, step, ns = (np.concatenate(column) for column in zip(*found, strict=True))
    return Allowance.of(len(steps), stage, on, step, ns)


def message_times(decomposition: Decomposition, steps: Sequence[int | str]) -> np.ndarray:
    """Median time in ns that messages between stages were transferring in each of `steps`, 0 where there is none."""
    table, waits = decomposition.matches.table, decomposition.matches.waits
    found = np.zeros(len(steps), np.int64)
    if table is None or waits is None:
        return found
    chosen = (table["axis"] == PIPELINE) & (table["collective"] == RECEIVE) & waits.split & ~waits.violation
    rows = np.flatnonzero(chosen & (waits.present > 1))
    ranks = np.array(table.ranks, np.int64)[table["rank"][rows]]
    step = pd.Series(steps_at(decomposition, ranks, table["arrival"][rows]), dtype="object")
    medians = pd.Series((table["end"] - waits.wait_end)[rows]).groupby(step).median()
    place = {one: at for at, one in enumerate(steps)}
    for one, ns in medians.items():
        found[place[one]] = round(ns)  # type: ignore[index]  # a step
    return found


def structural(played: PlanReplay, stages: np.ndarray) -> tuple[np.ndarray, ...]:
    """What stages wait for each other in the end, in each step of a schedule: stage, stage waited for, step (place), ns.

    `stages`: all of them, sorted.
    """
    count, waits = len(stages), played.waits
    length = played.makespan + 1
    before = count * (np.cumsum(length) - length)  # on the axis, one step after the other and in it stage after stage
    base = (before[:, None] + length[:, None] * np.arange(count)).ravel()
    stage, on = (waits.step * count + np.searchsorted(stages, one) for one in (waits.stage, waits.on))
    held = holders(stage, waits.start, waits.end, on, base)
    return stages[stage[held.wait] % count], stages[held.holder % count], waits.step[held.wait], held.ns


def blame_of(run: Run, decomposition: Decomposition, rows: pd.DataFrame) -> tuple[Blame, WaitTable]:
    """Who made whom wait in the run, and the waits that it rests on. `rows`: pipeline.actions(run)."""
    waits = exposed_waits(decomposition)
    allowed = allowances(run, rows, waits.steps, message_times(decomposition, waits.steps))
    return blame(waits, allowed, stages_of(run, decomposition)), waits


def step_starts(decomposition: Decomposition) -> pd.DataFrame:
    """rank, step, start_ns: when each step began, ns of the common clock since the first of them."""
    starts, ranks, steps = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [step_column([])]
    for rank, windows in decomposition.windows.items():
        starts.append(windows.start_ns - ahead_of(decomposition, rank, windows.start_ns))
        ranks.append(np.full(len(windows.steps), rank))
        steps.append(step_column(windows.steps))
    start = np.concatenate(starts)
    columns = {"rank": np.concatenate(ranks), "step": pd.Series(np.concatenate(steps), dtype="object")}
    return pd.DataFrame({**columns, "start_ns": start - (start.min() if len(start) else 0)})


def last_arrivals(parts: pd.DataFrame, steps: Sequence[int | str]) -> dict[int, int]:
    """Rank -> in how many communications of counted `steps` it was the last to arrive (its lead being certain).

    `parts`: Matches.parts with `step`, the one in which each part arrived.
    """
    names = ("match_id", "wait_ns", "last_rank", "unmatched")
    match, wait, last, unmatched = (parts[name].to_numpy() for name in names)
    told = np.flatnonzero((last >= 0) & ~unmatched.astype(bool))
    told = told[np.lexsort((-wait[told], match[told]))]
    told = told[firsts(match[told])]  # of each communication the part that waited longest
    inside = parts["step"].isin(steps).to_numpy()[told]
    ranks, counts = np.unique(last[told[inside]], return_counts=True)
    return dict(zip(ranks.tolist(), counts.tolist(), strict=True))


def steps_at(decomposition: Decomposition, ranks: np.ndarray, instants: np.ndarray) -> np.ndarray:
    """The step of each (rank, instant of the common clock), an object array; None outside all windows."""
    steps = np.full(len(ranks), None, object)
    clock, table = decomposition.matches.clock, decomposition.matches.table
    for rank in np.unique(ranks).tolist():
        windows, chosen = decomposition.windows[rank], np.flatnonzero(ranks == rank)
        own = instants[chosen]
        if clock is not None and table is not None and len(windows.steps):
            place = np.full(len(chosen), list(table.ranks).index(rank))
            own = own + clock.ahead(place, own)
        at = np.searchsorted(windows.start_ns, own, "right") - 1
        inside = (at >= 0) & (own < np.append(windows.end_ns, 0)[at])
        steps[chosen[inside]] = step_column(windows.steps)[at[inside]]
    return steps
