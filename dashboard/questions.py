"""Questions about the whole timeline: sums of a range, search, the next of a name, where an operation lies, tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from stepscope.analysis import units
from stepscope.analysis.records import TERMS
from stepscope.dashboard import details, text
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.theme import CATEGORIES, CODE
from stepscope.tracer.schema import KINDS

TABLE_ROWS = 500
LISTED_HITS = 50


def range_sums(loaded: LoadedRun, start: int, end: int, ranks: Iterable[int] | None = None) -> dict[str, Any]:
    """Exact time of every term in `[start, end)`, per rank, and the mean over ranks (ns)."""
    edges = np.array([start, end], np.int64)
    wanted = [r for r in (loaded.run.ranks if ranks is None else ranks) if r in loaded.terms]
    terms = [CODE[term] for term in TERMS]
    rows = []
    for rank in wanted:
        track = loaded.terms[rank]
        rows.append([int(np.diff(track.cumulative(code, edges))[0]) for code in terms])
    table = np.array(rows, np.int64).reshape(len(wanted), len(terms))
    mean = table.mean(0) if len(wanted) else np.zeros(len(terms))
    return {
        "start": start,
        "end": end,
        "ranks": wanted,
        "terms": terms,
        "ns": table.tolist(),
        "mean_ns": [float(v) for v in mean],
        "text": [units.duration(float(v)) for v in mean],
        "range": units.duration(end - start),
    }


def whole_events(track: Track, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ascending pieces put together to the events they are parts of: first piece, start and end of each event."""
    if not len(index):
        return index, track.start[index], track.end[index]
    first = np.flatnonzero(np.concatenate([[True], np.diff(track.row[index]) != 0]))
    last = np.append(first[1:], len(index)) - 1
    return index[first], track.start[index[first]], track.end[index[last]]


def search(loaded: LoadedRun, wanted: str, bins: int, after: int | None = None) -> dict[str, Any]:
    """Events over the whole run whose label holds `wanted`: how many, where (counts over `bins`), the first few, and
    the next one after time `after` (ns after the origin; from the start again when there is none)."""
    labels = loaded.labels.containing(wanted)
    width = max(1, -(-loaded.span_ns // bins))
    counts = np.zeros(bins, np.int64)
    total = 0
    listed: list[list[int]] = []
    nearest: tuple[int, int, int] | None = None  # distance, track, index
    if not labels.any():
        return {"count": 0, "bins": [], "hits": [], "labels": [], "next": None}
    for track_id, track in enumerate(loaded.tracks):
        index = np.flatnonzero(labels[track.name]) if len(track) else np.zeros(0, np.int64)
        index = index[track.row[index] >= 0]
        if not len(index):
            continue
        index, start, _ = whole_events(track, index)
        total += len(index)
        counts += np.bincount(np.clip(start // width, 0, bins - 1), minlength=bins)[:bins]
        if len(listed) < LISTED_HITS:
            listed += [[track_id, int(i), int(track.start[i])] for i in index[: LISTED_HITS - len(listed)]]
        if after is not None:
            at = int(np.searchsorted(start, after, "right"))
            distance = int(start[at] - after) if at < len(start) else int(start[0] + loaded.span_ns - after) + 2**52
            if nearest is None or distance < nearest[0]:
                nearest = (distance, track_id, int(index[at % len(start)]))
    marked = np.flatnonzero(counts)
    found = np.flatnonzero(labels)
    return {
        "count": total,
        "bin_ns": width,
        "bins": [[int(i), int(counts[i])] for i in marked],
        "hits": listed,
        "labels": found.tolist() if len(found) <= 20_000 else [],
        "next": None if nearest is None else [nearest[1], nearest[2]],
    }


def same_name(loaded: LoadedRun, track_id: int, index: int, direction: int) -> tuple[int, int] | None:
    """The next (`direction` 1) or previous (-1) event of the same name on the same lane; None at the end."""
    track = details.track_of(loaded, track_id)
    if not 0 <= index < len(track):
        raise IndexError(f"lane {track_id} has no piece {index}")
    row = int(track.row[index])
    if row < 0:
        same = (track.category == track.category[index]) & (track.row < 0)
    else:
        names = loaded.run.columns(track.rank, "name_id")["name_id"]
        same = (track.row >= 0) & (names[np.maximum(track.row, 0)] == names[row]) & (track.row != row)
    found = np.flatnonzero(same)
    at = int(np.searchsorted(found, index, "right" if direction > 0 else "left"))
    at = at if direction > 0 else at - 1
    return (track_id, int(found[at])) if 0 <= at < len(found) else None


def locate(loaded: LoadedRun, rank: int, op_id: int | None, start: int) -> tuple[int, int] | None:
    """The piece that shows a rank's communication `op_id`, nearest to `start`; None when it is not there."""
    if rank not in loaded.of_rank or op_id is None:
        return None
    columns = loaded.run.columns(rank, "op_id", "kind")
    rows = np.flatnonzero((columns["op_id"] == op_id) & (columns["kind"] == KINDS.index("comm")))
    found = [
        (abs(int(track.start[i]) - start), track_id, int(i))
        for track_id in loaded.of_rank[rank]
        for track in [loaded.tracks[track_id]]
        if track.role == "comm"
        for i in np.flatnonzero(np.isin(track.row, rows))
    ]
    return min(found)[1:] if found else None


def table(
    loaded: LoadedRun, wanted: str, start: int, end: int, ranks: Iterable[int] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The longest events that touch `[start, end)` and whose label holds `wanted`: rows and how many there are.

    Host rows (annotations that span whole steps) are listed only where something is searched for.
    """
    labels = loaded.labels.containing(wanted)
    chosen = set(loaded.run.ranks if ranks is None else ranks)
    candidates: list[tuple[int, int, int]] = []
    total = 0
    for track_id, track in enumerate(loaded.tracks):
        if track.rank not in chosen or (track.role == "host" and not wanted):
            continue
        low, high = track.window(start, end)
        index = np.arange(low, high)
        index = index[(track.row[index] >= 0) & labels[track.name[index]]]
        index, begin, until = whole_events(track, index)
        total += len(index)
        best = np.argsort(begin - until, kind="stable")[:TABLE_ROWS]
        candidates += [(int(until[i] - begin[i]), track_id, int(index[i])) for i in best]
    candidates.sort(reverse=True)
    rows = []
    for length, track_id, at in candidates[:TABLE_ROWS]:
        track = loaded.tracks[track_id]
        rows.append(
            {
                "name": loaded.labels.text_of(int(track.name[at])),
                "rank": track.rank,
                "lane": text.name(track.label or track.role, 40),
                "category": CATEGORIES[int(track.category[at])].label,
                "start_ns": int(track.start[at]),
                "duration_ns": length,
                "track": track_id,
                "index": at,
            }
        )
    return rows, total
