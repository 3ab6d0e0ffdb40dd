"""What communication rows say about themselves: collective, group, peers, element counts and message size.

Kernels of older traces say nothing: then the host's `record_param_comms` row with the same external id speaks for them,
and for the collective alone the annotation (`nccl:all_to_all`) around their launch, or their own name.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from stepscope.analysis.ingest.raw import MISSING, Interner, Raw, is_constant, own
from stepscope.analysis.ingest.rules import Rules, collective_of_kernel
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import AXES, COLLECTIVES, KINDS, code_of

_COMM, _WAIT, _HOST = (KINDS.index(kind) for kind in ("comm", "wait", "host"))
_SEND, _RECEIVE, _RING = (code_of(COLLECTIVES, word) for word in ("send", "receive", "ring_shift"))
_NEVER_SEND_RECEIVE = tuple(code_of(COLLECTIVES, word) for word in ("all_reduce", "reduce", "broadcast", "barrier"))
"""Collectives that NCCL never runs as its SendRecv kernel: an annotation that says so is about another kernel."""

_DESCRIPTION = (
    *("in_elements", "out_elements", "seq", "source_rank", "destination_rank", "root_rank"),
    *("collective", "dtype", "group_name", "group_description", "group_ranks"),
)
"""What a kernel inherits from the call that launched it."""

_FILLED = (
    "collective",
    "seq",
    "in_elements",
    "out_elements",
    "dtype_id",
    "bytes",
    "peer",
    "peer_from",
    "group_id",
    "axis",
)
"""Columns that are filled here."""

ELEMENT_BYTES = {
    **dict.fromkeys(("float64", "double", "int64", "long", "longint", "uint64", "complex64", "complexfloat"), 8),
    **dict.fromkeys(("float32", "float", "int32", "int", "uint32"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16", "int16", "short", "shortint", "uint16"), 2),
    **dict.fromkeys(("int8", "char", "signedchar", "uint8", "byte", "unsignedchar", "bool"), 1),
    **dict.fromkeys(("float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "float8e5m2fnuz", "float8e8m0fnu"), 1),
    **dict.fromkeys(("complex128", "complexdouble"), 16),
}
"""Data type as any writer names it (letters and digits, lower case) -> bytes of one element."""


def fill(
    raw: Raw, events: Columns, launches: np.ndarray, rules: Rules, names: Interner, ours: bool
) -> list[dict[str, Any]]:
    """Fill the communication columns of `events` in place (same row order as `raw`).

    Returns the groups that this file knows: name, axis and ranks.
    """
    rows = np.flatnonzero((events["kind"] == _COMM) | (events["kind"] == _WAIT))
    if not len(rows):
        return []
    columns = dict(raw.columns)
    if not ours:
        _inherit(raw, columns, events)
    for column in _FILLED:
        own(events, column)
    _fill_collective(raw, columns, events, rows, rules)
    if not ours:
        _collective_from_launch(raw, events, launches, rules)
    for column in ("seq", "in_elements", "out_elements"):
        values = columns[column][rows]
        events[column][rows] = np.where(values >= 0, values, -1)
    events["dtype_id"][rows] = raw.ask(columns["dtype"][rows], names.code, -1, np.int32)
    _fill_bytes(raw, columns, events, rows)
    _fill_peers(columns, events, rows)
    return _fill_groups(raw, columns, events, rows, rules, names, ours)


def _inherit(raw: Raw, columns: Columns, events: Columns) -> None:
    """Copy the description of `record_param_comms` onto the kernels that it launched (same external id)."""
    external, described = columns["external_id"], columns["collective"] >= 0
    calls = np.flatnonzero((events["kind"] == _HOST) & described & (external != MISSING))
    bare = np.flatnonzero((events["kind"] == _COMM) & ~described & (external != MISSING))
    waits = {code for code, text in enumerate(raw.strings) if text == "wait"}
    calls = calls[[code not in waits for code in columns["collective"][calls].tolist()]]
    if not len(calls) or not len(bare):
        return
    calls = calls[np.argsort(external[calls], kind="stable")]
    found = np.minimum(np.searchsorted(external[calls], external[bare]), len(calls) - 1)
    same = external[calls[found]] == external[bare]
    for column in _DESCRIPTION:
        if not is_constant(columns[column]):
            columns[column] = columns[column].copy()
            columns[column][bare[same]] = columns[column][calls[found[same]]]


def _fill_collective(raw: Raw, columns: Columns, events: Columns, rows: np.ndarray, rules: Rules) -> None:
    """By what the row says, else by a kernel's own name."""
    told = raw.ask(columns["collective"][rows], rules.collective, -1, np.int8)
    guess = raw.ask(columns["name"][rows], lambda name: collective_of_kernel(name.removeprefix("void ")), -1, np.int8)
    known = events["collective"][rows]
    events["collective"][rows] = np.where(told >= 0, told, np.where(known >= 0, known, guess))


