"""What is kept of one rank between reading it and charging its time: a picklable summary, far smaller than its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.rows import COMPUTE, MEMCPY, SLICE, RankRows, rank_rows
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

    def idle(self, *busy: Intervals) -> Intervals:
        """Instants of the windows in which nothing of the rank is in flight; `busy`: all but memory copies.

        Windows are worked on some at a time: a rank of ten million events has millions of idle stretches.
        """
        found = []
        for low, high in _spans(intervals.union(*self.windows.intervals), [self.memcpy, *busy]):
            held = intervals.join(*(intervals.clip(one, low, high) for one in (self.memcpy, *busy)))
            found.append(intervals.complement(held, low, high))
        return intervals.appended(found)


def summarise(run: Run, rank: int) -> RankSummary:
    """Read one rank and keep what the ledger needs of it."""
    rows = rank_rows(run, rank)
    windows = windows_of(rows)
    windows.launched = windows.launched[:0]  # one number a device row: only steps.windows keeps it
    comm, texts = _own_texts(rows)
    rows.forget_launches()
    return RankSummary(
        rank=rank,
        host=rows.host,
        windows=windows,
        compute=_union_of(rows, COMPUTE),
        memcpy=_union_of(rows, MEMCPY),
        comm=comm,
        texts=texts,
        streams=tuple(lane.name for lane in rows.lanes),
        waits=rows.waits,
        stages=rows.stages,
    )


def _union_of(rows: RankRows, kind: int) -> Intervals:
    """When the rank does work of a kind: the union of its rows, as many at a time as start within one span of time."""
    total = int(np.count_nonzero(rows.kind == kind))
    pieces = max(-(-total // SLICE), 1)
    if pieces == 1:
        chosen = rows.kind == kind
        return intervals.union(rows.start[chosen], rows.end[chosen])
    sample = np.sort(rows.start[rows.kind == kind][:: max(total // (16 * pieces), 1)])
    cuts = [sample[len(sample) * k // pieces] for k in range(1, pieces)]
    bounds = [np.iinfo(np.int64).min, *cuts, np.iinfo(np.int64).max]
    found = []
    for low, high in pairwise(bounds):
        chosen = (rows.kind == kind) & (rows.start >= low) & (rows.start < high)
        found.append(intervals.union(rows.start[chosen], rows.end[chosen]))
    return intervals.appended(found)


def _spans(windows: Intervals, sets: Sequence[Intervals]) -> Iterator[tuple[int, int]]:
    """The windows, longer ones in parts that hold at most about SLICE intervals of each of the sets."""
    for low, high in zip(windows[0].tolist(), windows[1].tolist(), strict=True):
        cuts: set[int] = set()
        for one in sets:
            first, last = np.searchsorted(one[0], (low, high)).tolist()
            cuts.update(one[0][first + SLICE : last : SLICE].tolist())
        yield from pairwise(sorted({low, high, *cuts}))


def summaries(run: Run, ranks: Sequence[int] | None = None) -> list[RankSummary]:
    """One summary a rank, in rank order; each rank's columns are forgotten before the next is read."""
    return [summarise(run, rank) for rank in (run.ranks if ranks is None else ranks)]


def _own_texts(rows: RankRows) -> tuple[Columns, tuple[str, ...]]:
    """The communications with ids into the few texts that they use themselves."""
    comm = dict(rows.comm)
    comm["launch_ns"] = rows.calls_of()(comm["launch_id"])
    used = np.unique(np.concatenate([comm[name] for name in TEXT_COLUMNS]))
    used = used[used >= 0]
    for name in TEXT_COLUMNS:
        comm[name] = np.where(comm[name] >= 0, np.searchsorted(used, comm[name]), -1)
    return comm, tuple(rows.strings[code] for code in used.tolist())
