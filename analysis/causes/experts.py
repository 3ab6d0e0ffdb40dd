"""Experts: how many tokens each took, how uneven that is over experts and ranks, and what their exchange costs.

An exchange takes as long as its busiest rank needs; skew = tokens of the busiest / mean. Definitions: definitions.md,
Experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from stepscope.analysis.causes.counters import samples
from stepscope.analysis.ledger.steps import Windows
from stepscope.analysis.run import Run

COUNTER = "tokens_per_expert"
KEY = re.compile(r"layer\.(\d+) expert\.(\d+)")

LOAD_COLUMNS = ("layer", "expert", "ranks", "tokens_per_step", "relative_load")
"""One row a layer and expert; `ranks` hold it; `relative_load`: tokens / mean of the layer's experts."""

RANK_COLUMNS = (
    *("rank", "tokens_per_step", "relative_load"),
    *("exchanges_per_step", "exchange_transfer_ns_per_step", "exchange_wait_ns_per_step"),
)
"""One row a rank with experts; `relative_load`: tokens / mean of the ranks of its stage; exchanges: its all-to-alls."""


@dataclass(frozen=True)
class Experts:
    """`loads` (LOAD_COLUMNS) and `ranks` (RANK_COLUMNS), busiest first; empty where a run counted no tokens."""

    loads: pd.DataFrame
    ranks: pd.DataFrame

    @property
    def skew(self) -> float | None:
        """Tokens of the busiest expert / mean of its layer, the largest of all layers; None without experts."""
        return float(self.loads["relative_load"].max()) if len(self.loads) else None

    @property
    def rank_skew(self) -> float | None:
        """The same for ranks, beside those of their stage."""
        return float(self.ranks["relative_load"].max()) if len(self.ranks) else None


def experts(
    run: Run,
    windows: Mapping[int, Windows],
    parts: pd.DataFrame,
    steps: tuple[int | str, ...],
    stage_of: Callable[[int], int],
) -> Experts:
    """Loads and costs, means of the counted `steps`. `parts`: Matches.parts with `step`."""
    found = samples(run, windows, (COUNTER,))
    if len(found):
        found = found[found["step"].isin(steps)]
        keys = found["key"].astype(str).str.extract(KEY)
        told = keys.notna().all(axis=1)
        found = found[told].assign(layer=keys[0][told].astype("int64"), expert=keys[1][told].astype("int64"))
    if found.empty:
        return Experts(pd.DataFrame(columns=list(LOAD_COLUMNS)), pd.DataFrame(columns=list(RANK_COLUMNS)))
    loads = found.groupby(["layer", "expert"], as_index=False).agg(
        ranks=("rank", lambda ranks: tuple(sorted(set(ranks.tolist())))), tokens_per_step=("value", "sum")
    )
    loads["tokens_per_step"] /= len(steps)
    loads["relative_load"] = _relative(loads["tokens_per_step"], loads["layer"])
    ranks = found.groupby("rank", as_index=False).agg(tokens_per_step=("value", "sum"))
    ranks["tokens_per_step"] /= len(steps)
    ranks["relative_load"] = _relative(ranks["tokens_per_step"], ranks["rank"].map(stage_of))
    ranks = ranks.merge(_exchanges(parts, steps), on="rank", how="left")
    return Experts(_busiest(loads)[list(LOAD_COLUMNS)], _busiest(ranks)[list(RANK_COLUMNS)])


def _relative(tokens: pd.Series, of: pd.Series) -> pd.Series:
    """Each / mean of those with the same `of`; NaN where that is 0."""
    mean = tokens.groupby(of).transform("mean")
    return tokens / mean.where(mean > 0)


def _busiest(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values("relative_load", ascending=False, kind="stable", ignore_index=True)


def _exchanges(parts: pd.DataFrame, steps: tuple[int | str, ...]) -> pd.DataFrame:
    """Per rank its all-to-alls of strategy ep in a step: number, transferring and waiting time, ns. Unmatched: no times."""
    mine = parts[(parts["strategy"] == "ep") & (parts["collective"] == "all_to_all") & parts["step"].isin(steps)]
    mine = mine.assign(
        transfer=mine["transfer_ns"].where(mine["transfer_ns"] >= 0, 0),
        wait=mine["wait_ns"].where(mine["wait_ns"] >= 0, 0),
    )
    sums = mine.groupby("rank", as_index=False).agg(
        exchanges_per_step=("match_id", "size"),
        exchange_transfer_ns_per_step=("transfer", "sum"),
        exchange_wait_ns_per_step=("wait", "sum"),
    )
    names = [name for name in sums.columns if name != "rank"]
    sums[names] = sums[names].astype(float) / len(steps)
    return sums
