"""From what a file says (`Raw`) to what it means: the column store's rows, lanes, strings and counters of one rank.

Everything here works on whole columns and on distinct strings, never on single events.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from stepscope.analysis.ingest import communication, damage, doubts
from stepscope.analysis.ingest.lanes import build_lanes
from stepscope.analysis.ingest.raw import MISSING, Interner, Raw, is_constant, own
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.ingest.steps_of_ours import settle_steps
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Columns, RankData, empty_columns, sort_order
from stepscope.tracer.schema import (
    AXES,
    COUNTER_COLUMNS,
    EVENT_COLUMNS,
    FLAG_DEVICE_COPY,
    FLAG_FUSED,
    FLAG_GRAPH,
    FLAG_PARTIAL,
    KINDS,
    PHASES,
    STRATEGIES,
    code_of,
)

CATEGORIES = ("host", "kernel", "memcpy", "wait", "launch")
"""What `Rules.category` says of a row."""

LAUNCH = CATEGORIES.index("launch")
COMPUTE, COMM, WAIT, MEMCPY, HOST = (KINDS.index(kind) for kind in ("compute", "comm", "wait", "memcpy", "host"))


@dataclass
class RankFile:
    """One rank as read from one file: its data, what to say about it, and the facts that the run is put together from."""

    data: RankData
    health: list[HealthItem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, code: str, text: str, touches: tuple[str, ...] = (), offset: int | None = None) -> None:
        """Add a health item."""
        self.health.append(HealthItem(code, text, offset=offset, touches=touches))


def normalize(raw: Raw, rules: Rules, ours: bool) -> RankFile:
    """One file's rows in the store's columns, sorted.

    `ours`: written by stepscope, whose rows are in step order and never implausible, and whose names follow no kernel's
    naming. The `rank` column is left at -1: the caller knows the rank. `raw` gives up its columns: a large trace is held
    once, not twice.
    """
    used_up, raw = raw, replace(raw, columns=dict(raw.columns))
    used_up.columns = {}
    result = RankFile(RankData({}))
    for repair in raw.repairs:
        touched = ("ledger",) if repair.code in ("lost_event", "long_event", "too_many_texts") else ()
        result.note(repair.code, f"{repair.times} {repair.text}", touched, repair.offset)
    raw = damage.select_rows(raw, result.note)
    if ours:
        raw = settle_steps(raw, result.note)
    categories = raw.ask(raw.columns["cat"], lambda cat: CATEGORIES.index(rules.category(cat)), 0, np.int8)
    kinds = _kinds(raw, categories, rules, ours)
    if not ours:
        kept = ~damage.zero_rows(raw, kinds != HOST, result.note)
        raw, kinds, categories = raw.take(kept), kinds[kept], categories[kept]
    names = Interner()
    events = _plain_columns(raw, names)
    events["kind"] = kinds
    device = kinds != HOST
    if len(kinds) and not device.any():
        _host_communication(raw, events, rules, result)
    groups = communication.fill(raw, events, categories == LAUNCH, rules, names, ours)
    events["flags"] = _flags(raw, events, categories, rules)
    if ours:
        ended = (raw.columns["partial"] > 0) | (raw.columns["unfinished"] > 0)
        events["flags"][ended] |= FLAG_PARTIAL
    lanes, events["lane"] = build_lanes(raw, events, device)
    raw.columns = {}
    order = sort_order(events)
    for name, values in events.items():
        if not is_constant(values):
            events[name] = values[order]
    if not ours:
        damage.cut_impossible(events, lanes, names.strings, result.note)
        doubts.launches(events, names.strings, result.note)
        doubts.unrecognised(events, lanes, names.strings, world_size(raw), result.note)
    if raw.cut is not None:
        if not ours:
            damage.mark_cut(events, names.strings)
        damage.report_cut(raw, ours, result.note)
    counters = _counters(raw, names)
    result.data = RankData(events, tuple(names.strings), lanes, counters)
    result.facts = _facts(raw, events, device, groups)
    return result


def world_size(raw: Raw) -> int | None:
    """How many ranks the header says there are."""
    info = raw.header.get("distributedInfo")
    size = info.get("world_size") if isinstance(info, dict) else None
    return size if isinstance(size, int) else None


def base_ns(raw: Raw) -> int:
    """What the file's stamps count from: `baseTimeNanoseconds` of its header, else the epoch itself."""
    base = raw.header.get("baseTimeNanoseconds", 0)
    try:
        return int(base)
    except (TypeError, ValueError):
        return 0


def _kinds(raw: Raw, categories: np.ndarray, rules: Rules, ours: bool) -> np.ndarray:
    """Kind of each row: category first, then communication metadata, then the kernel's name."""
    kind_of = {"kernel": COMPUTE, "memcpy": MEMCPY, "wait": WAIT}
    kinds = np.array([kind_of.get(category, HOST) for category in CATEGORIES], np.int8)[categories]
    kernels = np.flatnonzero(kinds == COMPUTE)
    communicates = raw.columns["collective"][kernels] >= 0
    if not ours:
        communicates = communicates | raw.ask(raw.columns["name"][kernels], rules.communication, False, bool)
    kinds[kernels[communicates]] = COMM
    return kinds


