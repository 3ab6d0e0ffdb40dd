"""The alpha-beta model: what one communication costs before its first byte, and what each byte adds.

    T = alpha + beta bytes

is fitted per (group, collective) on the last arriver's own duration, which holds no wait and needs no clock. The fit is
Theil-Sen's; outliers are named and left out. Definitions: definitions.md, The alpha-beta model; bandwidths and message
sizes as nccl-tests defines them.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from stepscope.analysis.causes.columns import coded, firsts

NORMAL_95 = 1.959963984540054
"""Half width of a 95 % interval in standard deviations."""

MOST_SAMPLES = 200
"""A fit looks at every pair of samples: of more than these, so many are taken, evenly over the sizes."""

OUTLIER_DEVIATIONS, OUTLIER_SHARE = 5.0, 0.1
"""An outlier lies both so many robust standard deviations (1.4826 MAD) and this share of its fitted time off the line."""

MOST_OUTLIERS = 0.25
"""Where a larger share of samples lies off the line, that is their spread and none is an outlier."""

NS_PER_BYTE_TO_US_PER_MB = 1000.0

FITTED, NOT_IDENTIFIABLE = "fitted", "not identifiable"

LINE_COLUMNS = (
    *("alpha_ns", "alpha_low_ns", "alpha_high_ns"),
    *("slope_us_per_mb", "slope_low_us_per_mb", "slope_high_us_per_mb"),
    *("algorithm_gb_per_s", "bus_gb_per_s", "hop_alpha_ns", "hop_slope_us_per_mb", "crossover_bytes"),
)
"""What a line tells."""

FIT_COLUMNS = (
    *("group", "axis", "collective", "group_size", "operations", "sizes", "outliers", "status", "bound"),
    *LINE_COLUMNS,
    *("median_bytes", "median_ns", "achieved_gb_per_s", "achieved_bus_gb_per_s"),
    *("operations_per_step", "latency_ns_per_step", "bandwidth_ns_per_step"),
)
"""One row a (group, collective). Unknown numbers are NaN; `bound`: latency or bandwidth, of the median message."""

OUTLIER_COLUMNS = ("group", "collective", "match_id", "rank", "step", "bytes", "duration_ns", "fitted_ns")


@dataclass(frozen=True)
class Line:
    """A fitted line: alpha in ns, beta in ns per byte, each with its 95 % interval; none is negative."""

    alpha: float
    alpha_low: float
    alpha_high: float
    beta: float
    beta_low: float
    beta_high: float

    def at(self, size: np.ndarray) -> np.ndarray:
        """Time in ns of messages of `size` bytes."""
        return np.asarray(self.alpha + self.beta * size)


@dataclass(frozen=True)
class AlphaBeta:
    """`fits` (FIT_COLUMNS), the one that takes longest first, and the `outliers` (OUTLIER_COLUMNS) that they leave out."""

    fits: pd.DataFrame
    outliers: pd.DataFrame


# -- the line ----------------------------------------------------------------------------------------------------------


def theil_sen(size: np.ndarray, time: np.ndarray) -> Line | None:
    """Theil-Sen line through (size, time): median slope of all pairs of unequal size, median intercept.

    Interval of the slope: Sen (1968), equation 2.6, with ties; that of alpha follows from it. A negative slope gives
    beta 0 and alpha the median; a negative intercept alpha 0 and beta the median of time / size. None for fewer than
    two sizes.
    """
    x, y = np.asarray(size, float), np.asarray(time, float)
    first, second = _pairs(len(x))
    unequal = x[first] != x[second]
    if not unequal.any():
        return None
    first, second = first[unequal], second[unequal]
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    low, high = _slope_interval(x, y, slopes)
    beta = float(np.median(slopes))
    alpha = float(np.median(y - beta * x))
    if beta <= 0:
        alpha, beta = float(np.median(y)), 0.0
    elif alpha < 0:
        alpha, beta = 0.0, float(np.median(y / x))
    low, high = min(max(low, 0.0), beta), max(high, beta)
    ends = [float(np.median(y - slope * x)) for slope in (high, low)]
    return Line(alpha, max(min(*ends, alpha), 0.0), max(*ends, alpha), beta, low, high)


@lru_cache(maxsize=4)
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of all pairs of so many samples: mostly MOST_SAMPLES."""
    first, second = np.triu_indices(count, 1)
    return first, second


