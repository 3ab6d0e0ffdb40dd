"""Columns that are copied or looked up, one for one, from what a file says; and what its header says of the whole."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from stepscope.analysis.ingest.damage import FARTHEST_NS
from stepscope.analysis.ingest.raw import MISSING, Interner, Question, Raw, is_constant, is_id, own
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.ingest.survey import COMM, MEMCPY
from stepscope.analysis.run import Columns, empty_columns
from stepscope.tracer.schema import (
    AXES,
    COUNTER_COLUMNS,
    EVENT_COLUMNS,
    FLAG_DEVICE_COPY,
    FLAG_FUSED,
    MAX_RANKS,
    PHASES,
    STEP_ANNOTATION,
    STRATEGIES,
    code_of,
)


class Lookups:
    """What is asked of the texts of one file's rows."""

    def __init__(self, rules: Rules, names: Interner) -> None:
        self._code = Question(names.code, -1, np.int32)
        self._grid = Question(lambda text: names.code(grid) if (grid := _grid(text)) else -1, -1, np.int32)
        self._vocabularies = {
            column: Question(partial(code_of, words), -1, np.int8)
            for column, words in (("phase", PHASES), ("axis", AXES), ("strategy", STRATEGIES))
        }
        self._fused = Question(rules.fused, 0, np.int32)
        self._within_device = Question(_within_a_device, 0, np.int32)
        self._annotated = Question(rules.host_communication, False, bool)
        self._collective = Question(rules.collective, -1, np.int8)
        self.is_step = Question(lambda name: name.startswith(STEP_ANNOTATION), False, bool)

    def plain_columns(self, raw: Raw) -> Columns:
        """The columns that are copied or looked up, one for one; those that no row has are one value shown often."""
        source = raw.columns
        events = {name: np.broadcast_to(np.array([-1], dtype), raw.rows) for name, dtype in EVENT_COLUMNS.items()}
        events["start_ns"] = source["ts"] + base_ns(raw)
        events["dur_ns"] = source["dur"]
        for name in _COPIED:
            if not is_constant(source[name]) or source[name][0] >= 0:
                events[name] = bounded(source[name], EVENT_COLUMNS[name])
        if not is_constant(source["correlation"]) or is_id(source["correlation"][:1]).any():
            events["launch_id"] = np.where(is_id(source["correlation"]), source["correlation"], -1)
        for ours, theirs, base in (("issue_ns", "issue_ns", base_ns(raw)), ("op_id", "waits_for", 0)):
            if is_constant(source[theirs]) and source[theirs][0] == MISSING:
                continue
            given = source[theirs] != MISSING
            own(events, ours)[given] = source[theirs][given] + base
        for column, question in self._vocabularies.items():
            events[column] = question(raw.strings, source[column])
        events["name_id"] = self._code(raw.strings, source["name"])
        events["grid_id"] = self._grid(raw.strings, source["grid"])
        return events

    def host_communication(self, raw: Raw, events: Columns) -> int:
        """Of a rank without any device row, the `gloo:*` annotations are its communication: how many there are."""
        found = self._annotated(raw.strings, raw.columns["name"])
        events["kind"][found] = COMM
        own(events, "collective")[found] = self._collective(raw.strings, raw.columns["name"][found])
        return int(found.sum())

    def flags(self, raw: Raw, events: Columns) -> np.ndarray:
        """FLAG_FUSED and FLAG_DEVICE_COPY."""
        flags = np.zeros(raw.rows, np.int32)
        for kind, question, flag in (
            (COMM, self._fused, FLAG_FUSED),
            (MEMCPY, self._within_device, FLAG_DEVICE_COPY),
        ):
            rows = np.flatnonzero(events["kind"] == kind)
            flags[rows] |= flag * question(raw.strings, raw.columns["name"][rows])
        return flags


_COPIED = ("stage", "chunk", "microbatch", "layer", "bytes", "op_id")
"""Columns that are ours and the file's."""


def _grid(text: str) -> str:
    """`[512, 1, 1]` -> `512x1x1`; nothing for anything else."""
    found = re.fullmatch(r"\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]", text, re.ASCII)
    return "x".join(found.groups()) if found else ""


def _within_a_device(name: str) -> bool:
    return "DtoD" in name or "Device -> Device" in name


def bounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As `dtype`; missing, negative and too large values become -1."""
    usable = (values >= 0) & (values <= np.iinfo(dtype).max)
    return np.where(usable, values, -1).astype(dtype)


def counter_columns(raw: Raw, names: Interner) -> Columns:
    """The file's counter samples in the store's columns, by name, series and time."""
    samples = sorted(raw.counters, key=lambda sample: (sample.name, sample.key, sample.time_ns))
    columns = empty_columns(COUNTER_COLUMNS, len(samples))
    if samples:
        columns["time_ns"] = np.array([sample.time_ns for sample in samples], np.int64) + base_ns(raw)
        columns["name_id"] = np.array([names.code(sample.name) for sample in samples], np.int32)
        columns["key_id"] = np.array([names.code(sample.key) for sample in samples], np.int32)
        columns["value"] = np.array([sample.value for sample in samples], np.int64)
    return columns


def embedded_rank(raw: Raw) -> int | None:
    """Which rank the header says the file is of."""
    info = raw.header.get("distributedInfo")
    return _header_number(info.get("rank"), 0, MAX_RANKS - 1) if isinstance(info, dict) else None


def world_size(raw: Raw) -> int | None:
    """How many ranks the header says there are."""
    info = raw.header.get("distributedInfo")
    return _header_number(info.get("world_size"), 1, MAX_RANKS) if isinstance(info, dict) else None


def base_ns(raw: Raw) -> int:
    """What the file's stamps count from: `baseTimeNanoseconds` of its header, else the epoch itself."""
    base = raw.header.get("baseTimeNanoseconds", 0)
    try:
        return int(base) if abs(int(base)) <= FARTHEST_NS else 0  # beyond, sums with a stamp do not fit
    except (TypeError, ValueError):
        return 0


def odd_header(raw: Raw) -> list[str]:
    """What the header says that cannot be, as words; it counts as not said."""
    info = raw.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    said = [(key, info.get(key), known(raw)) for key, known in (("rank", embedded_rank), ("world_size", world_size))]
    base = raw.header.get("baseTimeNanoseconds")
    said.append(("baseTimeNanoseconds", base, base_ns(raw) or None))
    return [
        f"{key} {str(value)[:40]}"
        for key, value, known in said
        if value is not None and value not in (0, "0", -1) and known is None
    ]


def _header_number(value: object, least: int, most: int) -> int | None:
    """A rank or a number of ranks, None where there is none that can be."""
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None
