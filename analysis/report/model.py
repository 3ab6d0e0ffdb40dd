"""The report of one run: frames and small dataclasses, and the public JSON made of them (docs/json_format.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from stepscope.analysis.causes.alpha_beta import FIT_COLUMNS, OUTLIER_COLUMNS, AlphaBeta
from stepscope.analysis.causes.classes import CLASS_MEAN_COLUMNS
from stepscope.analysis.causes.experts import LOAD_COLUMNS, RANK_COLUMNS, Experts
from stepscope.analysis.causes.idle import IDLE_COLUMNS
from stepscope.analysis.causes.links import LINK_COLUMNS
from stepscope.analysis.causes.memory import PEAK_COLUMNS, STATE_COLUMNS, Memory
from stepscope.analysis.causes.patterns import StragglerGroup
from stepscope.analysis.causes.pipeline import Pipeline
from stepscope.analysis.causes.ratios import CONTENTION_COLUMNS, RATIO_COLUMNS
from stepscope.analysis.causes.stages import STAGE_COLUMNS
from stepscope.analysis.causes.stragglers import Straggler
from stepscope.analysis.causes.summary import MEAN_COLUMNS, Means, overlap_of, written
from stepscope.analysis.causes.throughput import Throughput
from stepscope.analysis.causes.volumes import VOLUME_COLUMNS
from stepscope.analysis.ledger.match_frames import CLOCKS, RATES
from stepscope.analysis.records import JSON_SCHEMA_VERSION, LEDGER_COLUMNS, Finding, Health
from stepscope.analysis.report.written import Column, Lists, Numbers, Table, dumps, plain
from stepscope.tracer.schema import RunMeta

OVERLAP_FIELDS = ("rank", "step", "axis", "collective", "stream", "overlap_efficiency", "comm_overlap")

STEP_FIELDS = (
    *("rank", "step", "start_ns", "end_ns", "cpu_step_ns"),
    *("op_wait_ns", "nonblocking_ns", "blocking_comm_ns", "in_means"),
)
"""What stands beside a row of the ledger (Decomposition.steps); the window is in the rank's own clock."""

COLLECTIVE_FIELDS = (
    "group",
    "axis",
    "strategy",
    "collective",
    "seq",
    "ranks",
    "bytes",
    "arrival_ns",
    "end_ns",
    "wait_ns",
    "transfer_ns",
    "last_rank",
    "match",
    "partial",
)
"""One matched communication; `ranks`, `arrival_ns`, `end_ns`, `wait_ns`, `transfer_ns` are lists of one length."""

CLASS_COLUMNS = ("rank", "step", "class", "ns")
"""Time by operation class: compute by phase, exposed communication by axis and collective."""

PICTURE_COLUMNS = ("rank", "start_ns", "end_ns", "what")
"""One typical step, as drawn: `what` is a term, compute being told apart by phase."""

MISSING = -1
"""A missing integer in columns; null in JSON."""