def _slope_interval(x: np.ndarray, y: np.ndarray, slopes: np.ndarray) -> tuple[float, float]:
    """95 % interval of the median of the sorted `slopes`: Kendall's S is about normal, with this variance."""

    def ties(values: np.ndarray) -> int:
        counts = np.unique(values, return_counts=True)[1]
        return int((counts * (counts - 1) * (2 * counts + 5)).sum())

    n, pairs = len(x), len(slopes)
    deviation = math.sqrt(max(n * (n - 1) * (2 * n + 5) - ties(x) - ties(y), 0) / 18)
    upper = min(round((pairs + NORMAL_95 * deviation) / 2), pairs - 1)
    lower = max(round((pairs - NORMAL_95 * deviation) / 2) - 1, 0)
    return float(slopes[lower]), float(slopes[upper])


def fit(size: np.ndarray, time: np.ndarray) -> tuple[Line | None, np.ndarray]:
    """The line through (bytes, ns), and which samples are outliers (bool): those are left out of the line.

    None where fewer than two sizes are left. No sample is an outlier of a line that cannot be told.
    """
    chosen = _thinned(size)
    line = theil_sen(size[chosen], time[chosen])
    none = np.zeros(len(size), bool)
    if line is None:
        return None, none
    off = np.abs(time - line.at(size))
    spread = 1.4826 * float(np.median(off[chosen]))
    outlier = (off > OUTLIER_DEVIATIONS * spread) & (off > OUTLIER_SHARE * line.at(size))
    if not 0 < outlier.mean() <= MOST_OUTLIERS:
        return line, none
    left = np.flatnonzero(~outlier)
    chosen = left[_thinned(size[left])]
    return theil_sen(size[chosen], time[chosen]), outlier


def _thinned(size: np.ndarray) -> np.ndarray:
    """Places of at most MOST_SAMPLES samples, evenly over the sizes."""
    if len(size) <= MOST_SAMPLES:
        return np.arange(len(size))
    return np.argsort(size, kind="stable")[np.linspace(0, len(size) - 1, MOST_SAMPLES).round().astype(int)]


# -- what the line means -----------------------------------------------------------------------------------------------


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth, as nccl-tests defines it; NaN for what it does not know."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0 if collective in ("send_receive", "ring_shift", "broadcast", "reduce") else math.nan


def hops(collective: str, ranks: int) -> float:
    """Steps of a ring one after the other, each with 1/N of the message (a message between two ranks: 1, all of it)."""
    if collective == "all_reduce":
        return 2.0 * (ranks - 1)
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return float(ranks - 1)
    return 1.0 if collective in ("send_receive", "ring_shift") else math.nan


def meaning(line: Line | None, collective: str, ranks: int, median_bytes: float) -> dict[str, object]:
    """The columns of FIT_COLUMNS that follow from a line; NaN where there is none."""
    if line is None:
        return {**dict.fromkeys(LINE_COLUMNS, math.nan), "status": NOT_IDENTIFIABLE, "bound": ""}
    alpha, alpha_low, alpha_high, beta, beta_low, beta_high = astuple(line)
    bandwidth = 1 / beta if beta > 0 else math.nan  # bytes per ns are GB per s
    steps = hops(collective, ranks)
    share = 1 if collective in ("send_receive", "ring_shift") else ranks
    slope = beta * NS_PER_BYTE_TO_US_PER_MB
    return {
        "status": FITTED,
        "bound": "latency" if alpha > beta * median_bytes else "bandwidth",
        "alpha_ns": alpha,
        "alpha_low_ns": alpha_low,
        "alpha_high_ns": alpha_high,
        "slope_us_per_mb": slope,
        "slope_low_us_per_mb": beta_low * NS_PER_BYTE_TO_US_PER_MB,
        "slope_high_us_per_mb": beta_high * NS_PER_BYTE_TO_US_PER_MB,
        "algorithm_gb_per_s": bandwidth,
        "bus_gb_per_s": bandwidth * bus_factor(collective, ranks),
        "hop_alpha_ns": alpha / steps if steps else math.nan,
        "hop_slope_us_per_mb": slope * share / steps if steps else math.nan,
        "crossover_bytes": alpha / beta if beta > 0 else math.nan,
    }


# -- one run -----------------------------------------------------------------------------------------------------------


