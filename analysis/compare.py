"""Two or more runs side by side: per-step means, deltas that sum exactly, and a noise band for each.

Definitions: definitions.md (Comparing two runs). The first run is the base; every other is compared with it. Means are
over ranks, then over steps, so that runs of unequal world size and length compare; per token where both say their batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from stepscope.analysis.causes.classes import class_steps
from stepscope.analysis.causes.summary import TERM_COLUMNS, Means, grained, number
from stepscope.analysis.records import JSON_SCHEMA_VERSION
from stepscope.analysis.report import Report, analyze
from stepscope.analysis.run import Run

RESAMPLES = 2000
SEED = 20240229
BAND = (2.5, 97.5)
"""Percentiles of the bootstrap: a 95 % band."""

SLOWER, NOT_SLOWER, UNDECIDED = "slower", "not_slower", "undecided"


@dataclass(frozen=True)
class Delta:
    """One quantity on both sides, in ns a step (or a token); `low` and `high` are the noise band of the delta.

    The band is None where one side has fewer than two whole steps. `beyond_noise` says that the band excludes 0.
    """

    name: str
    a_ns: Fraction
    b_ns: Fraction
    low_ns: float | None = None
    high_ns: float | None = None

    @property
    def delta_ns(self) -> Fraction:
        """b - a, exact."""
        return self.b_ns - self.a_ns

    @property
    def relative(self) -> float | None:
        """The delta as a fraction of a; None where a is 0."""
        return float(self.delta_ns / self.a_ns) if self.a_ns else None

    @property
    def beyond_noise(self) -> bool | None:
        """Whether the band lies on one side of 0; None without a band."""
        if self.low_ns is None or self.high_ns is None:
            return None
        return self.low_ns > 0 or self.high_ns < 0


@dataclass(frozen=True)
class Pair:
    """Run B against run A. `terms` are in the order of TERMS and sum to `step`, on each side and in the delta."""

    a: str
    b: str
    step: Delta
    terms: tuple[Delta, ...]
    per_token: tuple[Delta, ...]  # step first, then the terms; empty where a side does not say its tokens
    classes: tuple[Delta, ...]  # by operation class, largest change first
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]


@dataclass
class Comparison:
    """All runs, and each later one against the first."""

    reports: list[Report]
    pairs: list[Pair] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The public JSON of `stepscope compare` (docs/json_format.md)."""
        return {
            "schema": JSON_SCHEMA_VERSION,
            "runs": [report.head() for report in self.reports],
            "comparisons": [_pair_json(pair) for pair in self.pairs],
        }


def compare(runs: Sequence[Run]) -> Comparison:
    """Analyse and compare two or more runs, the first being the base; ValueError for fewer than two."""
    return compare_reports([analyze(run) for run in runs])


def compare_reports(reports: Sequence[Report]) -> Comparison:
    """The same for runs that are analysed already; ValueError where one has no whole step to compare."""
    if len(reports) < 2:
        raise ValueError("compare needs two runs or more: stepscope compare A B")
    for report in reports:
        if not report.means.values:
            raise ValueError(f"run {report.name} has no whole step, so there is nothing to compare: record more steps")
    return Comparison(list(reports), [_pair(reports[0], other) for other in reports[1:]])


# -- the noise band ----------------------------------------------------------------------------------------------------


