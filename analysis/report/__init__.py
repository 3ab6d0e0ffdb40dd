"""The report of a run: `analyze(run) -> Report`, its public JSON, and how terminal and HTML show it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.actions import actions
from stepscope.analysis.causes.alpha_beta import alpha_beta
from stepscope.analysis.causes.audit import remarks
from stepscope.analysis.causes.classes import ahead_at, class_means, operation_classes, picture
from stepscope.analysis.causes.columns import coded, firsts
from stepscope.analysis.causes.evidence import blame_of, last_arrivals, stages_of, step_starts, steps_at
from stepscope.analysis.causes.experts import experts
from stepscope.analysis.causes.findings import findings
from stepscope.analysis.causes.ground import Ground, Stretch
from stepscope.analysis.causes.idle import idle
from stepscope.analysis.causes.links import links
from stepscope.analysis.causes.memory import memory
from stepscope.analysis.causes.patterns import straggler_groups
from stepscope.analysis.causes.pipeline import pipeline
from stepscope.analysis.causes.ratios import contention, ratios
from stepscope.analysis.causes.reasons import Reasons
from stepscope.analysis.causes.stages import stages as stage_balance
from stepscope.analysis.causes.stragglers import stragglers
from stepscope.analysis.causes.summary import Means, means
from stepscope.analysis.causes.throughput import throughput
from stepscope.analysis.causes.volumes import volumes
from stepscope.analysis.ledger.decompose import Decomposition, decompose, step_column
from stepscope.analysis.ledger.overlap import overlap
from stepscope.analysis.ledger.steps import tell
from stepscope.analysis.report.model import COLLECTIVE_FIELDS, STEP_FIELDS, Report
from stepscope.analysis.report.written import Column, Lists, Numbers, dumps
from stepscope.analysis.run import Run
from stepscope.tracer.schema import KINDS, RunMeta, code_of

__all__ = ["Report", "analyze", "dumps"]


@contextmanager
def _no_collector() -> Iterator[None]:
    """No search for circles of objects meanwhile: frames come by the hundred and hang in none, and each search looks at all
    that was ever imported, a tenth of what the analysis costs."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_collector()
def analyze(
    run: Run,
    method: str = "direct",
    peak_flops: float | None = None,
    decomposition: Decomposition | None = None,
) -> Report:
    """Everything that stepscope says about one run.

    `method`: of telling bubble from imbalance (decompose). `peak_flops`: FLOP/s of one device, for MFU. Health items
    that come up on the way are added to `run.health`, which the report carries. `decomposition`: of this run, where the
    caller has it already.
    """
    if decomposition is None:
        decomposition = decompose(run, method)
    ledger, mean = decomposition.ledger, means(decomposition.ledger)
    rows = actions(run, decomposition.windows)
    blame, waits = blame_of(run, decomposition, rows)
    stages, starts = stages_of(run, decomposition), step_starts(decomposition)
    reasons = Reasons(run, decomposition)
    parts = _stepped(decomposition)
    late = stragglers(ledger, starts, blame, last_arrivals(parts, mean.steps), stages.__getitem__, reasons)
    flow = pipeline(run.meta, ledger, rows)
    classes = operation_classes(run, decomposition)
    model, load = (
        alpha_beta(parts, mean.steps),
        experts(run, decomposition.windows, parts, mean.steps, stages.__getitem__),
    )
    empty, between = idle(run, decomposition), links(decomposition, parts, mean.steps, stages.__getitem__)
    taken = dict(zip(load.ranks["rank"], load.ranks["tokens_per_step"], strict=True))
    audited = volumes(run.meta, parts, mean.ranks, mean.steps, taken)
    kept = memory(run, decomposition.windows)
    tell(run.health, remarks(run.meta, audited, kept))
    ground = Ground(
        meta=run.meta,
        health=run.health,
        ledger=ledger,
        means=mean,
        classes=classes,
        blame=blame,
        waits=waits,
        stragglers=late,
        pipeline=flow,
        parts=parts,
        stage_of=stages.__getitem__,
        starts=starts,
        fits=model.fits,
        experts=load,
        idle=empty,
        links=between,
        volumes=audited,
        longest=_longest(decomposition, mean),
    )
    typical = _typical_step(mean)
    return Report(
        meta=run.meta,
        health=run.health,
        ranks=tuple(run.ranks),
        ledger=ledger,
        means=mean,
        throughput=throughput(run.meta, mean.step_ns, peak_flops),
        pipeline=flow,
        overlap=overlap(run, decomposition),
        collectives_of=partial(collectives, decomposition),
        stragglers=late,
        straggler_groups=straggler_groups(
            late, blame, mean.ranks, mean.steps, float(mean.step_ns or 0), places(run.meta, stages)
        ),
        findings=findings(ground),
        alpha_beta=model,
        volumes=audited,
        memory=kept,
        idle=empty,
        ratios=ratios(decomposition, mean),
        contention=contention(run, decomposition, mean),
        experts=load,
        class_means=class_means(classes, mean),
        matching=_missing(decomposition.matches.rates, "estimated_wait_ns"),
        steps=_beside(decomposition),
        clocks=decomposition.matches.clocks,
        links=between,
        stages=stage_balance(decomposition, mean, rows, stages.__getitem__),
        classes=classes,
        picture=picture(run, decomposition, typical) if typical is not None else Report.no_picture(),
        picture_step=typical,
        names=_device_names(run),
        path=run.path,
    )


