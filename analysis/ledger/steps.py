"""Step windows: which part of a rank's time each step is (docs/definitions.md, Steps).

Two ways, chosen by what the trace records. With launches, a step begins on the device where the first compute kernel
that it launched starts on the main stream. Without, a step is what lies between the starts of two annotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.ledger.rows import COMM, COMPUTE, RankRows, rank_rows
from stepscope.analysis.records import TERMS, Health, HealthItem
from stepscope.analysis.run import Run

OUT_OF_MEANS = ("partial", "empty", "slow_first")
"""Rows with one of these flags enter no mean; nor does an `open_end` row that is shorter for it (`whole_steps`)."""

NEVER = np.iinfo(np.int64).max


@dataclass
class Windows:
    """The steps of one rank, in order of time; they tile it. Times in the rank's own clock."""

    rank: int
    steps: list[int | str]
    start_ns: np.ndarray
    end_ns: np.ndarray
    flags: list[tuple[str, ...]]
    cpu_step_ns: np.ndarray  # duration of the step's annotation, -1 without one
    launched: np.ndarray  # of each device row: position of the step that launched it, -1 unknown
    health: list[HealthItem] = field(default_factory=list)

    @property
    def step_ns(self) -> np.ndarray:
        """Length of each window."""
        return self.end_ns - self.start_ns

    @property
    def intervals(self) -> intervals.Intervals:
        """The windows that are not empty, as intervals."""
        full = self.step_ns > 0
        return self.start_ns[full], self.end_ns[full]


def windows(run: Run, rank: int) -> Windows:
    """The step windows of one rank; what is worth saying goes to `run.health`."""
    found = windows_of(rank_rows(run, rank))
    tell(run.health, found.health)
    return found


def windows_of(rows: RankRows) -> Windows:
    """The step windows of one rank's rows."""
    if len(rows.steps["number"]) == 0:
        found = _whole_trace(rows)
    else:
        step = _launching_step(rows)
        found = _by_launch(rows, step) if (step >= 0).any() else _by_annotation(rows)
    _note_outside(found, rows)
    cut = set(rows.steps["number"][rows.steps["partial"]].tolist()) | ({"all"} if rows.partial else set())
    partial = [{"partial"} if step in cut else set() for step in found.steps]
    found.flags = mark_steps(found.step_ns, [set(flags) | one for flags, one in zip(found.flags, partial, strict=True)])
    return found


def mark_steps(lengths: np.ndarray, flags: Sequence[set[str]]) -> list[tuple[str, ...]]:
    """Flags of a rank's steps, with `slow_first` where the first is longer than twice the median of the other whole ones."""
    others = [int(lengths[i]) for i in range(1, len(flags)) if not flags[i] & {"partial", "empty"}]
    if others and not flags[0] & {"partial", "empty"} and int(lengths[0]) > 2 * median(others):
        flags[0].add("slow_first")
    return [tuple(sorted(one)) for one in flags]


def whole_steps(step_ns: Sequence[int], flags: Sequence[tuple[str, ...]]) -> np.ndarray:
    """Which of one rank's rows enter means (bool): not partial, empty or a slow first; nor an open end shorter than usual.

    The last window of a device trace closes at its last kernel (`open_end`): when that makes it shorter than the median
    of the rank's other whole steps it would pull a mean down. A lone step stays.
    """
    out = frozenset(OUT_OF_MEANS)
    usable = np.array([out.isdisjoint(one) for one in flags], bool)
    closed = [int(step_ns[i]) for i in np.flatnonzero(usable).tolist() if "open_end" not in flags[i]]
    if closed:
        usual = median(closed)
        for i in np.flatnonzero(usable).tolist():
            usable[i] = "open_end" not in flags[i] or int(step_ns[i]) >= usual
    return usable


def uncommon_steps(found: Sequence[Windows]) -> list[HealthItem]:
    """What to say of ranks that have whole steps, but none in common: means are then over different steps of each."""
    whole = []
    for one in found:
        counts = whole_steps(one.step_ns.tolist(), one.flags)
        whole.append({step for step, counted in zip(one.steps, counts.tolist(), strict=True) if counted})
    whole = [steps for steps in whole if steps]
    if len(whole) < 2 or set.intersection(*whole):
        return []
    text = f"no step is whole on all of the {len(whole)} ranks: means are over different steps of each"
    touches = ("summary", "stragglers", *(f"{term}_ns" for term in TERMS))
    return [HealthItem("uncommon_steps", text, touches=touches)]


