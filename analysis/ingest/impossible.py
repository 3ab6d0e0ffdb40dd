"""Durations of device rows that cannot be: a row that goes on beyond the end of the next one of its stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.ingest.merge import Runs
from stepscope.tracer.schema import FLAG_IMPOSSIBLE, KINDS, Lane

IMPOSSIBLE_FACTOR = 10
"""A duration is implausible from this multiple of the median of its name."""

_WAIT = KINDS.index("wait")
_COLUMNS = ("start_ns", "dur_ns", "kind", "name_id")


def cut_impossible(runs: Runs, lanes: tuple[Lane, ...], order: list[int], strings: list[str], note: Note) -> None:
    """Cut impossible durations of device rows, in place.

    Impossible: the end lies beyond the end of the next non-empty row of the lane, and the length exceeds
    IMPOSSIBLE_FACTOR times the median of the others of its name (of the lane's other rows where it is alone).
    Such a row ends where that next row starts.
    """
    device = [order[lane.index] for lane in lanes if lane.role != "host"]
    found = np.concatenate([_beyond(runs, number) for number in device] or [np.zeros((6, 0), np.int64)], axis=1)
    if not found.shape[1]:
        return
    usual = _usual(runs, device, found)
    found = found[:, found[2] > IMPOSSIBLE_FACTOR * usual]
    if not found.shape[1]:
        return
    for chunk in np.unique(found[0]).tolist():
        here = found[0] == chunk
        runs.cut(chunk, found[1][here], found[3][here], FLAG_IMPOSSIBLE)
    worst = int(np.argmax(found[2]))
    name = strings[found[4][worst]] if found[4][worst] >= 0 else "?"
    note(
        "impossible_duration",
        f"{found.shape[1]} durations are impossible (the longest {int(found[2][worst])} ns, {name[:80]}): "
        "cut at the next row's start and kept out of means and fits",
        touches=("ledger", "overlap"),
    )


def _beyond(runs: Runs, number: int) -> np.ndarray:
    """Rows of one lane that end beyond the next one's end: int64 [6, row] of chunk, place, length, time to the next start,
    name, lane."""
    found = [np.zeros((6, 0), np.int64)]
    last: np.ndarray | None = None
    for rows in _busy(runs, number):
        part = rows if last is None else np.concatenate([last, rows], axis=1)
        start, length = part[2], part[3]
        beyond = np.flatnonzero(start[:-1] + length[:-1] > start[1:] + length[1:])
        if len(beyond):
            of_lane = np.full(len(beyond), number)
            until = (start[1:] - start[:-1])[beyond]
            found.append(np.stack([part[0][beyond], part[1][beyond], length[beyond], until, part[4][beyond], of_lane]))
        last = part[:, -1:]
    return np.concatenate(found, axis=1)


def _busy(runs: Runs, number: int) -> Iterator[np.ndarray]:
    """The rows of one lane that take time and are no wait: int64 [5, row] of chunk, place, start, length, name."""
    for rows in runs.lane(number, _COLUMNS):
        busy = np.flatnonzero((rows["dur_ns"] > 0) & (rows["kind"] != _WAIT))
        if len(busy):
            names = ("in_chunk", "place", "start_ns", "dur_ns", "name_id")
            yield np.stack([rows[name][busy].astype(np.int64) for name in names])


def _usual(runs: Runs, device: list[int], found: np.ndarray) -> np.ndarray:
    """For each found row the median length of the other rows of its name on any lane, else of its lane's other rows."""
    by_name: dict[int, list[np.ndarray]] = {name: [] for name in np.unique(found[4]).tolist()}
    by_lane: dict[int, list[np.ndarray]] = {}
    for number in device:
        lengths, names = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for rows in runs.unordered(number, _COLUMNS[1:]):
            busy = (rows["dur_ns"] > 0) & (rows["kind"] != _WAIT)
            lengths.append(rows["dur_ns"][busy])
            names.append(rows["name_id"][busy])
        all_lengths, all_names = np.concatenate(lengths), np.concatenate(names)
        if number in found[5]:
            by_lane[number] = [all_lengths]
        for name in by_name:
            by_name[name].append(all_lengths[all_names == name])
    names_sorted = {name: np.sort(np.concatenate(parts)) for name, parts in by_name.items()}
    lanes_sorted = {number: np.sort(parts[0]) for number, parts in by_lane.items()}
    usual = np.zeros(found.shape[1])
    for index, (length, name, number) in enumerate(found[[2, 4, 5]].T.tolist()):
        same = names_sorted[name]
        usual[index] = _median_without(same if len(same) > 1 else lanes_sorted[number], length)
    return usual


def _median_without(ordered: np.ndarray, one: int) -> float:
    """Median of ascending values without one of those that equal `one`; infinite when nothing is left."""
    left = len(ordered) - 1
    if left < 1:
        return float("inf")
    at = int(np.searchsorted(ordered, one))
    middle = [int(ordered[k] if k < at else ordered[k + 1]) for k in ((left - 1) // 2, left // 2)]
    return sum(middle) / 2
