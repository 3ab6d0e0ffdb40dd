"""A run as every analysis sees it: what run.json says, and per rank lazily read columns.

Analyses never ask where a run came from: `Run` is filled from a run directory's column store, from a foreign trace, or
from arrays in memory (tests, simulations), and looks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepscope.analysis.records import Health
from stepscope.tracer.schema import COUNTER_COLUMNS, EVENT_COLUMNS, Lane, RunMeta

Columns = dict[str, np.ndarray]
"""Column name -> array of one length (schema.EVENT_COLUMNS); rows sorted by (lane, start_ns)."""

CACHE_BYTES = 256 << 20
"""Columns that a run keeps in memory once they are read, over all of its ranks."""

FEW_ROWS = 1 << 20
"""Of a rank with no more rows whole columns are kept, though only a piece at a time is asked for."""


@dataclass
class RankData:
    """Everything of one rank, in memory: event columns, string table, lanes and counter samples."""

    events: Columns
    strings: tuple[str, ...] = ()
    lanes: tuple[Lane, ...] = ()
    counters: Columns = field(default_factory=lambda: empty_columns(COUNTER_COLUMNS))


def empty_columns(columns: Mapping[str, str], rows: int = 0) -> Columns:
    """Arrays of the declared types, filled with -1 (missing)."""
    return {name: np.full(rows, -1, dtype=dtype) for name, dtype in columns.items()}


def sort_events(events: Columns) -> Columns:
    """The same rows in the store's order: by (lane, start_ns), longer rows first among equals (parents before children)."""
    order = sort_order(events)
    return {name: values if values.strides == (0,) else values[order] for name, values in events.items()}


def sort_order(events: Columns) -> np.ndarray:
    """Indices that put rows into the store's order."""
    lane, start, dur = events["lane"], events["start_ns"], events["dur_ns"]
    if len(lane) and lane.max() < 1 << 15 and lane.min() >= 0:
        lane = lane.astype(np.int16)  # numpy sorts these by radix, in a tenth of the time
    order = np.argsort(lane, kind="stable")  # most lanes are in time order already: sort only those that are not
    edges = np.flatnonzero(np.diff(lane[order], prepend=-2, append=-2))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        order[first:last] = _by_time(order[first:last], start, dur)
    return order


def _by_time(rows: np.ndarray, start: np.ndarray, dur: np.ndarray) -> np.ndarray:
    """Rows by start, longer ones first among equals, as they stand among those."""
    begin = start[rows]
    if (begin[1:] < begin[:-1]).any():
        order = np.argsort(begin, kind="stable")
        rows, begin = rows[order], begin[order]
    equal = begin[1:] == begin[:-1]
    if equal.any() and (equal & (dur[rows[1:]] > dur[rows[:-1]])).any():
        tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
        few = rows[tied]
        rows = rows.copy()
        rows[tied] = few[np.lexsort((-dur[few], start[few]))]
    return rows


class Run:
    """One run: `meta`, `health`, `ranks`, and per rank the columns of its events, read when they are first asked for."""

    def __init__(
        self,
        meta: RunMeta,
        ranks: Iterable[int],
        load: Callable[[int, tuple[str, ...] | None], RankData],
        health: Health | None = None,
        path: Path | None = None,
        load_pieces: Callable[[int, tuple[str, ...], tuple[str, ...], tuple[int, ...]], Iterator[Columns]]
        | None = None,
    ) -> None:
        """`load(rank, columns)` reads one rank: these event columns, or all of them (None); none of them (an empty
        tuple) still gives strings, lanes and counters. `load_pieces(rank, columns, rare, kinds)`: as `pieces`, some rows at a
        time, where that takes less memory."""
        self.meta = meta
        self.ranks = sorted(ranks)
        self.health = health if health is not None else Health()
        self.path = path
        self._load = load
        self._load_pieces = load_pieces
        self._columns: dict[int, Columns] = {}  # event columns read so far, of the rank used last at the end
        self._held = 0  # bytes of them
        self._beside: dict[int, RankData] = {}  # strings, lanes, counters

    @classmethod
    def from_memory(
        cls, meta: RunMeta, data: Mapping[int, RankData], health: Health | None = None, path: Path | None = None
    ) -> Run:
        """A run whose ranks are already arrays in memory."""
        return cls(meta, data.keys(), lambda rank, columns: data[rank], health, path)

    def rank(self, rank: int) -> RankData:
        """All of one rank (cached); KeyError for a rank that the run does not have."""
        return self.part(rank)

    def columns(self, rank: int, *names: str) -> Columns:
        """Some columns of one rank's events, all when none is named (cached, a column at a time)."""
        self._check(rank)
        wanted = names or tuple(EVENT_COLUMNS)
        have = self._columns[rank] = self._columns.pop(rank, {})  # used last: at the end
        missing = tuple(name for name in wanted if name not in have)
        if missing:
            events = self._load(rank, missing).events
            have.update({name: events[name] for name in missing})
            self._held += sum(events[name].nbytes for name in missing)
            self._forget_others()
        return {name: have[name] for name in wanted}

    def pieces(
        self, rank: int, *names: str, rare: tuple[str, ...] = (), kinds: tuple[int, ...] = ()
    ) -> Iterator[Columns]:
        """Some columns of one rank's events, consecutive rows at a time: for whoever needs few of many rows.

        They are not cached, unless others of so few rows already are. `rare`: columns that matter for rows of some `kinds`
        only (codes of `kind`, which must be among `names`): in a piece without such rows they may all be -1.
        """
        self._check(rank)
        read = self._columns.get(rank, {})
        few = 0 < min((len(values) for values in read.values()), default=0) <= FEW_ROWS
        if self._load_pieces is None or few:
            yield self.columns(rank, *names, *rare)
        else:
            yield from self._load_pieces(rank, names, rare, kinds)

    def part(self, rank: int, *names: str) -> RankData:
        """As `rank`, with these event columns only."""
        beside = self._side(rank)
        return RankData(self.columns(rank, *names), beside.strings, beside.lanes, beside.counters)

    def strings(self, rank: int) -> tuple[str, ...]:
        """The string table that `name_id`, `group_id`, `dtype_id` and `grid_id` of this rank point into."""
        return self._side(rank).strings

    def lanes(self, rank: int) -> tuple[Lane, ...]:
        """The rank's streams and threads, by `Lane.index`."""
        return self._side(rank).lanes

    def counters(self, rank: int) -> Columns:
        """The rank's counter samples (schema.COUNTER_COLUMNS)."""
        return self._side(rank).counters

    def release(self, rank: int) -> None:
        """Forget what was read of one rank (bounded memory over many ranks)."""
        self._held -= sum(values.nbytes for values in self._columns.pop(rank, {}).values())
        self._beside.pop(rank, None)

    def _forget_others(self) -> None:
        """Forget columns of the ranks that were used longest ago, beyond CACHE_BYTES in all; never the last one's."""
        while self._held > CACHE_BYTES and len(self._columns) > 1:
            oldest = next(iter(self._columns))
            self._held -= sum(values.nbytes for values in self._columns.pop(oldest).values())

    def _side(self, rank: int) -> RankData:
        self._check(rank)
        if rank not in self._beside:
            self._beside[rank] = self._load(rank, ())
        return self._beside[rank]

    def _check(self, rank: int) -> None:
        if rank not in self.ranks:
            raise KeyError(f"run {self.meta.name} has no rank {rank}")
