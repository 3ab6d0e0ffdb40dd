"""The inferred method: pipeline waiting where no communication was recorded, only stage, microbatch and phase.

In the gap before an operation, what passes until the last of its dependencies ends is waiting of the pipeline axis, the
rest of the gap is idle; the gap after a rank's last operation, up to the end of the common window, is waiting too. The
common window of a step runs from the first start to the last end over the pipeline's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.blockers import Exposed
from stepscope.analysis.ledger.classes import Charged
from stepscope.analysis.ledger.keys import code_columns
from stepscope.analysis.ledger.rows import COMPUTE
from stepscope.analysis.ledger.steps import Windows, mark_steps, tell
from stepscope.analysis.ledger.summary import RankSummary
from stepscope.analysis.ledger.times import RankTime
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Columns, Run
from stepscope.tracer.schema import PHASES

FORWARD, BACKWARD, WEIGHT_GRAD, RECOMPUTE = (
    PHASES.index(name) for name in ("forward", "backward", "weight_grad", "recompute")
)


@dataclass
class _Operations:
    """Compute rows of one rank, by start; `step` is a position in its windows, -1 outside; virtual stage -1 for none."""

    step: np.ndarray
    start: np.ndarray
    end: np.ndarray
    phase: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray


def can_infer(run: Run, found: Sequence[RankSummary]) -> bool:
    """No rank recorded a communication, the rows name at least two pipeline stages, and say what depends on what.

    Where only the last is missing, health says what that means.
    """
    silent = not any(len(summary.comm["row"]) for summary in found)
    if not silent or len({stage for summary in found for stage in summary.stages}) < 2:
        return False
    pipelines = _pipelines(run, found)
    if pipelines and all(any(_names_operations(run, summary) for summary in members) for members in pipelines):
        return True
    lacking = "which microbatch an operation is of" if pipelines else "which ranks of one stage are of one pipeline"
    text = f"nothing was recorded of communication, nor {lacking}: waiting for the pipeline counts as idle"
    tell(run.health, [HealthItem("no_waits", text, touches=("bubble_ns", "idle_ns", "pipeline"))])
    return False


def inferred_times(run: Run, found: Sequence[RankSummary]) -> list[RankTime]:
    """Classify every instant of every rank; the summaries' windows become the common ones of their pipelines.

    StepscopeError where the rows do not say enough.
    """
    times: dict[int, RankTime] = {}
    pipelines = _pipelines(run, found)
    if pipelines is None:
        raise StepscopeError(
            f"run {run.meta.name}: several ranks name the same stage and no mesh tells their pipelines apart: "
            "method inferred needs the mesh in run.json"
        )
    for members in pipelines:
        operations = [_read(run, summary) for summary in members]
        if not any((one.stage >= 0).any() for one in operations):
            raise StepscopeError(
                f"run {run.meta.name}: method inferred needs compute rows with stage, microbatch and phase: use direct"
            )
        waits = _waits_of_pipeline(members, operations)
        for summary, waiting in zip(members, waits, strict=True):
            times[summary.rank] = _time(summary, waiting)
    return [times[summary.rank] for summary in found]


def _pipelines(run: Run, found: Sequence[RankSummary]) -> list[list[RankSummary]] | None:
    """Ranks whose mesh coordinates differ along `pp` only; without a mesh all ranks, if each is a stage of its own."""
    coords = run.meta.coords
    if coords and max(summary.rank for summary in found) < len(coords):
        groups: dict[tuple[tuple[str, int], ...], list[RankSummary]] = {}
        for summary in found:
            place = tuple(sorted((axis, i) for axis, i in coords[summary.rank].items() if axis != "pp"))
            groups.setdefault(place, []).append(summary)
        return list(groups.values())
    stages = [stage for summary in found for stage in summary.stages]
    return [list(found)] if len(stages) == len(set(stages)) else None


def _names_operations(run: Run, summary: RankSummary) -> bool:
    """Does any compute row of the rank say its phase, stage and microbatch?"""
    events = run.columns(summary.rank, "dur_ns", "kind", "phase", "stage", "microbatch")
    rows = (events["kind"] == COMPUTE) & (events["dur_ns"] > 0)
    return bool((rows & _known(events) & (events["stage"] >= 0)).any())


def _known(events: Columns) -> np.ndarray:
    """Rows that say phase and microbatch."""
    known: np.ndarray = np.isin(events["phase"], (FORWARD, BACKWARD, WEIGHT_GRAD, RECOMPUTE))
    return known & (events["microbatch"] >= 0)


def _read(run: Run, summary: RankSummary) -> _Operations:
    names = ("start_ns", "dur_ns", "kind", "phase", "stage", "chunk", "microbatch")
    events = run.columns(summary.rank, *names)
    rows = np.flatnonzero((events["kind"] == COMPUTE) & (events["dur_ns"] > 0))
    rows = rows[np.argsort(events["start_ns"][rows], kind="stable")]
    start = events["start_ns"][rows]
    windows = summary.windows
    step = np.searchsorted(windows.start_ns, start, "right") - 1
    step = np.where((step >= 0) & (start < windows.end_ns[np.maximum(step, 0)]), step, -1)
    known = _known(events)[rows]
    return _Operations(
        step,
        start,
        start + events["dur_ns"][rows],
        events["phase"][rows].astype(np.int64),
        np.where(known, events["stage"][rows], -1).astype(np.int64),
        np.maximum(events["chunk"][rows], 0).astype(np.int64),
        events["microbatch"][rows].astype(np.int64),
    )


def _waits_of_pipeline(members: Sequence[RankSummary], operations: Sequence[_Operations]) -> list[Intervals]:
    """Waiting of each member; sets their windows to the common ones."""
    labels = list(dict.fromkeys(step for summary in members for step in summary.windows.steps))
    label = [
        np.array([labels.index(step) for step in summary.windows.steps] + [-1], np.int64)[one.step]
        for summary, one in zip(members, operations, strict=True)
    ]
    every = {name: np.concatenate([getattr(one, name) for one in operations]) for name in _Operations.__annotations__}
    step = np.concatenate(label)
    inside = step >= 0
    low = np.full(len(labels), np.iinfo(np.int64).max)
    high = np.full(len(labels), np.iinfo(np.int64).min)
    np.minimum.at(low, step[inside], every["start"][inside])
    np.maximum.at(high, step[inside], every["end"][inside])
    needed = _last_dependency(every, step)
    edges = np.cumsum([0, *(len(one.start) for one in operations)])
    waits = []
    for i, (summary, one) in enumerate(zip(members, operations, strict=True)):
        mine = [labels.index(name) for name in summary.windows.steps]
        summary.windows = _common(summary.windows, low[mine], high[mine], one)
        waits.append(_gaps(summary.windows, one, needed[edges[i] : edges[i + 1]]))
    return waits


def _last_dependency(every: dict[str, np.ndarray], step: np.ndarray) -> np.ndarray:
    """Last end of the operation that each row's operation depends on; the lowest integer without one.

    With v = chunk * stages + stage: forward v on forward v - 1; backward v on backward v + 1, the last one on its own
    forward; a weight gradient on its own backward; a recomputation on what its backward depends on.
    """
    never = np.iinfo(np.int64).min
    stages = int(every["stage"].max()) + 1
    virtual = np.where(every["stage"] >= 0, every["chunk"] * stages + every["stage"], -1)
    last = int(virtual.max())
    phase = every["phase"]
    backwards = np.isin(phase, (BACKWARD, RECOMPUTE))
    on_phase = np.select(
        [phase == FORWARD, backwards & (virtual == last), backwards, phase == WEIGHT_GRAD],
        [FORWARD, FORWARD, BACKWARD, BACKWARD],
        -1,
    )
    on_virtual = np.select([phase == FORWARD, backwards & (virtual < last)], [virtual - 1, virtual + 1], virtual)
    usable = (virtual >= 0) & (step >= 0)
    on_phase = np.where(usable & (on_virtual >= 0), on_phase, -1)
    both = [
        np.concatenate(pair)
        for pair in (
            (step, step),
            (phase, on_phase),
            (virtual, on_virtual),
            (every["microbatch"], every["microbatch"]),
        )
    ]
    code = np.unique(code_columns(both), return_inverse=True)[1]
    own, wanted = code[: len(step)], code[len(step) :]
    end = np.full(int(code.max(initial=0)) + 1, never)
    np.maximum.at(end, own[usable], every["end"][usable])
    return np.where(on_phase >= 0, end[wanted], never)


def _common(windows: Windows, low: np.ndarray, high: np.ndarray, one: _Operations) -> Windows:
    """The windows of one rank stretched or cut to the common ones, their flags told anew."""
    full = high > low
    start = np.where(full, low, windows.start_ns)
    end = np.where(full, high, windows.start_ns)
    busy = np.bincount(one.step[one.step >= 0], minlength=len(windows.steps)) > 0
    kept = [set(flags) - {"slow_first", "empty", "open_end"} for flags in windows.flags]
    flags = mark_steps(end - start, [one if busy[i] else one | {"empty"} for i, one in enumerate(kept)])
    return Windows(
        windows.rank, windows.steps, start, end, flags, windows.cpu_step_ns, windows.launched, windows.health
    )


def _gaps(windows: Windows, one: _Operations, needed: np.ndarray) -> Intervals:
    """Waiting of one rank: before each operation until its dependency ends, and after its last."""
    starts, ends = [], []
    for i in range(len(windows.steps)):  # steps are few
        rows = np.flatnonzero(one.step == i)
        low, high = int(windows.start_ns[i]), int(windows.end_ns[i])
        reach = np.maximum.accumulate(np.concatenate(([low], one.end[rows])))
        starts += [reach[:-1], reach[-1:]]
        ends += [np.minimum(one.start[rows], needed[rows]), np.array([high])]
    return intervals.union(np.concatenate(starts), np.concatenate(ends)) if starts else intervals.EMPTY


def _time(summary: RankSummary, waiting: Intervals) -> RankTime:
    none = Exposed.none()
    waiting = intervals.subtract(waiting, summary.compute)
    busy = intervals.join(summary.compute, waiting)
    terms = {
        "compute": summary.compute,
        "visible_comm": intervals.EMPTY,
        "bubble": waiting,
        "imbalance": intervals.EMPTY,
        "memcpy": intervals.subtract(summary.memcpy, busy),
        "idle": summary.idle(busy),
    }
    charged = Charged(none.start, none.end, none.part, none.bubble, none.nonblocking)
    return RankTime(summary, terms, intervals.EMPTY, intervals.EMPTY, intervals.EMPTY, charged, intervals.EMPTY)
