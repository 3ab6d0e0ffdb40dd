"""From the ledger to who is to blame: each exposed wait with the rank that it waited for, and the pipeline's allowance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.actions import step_durations
from stepscope.analysis.causes.blame import Blame, Wait, blame, holders_of
from stepscope.analysis.causes.classes import ahead_of
from stepscope.analysis.causes.pipeline import observed_tables, planned_tables, replay, stage_of
from stepscope.analysis.causes.summary import counted_rows
from stepscope.analysis.ledger.decompose import Decomposition, step_column
from stepscope.analysis.run import Run


def stages_of(run: Run, decomposition: Decomposition) -> dict[int, int]:
    """Rank -> pipeline stage: by run.json, else the one stage that the rank's rows name, else -1."""
    found = {}
    for rank, time in decomposition.time.items():
        named = time.summary.stages
        found[rank] = stage_of(run.meta, rank) if run.meta.coords else (named[0] if len(named) == 1 else -1)
    return found


def exposed_waits(decomposition: Decomposition) -> dict[int, list[Wait]]:
    """Per rank its exposed waits in the common clock; none that blocked nothing, and none that could not be split."""
    matches = decomposition.matches
    table, waits = matches.table, matches.waits
    if table is None or waits is None:
        return {rank: [] for rank in decomposition.time}
    ranks = np.array([*table.ranks, -1], np.int64)
    shift = table["arrival"] - table["arrival_own"]
    result: dict[int, list[Wait]] = {}
    for rank, time in decomposition.time.items():
        windows, charged = decomposition.windows[rank], time.charged
        steps = np.array(windows.steps, object)[windows.step_ns > 0]
        keep = ~charged.nonblocking & waits.split[charged.part]
        start, end, part = charged.start[keep], charged.end[keep], charged.part[keep]
        piece, at = intervals.pairs((start, end), windows.intervals)
        low = np.maximum(start[piece], windows.intervals[0][at]) + shift[part[piece]]
        high = np.minimum(end[piece], windows.intervals[1][at]) + shift[part[piece]]
        on = ranks[waits.straggler[part[piece]]]
        bubble, match = charged.bubble[keep][piece], matches.match_of_part[part[piece]]
        columns = (steps[at], low, high, on, bubble, match)
        result[rank] = list(map(Wait, *(column.tolist() for column in columns)))
    return result


def allowances(run: Run, rows: pd.DataFrame) -> dict[int | str, dict[tuple[int, int], int]]:
    """Per step, what each stage waits for each other in the schedule itself, ns: the step replayed with mean durations.

    The schedule is the planned one of run.json, else the order in which the step ran. `rows`: pipeline.actions(run).
    """
    planned = planned_tables(run.meta)
    found: dict[int | str, dict[tuple[int, int], int]] = {}
    for key, durations in step_durations(rows).items():
        tables = planned or observed_tables(rows, key)
        played = replay(tables, durations) if len(tables) > 1 else None
        if played is not None:
            lines = {stage: [Wait(0, int(a), int(b), on) for a, b, on in line] for stage, line in played.waits.items()}
            found[key] = {
                (stage, holder): ns for stage, held in holders_of(lines).items() for holder, ns in held.items()
            }
    return found


def blame_of(run: Run, decomposition: Decomposition, rows: pd.DataFrame) -> tuple[Blame, Mapping[int, list[Wait]]]:
    """Who made whom wait in the run, and the waits that it rests on. `rows`: pipeline.actions(run)."""
    waits = exposed_waits(decomposition)
    return blame(waits, allowances(run, rows), stages_of(run, decomposition)), waits


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


def last_arrivals(decomposition: Decomposition) -> dict[int, int]:
    """Rank -> in how many communications of counted steps it was the last to arrive (its lead being certain)."""
    parts = decomposition.matches.parts
    if parts.empty:
        return {}
    counted = set(counted_rows(decomposition.ledger)["step"])
    needed = ["match_id", "rank", "arrival_ns", "wait_ns", "last_rank"]
    last = parts[needed][(parts["last_rank"] >= 0) & ~parts["unmatched"]]
    last = last.sort_values(["match_id", "wait_ns"], ascending=[True, False], kind="stable").drop_duplicates("match_id")
    steps = steps_at(decomposition, last["rank"].to_numpy(), last["arrival_ns"].to_numpy())
    inside = np.array([step in counted for step in steps.tolist()], bool)
    ranks, counts = np.unique(last[inside]["last_rank"].to_numpy(), return_counts=True)
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
