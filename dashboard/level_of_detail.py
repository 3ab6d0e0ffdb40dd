"""What a timeline needs to draw, at any zoom: exact events where they fit, exact shares of time where they do not.

Plot-free and run-free: a `Track` is one drawn lane, its pieces sorted and not overlapping, times in integer ns after
the run's origin. A view is asked on an absolute power-of-two grid of bins of about one pixel, so that the picture does
not shimmer while it is panned and a repeated request is the same request. A lane with at most `EVENTS_PER_BIN` pieces a
bin is sent as pieces; beyond that as the time of every category in every bin (prefix sums and binary search: exact
whatever the zoom, O(bins log n)), so that a rare category is thin and never absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

EVENTS_PER_BIN = 0.75
"""At most so many pieces a bin (about a pixel) and lane are sent one by one."""

EVENTS_PER_VIEW = 30_000
"""At most so many pieces a view, over all lanes: what a canvas paints within a frame or two."""

MAX_BINS = 16_384
NAMES_PER_VIEW = 4_000

EVENTS, SHARES = 0, 1


class Track:
    """One drawn lane: pieces sorted by start, not overlapping.

    `start`, `end`: int64 ns after the run's origin; `category`: uint8; `name`: uint32, an id of the run's label table;
    `row`: int32, the piece's row in the rank's event columns (several pieces may be parts of one event), -1 for a piece
    that comes from the ledger and is no event.
    """

    __slots__ = ("_prefix", "category", "end", "label", "name", "rank", "role", "row", "start")

    def __init__(
        self,
        rank: int,
        role: str,
        label: str,
        start: np.ndarray,
        end: np.ndarray,
        category: np.ndarray,
        name: np.ndarray,
        row: np.ndarray,
    ) -> None:
        assert len(start) == len(end) == len(category) == len(name) == len(row)
        self.rank, self.role, self.label = rank, role, label
        self.start, self.end = start, end
        self.category, self.name, self.row = category, name, row
        self._prefix: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def categories(self) -> list[int]:
        """The categories that occur, ascending."""
        return sorted(self._prefixes())

    def _prefixes(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per category: starts, ends, and total time before each piece (one more entry than pieces)."""
        if self._prefix is None:
            prefix = {}
            for category in np.unique(self.category):
                mine = self.category == category
                start, end = self.start[mine], self.end[mine]
                total = np.zeros(len(start) + 1, np.int64)
                np.cumsum(end - start, out=total[1:])
                prefix[int(category)] = (start, end, total)
            self._prefix = prefix
        return self._prefix

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Index range of the pieces that touch `[start, end)`; pieces of no length at `start` included."""
        first = int(np.searchsorted(self.end, start, "left"))
        last = int(np.searchsorted(self.start, end, "left"))
        return first, max(first, last)

    def cumulative(self, category: int, edges: np.ndarray) -> np.ndarray:
        """Time of `category` (ns, int64) before each of the ascending `edges`: exact."""
        start, end, total = self._prefixes().get(category, (self.start[:0], self.end[:0], np.zeros(1, np.int64)))
        if not len(start):
            return np.zeros(len(edges), np.int64)
        last = np.searchsorted(start, edges, "right")
        beyond = np.where(last > 0, np.maximum(end[last - 1] - edges, 0), 0)
        return total[last] - beyond

    def times(self, edges: np.ndarray) -> dict[int, np.ndarray]:
        """Per category: its time (ns) between neighbouring `edges`; categories without any time there are left out."""
        found = {}
        for category in self.categories:
            time = np.diff(self.cumulative(category, edges))
            if time.any():
                found[category] = time
        return found


def edges_of(first_bin: int, bins: int, bin_ns: int) -> np.ndarray:
    """The `bins + 1` bin edges of a view, int64 ns: multiples of `bin_ns`.

    Raises ValueError unless `bin_ns` is a power of two and the view has 1 to MAX_BINS bins.
    """
    if bin_ns < 1 or bin_ns & (bin_ns - 1):
        raise ValueError(f"bin_ns is {bin_ns}: it must be a power of two")
    if not 1 <= bins <= MAX_BINS:
        raise ValueError(f"bins is {bins}: it must lie between 1 and {MAX_BINS}")
    if abs(first_bin) * bin_ns > 2**53 or bin_ns > 2**45:
        raise ValueError("the view lies outside any trace")
    return (first_bin + np.arange(bins + 1, dtype=np.int64)) * bin_ns


def shares(time: np.ndarray, bin_ns: int) -> np.ndarray:
    """Time in each bin as uint8, 255 a full bin; any time at all is at least 1: rare is thin, never absent."""
    return np.minimum((time * 255 + bin_ns - 1) // bin_ns, 255).astype(np.uint8)


class _Columns:
    """Binary columns one after the other, each aligned to 4 bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.length = 0

    def put(self, values: np.ndarray) -> int:
        """Append `values`; returns its offset."""
        raw = values.tobytes()
        offset = self.length
        padding = -len(raw) % 4
        self.parts.append(raw + b"\0" * padding)
        self.length += len(raw) + padding
        return offset


