"""What communication rows say about themselves: collective, group, peers, element counts and message size.

Kernels of older traces say nothing: then the host's rows speak for them (undescribed.py), or their own name.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from stepscope.analysis.ingest.raw import Interner, Question, Raw, own
from stepscope.analysis.ingest.rules import Rules, collective_of_kernel
from stepscope.analysis.ingest.undescribed import Calls
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import AXES, COLLECTIVES, KINDS, MAX_RANKS, code_of

_COMM, _WAIT = (KINDS.index(kind) for kind in ("comm", "wait"))
_SEND, _RECEIVE, _RING = (code_of(COLLECTIVES, word) for word in ("send", "receive", "ring_shift"))

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


class Filler:
    """Fills the communication columns of one file's rows, chunk by chunk, and keeps what it learns of the groups."""

    def __init__(self, rules: Rules, names: Interner, calls: Calls | None, header: dict[str, Any]) -> None:
        """`calls`: what host rows say of undescribed kernels; None for our own files, whose rows say all themselves."""
        self._rules, self._names, self._calls = rules, names, calls
        self._collective = Question(rules.collective, -1, np.int8)
        self._of_kernel = Question(lambda name: collective_of_kernel(name.removeprefix("void ")), -1, np.int8)
        self._dtype = Question(names.code, -1, np.int32)
        self._element = Question(_element_bytes, -1, np.int64)
        self._configured = _configured_groups(header)
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}  # codes of a row's three texts -> group id, axis
        self._told: dict[str, set[int]] = {}  # group -> axes that its rows name
        self.groups: dict[str, dict[str, Any]] = {}

    def fill(self, raw: Raw, events: Columns) -> None:
        """Fill the columns of `events` in place (same row order as `raw`)."""
        rows = np.flatnonzero((events["kind"] == _COMM) | (events["kind"] == _WAIT))
        if not len(rows):
            return
        columns = dict(raw.columns)
        if self._calls is not None:
            self._calls.inherit(columns, events["kind"])
        for column in _FILLED:
            own(events, column)
        self._fill_collective(raw, columns, events, rows)
        if self._calls is not None:
            self._calls.collectives(raw.strings, events, columns["name"])
        for column in ("seq", "in_elements", "out_elements"):
            values = columns[column][rows]
            events[column][rows] = np.where(values >= 0, values, -1)
        events["dtype_id"][rows] = self._dtype(raw.strings, columns["dtype"][rows])
        self._fill_bytes(raw, columns, events, rows)
        _fill_peers(columns, events, rows)
        self._fill_groups(raw, columns, events, rows)

    def _fill_collective(self, raw: Raw, columns: Columns, events: Columns, rows: np.ndarray) -> None:
        """By what the row says, else by a kernel's own name."""
        told = self._collective(raw.strings, columns["collective"][rows])
        guess = self._of_kernel(raw.strings, columns["name"][rows])
        known = events["collective"][rows]
        events["collective"][rows] = np.where(told >= 0, told, np.where(known >= 0, known, guess))

    def _fill_bytes(self, raw: Raw, columns: Columns, events: Columns, rows: np.ndarray) -> None:
        """Message size where it is not recorded: elements times element size, counted as nccl-tests does."""
        unknown = rows[(events["bytes"][rows] < 0) & (events["kind"][rows] == _COMM)]
        size = self._element(raw.strings, columns["dtype"][unknown])
        given, received = events["in_elements"][unknown], events["out_elements"][unknown]
        whole_output = events["collective"][unknown] == code_of(COLLECTIVES, "all_gather")
        from_peer = events["collective"][unknown] == _RECEIVE
        elements = np.where(whole_output | from_peer, received, given)
        usable = (size > 0) & (elements >= 0) & (elements < (1 << 58))
        events["bytes"][unknown] = np.where(usable, elements * size, -1)

    def _fill_groups(self, raw: Raw, columns: Columns, events: Columns, rows: np.ndarray) -> None:
        """`group_id`, and the axis where only the group's description tells it; the groups found."""
        parts = ("group_name", "group_description", "group_ranks")
        # a code has less than 21 bits (reading.MAX_TEXTS)
        key = np.zeros(len(rows), np.int64)
        for part in parts:
            key = (key << 21) + columns[part][rows] + 1
        distinct, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        triples = np.stack([(distinct >> shift) % (1 << 21) - 1 for shift in (42, 21, 0)], axis=1)
        ids, axes = np.empty((2, len(distinct)), np.int64)
        for place in np.argsort(first).tolist():  # as they come in the file: what is said first counts
            ids[place], axes[place] = self._group(raw.strings, tuple(triples[place].tolist()))
        events["group_id"][rows] = ids[inverse]
        told = events["axis"][rows]
        events["axis"][rows] = np.where(told >= 0, told, axes[inverse])
        of_both = (events["axis"][rows] >= 0) & (events["group_id"][rows] >= 0)
        pairs = (events["group_id"][rows[of_both]].astype(np.int64) << 8) + events["axis"][rows[of_both]]
        for pair in np.unique(pairs).tolist():
            group, axis = self._names.strings[pair >> 8], pair & 255
            self._told.setdefault(group, set()).add(axis)
            self.groups[group]["axis"] = AXES[min(self._told[group])]

    def contradictions(self) -> list[str]:
        """Groups whose rows name several axes: `dp_0 (dp, tp)`."""
        listed = {group: ", ".join(AXES[axis] for axis in sorted(axes)) for group, axes in self._told.items()}
        return sorted(f"{group} ({listed[group]})" for group, axes in self._told.items() if len(axes) > 1)

    def _group(self, strings: list[str], codes: tuple[int, ...]) -> tuple[int, int]:
        """Group id and axis of a row with these texts (name, description, ranks)."""
        known = self._known.get(codes)
        if known is not None:
            return known
        name, description, listed = (strings[code] if code >= 0 else "" for code in codes)
        configured = self._configured.get(name, {})
        ranks = _ranks(listed) or configured.get("ranks", ())
        description = description or configured.get("description", "")
        found = (-1, -1)
        if name or ranks:
            label = name if self._calls is None else group_label(name, ranks)
            axis = self._rules.axis(description or name)
            found = (self._names.code(label), axis)
            group = self.groups.setdefault(label, {"name": label, "axis": AXES[axis] if axis >= 0 else "", "ranks": []})
            group["ranks"] = group["ranks"] or list(ranks)
        self._known[codes] = found
        return found


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


def _configured_groups(header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Group name -> description and ranks, from the header's `pg_config`."""
    info = header.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    groups = {}
    for group in listed if isinstance(listed, list) else ():
        if isinstance(group, dict) and "pg_name" in group:
            ranks = group.get("ranks")
            ranks = _only_ranks(ranks) if isinstance(ranks, list) else ()
            groups[str(group["pg_name"])] = {"description": str(group.get("pg_desc", "")), "ranks": ranks}
    return groups


def _ranks(listed: str) -> tuple[int, ...]:
    """`[0, 1, 2, 3]` -> its ranks; empty for anything else (a long list is written with an ellipsis)."""
    try:
        ranks = json.loads(listed) if listed else ()
    except (ValueError, RecursionError):
        return ()
    return _only_ranks(ranks) if isinstance(ranks, list) and len(_only_ranks(ranks)) == len(ranks) else ()


def _only_ranks(listed: list[Any]) -> tuple[int, ...]:
    """Those entries of a list that can be ranks."""
    return tuple(r for r in listed if isinstance(r, int) and not isinstance(r, bool) and 0 <= r < MAX_RANKS)