def tell(health: Health, items: Sequence[HealthItem]) -> None:
    """Add health items that have not been said yet."""
    health.items.extend(item for item in dict.fromkeys(items) if item not in health.items)


def _note(found: Windows, code: str, text: str, touches: tuple[str, ...] = ()) -> None:
    found.health.append(HealthItem(code, text, rank=found.rank, touches=touches))


# -- without launches --------------------------------------------------------------------------------------------------


def _whole_trace(rows: RankRows) -> Windows:
    """No annotation: one step called `all`, from the first device row to the end of the last."""
    none = np.zeros(len(rows.start), np.int64)
    if len(rows.start) == 0:
        return Windows(rows.rank, [], none, none, [], none, none)
    start, end = np.array([rows.start.min()]), np.array([rows.end.max()])
    return Windows(rows.rank, ["all"], start, end, [()], np.array([-1]), none)


def _by_annotation(rows: RankRows) -> Windows:
    """From the start of each annotation to the start of the next; the last ends with its own."""
    start, own_end = rows.steps["start"], rows.steps["end"]
    end = np.append(start[1:], max(int(own_end[-1]), int(start[-1])))
    launched = np.searchsorted(start, rows.start, "right") - 1
    launched[rows.start >= end[-1]] = -1
    begun = np.bincount(launched[launched >= 0], minlength=len(start))
    empty = [not begun[i] and not ((rows.start < end[i]) & (rows.end > start[i])).any() for i in range(len(start))]
    found = Windows(
        rows.rank,
        rows.steps["number"].tolist(),
        start,
        end,
        [("empty",) if one else () for one in empty],
        own_end - start,
        launched,
    )
    _note_empty(found)
    return found


# -- with launches -----------------------------------------------------------------------------------------------------


def _launching_step(rows: RankRows) -> np.ndarray:
    """Position (int32) of the annotation that was open when each device row's launching call began, -1 for none."""
    start, end = rows.steps["start"], rows.steps["end"]
    calls, last = rows.calls_of(), len(start) - 1
    steps = np.full(len(rows.start), -1, np.int32)
    for part in rows.slices():
        call = calls(rows.launch[part])
        step = np.searchsorted(start, call, "right") - 1
        # -1 is no call; stamps before 0 are as good as others
        steps[part] = np.where((call != -1) & ((call < end[-1]) | (step < last)), step, -1)
    return steps


@dataclass
class _Span:
    """Steps that share one window: its name is the last of them that has a main-stream kernel."""

    name: int
    members: list[int]
    start: int


def _by_launch(rows: RankRows, step: np.ndarray) -> Windows:
    count = len(rows.steps["number"])
    used = np.bincount(step[step >= 0], minlength=count)
    spans = _spans(_main_stream_starts(rows, step, count), used)
    member = np.isin(step, spans[0].members)
    kernels = member & ((rows.kind == COMPUTE) | (rows.kind == COMM))
    spans[0].start = int(rows.start[kernels if kernels.any() else member].min())
    last_end = int(rows.end[np.isin(step, spans[-1].members)].max())
    starts = np.maximum.accumulate([span.start for span in spans])
    ends = np.append(starts[1:], max(last_end, int(starts[-1])))
    found, place = _assemble(rows, spans, starts, ends, used)
    found.launched = np.append(place, -1).astype(np.int32)[step]  # the last entry is that of -1
    _note_launches(found, rows)
    return found


def _main_stream_starts(rows: RankRows, step: np.ndarray, count: int) -> np.ndarray:
    """Earliest start of a compute kernel of each step on the stream with the most compute time, NEVER for none."""
    first = np.full(count, NEVER)
    busy = np.zeros(int(rows.lane.max()) + 1, np.int64)
    for part in rows.slices():
        compute = rows.kind[part] == COMPUTE
        np.add.at(busy, rows.lane[part][compute], (rows.end[part] - rows.start[part])[compute])
    main_lane = int(busy.argmax())
    for part in rows.slices():
        main = (rows.kind[part] == COMPUTE) & (rows.lane[part] == main_lane) & (step[part] >= 0)
        np.minimum.at(first, step[part][main], rows.start[part][main])
    return first