def samples(parts: pd.DataFrame) -> pd.DataFrame:
    """One row a whole communication: group, axis, collective, ranks, match_id, rank, step, bytes, duration_ns.

    `parts`: Matches.parts with `step`. `rank` is the last arriver (of equals the one that is done first), whose own
    duration it is; `bytes` the largest of its parts. Left out: partial and unmatched ones, impossible durations,
    violations of causality, unknown or empty messages.
    """
    columns = ["group", "axis", "collective", "group_size", "match_id", "rank", "step", "bytes", "duration_ns"]
    if parts.empty:
        return pd.DataFrame(columns=columns)
    names = ("match_id", "bytes", "arrival_ns", "end_ns", "unmatched", "partial", "violation", "impossible")
    match, size, arrival, end, *doubts = (parts[name].to_numpy() for name in names)
    words, kind = coded(parts["collective"])
    order = np.lexsort((end - arrival, -arrival, match))
    first = firsts(match[order])
    last, count = order[first], np.diff(np.append(first, len(order)))
    largest = np.maximum.reduceat(size[order], first)
    good = ~np.logical_or.reduceat(np.logical_or.reduce(doubts)[order], first) & (count > 1) & (largest > 0)
    low, high = (one.reduceat(kind[order], first) for one in (np.minimum, np.maximum))
    other = (kind[order] != np.repeat(low, count)) & (kind[order] != np.repeat(high, count))
    paired = (low != high) & ~np.logical_or.reduceat(other, first)  # two kinds of operation: a send and its receive
    paired &= np.isin(kind[last], [at for at, word in enumerate(words) if word in ("send", "receive")])
    found = parts[["group", "axis", "collective", "match_id", "rank", "step"]].iloc[last[good]]
    collective = np.where(paired, len(words), kind[last])[good]
    return found.assign(
        collective=pd.Series([*words, "send_receive"]).array.take(collective),
        group_size=count[good],
        bytes=largest[good],
        duration_ns=(end - arrival)[last[good]],
    )[columns]


def alpha_beta(parts: pd.DataFrame, steps: tuple[int | str, ...]) -> AlphaBeta:
    """The model of every (group, collective). `parts`: Matches.parts with `step`; `steps`: those that count."""
    rows, strange = [], []
    found = samples(parts)
    found = found[found["step"].isin(steps)]
    for (group, collective), part in found.groupby(["group", "collective"], sort=True):
        size, time = part["bytes"].to_numpy(), part["duration_ns"].to_numpy()
        line, outlier = fit(size, time)
        rows.append(_row(part, str(group), str(collective), line, int(outlier.sum()), len(steps)))
        if outlier.any():
            named = part[outlier][["group", "collective", "match_id", "rank", "step", "bytes", "duration_ns"]]
            fitted = line.at(size[outlier]) if line is not None else math.nan
            strange.append(named.assign(fitted_ns=fitted))
    fits = pd.DataFrame(rows, columns=list(FIT_COLUMNS))
    takes = fits["median_ns"].astype(float) * fits["operations"].astype(float)
    fits = fits.loc[takes.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)
    outliers = pd.concat(strange, ignore_index=True) if strange else pd.DataFrame(columns=list(OUTLIER_COLUMNS))
    return AlphaBeta(fits, outliers)


def _row(
    part: pd.DataFrame, group: str, collective: str, line: Line | None, outliers: int, steps: int
) -> dict[str, object]:
    most, sizes, took = (part[name].to_numpy() for name in ("group_size", "bytes", "duration_ns"))
    ranks, median_bytes, each = int(most.max()), float(np.median(sizes)), len(part) / steps
    speeds = sizes[took > 0] / took[took > 0]
    achieved = float(np.median(speeds)) if len(speeds) else math.nan
    return {
        "group": group,
        "axis": str(part["axis"].iloc[0]),
        "collective": collective,
        "group_size": ranks,
        "operations": len(part),
        "sizes": len(np.unique(sizes)),
        "outliers": outliers,
        "median_bytes": median_bytes,
        "median_ns": float(np.median(took)),
        "achieved_gb_per_s": achieved,
        "achieved_bus_gb_per_s": achieved * bus_factor(collective, ranks),
        "operations_per_step": each,
        "latency_ns_per_step": line.alpha * each if line else math.nan,
        "bandwidth_ns_per_step": line.beta * float(sizes.sum()) / steps if line else math.nan,
        **meaning(line, collective, ranks, median_bytes),
    }