def _plain_columns(raw: Raw, names: Interner) -> Columns:
    """The columns that are copied or looked up, one for one; those that no row has are one value shown often."""
    source = raw.columns
    events = {name: np.broadcast_to(np.array([-1], dtype), raw.rows) for name, dtype in EVENT_COLUMNS.items()}
    events["start_ns"] = source["ts"] + base_ns(raw)
    events["dur_ns"] = source["dur"]
    for ours, theirs in (
        ("stage", "stage"),
        ("chunk", "chunk"),
        ("microbatch", "microbatch"),
        ("layer", "layer"),
        ("bytes", "bytes"),
        ("launch_id", "correlation"),
        ("op_id", "op_id"),
    ):
        if not is_constant(source[theirs]):
            events[ours] = bounded(source[theirs], EVENT_COLUMNS[ours])
    if (events["launch_id"] == 0).any():
        own(events, "launch_id")[events["launch_id"] == 0] = -1  # 0: launched by no call
    for ours, theirs, base in (("issue_ns", "issue_ns", base_ns(raw)), ("op_id", "waits_for", 0)):
        given = source[theirs] != MISSING
        if given.any():
            own(events, ours)[given] = source[theirs][given] + base
    for column, vocabulary in (("phase", PHASES), ("axis", AXES), ("strategy", STRATEGIES)):
        events[column] = raw.ask(source[column], partial(code_of, vocabulary), -1, np.int8)
    events["name_id"] = raw.ask(source["name"], names.code, -1, np.int32)
    return events


def bounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As `dtype`; missing, negative and too large values become -1."""
    usable = (values >= 0) & (values <= np.iinfo(dtype).max)
    return np.where(usable, values, -1).astype(dtype)


def _host_communication(raw: Raw, events: Columns, rules: Rules, result: RankFile) -> None:
    """A rank without any device row: its `gloo:*` annotations are its communication."""
    found = raw.ask(raw.columns["name"], rules.host_communication, False, bool)
    events["kind"][found] = COMM
    own(events, "collective")[found] = raw.ask(raw.columns["name"][found], rules.collective, -1, np.int8)
    result.note(
        "host_ledger",
        "the rank has no device row: its ledger is of host time, with "
        f"{int(found.sum())} annotated communications and no compute kernel",
        touches=("ledger", "overlap"),
    )


def _flags(raw: Raw, events: Columns, categories: np.ndarray, rules: Rules) -> np.ndarray:
    """FLAG_FUSED, FLAG_DEVICE_COPY and FLAG_GRAPH."""
    flags = np.zeros(raw.rows, np.int32)
    name = raw.columns["name"]
    comm = np.flatnonzero(events["kind"] == COMM)
    flags[comm] |= FLAG_FUSED * raw.ask(name[comm], rules.fused, 0, np.int32)
    copies = np.flatnonzero(events["kind"] == MEMCPY)
    flags[copies] |= FLAG_DEVICE_COPY * raw.ask(name[copies], _within_a_device, 0, np.int32)
    launches = np.flatnonzero((categories == LAUNCH) & (events["launch_id"] >= 0))
    graphs = launches[raw.ask(name[launches], lambda text: "GraphLaunch" in text, False, bool)]
    if len(graphs):
        device = np.isin(events["launch_id"], events["launch_id"][graphs]) & (events["kind"] != HOST)
        flags[device] |= FLAG_GRAPH
    return flags


def _within_a_device(name: str) -> bool:
    return "DtoD" in name or "Device -> Device" in name


def _counters(raw: Raw, names: Interner) -> Columns:
    samples = sorted(raw.counters, key=lambda sample: (sample.name, sample.key, sample.time_ns))
    columns = empty_columns(COUNTER_COLUMNS, len(samples))
    if samples:
        columns["time_ns"] = np.array([sample.time_ns for sample in samples], np.int64) + base_ns(raw)
        columns["name_id"] = np.array([names.code(sample.name) for sample in samples], np.int32)
        columns["key_id"] = np.array([names.code(sample.key) for sample in samples], np.int32)
        columns["value"] = np.array([sample.value for sample in samples], np.int64)
    return columns


def _facts(raw: Raw, events: Columns, device: np.ndarray, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What the run is put together from, in JSON's types."""
    info = raw.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rows = len(events["start_ns"])
    return {
        "rank": info.get("rank") if isinstance(info.get("rank"), int) else None,
        "world_size": world_size(raw),
        "backend": str(info.get("backend", "")),
        "host": str(raw.header.get("host_name", "")),
        "rows": rows,
        "device_rows": int(device.sum()),
        "first_ns": int(events["start_ns"].min()) if rows else -1,
        "last_ns": int((events["start_ns"] + events["dur_ns"]).max()) if rows else -1,
        "groups": groups,
        "cut": raw.cut is not None,
    }