@dataclass
class Report:
    """Everything that `stepscope analyze` says about one run."""

    meta: RunMeta
    health: Health
    ranks: tuple[int, ...]
    ledger: pd.DataFrame  # records.LEDGER_COLUMNS
    means: Means
    throughput: Throughput
    pipeline: Pipeline
    overlap: pd.DataFrame  # OVERLAP_FIELDS
    collectives_of: Callable[[], Mapping[str, Column]] = field(repr=False)  # COLLECTIVE_FIELDS
    stragglers: tuple[Straggler, ...]  # dearest first
    findings: tuple[Finding, ...]  # dearest first, at most five
    alpha_beta: AlphaBeta
    volumes: pd.DataFrame  # VOLUME_COLUMNS
    memory: Memory
    experts: Experts
    idle: pd.DataFrame  # IDLE_COLUMNS
    ratios: pd.DataFrame  # RATIO_COLUMNS
    contention: pd.DataFrame  # CONTENTION_COLUMNS
    class_means: pd.DataFrame  # CLASS_MEAN_COLUMNS
    matching: pd.DataFrame  # RATES
    clocks: pd.DataFrame  # CLOCKS
    links: pd.DataFrame  # LINK_COLUMNS
    stages: pd.DataFrame  # STAGE_COLUMNS
    steps: pd.DataFrame  # STEP_FIELDS
    classes: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(CLASS_COLUMNS)))
    picture: pd.DataFrame = field(default_factory=lambda: Report.no_picture())
    picture_step: int | str | None = None
    names: frozenset[str] = frozenset()  # names of device operations
    path: Path | None = None
    straggler_groups: tuple[StragglerGroup, ...] = ()  # by host and by stage, dearest first

    @staticmethod
    def no_picture() -> pd.DataFrame:
        """An empty picture."""
        return pd.DataFrame(columns=list(PICTURE_COLUMNS))

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """The matched communications, one row each (COLLECTIVE_FIELDS)."""
        columns = self.collectives_of()
        lists = {
            name: pd.Series(column.objects(), dtype="object")
            for name, column in columns.items()
            if isinstance(column, (Lists, Numbers))
        }
        return pd.DataFrame({**columns, **lists}, columns=list(COLLECTIVE_FIELDS)).infer_objects()

    @property
    def name(self) -> str:
        """What a person calls the run."""
        return self.meta.name or self.meta.run_id

    def to_json(self) -> dict[str, Any]:
        """The public format, exactly: strict JSON values, undefined is null."""
        return {name: plain(section) for name, section in self.sections().items()}

    def json_text(self) -> str:
        """The public format as text: what `dumps(report.to_json())` gives, many times faster."""
        return dumps(self.sections())

    def head(self) -> dict[str, Any]:
        """What says which run it is, whether to believe it, and its mean step: run, health and summary of the public format."""
        return {"run": self._run(), "health": self.health.to_json(), "summary": self._summary()}

    def sections(self) -> dict[str, Any]:
        """What is in the public format, tables as Table."""
        head = self.head()
        return {
            "schema": JSON_SCHEMA_VERSION,
            "health": head["health"],
            "run": head["run"],
            "ledger": Table(self.ledger, tuple(LEDGER_COLUMNS)),
            "steps": Table(self.steps, STEP_FIELDS),
            "summary": head["summary"],
            "classes": Table(self.class_means, CLASS_MEAN_COLUMNS),
            "overlap": Table(self.overlap, OVERLAP_FIELDS),
            "matching": Table(self.matching, RATES),
            "clocks": Table(self.clocks, CLOCKS),
            "collectives": Table(self.collectives_of(), COLLECTIVE_FIELDS),
            "pipeline": plain(self.pipeline.to_json()),
            "stages": Table(self.stages, STAGE_COLUMNS),
            "stragglers": [plain(asdict(straggler)) for straggler in self.stragglers],
            "straggler_groups": [plain(asdict(group)) for group in self.straggler_groups],
            "findings": [plain(asdict(finding)) for finding in self.findings],
            "alpha_beta": {
                "fits": Table(self.alpha_beta.fits, FIT_COLUMNS),
                "outliers": Table(self.alpha_beta.outliers, OUTLIER_COLUMNS),
            },
            "links": Table(self.links, LINK_COLUMNS),
            "volumes": Table(self.volumes, VOLUME_COLUMNS),
            "memory": {
                "state": Table(self.memory.state, STATE_COLUMNS),
                "peaks": Table(self.memory.peaks, PEAK_COLUMNS),
            },
            "experts": {
                "loads": Table(self.experts.loads, LOAD_COLUMNS),
                "ranks": Table(self.experts.ranks, RANK_COLUMNS),
            },
            "idle": Table(self.idle, IDLE_COLUMNS),
            "compute_per_transfer": Table(self.ratios, RATIO_COLUMNS),
            "contention": Table(self.contention, CONTENTION_COLUMNS),
        }

    def _run(self) -> dict[str, Any]:
        meta = self.meta
        facts = {
            name: getattr(meta, name)
            for name in ("run_id", "name", "source", "complete", "created", "world_size", "mesh", "backend", "device")
        }
        steps = list(dict.fromkeys(self.ledger["step"])) if len(self.ledger) else []
        more = {
            "path": str(self.path) if self.path else None,
            "hosts": sorted(set(meta.hosts)),
            "ranks": list(self.ranks),
            "steps": steps,
            "steps_in_means": list(self.means.steps),
            "ranks_in_means": list(self.means.ranks),
            "tokens_per_step": self.throughput.tokens_per_step,
            "model": meta.model,
            "parallel": meta.parallel,
            "train": meta.train,
        }
        return dict(plain({**facts, **more}))

    def _summary(self) -> dict[str, Any]:
        names = ("step_ns", *MEAN_COLUMNS)
        means = written(self.means.values) if self.means.values else dict.fromkeys(names)
        efficiency, comm = overlap_of(self.ledger) if len(self.ledger) else (None, None)
        more = {
            "overlap_efficiency": efficiency,
            "comm_overlap": comm,
            "steps": len(self.means.steps),
            **self._matched(),
            "tokens_per_s": self.throughput.tokens_per_s,
            "tokens_per_s_per_device": self.throughput.tokens_per_s_per_device,
            "mfu": self.throughput.mfu,
        }
        return dict(plain({**means, **more}))

    def _matched(self) -> dict[str, int]:
        """How many communications there are, and how many of them are whole, partial, inferred, unmatched."""
        frame = self.matching
        counts = {name: int(frame[name].sum()) for name in ("matched", "partial", "unmatched")}
        inferred = frame[frame["method"] == "inferred"]
        return {"communications": int(frame["operations"].sum()), **counts, "inferred": int(inferred["matched"].sum())}
