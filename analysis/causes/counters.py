"""Counter samples of a run as a frame: each with the step in which it was taken and the phase that ran then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from stepscope.analysis.ledger.decompose import step_column
from stepscope.analysis.ledger.steps import Windows
from stepscope.analysis.run import Run

COLUMNS = ("rank", "step", "time_ns", "name", "key", "value")


def samples(run: Run, windows: Mapping[int, Windows], names: Sequence[str]) -> pd.DataFrame:
    """COLUMNS of the samples of these counters inside the windows of each rank's steps; time in the rank's own clock."""
    frames = []
    for rank in run.ranks:
        wanted = [code for code, text in enumerate(run.strings(rank)) if text in names]
        if wanted and rank in windows:
            frames.append(_of_rank(run, rank, windows[rank], wanted))
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))


def _of_rank(run: Run, rank: int, steps: Windows, wanted: Sequence[int]) -> pd.DataFrame:
    """`wanted`: codes of the counters' names."""
    counters, strings = run.counters(rank), run.strings(rank)
    time = counters["time_ns"]
    at = np.searchsorted(steps.start_ns, time, "right") - 1
    inside = (at >= 0) & (time < np.append(steps.end_ns, 0)[at])
    rows = np.flatnonzero(np.isin(counters["name_id"], wanted) & inside)
    words = pd.Series([*strings, ""]).array
    return pd.DataFrame(
        {
            "rank": rank,
            "step": pd.Series(step_column(steps.steps)[at[rows]], dtype="object"),
            "time_ns": time[rows],
            "name": words.take(counters["name_id"][rows]),
            "key": words.take(counters["key_id"][rows]),
            "value": counters["value"][rows],
        },
        columns=list(COLUMNS),
    )
