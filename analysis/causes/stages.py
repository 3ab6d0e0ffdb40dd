"""Stage balance: what each pipeline stage computes in a step beside the others, and what it waits.

The pipeline's rate is one over the slowest stage's time: a split should equalise them. *Head of line*: exposed waiting for
a communication that had queued behind another one on its stream. Definitions: definitions.md, Stages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.summary import Means, counted_rows
from stepscope.analysis.ledger.decompose import Decomposition

STAGE_COLUMNS = (
    *("stage", "ranks", "compute_ns_per_step", "relative_compute"),
    *("bubble_ns_per_step", "imbalance_ns_per_step", "head_of_line_ns_per_step"),
)
"""One row a stage, means of a rank and counted step; `relative_compute`: beside the mean of the stages."""


def stages(
    decomposition: Decomposition, mean: Means, rows: pd.DataFrame, stage_of: Callable[[int], int]
) -> pd.DataFrame:
    """STAGE_COLUMNS; empty where fewer than two stages are known. `rows`: pipeline.actions, the microbatches' compute
    (where they name none, all compute counts)."""
    places = {rank: stage_of(rank) for rank in mean.ranks}
    names = sorted(set(places.values()) - {-1})
    if len(names) < 2 or not mean.steps:
        return pd.DataFrame(columns=list(STAGE_COLUMNS))
    ledger = counted_rows(decomposition.ledger)
    work = rows[rows["step"].isin(mean.steps)].rename(columns={"compute_ns": "ns"})
    if work.empty:
        work = ledger.rename(columns={"compute_ns": "ns"})
    queued = {rank: _head_of_line(decomposition, rank, mean) for rank in mean.ranks}
    found = []
    for stage in names:
        ranks = [rank for rank, place in places.items() if place == stage]
        share = len(ranks) * len(mean.steps)
        mine = ledger[ledger["rank"].isin(ranks)]
        found.append(
            {
                "stage": stage,
                "ranks": tuple(ranks),
                "compute_ns_per_step": int(work.loc[work["rank"].isin(ranks), "ns"].sum()) / share,
                "bubble_ns_per_step": int(mine["bubble_ns"].sum()) / share,
                "imbalance_ns_per_step": int(mine["imbalance_ns"].sum()) / share,
                "head_of_line_ns_per_step": sum(queued[rank] for rank in ranks) / share,
            }
        )
    frame = pd.DataFrame(found)
    usual = float(frame["compute_ns_per_step"].mean())
    frame["relative_compute"] = frame["compute_ns_per_step"] / usual if usual > 0 else np.nan
    return frame[list(STAGE_COLUMNS)]


def _head_of_line(decomposition: Decomposition, rank: int, mean: Means) -> int:
    """Exposed waiting of a rank in counted steps, ns, for a last arriver that had queued behind an earlier communication."""
    waits, windows, charged = decomposition.matches.waits, decomposition.windows[rank], decomposition.time[rank].charged
    if waits is None or len(charged.part) == 0:
        return 0
    behind = (waits.leader >= 0) & (waits.straggler >= 0) & (waits.straggler != waits.leader)
    chosen = behind[charged.part]
    steps = set(mean.steps)
    counted = np.array([step in steps for step in windows.steps], bool)
    held = intervals.union(charged.start[chosen], charged.end[chosen])
    return int(intervals.covered(held, windows.start_ns, windows.end_ns)[counted].sum())