def noise_band(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Percentiles BAND of mean(b) - mean(a) when the steps of each side are drawn anew, with replacement.

    `a`, `b`: (steps, quantities). Where both have the same number of steps, step k is drawn with step k, so that a run
    has no noise against itself. Deviations are widened by sqrt(n / (n - 1)), which a bootstrap of few steps lacks.
    None when a side has fewer than two steps. The seed is fixed: the same runs give the same band.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    paired = len(a) == len(b)
    draws = _deviations(b - a, SEED) if paired else _deviations(b, SEED) - _deviations(a, SEED + 1)
    middle = b.mean(axis=0) - a.mean(axis=0)
    low, high = np.percentile(draws, BAND, axis=0)
    return middle + low, middle + high


def _deviations(values: np.ndarray, seed: int) -> np.ndarray:
    """Deviations of RESAMPLES bootstrap means from the mean: (RESAMPLES, quantities)."""
    steps = len(values)
    drawn = np.random.default_rng(seed).integers(0, steps, (RESAMPLES, steps))
    centred = values - values.mean(axis=0)
    return centred[drawn].mean(axis=1) * np.sqrt(steps / (steps - 1))


def _deltas(
    names: Sequence[str], a: Sequence[Mapping[str, Fraction]], b: Sequence[Mapping[str, Fraction]]
) -> tuple[Delta, ...]:
    """One Delta a name, from the values of each step on each side."""
    matrix = [np.array([[float(step[name]) for name in names] for step in side]) for side in (a, b)]
    band = noise_band(*matrix)
    means = [{name: sum((step[name] for step in side), Fraction(0)) / len(side) for name in names} for side in (a, b)]
    return tuple(
        Delta(
            name,
            means[0][name],
            means[1][name],
            *((None, None) if band is None else (float(band[0][i]), float(band[1][i]))),
        )
        for i, name in enumerate(names)
    )


# -- one pair ----------------------------------------------------------------------------------------------------------


def _pair(a: Report, b: Report) -> Pair:
    names = ("step_ns", *TERM_COLUMNS)
    step, *terms = _deltas(names, a.means.by_step, b.means.by_step)
    tokens = a.throughput.tokens_per_step, b.throughput.tokens_per_step
    per_token: tuple[Delta, ...] = ()
    if tokens[0] and tokens[1]:
        per_token = _deltas(names, _divided(a.means, tokens[0]), _divided(b.means, tokens[1]))
    return Pair(
        a=a.name,
        b=b.name,
        step=step,
        terms=tuple(terms),
        per_token=per_token,
        classes=_class_deltas(a, b),
        only_in_a=tuple(sorted(a.names - b.names)),
        only_in_b=tuple(sorted(b.names - a.names)),
    )


def _divided(means: Means, tokens: int) -> list[dict[str, Fraction]]:
    return [{name: value / tokens for name, value in step.items()} for step in means.by_step]


def _class_deltas(a: Report, b: Report) -> tuple[Delta, ...]:
    """By operation class, the dearest change first; a class that one side lacks is 0 there."""
    sides = [class_steps(report.classes, report.means) for report in (a, b)]
    names = sorted({name for side in sides for step in side for name in step})
    if not names:
        return ()
    filled = [[{name: step.get(name, Fraction(0)) for name in names} for step in side] for side in sides]
    return tuple(sorted(_deltas(names, *filled), key=lambda delta: (-abs(delta.delta_ns), delta.name)))


# -- JSON and the verdict for CI ---------------------------------------------------------------------------------------


def _delta_json(delta: Delta) -> dict[str, Any]:
    """One row; a and b are multiples of 1/1024 ns, so that deltas of terms sum to the step's without rounding."""
    a, b = grained(delta.a_ns), grained(delta.b_ns)
    return {
        "name": delta.name.removesuffix("_ns"),
        "a_ns": number(a),
        "b_ns": number(b),
        "delta_ns": number(b - a),
        "low_ns": delta.low_ns,
        "high_ns": delta.high_ns,
        "beyond_noise": delta.beyond_noise,
    }


def _summed_json(step: Delta, terms: Sequence[Delta]) -> dict[str, Any]:
    """A step and its terms; the step's numbers are the sums of the terms' as written."""
    rows = [_delta_json(term) for term in terms]
    whole = _delta_json(step)
    for name in ("a_ns", "b_ns", "delta_ns"):
        whole[name] = number(sum(row[name] for row in rows))
    whole.pop("name")
    return {"step": {**whole, "relative": step.relative}, "terms": rows}


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "a": pair.a,
        "b": pair.b,
        **_summed_json(pair.step, pair.terms),
        "per_token": _summed_json(pair.per_token[0], pair.per_token[1:]) if pair.per_token else None,
        "classes": [_delta_json(delta) for delta in pair.classes],
        "only_in_a": list(pair.only_in_a),
        "only_in_b": list(pair.only_in_b),
    }


def verdict(pair: Pair, limit: float) -> str:
    """Whether B's step is slower than A's by `limit` (a fraction) or more: `slower`, `not_slower` or `undecided`.

    `slower` only where the slowdown reaches the limit and the noise band excludes 0; `not_slower` where even the upper
    end of the band stays below the limit; everything between, and a run too short for a band, is `undecided`.
    """
    step = pair.step
    if step.low_ns is None or step.high_ns is None or step.relative is None:
        return UNDECIDED
    if step.relative >= limit and step.low_ns > 0:
        return SLOWER
    return NOT_SLOWER if step.high_ns / float(step.a_ns) < limit else UNDECIDED
