"""The lanes of one rank: its device streams and host threads, in the order in which a person wants to see them."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.raw import Raw
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import AXES, KINDS, LANE_ROLES, Lane

_ROLE_OF_KIND = {"compute": "compute", "comm": "comm", "memcpy": "memcpy", "wait": "compute", "host": "host"}


def build_lanes(raw: Raw, events: Columns, device: np.ndarray) -> tuple[tuple[Lane, ...], np.ndarray]:
    """The lanes and each row's lane index.

    A lane is one (pid, tid) of one side: host rows that a profiler wrote onto a device stream (annotations,
    synchronisations) get a lane of their own, so that lanes of `device` rows hold nothing else. Order: by role (compute,
    comm, memcpy, host), then device or process, then stream.
    """
    pid, tid = raw.columns["pid"], raw.columns["tid"]
    first, inverse = _distinct(pid, tid, device)
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(first) + 1))
    device_ids = {(int(pid[row]), int(tid[row])) for row in first.tolist() if device[row]}
    lanes = []
    for lane, row in enumerate(first.tolist()):
        rows = order[edges[lane] : edges[lane + 1]]
        at = (_text(raw, "pid", row), _text(raw, "tid", row))
        title = raw.thread_names.get(at, "").strip()
        if device[row]:
            stream = int(raw.columns["stream"][rows].max())
            one = Lane(
                lane, title or _stream_title(at[1]), _role(events, rows), _axis(events, rows), max(stream, -1), *at
            )
        else:
            title = title or _thread_title(*at)
            beside = (int(pid[row]), int(tid[row])) in device_ids
            one = Lane(lane, title + " annotations" * beside, "host", _axis(events, rows), -1, *at)
        lanes.append(one)
    ranked = sorted(lanes, key=_place)
    new_index = np.zeros(len(lanes), np.int32)
    for index, one in enumerate(ranked):
        new_index[one.index] = index
    return tuple(one._replace(index=index) for index, one in enumerate(ranked)), new_index[inverse]


def _distinct(pid: np.ndarray, tid: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each (pid, tid, side), and which of them every row is of."""
    size = int(tid.max(initial=-1)) + 2
    key = (pid.astype(np.int64) + 1) * size + (tid + 1)
    if (int(pid.max(initial=-1)) + 2) * size > 1 << 24:  # too many to count
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


def _role(events: Columns, rows: np.ndarray) -> str:
    """The role with the most time on a device lane; the waits of a training thread count as compute."""
    kinds = events["kind"][rows]
    time = dict.fromkeys(LANE_ROLES, 0)
    for kind in np.unique(kinds).tolist():
        time[_ROLE_OF_KIND[KINDS[kind]]] += int(events["dur_ns"][rows[kinds == kind]].sum()) + 1
    return max(LANE_ROLES, key=lambda role: time[role])


def _axis(events: Columns, rows: np.ndarray) -> str:
    """The one mesh axis of the lane's communication, empty where there are none or several."""
    axes = np.unique(events["axis"][rows])
    axes = axes[axes >= 0]
    return AXES[axes[0]] if len(axes) == 1 else ""


def _place(lane: Lane) -> tuple[object, ...]:
    return (LANE_ROLES.index(lane.role), _number(lane.pid), lane.pid, _number(lane.tid), lane.tid, lane.index)


def _number(text: str) -> int:
    digits = "".join(character for character in text if character.isascii() and character.isdigit())
    return int(digits[:18]) if digits else -1


def _text(raw: Raw, column: str, row: int) -> str:
    code = int(raw.columns[column][row])
    return raw.strings[code] if code >= 0 else ""
