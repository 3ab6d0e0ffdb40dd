"""What findings rest on, what is worth one, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from stepscope.analysis.causes.blame import Blame
from stepscope.analysis.causes.experts import Experts
from stepscope.analysis.causes.exposed import WaitTable
from stepscope.analysis.causes.pipeline import Pipeline
from stepscope.analysis.causes.stragglers import Excess, Straggler
from stepscope.analysis.causes.summary import Means, counted_rows
from stepscope.analysis.records import Finding, Health
from stepscope.tracer.schema import RunMeta

MOST = 5
"""Findings of one run."""

LEAST_SHARE = 0.02
"""Below this share of the mean step nothing is a finding."""

LEAST_TERM = 0.05
"""A whole term (communication, bubble, idle, copies) is worth a sentence from this share of the step on."""

ENOUGH_STEPS = 3
"""Fewer counted steps give no high confidence."""


class Stretch(NamedTuple):
    """Where something happened; instants of the common clock, ns."""

    rank: int
    step: int | str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Ground:
    """What findings rest on. Times ns; instants of the common clock."""

    meta: RunMeta
    health: Health
    ledger: pd.DataFrame
    means: Means
    classes: pd.DataFrame  # classes.COLUMNS
    blame: Blame
    waits: WaitTable
    stragglers: Sequence[Straggler]
    pipeline: Pipeline
    parts: pd.DataFrame  # Matches.parts with `step`
    stage_of: Callable[[int], int]
    starts: pd.DataFrame  # rank, step, start_ns (common clock)
    fits: pd.DataFrame  # alpha_beta.FIT_COLUMNS
    experts: Experts
    idle: pd.DataFrame  # idle.IDLE_COLUMNS
    links: pd.DataFrame  # links.LINK_COLUMNS
    volumes: pd.DataFrame  # volumes.VOLUME_COLUMNS
    longest: Mapping[str, Stretch] = field(default_factory=dict)  # term -> its longest stretch in a counted step

    @cached_property
    def excess(self) -> Excess:
        """The counted rows of the ledger, with `start_ns`, beside each other."""
        return Excess(counted_rows(self.ledger).merge(self.starts, on=["rank", "step"], how="left"))

    @property
    def step_ns(self) -> float:
        """Mean step time."""
        return float(self.means.values["step_ns"])

    def mean(self, column: str) -> float:
        """Mean of a ledger column."""
        return float(self.means.values[column])

    def where(self, term: str) -> dict[str, Any]:
        """The longest stretch of a term as a finding's evidence."""
        stretch = self.longest.get(term)
        return {} if stretch is None else stretch._asdict()

    @property
    def sure(self) -> str:
        """Confidence that the number of steps allows."""
        return "high" if len(self.means.steps) >= ENOUGH_STEPS else "medium"


def finding(
    ground: Ground, text: str, cost: float, confidence: str, advice: str, rests_on: Sequence[str], **where: object
) -> Finding:
    """A finding; where health touches what it rests on, it says so and is of low confidence."""
    base = Finding(text[0].upper() + text[1:], round(cost), None, None, None, None, None, confidence, advice)
    one = replace(base, **where)  # type: ignore[arg-type]
    items = [item for item in ground.health.items if set(item.touches) & {"ledger", *rests_on}]
    touched = sorted({item.code for item in items if not _only_outside_means(ground, item.code)})
    if touched:
        one = replace(one, text=f"{one.text} (rests on touched data: {', '.join(touched)})", confidence="low")
    return one


CUT = ("cut_file", "stopped_recording")
"""Health codes whose step is flagged partial: it is in no mean, so no finding rests on it."""

LACKING_PARTNERS = ("unmatched", "partial_match", "unequal_counts", "missing_rank")
"""Health codes of communications without all their partners: what they touch is unsplit time."""


def _only_outside_means(ground: Ground, code: str) -> bool:
    """Whether what this health code touches lies outside the counted steps."""
    return code in CUT or (code in LACKING_PARTNERS and ground.mean("unsplit_ns") == 0)
