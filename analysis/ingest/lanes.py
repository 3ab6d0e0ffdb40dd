"""The lanes of one rank: its device streams and host threads, in the order in which a person wants to see them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepscope.analysis.ingest.raw import Raw, is_constant
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import AXES, KINDS, LANE_ROLES, Lane

_ROLE_OF_KIND = {"compute": "compute", "comm": "comm", "memcpy": "memcpy", "wait": "compute", "host": "host"}


@dataclass
class _Seen:
    """What is known of one lane so far."""

    pid: str
    tid: str
    device: bool
    stream: int = -1
    time: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANE_ROLES, 0))
    kinds: set[int] = field(default_factory=set)
    axes: set[int] = field(default_factory=set)


class LaneTable:
    """The lanes of one rank, found chunk by chunk.

    A lane is one (pid, tid) of one side: host rows that a profiler wrote onto a device stream (annotations,
    synchronisations) get a lane of their own, so that lanes of `device` rows hold nothing else. Order: by role (compute,
    comm, memcpy, host), then device or process, then stream.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, bool], int] = {}  # codes of pid and tid, side -> number
        self._named: dict[tuple[str, str, bool], int] = {}  # the same by their texts: none is as an empty one
        self._lanes: list[_Seen] = []

    def __len__(self) -> int:
        return len(self._lanes)

    def add(self, raw: Raw, events: Columns, device: np.ndarray) -> np.ndarray:
        """Each row's lane, numbered as they come. `device` marks device rows."""
        columns = raw.columns
        first, inverse = _distinct(columns["pid"], columns["tid"], device)
        keys = [(int(columns["pid"][row]), int(columns["tid"][row]), bool(device[row])) for row in first.tolist()]
        numbers = np.array([self._number(raw, key) for key in keys], np.int32)
        self._learn(numbers, inverse, columns["stream"], events)
        return numbers[inverse]

    def _number(self, raw: Raw, key: tuple[int, int, bool]) -> int:
        number = self._numbers.get(key)
        if number is None:
            pid, tid = (raw.strings[code] if code >= 0 else "" for code in key[:2])
            number = self._named.setdefault((pid, tid, key[2]), len(self._lanes))
            self._numbers[key] = number
            if number == len(self._lanes):
                self._lanes.append(_Seen(pid, tid, key[2]))
        return number

    def _learn(self, numbers: np.ndarray, inverse: np.ndarray, streams: np.ndarray, events: Columns) -> None:
        """Time of each kind, axes and stream of the lanes of one chunk."""
        kinds = len(KINDS)
        times = np.bincount(inverse * kinds + events["kind"], weights=events["dur_ns"], minlength=len(numbers) * kinds)
        rows = np.bincount(inverse * kinds + events["kind"], minlength=len(numbers) * kinds)
        for place in np.flatnonzero(rows).tolist():
            seen, kind = self._lanes[int(numbers[place // kinds])], place % kinds
            seen.time[_ROLE_OF_KIND[KINDS[kind]]] += int(times[place]) + (kind not in seen.kinds)
            seen.kinds.add(kind)
        if not is_constant(events["axis"]):
            told = np.flatnonzero(events["axis"] >= 0)
            for pair in np.unique(inverse[told].astype(np.int64) * 256 + events["axis"][told]).tolist():
                self._lanes[int(numbers[pair // 256])].axes.add(pair % 256)
        if not is_constant(streams):
            told = np.flatnonzero(streams >= 0)
            highest = np.full(len(numbers), -1, np.int64)
            np.maximum.at(highest, inverse[told], streams[told])
            for number, stream in zip(numbers.tolist(), highest.tolist(), strict=True):
                self._lanes[number].stream = max(self._lanes[number].stream, stream)
        elif len(streams) and streams[0] >= 0:
            for number in numbers.tolist():
                self._lanes[number].stream = max(self._lanes[number].stream, int(streams[0]))

    def finish(self, titles: dict[tuple[str, str], str]) -> tuple[tuple[Lane, ...], list[int]]:
        """The lanes in their order, and of each its number as it came. `titles`: what the file calls (pid, tid)."""
        on_device = {(seen.pid, seen.tid) for seen in self._lanes if seen.device}
        lanes = []
        for number, seen in enumerate(self._lanes):
            at = (seen.pid, seen.tid)
            title = titles.get(at, "").strip()
            axis = AXES[min(seen.axes)] if len(seen.axes) == 1 else ""  # the one that its communication is of
            if seen.device:
                role = max(LANE_ROLES, key=seen.time.__getitem__)
                lanes.append(Lane(number, title or _stream_title(seen.tid), role, axis, seen.stream, *at))
            else:
                title = title or _thread_title(*at)
                lanes.append(Lane(number, title + " annotations" * (at in on_device), "host", axis, -1, *at))
        ranked = sorted(lanes, key=_place)
        return tuple(one._replace(index=index) for index, one in enumerate(ranked)), [one.index for one in ranked]


def _distinct(pid: np.ndarray, tid: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each (pid, tid, side), and which of them every row is of."""
    size = int(tid.max(initial=-1)) + 2
    key = (pid.astype(np.int64) + 1) * size + (tid + 1)
    if (int(pid.max(initial=-1)) + 2) * size > 1 << 22:  # too many to count
        _, key = np.unique(key, return_inverse=True)
    key = 2 * key + device
    first = np.full(int(key.max(initial=-1)) + 1, -1, np.int64)
    first[key[::-1]] = np.arange(len(key))[::-1]
    used = np.flatnonzero(first >= 0)
    number = np.zeros(len(first), np.int32)
    number[used] = np.arange(len(used))
    return first[used], number[key]


def _stream_title(tid: str) -> str:
    return tid if tid.startswith("stream") else f"stream {tid}"


def _thread_title(pid: str, tid: str) -> str:
    return f"thread {tid}" if tid.lstrip("-").isdigit() else tid or pid or "trace"


def _place(lane: Lane) -> tuple[object, ...]:
    return (LANE_ROLES.index(lane.role), _number(lane.pid), lane.pid, _number(lane.tid), lane.tid, lane.index)


def _number(text: str) -> int:
    digits = "".join(character for character in text if character.isascii() and character.isdigit())
    return int(digits[:18]) if digits else -1
