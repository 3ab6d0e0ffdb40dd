"""What is wrong with a file's rows: which are left out, cut or marked, each counted and said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stepscope.analysis.ingest.raw import MISSING, Raw
from stepscope.analysis.run import Columns
from stepscope.analysis.units import counted
from stepscope.tracer.schema import FLAG_IMPOSSIBLE, FLAG_PARTIAL, KINDS, STEP_ANNOTATION, Lane

Note = Callable[..., None]
"""`note(code, text, touches=..., offset=...)` adds one health item."""

IMPOSSIBLE_FACTOR = 10
"""A duration is implausible from this multiple of the median of its name."""

FARTHEST_NS = 1 << 61
"""Stamps and durations beyond are no times (and their sums would not fit)."""

_BEGIN = 4  # code of `B` among the letters of rows that have an extent

_HOST, _WAIT = KINDS.index("host"), KINDS.index("wait")


def select_rows(raw: Raw, note: Note) -> Raw:
    """The rows that have an extent: complete ones, begin-end pairs (joined), and instants (length 0).

    Metadata, counters and flows are used elsewhere or say nothing that ids do not say.
    """
    letters = raw.ask(raw.columns["ph"], lambda ph: "XiIRBE".find(ph) if len(ph) == 1 else -1, -1, np.int8)
    columns = raw.columns
    timed = (columns["ts"] != MISSING) & (np.abs(columns["ts"]) < FARTHEST_NS)
    complete = letters == 0
    instants = (letters > 0) & (letters <= 3)
    pairs = letters >= _BEGIN
    lost = int((complete & ~timed).sum())
    if lost:
        note(
            "no_time", f"{counted(lost, 'row has', 'rows have')} no readable time stamp: left out", touches=("ledger",)
        )
    endless = complete & timed & ((columns["dur"] == MISSING) | (columns["dur"] > FARTHEST_NS))
    negative = complete & timed & (columns["dur"] < 0) & ~endless
    for code, rows, what in (
        ("no_duration", endless, "no readable duration"),
        ("negative_duration", negative, "a negative duration"),
    ):
        if rows.any():
            note(
                code,
                f"{counted(int(rows.sum()), 'row has', 'rows have')} {what}: kept with length 0",
                touches=("ledger",),
            )
    keep = timed & (complete | instants)
    if pairs.any():
        begins, lengths = _pair(raw, np.flatnonzero(pairs & timed), letters, note)
        columns = dict(columns)
        columns["dur"] = columns["dur"].copy()
        columns["dur"][begins] = lengths
        keep[begins] = True
        raw = replace(raw, columns=columns)
    raw = raw.take(keep)
    dur = raw.columns["dur"]
    raw.columns["dur"] = np.where((dur < 0) | (dur > FARTHEST_NS), 0, dur)
    return raw


def _pair(raw: Raw, rows: np.ndarray, letters: np.ndarray, note: Note) -> tuple[np.ndarray, np.ndarray]:
    """Begin rows and their lengths: an end closes the last open begin of its thread."""
    columns = raw.columns
    rows = rows[np.argsort(columns["ts"][rows], kind="stable")]
    stacks: dict[tuple[int, int], list[int]] = {}
    begins, lengths, loose = [], [], 0
    for row in rows.tolist():
        stack = stacks.setdefault((int(columns["pid"][row]), int(columns["tid"][row])), [])
        if letters[row] == _BEGIN:
            stack.append(row)
        elif stack:
            begin = stack.pop()
            begins.append(begin)
            lengths.append(int(columns["ts"][row] - columns["ts"][begin]))
        else:
            loose += 1
    loose += sum(map(len, stacks.values()))
    if loose:
        note("loose_pairs", f"{loose} begin or end rows have no partner: left out", touches=("ledger",))
    return np.array(begins, np.int64), np.array(lengths, np.int64)


def zero_rows(raw: Raw, device: np.ndarray, note: Note) -> np.ndarray:
    """Device rows with stamp 0 and length 0 among others that have a stamp: a profiler's empty records."""
    zero = device & (raw.columns["ts"] == 0) & (raw.columns["dur"] <= 0)
    if not zero.any() or not (device & (raw.columns["ts"] > 0)).any():
        return np.zeros(raw.rows, bool)
    note("zero_rows", f"{int(zero.sum())} device rows have time 0 and length 0: left out")
    return zero


def cut_impossible(events: Columns, lanes: tuple[Lane, ...], strings: list[str], note: Note) -> None:
    """Cut impossible durations of device rows, in place; `events` sorted by (lane, start).

    Impossible: the end lies beyond the end of the next non-empty row of the lane, and the length exceeds
    IMPOSSIBLE_FACTOR times the median of the others of its name (of the lane's other rows where it is alone).
    Such a row ends where that next row starts.
    """
    device = np.isin(events["lane"], [lane.index for lane in lanes if lane.role != "host"]) & (events["kind"] != _WAIT)
    rows = np.flatnonzero(device & (events["dur_ns"] > 0))
    if len(rows) < 2:
        return
    start, length = events["start_ns"][rows], events["dur_ns"][rows]
    same_lane = events["lane"][rows][1:] == events["lane"][rows][:-1]
    beyond = np.flatnonzero(same_lane & (start[:-1] + length[:-1] > start[1:] + length[1:]))
    cut = [index for index in beyond.tolist() if length[index] > IMPOSSIBLE_FACTOR * _usual(events, rows, index)]
    for index in cut:
        row = rows[index]
        events["dur_ns"][row] = start[index + 1] - start[index]
        events["flags"][row] |= FLAG_IMPOSSIBLE
    if cut:
        worst = max(cut, key=lambda index: int(length[index]))
        name = strings[events["name_id"][rows[worst]]] if events["name_id"][rows[worst]] >= 0 else "?"
        note(
            "impossible_duration",
            f"{len(cut)} durations are impossible (the longest {int(length[worst])} ns, {name[:80]}): "
            "cut at the next row's start and kept out of means and fits",
            touches=("ledger", "overlap"),
        )


def _usual(events: Columns, rows: np.ndarray, index: int) -> float:
    """Median length of the other rows of this row's name, else of its lane's other rows."""
    others = np.delete(rows, index)
    same = others[events["name_id"][others] == events["name_id"][rows[index]]]
    if not len(same):
        same = others[events["lane"][others] == events["lane"][rows[index]]]
    return float(np.median(events["dur_ns"][same]))


def mark_cut(events: Columns, strings: list[str]) -> None:
    """FLAG_PARTIAL on the steps of a foreign file that was cut, in place: it is in no time order, so all are touched."""
    steps = step_rows(events, strings)
    if len(steps):
        events["flags"][steps] |= FLAG_PARTIAL
    elif len(events["start_ns"]):
        events["flags"][int(np.argmax(events["start_ns"] + events["dur_ns"]))] |= FLAG_PARTIAL


def step_rows(events: Columns, strings: list[str]) -> np.ndarray:
    """Indices of the rows that annotate a step, in the order of `events`."""
    named = np.array([name.startswith(STEP_ANNOTATION) for name in strings] or [False])
    known = events["name_id"] >= 0
    return np.flatnonzero((events["kind"] == _HOST) & known & named[np.where(known, events["name_id"], 0)])


def report_cut(raw: Raw, own: bool, note: Note) -> None:
    """The health item of a file that ends too early."""
    which = "the last step is partial" if own else "it is in no time order, so all its steps are partial"
    note(
        "cut_file",
        f"the file ends early ({raw.cut}): every complete event before is kept, {which}",
        touches=("ledger", "summary"),
        offset=raw.cut_offset,
    )
