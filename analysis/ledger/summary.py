"""What is kept of one rank between reading it and charging its time: a picklable summary, far smaller than its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.rows import COMPUTE, MEMCPY, RankRows, rank_rows
from stepscope.analysis.ledger.steps import Windows, windows_of
from stepscope.analysis.run import Columns, Run

TEXT_COLUMNS = ("group_id", "dtype_id", "name_id")


@dataclass
class RankSummary:
    """One rank: its steps, when it computes and copies, its communications and waits. The rank's own clock, int64 ns."""

    rank: int
    host: bool  # no device row: the ledger is of host time
    windows: Windows
    compute: Intervals
    memcpy: Intervals
    comm: Columns  # RankRows.comm with `launch_ns`, the start of the launching call (-1); text ids into `texts`
    texts: tuple[str, ...]
    streams: tuple[str, ...]  # name of each lane
    waits: Columns
    stages: tuple[int, ...]

    def idle(self, busy: Intervals) -> Intervals:
        """Instants of the windows in which nothing of the rank is in flight; `busy`: all but memory copies."""
        windows = self.windows.intervals
        if len(windows[0]) == 0:
            return intervals.EMPTY
        everything = intervals.join(busy, self.memcpy)
        free = intervals.complement(everything, int(windows[0].min()), int(windows[1].max()))
        return intervals.intersect(free, intervals.join(windows))


def summarise(run: Run, rank: int) -> RankSummary:
    """Read one rank and keep what the ledger needs of it."""
    rows = rank_rows(run, rank)
    windows = windows_of(rows)
    windows.launched = windows.launched[:0]  # one number a device row: only steps.windows keeps it
    comm, texts = _own_texts(rows)
    return RankSummary(
        rank=rank,
        host=rows.host,
        windows=windows,
        compute=intervals.union(*rows.of_kind(COMPUTE)),
        memcpy=intervals.union(*rows.of_kind(MEMCPY)),
        comm=comm,
        texts=texts,
        streams=tuple(lane.name for lane in rows.lanes),
        waits=rows.waits,
        stages=rows.stages,
    )


def summaries(run: Run, ranks: Sequence[int] | None = None) -> list[RankSummary]:
    """One summary a rank, in rank order; each rank's columns are forgotten before the next is read."""
    return [summarise(run, rank) for rank in (run.ranks if ranks is None else ranks)]


def _own_texts(rows: RankRows) -> tuple[Columns, tuple[str, ...]]:
    """The communications with ids into the few texts that they use themselves."""
    comm = dict(rows.comm)
    comm["launch_ns"] = rows.launched_at(comm["launch_id"])
    used = np.unique(np.concatenate([comm[name] for name in TEXT_COLUMNS]))
    used = used[used >= 0]
    for name in TEXT_COLUMNS:
        comm[name] = np.where(comm[name] >= 0, np.searchsorted(used, comm[name]), -1)
    return comm, tuple(rows.strings[code] for code in used.tolist())
