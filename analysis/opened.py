"""A run in Python or a notebook: `stepscope.open(path)`, every answer a DataFrame (docs/python.md).

Columns carry their unit (`_ns`, `_ns_per_step`, `_ns_per_token`, `bytes`); those without one are names, counts, or
fractions of 1. Undefined is NaN, NA or None, never 0. Frames are copies: changing one changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path

import pandas as pd

from stepscope.analysis.causes.patterns import StragglerGroup
from stepscope.analysis.causes.stragglers import Straggler
from stepscope.analysis.compare import Delta, compare_reports
from stepscope.analysis.ingest import open_run
from stepscope.analysis.records import TERMS, Finding, Health
from stepscope.analysis.report import Report, analyze
from stepscope.analysis.report.view import health_line, mesh_text, scope
from stepscope.analysis.run import Run

LISTS = ("ranks", "arrival_ns", "end_ns", "wait_ns", "transfer_ns")
"""Fields of a communication that hold one value a rank."""

WHOLE_NUMBERS = ("seq", "bytes", "arrival_ns", "end_ns", "wait_ns", "transfer_ns", "last_rank")


def open(path: str | Path | Sequence[str | Path], peak_tflops: float | None = None) -> OpenedRun:
    """Open a run directory or traces of other programs (what `stepscope analyze` takes); nothing is analysed yet.

    `peak_tflops`: peak of one device in TFLOP/s, for MFU. StepscopeError where nothing can be read.
    """
    return OpenedRun(open_run(path), peak_tflops)


class OpenedRun:
    """One run; the analysis runs when something is first asked for, and once."""

    def __init__(self, run: Run, peak_tflops: float | None = None) -> None:
        self.run = run
        self._peak_flops = None if peak_tflops is None else peak_tflops * 1e12

    @cached_property
    def report(self) -> Report:
        """All of what `stepscope analyze` says; `report.to_json()` is the public JSON."""
        return analyze(self.run, peak_flops=self._peak_flops)

    @property
    def health(self) -> Health:
        """`status` (ok, touched, broken) and `items`: look here before at any figure."""
        return self.report.health

    def __repr__(self) -> str:
        return f"<stepscope run {self.report.name}: {mesh_text(self.report)}; {scope(self.report)}; {health_line(self.report)}>"

    def ledger(self) -> pd.DataFrame:
        """One row a rank and step: step_ns and the six terms that sum to it, what is beside them, flags."""
        return self.report.ledger.copy()

    def steps(self) -> pd.DataFrame:
        """Beside the ledger, one row a rank and step: the window, op_wait_ns, nonblocking_ns, blocking_comm_ns, in_means."""
        return self.report.steps.copy()

    def summary(self) -> pd.DataFrame:
        """The mean step: one row a term with its ns_per_step and share; the shares sum to 1. Empty without a whole step."""
        values = self.report.means.values
        step = values.get("step_ns")
        rows = (
            [(term, float(values[f"{term}_ns"]), float(values[f"{term}_ns"] / step)) for term in TERMS] if step else []
        )
        return pd.DataFrame(rows, columns=["term", "ns_per_step", "share"])

    def classes(self) -> pd.DataFrame:
        """The mean step: one row an operation class (compute by phase, the rest by axis and collective), longest first."""
        return self.report.class_means.copy()

    def throughput(self) -> pd.DataFrame:
        """One row: tokens_per_step, tokens_per_s, tokens_per_s_per_device, flops_per_token, mfu; NaN where unknown."""
        return pd.DataFrame([asdict(self.report.throughput)]).astype(float)

    def overlap(self) -> pd.DataFrame:
        """One row a rank, step, axis, collective and stream: overlap_efficiency and comm_overlap, fractions."""
        return self.report.overlap.copy()

    def collectives(self) -> pd.DataFrame:
        """One row a communication and rank: arrival, end, wait and transfer; `communication` numbers them by arrival."""
        frame = self.report.collectives.copy()
        frame.insert(0, "communication", range(len(frame)))
        frame = frame.explode(list(LISTS), ignore_index=True).rename(columns={"ranks": "rank"})
        return frame.astype(dict.fromkeys(WHOLE_NUMBERS, "Int64") | {"rank": "int64"})

    def matching(self) -> pd.DataFrame:
        """One row a process group and way of matching: communications, of these whole, partial, unmatched, and the rate."""
        return self.report.matching.copy()

    def clocks(self) -> pd.DataFrame:
        """One row a rank: offset, residual and uncertainty of its clock in ns, violations of causality, source."""
        return self.report.clocks.copy()

    def alpha_beta(self) -> pd.DataFrame:
        """One row a group and collective: alpha_ns and slope_us_per_mb with intervals, bandwidths, crossover_bytes."""
        return self.report.alpha_beta.fits.copy()

    def outliers(self) -> pd.DataFrame:
        """One row a communication that lies off its line and was left out of the fit."""
        return self.report.alpha_beta.outliers.copy()

    def links(self) -> pd.DataFrame:
        """One row a pair of ranks that exchange messages: median_transfer_ns, beside the other links, exposed time."""
        return self.report.links.copy()

    def volumes(self) -> pd.DataFrame:
        """One row a stage, strategy and collective: operations and bytes of a rank and step beside theory, in words too."""
        frame = self.report.volumes
        stage = frame["stage"].astype("Int64")
        return frame.assign(stage=stage.mask(stage < 0))

    def memory(self, of: str = "state") -> pd.DataFrame:
        """Bytes of each rank: `state` beside theory, one row a kind, or `peaks`, one row a phase. ValueError otherwise."""
        return _chosen("memory of", of, {"state": self.report.memory.state, "peaks": self.report.memory.peaks})

    def experts(self, by: str = "rank") -> pd.DataFrame:
        """Tokens a step, busiest first, `by` rank (with what its exchange costs) or expert. ValueError otherwise."""
        return _chosen("experts by", by, {"rank": self.report.experts.ranks, "expert": self.report.experts.loads})

    def idle(self) -> pd.DataFrame:
        """One row a rank and step: idle_ns and the reasons that sum to it."""
        return self.report.idle.copy()

    def compute_per_transfer(self) -> pd.DataFrame:
        """One row a mesh axis: compute and transfer of a rank and step, in ns, and their ratio."""
        return self.report.ratios.copy()

    def contention(self) -> pd.DataFrame:
        """One row a kernel that ran both beside a transfer and alone: mean durations in ns, and what it loses a step."""
        return self.report.contention.copy()

    def stragglers(self, by: str = "rank") -> pd.DataFrame:
        """Who made the others wait, dearest first, `by` rank, host or stage: cost_ns_per_step, cause, pattern.

        ValueError for any other word.
        """
        if by == "rank":
            return _frame(self.report.stragglers, Straggler)
        if by not in ("host", "stage"):
            raise ValueError(f"stragglers by {by!r}: say rank, host or stage")
        return _frame([one for one in self.report.straggler_groups if one.by == by], StragglerGroup)

    def pipeline(self) -> pd.DataFrame:
        """One row: schedule, stages, microbatches, and the bubble measured, in theory and as planned, as fractions."""
        return pd.DataFrame([self.report.pipeline.to_json()])

    def stages(self) -> pd.DataFrame:
        """One row a pipeline stage: compute beside the other stages, bubble, imbalance, head-of-line waits, ns a step."""
        return self.report.stages.copy()

    def findings(self) -> pd.DataFrame:
        """At most five rows, dearest first: text, cost_ns_per_step, evidence, confidence, advice."""
        return _frame(self.report.findings, Finding)

    def compare(self, other: OpenedRun | str | Path, by: str = "terms", per: str = "step") -> pd.DataFrame:
        """This run (a) beside another (b): one row for the step and one a term, whose deltas sum to the step's.

        `by` `classes`: one row an operation class instead, largest change first. `per` `token`: divided by the tokens of
        a step. low and high are the noise band of delta. ValueError where a run has no whole step, or no known tokens.
        """
        if by not in ("terms", "classes") or per not in ("step", "token") or (by, per) == ("classes", "token"):
            raise ValueError(f"compare by {by!r} per {per!r}: by terms (per step or token) or by classes (per step)")
        beside = other if isinstance(other, OpenedRun) else open(other)
        (pair,) = compare_reports([self.report, beside.report]).pairs
        if per == "token" and not pair.per_token:
            raise ValueError("compare per token: a run does not say how many tokens its step has")
        if by == "classes":
            return _deltas(pair.classes, per)
        return _deltas(pair.per_token if per == "token" else (pair.step, *pair.terms), per)


def _chosen(what: str, word: str, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    if word not in frames:
        raise ValueError(f"{what} {word!r}: say {' or '.join(frames)}")
    return frames[word].copy()


def _frame(records: Sequence[Straggler | StragglerGroup | Finding], kind: type) -> pd.DataFrame:
    """One row a record; the columns are there without any record too."""
    return pd.DataFrame([asdict(one) for one in records], columns=[field.name for field in fields(kind)])


def _deltas(deltas: Sequence[Delta], per: str) -> pd.DataFrame:
    unit = f"_ns_per_{per}"
    rows = [
        {
            "name": one.name.removesuffix("_ns"),
            f"a{unit}": float(one.a_ns),
            f"b{unit}": float(one.b_ns),
            f"delta{unit}": float(one.delta_ns),
            f"low{unit}": one.low_ns,
            f"high{unit}": one.high_ns,
            "relative": one.relative,
            "beyond_noise": one.beyond_noise,
        }
        for one in deltas
    ]
    names = ["name", *(f"{side}{unit}" for side in ("a", "b", "delta", "low", "high")), "relative", "beyond_noise"]
    return pd.DataFrame(rows, columns=names)
