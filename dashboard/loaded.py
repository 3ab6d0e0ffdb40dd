"""One run in memory as the pages and the timeline need it: report, ledger segments, drawn lanes, label table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from stepscope.analysis.records import Health
from stepscope.analysis.report import view
from stepscope.analysis.run import RankData, Run
from stepscope.dashboard import text
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.pieces import Clock, Segments
from stepscope.dashboard.tracks import Labels, build_tracks
from stepscope.tracer.schema import RunMeta

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is (0 to 1); may raise to cancel."""

MAX_BOUNDS = 20_000
"""Step boundaries of single ranks are drawn up to so many; beyond that those of the whole run only."""


KEPT_RANKS = 8


class Parts:
    """Which event takes part in which matched communication, both ways.

    `frame` is `Matches.parts`: one row a (match, rank) with `rank`, `row`, `match_id`, `arrival_ns`, `end_ns`,
    `last_arrival_ns`, `wait_ns`, `transfer_ns`, `last_rank`, `method`, `partial`.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame.reset_index(drop=True)
        match = self.frame["match_id"].to_numpy(np.int64) if len(frame) else np.zeros(0, np.int64)
        self._by_match = np.argsort(match, kind="stable")
        self._sorted_match = match[self._by_match]
        rank = self.frame["rank"].to_numpy(np.int64) if len(frame) else match
        row = self.frame["row"].to_numpy(np.int64) if len(frame) else match
        self._by_event = np.lexsort((row, rank))
        self._rank, self._row = rank[self._by_event], row[self._by_event]

    def _of_rank(self, rank: int) -> tuple[int, int]:
        low, high = np.searchsorted(self._rank, [rank, rank + 1])
        return int(low), int(high)

    def last_arrival(self, rank: int, events: int) -> np.ndarray:
        """Per event row of the rank the last arrival (common time, absolute ns), -1 where none is known."""
        arrival = np.full(events, -1, np.int64)
        low, high = self._of_rank(rank)
        at = self._by_event[low:high]
        if len(at):
            arrival[self._row[low:high]] = self.frame["last_arrival_ns"].to_numpy(np.int64)[at]
        return arrival

    def of_event(self, rank: int, row: int) -> pd.DataFrame:
        """All parts of the communication that this event belongs to; empty when it was not matched."""
        low, high = self._of_rank(rank)
        at = low + int(np.searchsorted(self._row[low:high], row))
        if at >= high or self._row[at] != row:
            return self.frame.iloc[:0]
        match = int(self.frame["match_id"].iloc[int(self._by_event[at])])
        first, last = np.searchsorted(self._sorted_match, [match, match + 1])
        return self.frame.iloc[self._by_match[first:last]]


@dataclass(frozen=True)
class Summary:
    """What the page of all runs says of one."""

    meta: RunMeta
    health: Health
    bar: view.Bar | None  # the mean step; None without a whole one
    scope: str


@dataclass
class LoadedRun:
    """Everything the dashboard shows of one run. Track ids count through `tracks`; times there count from `origin`."""

    id: str
    run: Run
    report: Any  # analysis.report.Report
    parts: Parts
    origin: int
    span_ns: int
    labels: Labels
    tracks: list[Track] = field(default_factory=list)
    terms: dict[int, Track] = field(default_factory=dict)  # rank -> the ledger's partition
    of_rank: dict[int, range] = field(default_factory=dict)  # rank -> its track ids
    steps: list[dict[str, Any]] = field(default_factory=list)  # step, start, end over all ranks
    bounds: dict[int, list[int]] = field(default_factory=dict)  # rank -> starts of its steps and the last end
    categories: set[int] = field(default_factory=set)  # that occur on any lane
    recent: list[int] = field(default_factory=list)  # ranks whose columns are in memory, the latest first

    def summary(self) -> Summary:
        """What a card shows, small enough to be kept of every run."""
        return Summary(self.run.meta, self.report.health, view.mean_bar(self.report), view.scope(self.report))

    def data(self, rank: int) -> RankData:
        """All columns of one rank; those of the ranks asked for before are forgotten beyond a few."""
        found = self.run.rank(rank)
        if self.run.path is not None:
            self.recent = [rank, *(one for one in self.recent if one != rank)]
            for old in self.recent[KEPT_RANKS:]:
                self.run.release(old)
            self.recent = self.recent[:KEPT_RANKS]
        return found

    def rank_label(self, rank: int) -> str:
        """`pp1 dp0`, empty without a recorded mesh."""
        coords = self.run.meta.coords
        shown = coords[rank] if 0 <= rank < len(coords) else {}
        sizes = self.run.meta.mesh
        return text.ranks_label({axis: at for axis, at in shown.items() if sizes.get(axis, 2) > 1})

    def describe(self) -> dict[str, Any]:
        """What the timeline needs before it draws: ranks, lanes, steps. Small: no event is in it."""
        ranks = []
        for rank, ids in self.of_rank.items():
            lanes = [[i, self.tracks[i].role, text.name(self.tracks[i].label, 40), len(self.tracks[i])] for i in ids]
            ranks.append({"rank": rank, "label": self.rank_label(rank), "tracks": lanes})
        many = sum(len(edges) for edges in self.bounds.values()) > MAX_BOUNDS
        return {
            "id": self.id,
            "name": text.name(self.run.meta.name, 80),
            "origin_ns": str(self.origin),
            "span_ns": self.span_ns,
            "ranks": ranks,
            "steps": self.steps,
            "categories": sorted(self.categories),
            "bounds": {} if many else self.bounds,
        }


def lay_out(run_id: str, run: Run, report: Any, decomposition: Any, matches: Any, progress: Progress) -> LoadedRun:
    """Draw-ready lanes of every rank.

    `decomposition.segments(rank)` is the ledger's partition, `matches.parts` the matched communications. A rank's
    columns are released once it is laid out; details are read again when they are asked for.
    """
    parts = Parts(matches.parts)
    clocks = {rank: common_time(matches, rank) for rank in run.ranks}
    extents = [_extent(run, rank, clocks[rank]) for rank in run.ranks]
    known = [e for e in extents if e is not None]
    origin = min((e[0] for e in known), default=0)
    span = max((e[1] for e in known), default=1) - origin
    loaded = LoadedRun(run_id, run, report, parts, origin, max(span, 1), Labels())
    for done, rank in enumerate(run.ranks):
        progress(f"laying out rank {rank}", done / len(run.ranks))
        clock = _after(clocks[rank], origin)
        segments = Segments.of(decomposition.segments(rank), clock)
        data = run.rank(rank)
        arrival = parts.last_arrival(rank, len(data.events["start_ns"])) - origin
        tracks = build_tracks(rank, data, segments, arrival, clock, loaded.labels)
        loaded.of_rank[rank] = range(len(loaded.tracks), len(loaded.tracks) + len(tracks))
        loaded.tracks += tracks
        loaded.categories.update(int(c) for track in tracks for c in np.unique(track.category))
        loaded.terms[rank] = segments.track(rank)
        _note_steps(loaded, rank, segments)
        if run.path is not None:
            run.release(rank)
    loaded.steps.sort(key=lambda step: step["start"])
    return loaded


def common_time(matches: Any, rank: int) -> Clock:
    """What turns a rank's own times into the common time of `matches.parts` (definitions: Clocks)."""
    clock, table = matches.clock, matches.table
    if clock is None or table is None or rank not in list(table.ranks):
        return lambda times: times
    place = list(table.ranks).index(rank)
    return lambda times: times - clock.ahead(np.full(len(times), place), times)