def pack_view(
    tracks: Sequence[tuple[int, Track]],
    first_bin: int,
    bins: int,
    bin_ns: int,
    label_of: Callable[[int], str] | None = None,
) -> bytes:
    """One binary message: u32 header length, JSON header, 4-byte aligned little-endian columns.

    `tracks` are (id, track) pairs; `label_of` gives the text of a label id. The header is
    `{first_bin, bins, bin_ns, single, merged, names: {id: text}, tracks: [[id, EVENTS, n, first, x, w, category, name],
    [id, SHARES, n, first, [[category, offset], ...]]]}`: `x`, `w` are float32 bins after the view's start, `first` the
    index of the first piece, `n` the number of pieces in the window; `single` and `merged` count pieces over all lanes.
    """
    edges = edges_of(first_bin, bins, bin_ns)
    start, end = int(edges[0]), int(edges[-1])
    most = min(int(EVENTS_PER_BIN * bins), max(64, EVENTS_PER_VIEW // max(1, len(tracks))))
    columns = _Columns()
    rows: list[list[Any]] = []
    wanted: list[np.ndarray] = []
    single = merged = 0
    for identity, track in tracks:
        first, last = track.window(start, end)
        n = last - first
        if n <= most:
            single += n
            rows.append([identity, EVENTS, n, first, *_put_events(columns, track, first, last, start, bin_ns)])
            wanted.append(track.name[first:last])
        else:
            merged += n
            kept = [[c, columns.put(shares(time, bin_ns))] for c, time in track.times(edges).items()]
            rows.append([identity, SHARES, n, first, kept])
    header = {
        "first_bin": first_bin,
        "bins": bins,
        "bin_ns": bin_ns,
        "single": single,
        "merged": merged,
        "names": _names(wanted, label_of),
        "tracks": rows,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 4)
    return len(text).to_bytes(4, "little") + text + b"".join(columns.parts)


def _put_events(
    columns: _Columns, track: Track, first: int, last: int, origin: int, bin_ns: int
) -> tuple[int, int, int, int]:
    start, end = track.start[first:last], track.end[first:last]
    return (
        columns.put(((start - origin) / bin_ns).astype("<f4")),
        columns.put(((end - start) / bin_ns).astype("<f4")),
        columns.put(track.category[first:last]),
        columns.put(track.name[first:last].astype("<u4")),
    )


def _names(wanted: list[np.ndarray], label_of: Callable[[int], str] | None) -> dict[int, str]:
    """Texts of the labels in view; more than NAMES_PER_VIEW are not sent (the exact route gives each on hover)."""
    if label_of is None or not wanted:
        return {}
    ids = np.unique(np.concatenate(wanted))[:NAMES_PER_VIEW]
    return {int(i): label_of(int(i)) for i in ids}


def pack_overview(groups: Sequence[Sequence[Track]], edges: np.ndarray) -> bytes:
    """The whole run in few rows: per group of tracks the mean share of each category in each bin, as uint8.

    Same framing as `pack_view`; the header is `{bins, rows: [[[category, offset], ...], ...]}`.
    """
    width = np.maximum(np.diff(edges), 1)
    columns, rows = _Columns(), []
    for group in groups:
        total: dict[int, np.ndarray] = {}
        for track in group:
            for category, time in track.times(edges).items():
                total[category] = total.get(category, 0) + time
        kept = []
        for category, time in sorted(total.items()):
            share = -(-time * 255 // (width * len(group)))
            kept.append([category, columns.put(np.minimum(share, 255).astype(np.uint8))])
        rows.append(kept)
    text = json.dumps({"bins": len(width), "rows": rows}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 4)
    return len(text).to_bytes(4, "little") + text + b"".join(columns.parts)