def _spans(opening: np.ndarray, used: np.ndarray) -> list[_Span]:
    """One span a step that has a main-stream kernel; steps without one join the next (the last ones the one before)."""
    spans: list[_Span] = []
    waiting: list[int] = []
    for k in np.flatnonzero(used).tolist():
        waiting.append(k)
        if opening[k] < NEVER:
            spans.append(_Span(k, waiting, int(opening[k])))
            waiting = []
    if waiting and spans:
        spans[-1].members += waiting
    elif waiting:
        spans.append(_Span(waiting[-1], waiting, 0))
    return spans


def _assemble(
    rows: RankRows, spans: list[_Span], starts: np.ndarray, ends: np.ndarray, used: np.ndarray
) -> tuple[Windows, np.ndarray]:
    """The windows, with one of length zero for each step without device rows; and the position of each annotation's step."""
    number = rows.steps["number"].tolist()
    entries = [(span.name, int(starts[i]), int(ends[i]), span) for i, span in enumerate(spans)]
    for k in np.flatnonzero(used == 0).tolist():
        later = [start for name, start, _, _ in entries[: len(spans)] if name > k]
        at = later[0] if later else int(ends[-1])
        entries.append((k, at, at, _Span(k, [k], at)))
    entries.sort(key=lambda entry: entry[0])
    flags = [
        {"empty"}
        if used[name] == 0
        else ({"joined"} if len(span.members) > 1 else set()) | ({"open_end"} if span is spans[-1] else set())
        for name, _, _, span in entries
    ]
    cpu = rows.steps["end"] - rows.steps["start"]
    found = Windows(
        rows.rank,
        [number[name] for name, *_ in entries],
        np.array([start for _, start, _, _ in entries], np.int64),
        np.array([end for _, _, end, _ in entries], np.int64),
        [tuple(one) for one in flags],
        np.array([int(cpu[span.members].sum()) for *_, span in entries], np.int64),
        np.empty(0, np.int64),
    )
    place = np.full(len(number), -1)
    for position, (*_, span) in enumerate(entries):
        place[span.members] = position
        if len(span.members) > 1:
            text = ", ".join(str(number[member]) for member in span.members)
            _note(
                found,
                "joined_steps",
                f"rank {rows.rank}: steps {text} are one row: not each has a kernel on the main stream",
            )
    _note_empty(found)
    return found, place


# -- what health says --------------------------------------------------------------------------------------------------


def _note_empty(found: Windows) -> None:
    empty = sum("empty" in flags for flags in found.flags)
    if empty:
        whole = len(found.steps)
        text = f"rank {found.rank}: device data in {whole - empty} of {whole} steps; averages are over those"
        _note(found, "empty_steps", text, touches=("summary",))


def _note_launches(found: Windows, rows: RankRows) -> None:
    """Totals of the rows without a launch record and of those that run past the window of the step that launched them."""
    orphans = orphan_ns = spilling = spilt_ns = 0
    for part in rows.slices():
        start, end, launched = rows.start[part], rows.end[part], found.launched[part]
        orphan = launched < 0
        orphans += int(orphan.sum())
        orphan_ns += int((end - start)[orphan].sum())
        past = end - np.maximum(start, found.end_ns[np.maximum(launched, 0)])
        past = past[~orphan & (past > 0)]
        spilling += len(past)
        spilt_ns += int(past.sum())
    if orphans:
        text = f"rank {rows.rank}: {orphans} of {len(rows.start)} device rows ({orphan_ns} ns) have no launch in a step"
        _note(found, "no_launch", f"{text}; the ledger counts them by time, tables by step do not")
    if spilling:
        text = f"rank {rows.rank}: {spilling} device rows run {spilt_ns} ns past the step that launched them"
        _note(found, "spill", text)


def _note_outside(found: Windows, rows: RankRows) -> None:
    """Totals of device time before, between and after the windows."""
    if not found.steps:
        return
    low, high = int(found.start_ns[0]), int(found.end_ns[-1])  # windows tile what lies between
    outside = outside_ns = 0
    for part in rows.slices():
        start, end = rows.start[part], rows.end[part]
        inside = np.minimum(end, high) - np.maximum(start, low)
        beyond = end - start - np.maximum(inside, 0)
        outside += int((beyond > 0).sum())
        outside_ns += int(beyond.sum())
    if outside_ns:
        text = f"rank {rows.rank}: {outside} device rows lie {outside_ns} ns outside all steps"
        _note(found, "outside", f"{text}; no step counts that time")