def _after(clock: Clock, origin: int) -> Clock:
    return lambda times: clock(times) - origin


def _extent(run: Run, rank: int, clock: Clock) -> tuple[int, int] | None:
    """First start and last end of a rank's rows, common time."""
    columns = run.columns(rank, "start_ns", "dur_ns")
    if not len(columns["start_ns"]):
        return None
    return int(clock(columns["start_ns"]).min()), int(clock(columns["start_ns"] + columns["dur_ns"]).max())


def _note_steps(loaded: LoadedRun, rank: int, segments: Segments) -> None:
    """The rank's step windows, and their union over ranks."""
    if not len(segments.start):
        return
    first = np.ones(len(segments.step), bool)
    first[1:] = segments.step[1:] != segments.step[:-1]
    at = np.flatnonzero(first)
    last = np.append(at[1:], len(first)) - 1
    known = {step["step"]: step for step in loaded.steps}
    for i, j in zip(at.tolist(), last.tolist(), strict=True):
        step = segments.step[i]
        step = int(step) if isinstance(step, (int, np.integer)) else str(step)
        start, end = int(segments.start[i]), int(segments.end[j])
        if step in known:
            known[step]["start"] = min(known[step]["start"], start)
            known[step]["end"] = max(known[step]["end"], end)
        else:
            known[step] = {"step": step, "start": start, "end": end}
            loaded.steps.append(known[step])
    loaded.bounds[rank] = [*segments.start[at].tolist(), int(segments.end[-1])]


def load(run_id: str, run: Run, progress: Progress) -> LoadedRun:
    """Match, decompose and report one run, and lay it out.

    Raises StepscopeError for a run that cannot be analysed, and whatever `progress` raises to cancel.
    """
    from stepscope.analysis.ledger.decompose import decompose
    from stepscope.analysis.report import analyze

    progress("decomposing every step", 0.1)
    decomposition = decompose(run)
    progress("looking for causes", 0.5)
    report = analyze(run, decomposition=decomposition)
    return lay_out(run_id, run, report, decomposition, decomposition.matches, progress)
