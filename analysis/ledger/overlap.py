"""Overlap of communication with computation, by axis, collective and stream; and what overlap does to the kernels.

More overlap with a longer step is no gain: rank by time, never by these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.ledger.decompose import Decomposition, ratio, stacked, step_column
from stepscope.analysis.ledger.keys import code_columns
from stepscope.analysis.ledger.rows import COMPUTE
from stepscope.analysis.ledger.times import RankTime
from stepscope.analysis.run import Columns, Run
from stepscope.tracer.schema import AXES, COLLECTIVES, FLAG_IMPOSSIBLE

if TYPE_CHECKING:
    import pandas as pd  # where a frame is made

OVERLAP_COLUMNS = (
    *("rank", "step", "axis", "collective", "stream"),
    *("comm_ns", "transfer_ns", "hidden_comm_ns", "hidden_ns", "overlap_efficiency", "comm_overlap"),
)


def overlap(run: Run, decomposition: Decomposition) -> pd.DataFrame:
    """Per rank, step, axis, collective and stream (OVERLAP_COLUMNS, ns).

    `comm_ns` is the time in flight, `transfer_ns` the transferring part (with what cannot be split), `hidden_comm_ns` and
    `hidden_ns` their overlap with computation; `overlap_efficiency = hidden_comm / transfer` and
    `comm_overlap = hidden / comm`, NaN where nothing communicates. Only combinations that occur in a step have a row.
    """
    import pandas as pd

    return pd.DataFrame(overlap_columns(decomposition), columns=list(OVERLAP_COLUMNS))


def overlap_columns(decomposition: Decomposition) -> Columns:
    """The same as arrays; no columns where nothing communicates."""
    columns = stacked([piece for time in decomposition.time.values() for piece in _of_rank(decomposition, time)])
    if columns:
        columns["overlap_efficiency"] = ratio(columns["hidden_comm_ns"], columns["transfer_ns"])
        columns["comm_overlap"] = ratio(columns["hidden_ns"], columns["comm_ns"])
    return columns


def _of_rank(decomposition: Decomposition, time: RankTime) -> list[Columns]:
    """Columns of one rank's rows, a piece an axis, collective and stream."""
    summary, table, waits = time.summary, decomposition.matches.table, decomposition.matches.waits
    windows = summary.windows
    if table is None or waits is None or not windows.steps:
        return []
    rows = table.of_rank(summary.rank)
    start, end = table["arrival_own"][rows], table["end_own"][rows]
    wait_end = np.minimum(start + (waits.wait_end - table["arrival"])[rows], end)
    keys = [table[name][rows] for name in ("axis", "collective", "lane")]
    _, first, inverse = np.unique(code_columns(keys), return_index=True, return_inverse=True)
    pieces = []
    for group, one in enumerate(first.tolist()):
        mine = inverse == group
        flying = intervals.union(start[mine], end[mine])
        moving = intervals.union(wait_end[mine], end[mine])
        held = {
            "comm_ns": flying,
            "transfer_ns": moving,
            "hidden_comm_ns": intervals.intersect(moving, summary.compute),
            "hidden_ns": intervals.intersect(flying, summary.compute),
        }
        measured = {name: intervals.covered(it, windows.start_ns, windows.end_ns) for name, it in held.items()}
        occurs = measured["comm_ns"] > 0
        words = {
            "axis": [*AXES, ""][int(keys[0][one])],
            "collective": [*COLLECTIVES, ""][int(keys[1][one])],
            "stream": summary.streams[int(keys[2][one])],
        }
        size = int(occurs.sum())
        piece = {"rank": np.full(size, summary.rank), "step": step_column(windows.steps)[occurs]}
        piece |= {name: np.full(size, word, object) for name, word in words.items()}
        pieces.append(piece | {name: values[occurs] for name, values in measured.items()})
    return pieces


def contention(run: Run, decomposition: Decomposition, rank: int) -> pd.DataFrame:
    """How much longer the same kernel runs beside a transfer: one row a kernel that ran both ways.

    The same kernel: one name and one launch grid, which stands for the shapes (empty where none is recorded).
    Columns: name, grid, inside, outside (counts), inside_ns, outside_ns (mean durations), outside_square_ns (mean of the squares
    of those outside, ns^2), contention = inside_ns / outside_ns.
    Inside: some of it overlaps a transferring communication; outside: nothing of it overlaps any communication. Rows that
    name a phase are no kernels but blocks, which communication cuts into unequal pieces: they are left out.
    """
    import pandas as pd

    data = run.part(rank, "start_ns", "dur_ns", "kind", "name_id", "grid_id", "flags", "phase")
    time, events = decomposition.time[rank], data.events
    rows = np.flatnonzero(
        (events["kind"] == COMPUTE)
        & (events["dur_ns"] > 0)
        & ((events["flags"] & FLAG_IMPOSSIBLE) == 0)
        & (events["phase"] < 0)
    )
    start, duration = events["start_ns"][rows], events["dur_ns"][rows]
    name, grid = events["name_id"][rows], events["grid_id"][rows]
    inside = intervals.covered(time.transferring, start, start + duration) > 0
    outside = intervals.covered(time.comm, start, start + duration) == 0
    kernels, first, code = np.unique(code_columns([name, grid]), return_index=True, return_inverse=True)
    count_in, count_out = (np.bincount(code[side], minlength=len(kernels)) for side in (inside, outside))
    total_in, total_out = (
        np.bincount(code[side], duration[side], minlength=len(kernels)) for side in (inside, outside)
    )
    squares = np.bincount(code[outside], duration[outside].astype(float) ** 2, minlength=len(kernels))
    both = np.flatnonzero((count_in > 0) & (count_out > 0))
    texts = [*data.strings, ""]
    frame = pd.DataFrame(
        {
            "name": [texts[one] for one in name[first[both]].tolist()],
            "grid": [texts[one] for one in grid[first[both]].tolist()],
            "inside": count_in[both],
            "outside": count_out[both],
            "inside_ns": total_in[both] / count_in[both],
            "outside_ns": total_out[both] / count_out[both],
            "outside_square_ns": squares[both] / count_out[both],
        }
    )
    frame["contention"] = frame["inside_ns"] / frame["outside_ns"]
    return frame
