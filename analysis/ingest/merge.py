"""Sorted runs of rows to one order: by lane, then start, longer rows first among equals, then as they stood in the file.

Longer means as the file says it, whatever it was cut to later: so the order does not depend on where a chunk ends.
A run is the rows of one lane in one chunk. Most traces are nearly in order: where a lane's next run starts after the one before
has ended, its rows are handed on as they are; where runs overlap, some of each are merged at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.ingest.raw import is_constant
from stepscope.analysis.ingest.spool import Spool
from stepscope.analysis.run import Columns, sort_order
from stepscope.tracer.schema import KINDS

BATCH_ROWS = 1 << 15
"""Rows of one run that are looked at at once."""

_HOST = KINDS.index("host")
_KEYS = ("start_ns", "dur_ns")


@dataclass
class _Run:
    """The rows `at` to `end` of a chunk, all of one lane, in order."""

    chunk: int
    at: int
    end: int
    first_ns: int
    last_ns: int


class Runs:
    """The understood chunks of one file."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lanes: dict[int, list[_Run]] = {}  # by the number of the lane
        self.rows = self.device_rows = 0
        self.first_ns = self.last_ns = -1
        self.latest = (-1, -1)  # chunk and place of the row that ends last
        self._uncut: dict[
            int, tuple[np.ndarray, np.ndarray]
        ] = {}  # of a chunk: places that were cut, and their lengths
        self.constants: dict[str, int] = {}  # columns that have had one value so far

    def append(self, events: Columns) -> None:
        """One chunk's rows in the store's columns, whose lanes are numbers as they came."""
        order = sort_order(events)
        chunk = len(self._spool)
        sorted_ = {name: values if is_constant(values) else values[order] for name, values in events.items()}
        start, lane = sorted_["start_ns"], sorted_.pop("lane")
        ends = start + sorted_["dur_ns"]
        last_ns = int(ends.max())
        if self.rows == 0 or last_ns >= self.last_ns:  # of equal ones the last in the file
            last = np.flatnonzero(ends == last_ns)
            self.last_ns, self.latest = last_ns, (chunk, int(last[np.argmax(order[last])]))
        self.first_ns = int(start.min()) if self.rows == 0 else min(self.first_ns, int(start.min()))
        self.rows += len(start)
        self.device_rows += int((sorted_["kind"] != _HOST).sum())
        self._note_constants(sorted_)
        edges = np.flatnonzero(np.diff(lane, prepend=-2, append=-2))
        for at, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            run = _Run(chunk, at, end, int(start[at]), int(start[end - 1]))
            self._lanes.setdefault(int(lane[at]), []).append(run)
        self._spool.append(sorted_)

    def _note_constants(self, columns: Columns) -> None:
        if self.rows == len(columns["start_ns"]):  # the first chunk
            self.constants = {name: int(values[0]) for name, values in columns.items()}
        for name, value in list(self.constants.items()):
            values = columns[name]
            if values[0] != value or not (is_constant(values) or (values == value).all()):
                del self.constants[name]

    def flag(self, chunk: int, place: int, flag: int) -> None:
        """Set a flag on one row."""
        flags = self._spool.column(chunk, "flags").copy()
        flags[place] |= flag
        self.constants.pop("flags", None)
        self._spool.put(chunk, "flags", flags)

    def cut(self, chunk: int, places: np.ndarray, lengths: np.ndarray, flag: int) -> None:
        """Give rows of one chunk another length, and a flag; once at most."""
        dur, flags = self._spool.column(chunk, "dur_ns").copy(), self._spool.column(chunk, "flags").copy()
        order = np.argsort(places)
        self._uncut[chunk] = places[order], dur[places[order]]
        dur[places] = lengths
        flags[places] |= flag
        self.constants.pop("flags", None)
        self.constants.pop("dur_ns", None)
        self._spool.put(chunk, "dur_ns", dur)
        self._spool.put(chunk, "flags", flags)

    def lane(self, number: int, names: tuple[str, ...]) -> Iterator[Columns]:
        """Some columns of one lane's rows in order, and where each row lies (`chunk`, `place`), some rows at a time."""
        for group in _clusters(self._lanes.get(number, [])):
            for batch in self._batches(group):
                yield self._rows_of(batch, names)

    def unordered(self, number: int, names: tuple[str, ...]) -> Iterator[Columns]:
        """Some columns of one lane's rows, in whatever order."""
        for run in self._lanes.get(number, []):
            yield {name: self._spool.column(run.chunk, name, run.at, run.end) for name in names}

    def merged(self, order: list[int]) -> Iterator[Columns]:
        """All columns of all rows; `order`: the lanes' numbers in the order of their indices. Each part is of one lane."""
        for index, number in enumerate(order):
            names = tuple(self._spool.names(0)) if len(self._spool) else ()
            for rows in self.lane(number, names):
                count = len(rows["start_ns"])
                del rows["place"], rows["in_chunk"]
                yield rows | {"lane": np.broadcast_to(np.int32(index), count)}

    # -- merging ---------------------------------------------------------------------------------------------------

    def _batches(self, group: list[_Run]) -> Iterator[list[_Run]]:
        """Parts of runs that may be merged by themselves, in order."""
        left = [_Run(run.chunk, run.at, run.end, run.first_ns, run.last_ns) for run in group]
        if len(left) == 1:
            [run] = left
            for at in range(run.at, run.end, BATCH_ROWS):
                yield [_Run(run.chunk, at, min(at + BATCH_ROWS, run.end), run.first_ns, run.last_ns)]
            return
        while left:
            cutoff = min(self._start(run, run.at + BATCH_ROWS) for run in left)
            batch = []
            for run in left:
                end = self._first_from(run, cutoff)
                if end > run.at:
                    batch.append(_Run(run.chunk, run.at, end, run.first_ns, run.last_ns))
                    run.at = end
            if not batch:  # more rows than a batch start at the same time: all of them at once
                for run in left:
                    end = self._first_from(run, cutoff + 1)
                    if end > run.at:
                        batch.append(_Run(run.chunk, run.at, end, run.first_ns, run.last_ns))
                        run.at = end
            yield batch
            left = [run for run in left if run.at < run.end]

    def _start(self, run: _Run, place: int) -> int:
        """Start of the row at a place of a run; beyond its last one, later than any."""
        if place >= run.end:
            return run.last_ns + 1
        return int(self._spool.column(run.chunk, "start_ns", place, place + 1)[0])

    def _first_from(self, run: _Run, time: int) -> int:
        """The place of the run's first row that starts at `time` or later."""
        if run.last_ns < time:
            return run.end
        low, high = run.at, run.end  # the answer lies between them, or is one of them
        while high - low > BATCH_ROWS:
            middle = (low + high) // 2
            if self._start(run, middle) < time:
                low = middle
            else:
                high = middle
        starts = self._spool.column(run.chunk, "start_ns", low, high)
        return low + int(np.searchsorted(starts, time))

    def _rows_of(self, batch: list[_Run], names: tuple[str, ...]) -> Columns:
        """The rows of parts of runs, merged."""
        wanted = names if len(batch) == 1 else tuple(dict.fromkeys((*_KEYS, *names)))
        parts = [{name: self._spool.column(run.chunk, name, run.at, run.end) for name in wanted} for run in batch]
        places = [np.arange(run.at, run.end) for run in batch]
        chunks = [np.broadcast_to(np.int64(run.chunk), run.end - run.at) for run in batch]
        if len(batch) == 1:
            return parts[0] | {"place": places[0], "in_chunk": chunks[0]}
        whole = {name: _joined([part[name] for part in parts]) for name in wanted}
        whole |= {"place": np.concatenate(places), "in_chunk": np.concatenate(chunks)}
        lengths = np.concatenate([self._as_said(run, part["dur_ns"]) for run, part in zip(batch, parts, strict=True)])
        order = np.lexsort((-lengths, whole["start_ns"]))
        return {
            name: whole[name] if is_constant(whole[name]) else whole[name][order]
            for name in (*names, "place", "in_chunk")
        }

    def _as_said(self, run: _Run, lengths: np.ndarray) -> np.ndarray:
        """The lengths of a part of a run, before any of them was cut."""
        if run.chunk not in self._uncut:
            return lengths
        places, uncut = self._uncut[run.chunk]
        low, high = np.searchsorted(places, (run.at, run.end))
        lengths = lengths.copy()
        lengths[places[low:high] - run.at] = uncut[low:high]
        return lengths


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """One array; one value shown often where all of them are that."""
    constant = all(is_constant(part) or len(part) == 1 for part in parts)
    if constant and all(part[0] == parts[0][0] for part in parts):
        return np.broadcast_to(parts[0][:1], sum(map(len, parts)))
    return np.concatenate(parts)


def _clusters(runs: list[_Run]) -> Iterator[list[_Run]]:
    """Runs that overlap, together; those clusters in order."""
    group: list[_Run] = []
    end = 0
    for run in sorted(runs, key=lambda run: (run.first_ns, run.chunk)):
        if group and run.first_ns > end:
            yield sorted(group, key=lambda run: run.chunk)
            group = []
        end = run.last_ns if not group else max(end, run.last_ns)
        group.append(run)
    if group:
        yield sorted(group, key=lambda run: run.chunk)
