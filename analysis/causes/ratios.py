"""Compute beside communication: their ratio per mesh axis, and what transfers do to the kernels beside them.

Formulas: definitions.md, Overlap and Compute and communication.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.summary import Means
from stepscope.analysis.ledger.decompose import Decomposition
from stepscope.analysis.ledger.overlap import contention as of_rank
from stepscope.analysis.run import Run
from stepscope.tracer.schema import AXES

RATIO_COLUMNS = ("axis", "compute_ns_per_step", "transfer_ns_per_step", "ratio")
"""One row an axis, means of a counted rank and step; `ratio` = compute / transfer. The axis is empty where unknown."""

CONTENTION_COLUMNS = (
    "name",
    "grid",
    "ranks",
    "inside",
    "outside",
    "inside_ns",
    "outside_ns",
    "outside_spread",
    "contention",
    "extra_ns_per_step",
)
"""One row a kernel name and launch grid; `outside_spread`: standard deviation / mean of its runs alone, large where these
stand for kernels of several sizes; `extra_ns_per_step`: (inside_ns - outside_ns) x inside, of a rank and step."""


def ratios(decomposition: Decomposition, mean: Means) -> pd.DataFrame:
    """RATIO_COLUMNS, the axis that transfers longest first. What could not be split into wait and transfer is left out."""
    table, waits = decomposition.matches.table, decomposition.matches.waits
    if table is None or waits is None or not mean.steps:
        return pd.DataFrame(columns=list(RATIO_COLUMNS))
    total: dict[int, int] = {}
    steps = set(mean.steps)
    for rank in mean.ranks:
        windows, rows = decomposition.windows[rank], table.of_rank(rank)
        counted = np.array([step in steps for step in windows.steps], bool)
        shift = (table["arrival_own"] - table["arrival"])[rows]
        start, end = waits.wait_end[rows] + shift, table["end_own"][rows]
        split, axis = waits.split[rows], table["axis"][rows]
        for code in np.unique(axis[split]).tolist():
            of = split & (axis == code)
            moving = intervals.union(start[of], end[of])
            inside = intervals.covered(moving, windows.start_ns, windows.end_ns)[counted]
            total[code] = total.get(code, 0) + int(inside.sum())
    share = len(mean.ranks) * len(mean.steps)
    compute = float(mean.values["compute_ns"])
    words = [*AXES, ""]
    rows_of = [
        (words[code], compute, ns / share, compute * share / ns if ns else np.nan)
        for code, ns in sorted(total.items(), key=lambda item: -item[1])
    ]
    return pd.DataFrame(rows_of, columns=list(RATIO_COLUMNS))


def contention(run: Run, decomposition: Decomposition, mean: Means) -> pd.DataFrame:
    """CONTENTION_COLUMNS over all ranks, the kernel that loses most first; empty where none ran both ways."""
    frames = [of_rank(run, decomposition, rank) for rank in decomposition.time]
    frames = [frame for frame in frames if len(frame)]
    if not frames or not mean.steps:
        return pd.DataFrame(columns=list(CONTENTION_COLUMNS))
    every = pd.concat(frames, ignore_index=True)
    weighed = {"inside_ns": "inside", "outside_ns": "outside", "outside_square_ns": "outside"}
    for column, count in weighed.items():
        every[column] *= every[count]
    named = every.groupby(["name", "grid"], as_index=False)
    found = named[["inside", "outside", *weighed]].sum()
    found["ranks"] = named["name"].size()["size"]
    for column, count in weighed.items():
        found[column] /= found[count]
    variance = np.maximum(found["outside_square_ns"] - found["outside_ns"] ** 2, 0)
    found["outside_spread"] = np.sqrt(variance) / found["outside_ns"]
    found["contention"] = found["inside_ns"] / found["outside_ns"]
    steps = sum(len(windows.steps) for windows in decomposition.windows.values())
    found["extra_ns_per_step"] = (found["inside_ns"] - found["outside_ns"]) * found["inside"] / steps
    return found.sort_values("extra_ns_per_step", ascending=False, ignore_index=True)[list(CONTENTION_COLUMNS)]