def collectives(decomposition: Decomposition) -> dict[str, Column]:
    """One row a matched communication, in order of its first arrival: the public JSON's fields (COLLECTIVE_FIELDS).

    Lists are by rank, ascending. A send and its receive are one row, `send_receive`. Missing numbers are None.
    """
    parts = decomposition.matches.parts  # sorted by match, then rank
    if parts.empty:
        return {name: np.empty(0, object) for name in COLLECTIVE_FIELDS}
    first = firsts(parts["match_id"].to_numpy())
    columns: dict[str, Column] = {name: parts[name].array.take(first) for name in ("group", "axis", "strategy")}
    words, kind = coded(parts["collective"])
    ends = [kind == words.index(one) if one in words else np.zeros(len(kind), bool) for one in ("send", "receive")]
    both = np.logical_and(*(np.logical_or.reduceat(end, first) for end in ends))
    columns["collective"] = _taken([*words, "send_receive"], np.where(both, len(words), kind[first]))
    words, method = coded(parts["method"].iloc[first])
    unmatched = parts["unmatched"].to_numpy(bool)[first]
    columns["match"] = _taken(
        [*(word or "single" for word in words), "unmatched"], np.where(unmatched, len(words), method)
    )
    columns["seq"] = Numbers(parts["seq"].to_numpy()[first])
    columns["bytes"] = Numbers(np.maximum.reduceat(parts["bytes"].to_numpy(), first))
    longest = _longest_waits(parts["wait_ns"].to_numpy(), first)
    columns["last_rank"] = Numbers(parts["last_rank"].to_numpy()[longest])
    columns["partial"] = parts["partial"].to_numpy()[first]
    for name in ("ranks", "arrival_ns", "end_ns", "wait_ns", "transfer_ns"):
        values = parts["rank" if name == "ranks" else name].to_numpy()
        columns[name] = Lists(values, first, missing=name in ("wait_ns", "transfer_ns"))
    arrival = np.minimum.reduceat(parts["arrival_ns"].to_numpy(), first)
    order = np.lexsort((coded(parts["group"])[1][first], arrival))
    return {name: columns[name][order] for name in COLLECTIVE_FIELDS}


def _taken(words: Sequence[str], code: np.ndarray) -> pd.api.extensions.ExtensionArray:
    """The word of each code."""
    return pd.Series(words).array.take(code)


def _longest_waits(wait: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Of each communication the first part that waited longest; `first`: where each begins."""
    longest = np.repeat(np.maximum.reduceat(wait, first), np.diff([*first.tolist(), len(wait)]))
    return np.minimum.reduceat(np.where(wait == longest, np.arange(len(wait)), len(wait)), first)


def places(meta: RunMeta, stages: Mapping[int, int]) -> dict[str, dict[int, str]]:
    """Where ranks are: `host` and `stage`, rank -> name, of the ranks for which it is known."""
    hosts = {rank: host for rank, host in enumerate(meta.hosts) if host}
    return {"host": hosts, "stage": {rank: str(stage) for rank, stage in stages.items() if stage >= 0}}


def _stepped(decomposition: Decomposition) -> pd.DataFrame:
    """The matched parts, each with the step in which it arrived."""
    parts = decomposition.matches.parts.copy()
    found = steps_at(decomposition, parts["rank"].to_numpy(), parts["arrival_ns"].to_numpy())
    parts["step"] = pd.Series(found, index=parts.index, dtype="object")
    return parts


def _typical_step(mean: Means) -> int | str | None:
    """The counted step whose time is closest to the median."""
    if not mean.steps:
        return None
    lengths = np.array(mean.step_lengths)
    return mean.steps[int(np.abs(lengths - np.median(lengths)).argmin())]


def _longest(decomposition: Decomposition, mean: Means) -> dict[str, Stretch]:
    """Term -> rank, step, start and end (common clock) of its longest stretch inside a counted step."""
    best: dict[str, tuple[int, Stretch]] = {}
    counted = set(mean.steps)
    for rank, time in decomposition.time.items():
        windows = decomposition.windows[rank]
        inside = np.array([step in counted for step in windows.steps], bool) & (windows.step_ns > 0)
        steps = step_column(windows.steps)[inside]
        low, high = windows.start_ns[inside], windows.end_ns[inside]
        for term in ("bubble", "imbalance", "memcpy", "idle"):
            stretch, at = intervals.pairs(time.terms[term], (low, high))
            if len(stretch) == 0:
                continue
            start = np.maximum(time.terms[term][0][stretch], low[at])
            end = np.minimum(time.terms[term][1][stretch], high[at])
            place = int((end - start).argmax())
            ahead, first, last = ahead_at(decomposition, rank, int(start[place])), int(start[place]), int(end[place])
            if term not in best or last - first > best[term][0]:
                best[term] = (last - first, Stretch(rank, steps[at[place]], first - ahead, last - ahead))
    return {term: stretch for term, (_, stretch) in best.items()}


def _beside(decomposition: Decomposition) -> pd.DataFrame:
    """Decomposition.steps with the fields of the public JSON; empty with those fields."""
    frame = decomposition.steps
    return _missing(frame[list(STEP_FIELDS)], "cpu_step_ns") if len(frame) else pd.DataFrame(columns=list(STEP_FIELDS))


def _missing(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The frame with NA for the -1 that stands for missing in one column."""
    whole = frame[name].astype("Int64")
    return frame.assign(**{name: whole.mask(whole < 0)})


def _device_names(run: Run) -> frozenset[str]:
    """Names of all computations, communications and copies of the run."""
    wanted = [code_of(KINDS, kind) for kind in ("compute", "comm", "memcpy")]
    names: set[str] = set()
    for rank in run.ranks:
        columns = run.columns(rank, "kind", "name_id")
        strings = run.strings(rank)
        used = np.zeros(len(strings) + 1, bool)
        used[columns["name_id"][np.isin(columns["kind"], wanted)]] = True  # -1, no name, is the last
        names.update(strings[code] for code in np.flatnonzero(used[:-1]).tolist())
    return frozenset(names)
