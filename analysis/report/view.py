"""What terminal and HTML both show: the words, the order and the small tables, made once from a Report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.columns import places
from stepscope.analysis.causes.ground import LEAST_TERM
from stepscope.analysis.causes.pipeline import stage_of
from stepscope.analysis.causes.stragglers import NEGLIGIBLE, Straggler
from stepscope.analysis.causes.summary import counted_rows, overlap_of, step_key
from stepscope.analysis.records import TERMS, Health
from stepscope.analysis.report.model import Report

PARTS = ("compute", "forward", "backward", "weight_grad", "recompute", "optimizer", "other", *TERMS[1:])
"""The parts of a bar, in order: compute (by phase where phases are recorded), then the other five terms."""

COMPUTE_PARTS = PARTS[: -len(TERMS) + 1]
PHASE_PARTS = COMPUTE_PARTS[1:]

LABELS = {
    "compute": "compute",
    "forward": "forward",
    "backward": "backward",
    "weight_grad": "weight gradient",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "other": "other compute",
    "visible_comm": "visible communication",
    "bubble": "pipeline bubble",
    "imbalance": "imbalance",
    "memcpy": "memory copies",
    "idle": "idle",
}

SHORT_LABELS = {**LABELS, "visible_comm": "visible comm", "bubble": "bubble", "memcpy": "memcpy"}

DEFINITIONS = {
    "compute": "A compute kernel or block of this rank runs.",
    "forward": "Compute of the forward pass.",
    "backward": "Compute of the backward pass.",
    "weight_grad": "Compute of weight gradients, apart from the rest of backward.",
    "recompute": "Forward compute done again in backward.",
    "optimizer": "Compute of the optimizer.",
    "other": "Compute of no recorded phase.",
    "visible_comm": "No compute; a communication of this rank is transferring, or cannot be split into waiting and transferring.",
    "bubble": "No compute; this rank waits for a peer because of the pipeline's schedule.",
    "imbalance": "No compute; this rank waits for a peer that comes late.",
    "memcpy": "None of the above; a memory copy or memset runs.",
    "idle": "Nothing of this rank is in flight.",
    "overlap_efficiency": "Transferring time hidden under compute, as a share of all transferring time.",
    "comm_overlap": "Communication time (waiting included) under compute, as a share of all communication time.",
    "hidden_comm": "Transferring while computing: costs nothing by itself.",
    "hidden_wait": "Waiting while computing: costs nothing by itself.",
    "unsplit": "The part of visible communication that could not be split; no finding rests on it.",
    "of_step": "Share of the step that is bubble.",
    "of_work": "Bubble divided by the compute time of the microbatches.",
    "pattern": "Over the steps: persistent, drifting (rising or falling), one-off, or occasional.",
    "cost": "Exposed time that this rank made the others wait, summed over them, per step.",
}


@dataclass(frozen=True)
class Bar:
    """One bar: a label, its whole length and its parts in ns (keys of PARTS; they sum to the whole)."""

    label: str
    total_ns: float
    parts: dict[str, float]

    @property
    def compute_ns(self) -> float:
        """Compute of all phases."""
        return sum(ns for part, ns in self.parts.items() if part in COMPUTE_PARTS)

    @property
    def terms(self) -> list[float]:
        """The six terms in ns, in the order of TERMS."""
        return [self.compute_ns, *(self.parts.get(term, 0.0) for term in TERMS[1:])]


def health_line(report: Report) -> str:
    """The first line of every report: what touches the figures, or that nothing does."""
    return health_words(report.health)


def health_words(health: Health) -> str:
    """Health in one line."""
    touching = [item for item in health.items if item.touches or item.broken]
    remarks = len(health.items) - len(touching)
    more = f" ({remarks} remark{'s' if remarks != 1 else ''})" if remarks else ""
    if health.status == "ok":
        return f"health ok: nothing touches the figures{more}"
    touched = sorted({name for item in touching for name in item.touches})
    names = f": touches {', '.join(touched)}" if touched else ""
    count = f"{len(touching)} thing{'s' if len(touching) != 1 else ''}"
    return f"health {health.status}, {count}{names}{more}"


def scope(report: Report) -> str:
    """What the figures are of: `mean over 4 ranks and 5 steps (1-5)`."""
    means = report.means
    if not means.values:
        return "no whole step"
    ranks, steps = len(means.ranks), len(means.steps)
    which = "" if means.steps == ("all",) else f" ({spans(means.steps)}{left_out(report)})"
    return f"mean over {ranks} rank{'s' if ranks != 1 else ''} and {steps} step{'s' if steps != 1 else ''}{which}"


def left_out(report: Report) -> str:
    """`; left out: step 0, slow first`: the steps that enter no mean, and why. No step is dropped without a word."""
    rows = report.ledger[~report.ledger["step"].isin(report.means.steps)]
    steps_of: dict[str, list[int | str]] = {}
    for step, part in rows.groupby("step", sort=False):
        flags = {flag for one in part["flags"] for flag in one}
        known = [flag.replace("_", " ") for flag in WHY_LEFT_OUT if flag in flags]
        steps_of.setdefault(" and ".join(known) or "not whole on every rank", []).append(step_key(step))
    told = [f"step{'s' if len(steps) > 1 else ''} {spans(steps)}, {why}" for why, steps in steps_of.items()]
    return f"; left out: {'; '.join(told)}" if told else ""


WHY_LEFT_OUT = ("partial", "empty", "slow_first", "open_end")


def spans(numbers: Sequence[int | str]) -> str:
    """`1-5, 7` for 1 2 3 4 5 7."""
    pieces: list[list[int | str]] = []
    for number in numbers:
        last = pieces[-1][-1] if pieces else None
        if isinstance(number, int) and isinstance(last, int) and number == last + 1:
            pieces[-1] = [pieces[-1][0], number]
        else:
            pieces.append([number])
    return ", ".join("–".join(str(n) for n in piece) for piece in pieces)


def mesh_text(report: Report) -> str:
    """`pp 2 · dp 2`; the number of ranks where no axis is larger than 1."""
    axes = [f"{axis} {size}" for axis, size in report.meta.mesh.items() if size > 1]
    world = f"{report.meta.world_size} rank{'s' if report.meta.world_size != 1 else ''}"
    return " · ".join([world, *axes])


def rank_label(report: Report, rank: int) -> str:
    """`rank 5 · pp1 dp0`: coordinates on the axes larger than 1."""
    coords = report.meta.coords[rank] if rank < len(report.meta.coords) else {}
    places = [f"{axis}{place}" for axis, place in coords.items() if report.meta.mesh.get(axis, 1) > 1]
    return f"rank {rank}" + (f" · {' '.join(places)}" if places else "")


def mean_bar(report: Report) -> Bar | None:
    """The mean step of all ranks; None without a whole step."""
    if not report.means.values:
        return None
    rows = rank_frame(report)
    parts = {name: float(rows[name].mean()) for name in PARTS if rows[name].any()}
    return Bar("mean step", float(report.means.values["step_ns"]), parts)


def rank_frame(report: Report) -> pd.DataFrame:
    """Per counted rank (index): mean over its counted steps of `step` and of every part that a bar shows, ns."""
    rows = counted_rows(report.ledger)
    by_rank = rows.groupby("rank")[[f"{name}_ns" for name in ("step", *TERMS)]].mean()
    frame = by_rank.rename(columns=lambda name: name.removesuffix("_ns"))
    spent = _phase_times(report, frame.index.to_numpy(np.int64))
    steps = rows.groupby("rank")["step"].nunique()
    for name in PHASE_PARTS:
        frame[name] = spent[name] / steps
    other = frame["compute"] - frame[list(PHASE_PARTS[:-1])].sum(axis=1)
    frame["other"] = other.where(other >= 0.5, 0.0)  # less than half a nanosecond is rounding
    if frame[list(PHASE_PARTS[:-1])].to_numpy().any():
        frame["compute"] = 0.0  # told apart by phase
    else:
        frame["other"] = 0.0
    return frame


def _phase_times(report: Report, ranks: np.ndarray) -> dict[str, np.ndarray]:
    """Of each of PHASE_PARTS, ns that each of these (sorted) ranks computed in it in all counted steps."""
    classes = report.classes
    code, names = pd.factorize(classes["class"])
    at = places(classes["rank"].to_numpy(np.int64), ranks)
    counted = (at >= 0) & classes["step"].isin(report.means.steps).to_numpy()
    found = {}
    for part in PHASE_PARTS:
        found[part] = np.zeros(len(ranks), np.int64)
        if f"compute {part}" in names:
            of = counted & (code == names.get_loc(f"compute {part}"))
            np.add.at(found[part], at[of], classes["ns"].to_numpy(np.int64)[of])
    return found


MOST_BARS = 64


def rank_bars(report: Report) -> list[Bar]:
    """One bar a rank; more than MOST_BARS ranks: one a pipeline stage, else one a block of ranks, means over each."""
    if not report.means.values:
        return []
    frame = rank_frame(report)
    if len(frame) <= MOST_BARS:
        return [_bar(rank_label(report, int(str(rank))), row) for rank, row in frame.iterrows()]
    ranks = [int(rank) for rank in frame.index]
    stages = [stage_of(report.meta, rank) for rank in ranks]
    if len(set(stages)) > 1:
        return [_bar(f"stage {stage} (mean)", part.mean()) for stage, part in frame.groupby(stages)]
    size = -(-len(ranks) // MOST_BARS)
    blocks = frame.groupby([place // size for place in range(len(ranks))])
    return [_bar(f"ranks {part.index.min()}–{part.index.max()} (mean)", part.mean()) for _, part in blocks]


def _bar(label: str, row: pd.Series) -> Bar:
    return Bar(label, float(row["step"]), {name: float(row[name]) for name in PARTS if row[name] > 0})


def headline(report: Report) -> list[tuple[str, str, str]]:
    """(label, value, what it means) of the figures beside the step time."""
    efficiency, comm = overlap_of(report.ledger) if len(report.ledger) else (None, None)
    rows = [
        ("overlap efficiency", units.share(efficiency), DEFINITIONS["overlap_efficiency"]),
        ("comm overlap", units.share(comm), DEFINITIONS["comm_overlap"]),
        ("tokens/s", units.count(report.throughput.tokens_per_s), "Tokens of the global batch per second."),
    ]
    each = units.count(report.throughput.tokens_per_s_per_device)
    rows.append(("per device", each, "Tokens per second and device."))
    rows.append(
        ("MFU", units.share(report.throughput.mfu), "Share of the devices' peak arithmetic that training used.")
    )
    return rows


def pipeline_rows(report: Report) -> list[tuple[str, str, str]]:
    """(what, of the step, of the work) for measured, theory and plan."""
    p = report.pipeline
    if p.stages < 2:
        return []
    return [
        ("measured", units.share(p.bubble_of_step), units.share(p.bubble_of_work)),
        ("theory", units.share(p.theory_of_step), units.share(p.theory_of_work)),
        ("planned", units.share(p.planned_of_step), units.DASH),
    ]


def notable(report: Report) -> list[Straggler]:
    """Stragglers that cost enough to look at (stragglers.NEGLIGIBLE of the step), dearest first."""
    least = NEGLIGIBLE * float(report.means.step_ns or 0)
    return [one for one in report.stragglers if one.cost_ns_per_step > least]


def group_lines(report: Report) -> list[str]:
    """`stage 1 (ranks 2–3): 6 ms a step, slower compute, persistent; rank 2 alone 4 ms`, those that cost enough."""
    least = NEGLIGIBLE * float(report.means.step_ns or 0)
    lines = []
    for one in report.straggler_groups:
        if one.cost_ns_per_step <= least:
            continue
        words = [units.duration(one.cost_ns_per_step) + " a step", *filter(None, (one.cause, one.pattern))]
        alone = f"; rank {one.dearest_rank} alone {units.duration(one.dearest_cost_ns_per_step)}"
        of = f"{one.by} {one.name} (rank{'s' if len(one.ranks) > 1 else ''} {spans(one.ranks)})"
        lines.append(f"{of}: {', '.join(words)}{alone if len(one.ranks) > 1 else ''}")
    return lines


def overlap_rows(report: Report) -> list[tuple[str, ...]]:
    """(axis, collective, stream, overlap efficiency, comm overlap): means over the counted ranks and steps, as shown."""
    rows = report.overlap
    rows = rows[rows["rank"].isin(report.means.ranks) & rows["step"].isin(report.means.steps)]
    if rows.empty:
        return []
    shares = ["overlap_efficiency", "comm_overlap"]
    means = rows.groupby(["axis", "collective", "stream"], sort=True)[shares].mean().reset_index()
    words = [[str(word) or units.DASH for word in means[name]] for name in ("axis", "collective", "stream")]
    numbers = [[units.share(value) for value in means[name].tolist()] for name in shares]
    return list(zip(*words, *numbers, strict=True))


def findings_note(report: Report) -> str:
    """What no finding may rest on, where that is much: communication that could not be split."""
    values = report.means.values
    if not values or values["unsplit_ns"] < LEAST_TERM * float(values["step_ns"]):
        return ""
    share = units.share(float(values["unsplit_ns"] / values["step_ns"]))
    return f"No finding rests on the {share} of the step that is communication which could not be split (see health)."


def evidence(report: Report, index: int) -> str:
    """Where a finding shows: rank, step, operation, interval."""
    finding = report.findings[index]
    where = []
    if finding.rank is not None:
        where.append(f"rank {finding.rank}")
    if finding.step is not None:
        where.append(f"step {finding.step}")
    if finding.op_id is not None:
        where.append(f"operation {finding.op_id}")
    if finding.start_ns is not None and finding.end_ns is not None:
        where.append(f"for {units.duration(finding.end_ns - finding.start_ns)}")
    return ", ".join(where)
