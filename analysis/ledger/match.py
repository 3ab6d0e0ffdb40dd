"""Matching of communications across ranks: `match(run) -> Matches`, with waits, clocks and evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stepscope.analysis.ledger import clocks as clock
from stepscope.analysis.ledger import keys
from stepscope.analysis.ledger.clocks import Clocks
from stepscope.analysis.ledger.keys import Matched
from stepscope.analysis.ledger.match_health import match_health
from stepscope.analysis.ledger.parts import Parts, collect
from stepscope.analysis.ledger.steps import tell
from stepscope.analysis.ledger.summary import RankSummary, summaries
from stepscope.analysis.ledger.waits import Waits, reckon
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Run
from stepscope.tracer.schema import RunMeta

if TYPE_CHECKING:
    import pandas as pd  # match_frames makes the frames, when they are asked for


@dataclass
class Matches:
    """All communications of a run, matched; as arrays (one value a part, in the order of `table`) and as frames.

    `table` is None for a run without communication.
    """

    table: Parts | None
    matched: Matched
    waits: Waits | None
    clock: Clocks | None
    streams: list[tuple[str, ...]]  # of each rank place: the names of its lanes
    health: list[HealthItem]

    @cached_property
    def parts(self) -> pd.DataFrame:
        """One row a (match, rank), match_frames.PARTS; arrivals and ends in the common clock, ns, missing -1."""
        from stepscope.analysis.ledger.match_frames import PARTS, empty, parts_frame

        if self.table is None or self.waits is None:
            return empty(PARTS)
        return parts_frame(self.table, self.matched, self.waits, self.streams)

    @cached_property
    def clocks(self) -> pd.DataFrame:
        """One row a rank: offset_ns (how far ahead), drift_ppm, residual_ns, bound_ns, samples, violations, source."""
        from stepscope.analysis.ledger.match_frames import CLOCKS, clock_frame, empty

        if self.table is None or self.waits is None or self.clock is None:
            return empty(CLOCKS)
        return clock_frame(self.table, self.clock, self.waits)

    @cached_property
    def rates(self) -> pd.DataFrame:
        """Per group and key: operations, those matched on all, on some, on one of their ranks, and the rate of the first."""
        from stepscope.analysis.ledger.match_frames import RATES, empty, rates_frame

        if self.table is None or self.waits is None:
            return empty(RATES)
        return rates_frame(self.table, self.matched, self.waits)

    @property
    def match_of_part(self) -> np.ndarray:
        """The match of each part of `table`."""
        return self.matched.match


def match(run: Run, axes: Mapping[str, str] | None = None) -> Matches:
    """Match the communications of all ranks; health items go to `run.health`.

    `axes` maps names of process groups to mesh axes where the trace does not tell (docs/definitions.md, Matching).
    """
    return match_summaries(run, summaries(run), axes)


def match_summaries(run: Run, found: Sequence[RankSummary], axes: Mapping[str, str] | None = None) -> Matches:
    """The same from summaries that are already at hand."""
    parts = collect(run.meta, found, axes)
    streams = [one.streams for one in found]
    if not len(parts):
        return Matches(None, Matched.nothing(0), None, None, streams, [])
    matched = Matched.nothing(len(parts))
    clocks = _match_all(run.meta, parts, matched, np.array([not one.host for one in found], bool))
    waits = reckon(parts, matched, run.meta.world_size, clocks.bound_ns)
    health = match_health(parts, matched, waits, clocks, found)
    tell(run.health, health)
    return Matches(parts, matched, waits, clocks, streams, health)


def _match_all(meta: RunMeta, parts: Parts, matched: Matched, on_device: np.ndarray) -> Clocks:
    """Keys and clocks need each other: numbers need no clock, order and time do."""
    clocks = clock.recorded(meta, parts)
    clocks.correct(parts)
    keys.by_sequence(parts, matched)
    if meta.source == "imported":
        keys.doubt_messages(parts, matched)
    if clock.needs_estimate(meta, parts):
        clocks = clock.estimate(meta, parts, matched)
    numbered = matched.method == keys.SEQ
    keys.by_order(parts, matched)
    if clock.needs_estimate(meta, parts) and not numbered.all():
        clocks.correct(parts)
        clocks = clock.estimate(meta, parts, matched)
    keys.by_time(parts, matched, on_device)  # a foreign gloo trace has one name for all groups: refused
    alone = np.flatnonzero(matched.match < 0)
    matched.match[alone] = np.arange(len(alone)) + int(matched.match.max(initial=-1)) + 1
    matched.match[:] = np.unique(matched.match, return_inverse=True)[1]  # without gaps, where matches were undone
    return clocks