def _collective_from_launch(raw: Raw, events: Columns, launches: np.ndarray, rules: Rules) -> None:
    """Kernels of unknown collective: the `nccl:*` annotation around the call that launched them, on its thread."""
    columns = raw.columns
    bare = np.flatnonzero((events["kind"] == _COMM) & (events["collective"] < 0) & (events["launch_id"] >= 0))
    calls = np.flatnonzero(launches & (events["launch_id"] >= 0))
    marks = np.flatnonzero(
        (events["kind"] == _HOST)
        & raw.ask(columns["name"], lambda name: name.startswith(("nccl:", "rccl:")), False, bool)
        & (events["dur_ns"] > 0)
    )
    if not len(bare) or not len(calls) or not len(marks):
        return
    calls = calls[np.argsort(events["launch_id"][calls], kind="stable")]
    found = np.minimum(np.searchsorted(events["launch_id"][calls], events["launch_id"][bare]), len(calls) - 1)
    same = events["launch_id"][calls[found]] == events["launch_id"][bare]
    start, end = events["start_ns"], events["start_ns"] + events["dur_ns"]
    for row, call in zip(bare[same].tolist(), calls[found[same]].tolist(), strict=True):
        around = marks[
            (columns["pid"][marks] == columns["pid"][call])
            & (columns["tid"][marks] == columns["tid"][call])
            & (start[marks] <= start[call])
            & (start[call] < end[marks])
        ]
        if len(around):
            innermost = around[int(np.argmax(start[around]))]
            found_code = rules.collective(raw.strings[columns["name"][innermost]])
            if found_code not in _NEVER_SEND_RECEIVE or "SendRecv" not in raw.strings[columns["name"][row]]:
                events["collective"][row] = found_code


def _fill_bytes(raw: Raw, columns: Columns, events: Columns, rows: np.ndarray) -> None:
    """Message size where it is not recorded: elements times element size, counted as nccl-tests does."""
    unknown = rows[(events["bytes"][rows] < 0) & (events["kind"][rows] == _COMM)]
    size = raw.ask(columns["dtype"][unknown], _element_bytes, -1, np.int64)
    given, received = events["in_elements"][unknown], events["out_elements"][unknown]
    whole_output = events["collective"][unknown] == code_of(COLLECTIVES, "all_gather")
    from_peer = events["collective"][unknown] == _RECEIVE
    elements = np.where(whole_output | from_peer, received, given)
    usable = (size > 0) & (elements >= 0) & (elements < (1 << 58))
    events["bytes"][unknown] = np.where(usable, elements * size, -1)


def _element_bytes(dtype: str) -> int:
    return ELEMENT_BYTES.get(re.sub("[^a-z0-9]", "", dtype.lower()), -1)


def _fill_peers(columns: Columns, events: Columns, rows: np.ndarray) -> None:
    """The other end of a point to point, both ends of a ring shift, the root of a rooted collective."""
    collective = events["collective"][rows]
    source, destination, root = (columns[name][rows] for name in ("source_rank", "destination_rank", "root_rank"))
    peer = np.where(collective == _RECEIVE, source, np.where(np.isin(collective, (_SEND, _RING)), destination, root))
    peer_from = np.where(collective == _RING, source, -1)
    events["peer"][rows] = np.where((peer >= 0) & (peer < 1 << 31), peer, -1)
    events["peer_from"][rows] = np.where((peer_from >= 0) & (peer_from < 1 << 31), peer_from, -1)


def _fill_groups(
    raw: Raw, columns: Columns, events: Columns, rows: np.ndarray, rules: Rules, names: Interner, ours: bool
) -> list[dict[str, Any]]:
    """`group_id`, and the axis where only the group's description tells it; the groups found."""
    configured = _configured_groups(raw)
    parts = ("group_name", "group_description", "group_ranks")
    codes = np.stack([columns[part][rows].astype(np.int64) for part in parts], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True) if len(rows) else (codes, np.zeros(0, np.int64))
    groups: dict[str, dict[str, Any]] = {}
    ids, axes = [], []
    for triple in distinct.tolist():
        name, description, listed = (raw.strings[code] if code >= 0 else "" for code in triple)
        known = configured.get(name, {})
        ranks = _ranks(listed) or known.get("ranks", ())
        description = description or known.get("description", "")
        if not name and not ranks:
            ids.append(-1)
            axes.append(-1)
            continue
        label = name if ours else group_label(name, ranks)
        axis = rules.axis(description or name)
        ids.append(names.code(label))
        axes.append(axis)
        groups[label] = {"name": label, "axis": AXES[axis] if axis >= 0 else "", "ranks": list(ranks)}
    if len(rows):
        inverse = inverse.reshape(-1)
        events["group_id"][rows] = np.array(ids, np.int32)[inverse]
        told = events["axis"][rows]
        events["axis"][rows] = np.where(told >= 0, told, np.array(axes, np.int8)[inverse])
    for row_axis, label_id in zip(events["axis"][rows].tolist(), events["group_id"][rows].tolist(), strict=True):
        if row_axis >= 0 and label_id >= 0:
            groups[names.strings[label_id]]["axis"] = AXES[row_axis]
    return list(groups.values())


def group_label(name: str, ranks: tuple[int, ...]) -> str:
    """A group's name that is the same on all its ranks and on no other group: `1 [0-3]`, `2 [0,4,8]`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{name} [{listed}]".strip() if ranks else name


def _configured_groups(raw: Raw) -> dict[str, dict[str, Any]]:
    """Group name -> description and ranks, from the header's `pg_config`."""
    info = raw.header.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    groups = {}
    for group in listed if isinstance(listed, list) else ():
        if isinstance(group, dict) and "pg_name" in group:
            ranks = group.get("ranks")
            ranks = tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else ()
            groups[str(group["pg_name"])] = {"description": str(group.get("pg_desc", "")), "ranks": ranks}
    return groups


def _ranks(listed: str) -> tuple[int, ...]:
    """`[0, 1, 2, 3]` -> its ranks; empty for anything else (a long list is written with an ellipsis)."""
    try:
        ranks = json.loads(listed) if listed else ()
    except json.JSONDecodeError:
        return ()
    return tuple(ranks) if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks) else ()
