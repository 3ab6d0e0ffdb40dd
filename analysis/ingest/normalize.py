"""From what a file says (`Raw`) to what it means: the column store's rows, lanes, strings and counters of one rank.

Everything here works on whole columns and on distinct strings, never on single events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepscope.analysis.ingest import communication, damage, doubts
from stepscope.analysis.ingest.lanes import build_lanes, thread_names
from stepscope.analysis.ingest.raw import MISSING, Interner, Raw
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.ingest.steps_of_ours import settle_steps
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Columns, RankData, empty_columns, sort_events
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


def normalize(raw: Raw, rules: Rules, own: bool) -> RankFile:
    """One file's rows in the store's columns, sorted.

    `own`: written by stepscope, whose rows are in step order and never implausible, and whose names follow no kernel's
    naming. The `rank` column is left at -1: the caller knows the rank.
    """
    result = RankFile(RankData({}))
    for repair in raw.repairs:
        touched = ("ledger",) if repair.code in ("lost_event", "long_event", "too_many_texts") else ()
        result.note(repair.code, f"{repair.times} {repair.text}", touched, repair.offset)
    titles = thread_names(raw)
    raw = damage.select_rows(raw, result.note)
    if own:
        raw = settle_steps(raw, result.note)
    categories = _per_string(raw, "cat", rules.category, "host")
    kinds = _kinds(raw, categories, rules, own)
    if not own:
        kept = ~damage.zero_rows(raw, kinds != HOST, result.note)
        raw, kinds, categories = raw.take(kept), kinds[kept], categories[kept]
    names = Interner()
    events = _plain_columns(raw, names)
    events["kind"] = kinds.astype(np.int8)
    device = kinds != HOST
    if len(kinds) and not device.any():
        _host_communication(raw, events, rules, result)
    groups = communication.fill(raw, events, categories == "launch", rules, names, own)
    events["flags"] = _flags(raw, events, categories, rules)
    if own:
        ended = (raw.columns["partial"] > 0) | (raw.columns["unfinished"] > 0)
        events["flags"][ended] |= FLAG_PARTIAL
    lanes, events["lane"] = build_lanes(raw, events, device, titles)
    events = sort_events(events)
    if not own:
        damage.cut_impossible(events, lanes, names.strings, result.note)
        doubts.launches(events, names.strings, result.note)
        doubts.unrecognised(events, lanes, names.strings, world_size(raw), result.note)
    if raw.cut is not None:
        if not own:
            damage.mark_cut(events, names.strings)
        damage.report_cut(raw, own, result.note)
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


def _per_string(raw: Raw, column: str, answer: Any, missing: Any) -> np.ndarray:
    """`answer(text)` of each row's text in `column`, asked once per distinct text."""
    codes = raw.columns[column]
    distinct, inverse = np.unique(codes, return_inverse=True)
    answers = [answer(raw.strings[code]) if code >= 0 else missing for code in distinct.tolist()]
    return np.array(answers)[inverse] if len(codes) else np.zeros(0, np.array([missing]).dtype)


def _kinds(raw: Raw, categories: np.ndarray, rules: Rules, own: bool) -> np.ndarray:
    """Kind of each row: category first, then communication metadata, then the kernel's name."""
    kinds = np.full(raw.rows, HOST, np.int64)
    kinds[categories == "memcpy"] = MEMCPY
    kinds[categories == "wait"] = WAIT
    kernels = np.flatnonzero(categories == "kernel")
    described = raw.columns["collective"][kernels] >= 0
    if own:
        named = np.zeros(len(kernels), bool)
    else:
        codes, inverse = np.unique(raw.columns["name"][kernels], return_inverse=True)
        named = np.array([code >= 0 and rules.communication(raw.strings[code]) for code in codes.tolist()], bool)[
            inverse
        ]
    kinds[kernels] = np.where(described | named, COMM, COMPUTE)
    return kinds


def _plain_columns(raw: Raw, names: Interner) -> Columns:
    """The columns that are copied or looked up, one for one."""
    events = empty_columns(EVENT_COLUMNS, raw.rows)
    source = raw.columns
    events["start_ns"] = source["ts"] + base_ns(raw)
    events["dur_ns"] = np.maximum(source["dur"], 0)
    for ours, theirs in (
        ("stage", "stage"),
        ("chunk", "chunk"),
        ("microbatch", "microbatch"),
        ("layer", "layer"),
        ("bytes", "bytes"),
        ("launch_id", "correlation"),
        ("op_id", "op_id"),
    ):
        events[ours] = bounded(source[theirs], EVENT_COLUMNS[ours])
    events["launch_id"][events["launch_id"] == 0] = -1  # 0: launched by no call
    issued = source["issue_ns"] != MISSING
    events["issue_ns"][issued] = source["issue_ns"][issued] + base_ns(raw)
    waiting = source["waits_for"] != MISSING
    events["op_id"][waiting] = source["waits_for"][waiting]
    for column, vocabulary in (("phase", PHASES), ("axis", AXES), ("strategy", STRATEGIES)):
        events[column] = _per_string(raw, column, lambda word, v=vocabulary: code_of(v, word), -1).astype(np.int8)
    events["name_id"] = _per_string(raw, "name", names.code, -1).astype(np.int32)
    return events


def bounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As `dtype`; missing, negative and too large values become -1."""
    usable = (values >= 0) & (values <= np.iinfo(dtype).max)
    return np.where(usable, values, -1).astype(dtype)


def _host_communication(raw: Raw, events: Columns, rules: Rules, result: RankFile) -> None:
    """A rank without any device row: its `gloo:*` annotations are its communication."""
    found = _per_string(raw, "name", rules.host_communication, False).astype(bool)
    events["kind"][found] = COMM
    events["collective"][found] = _per_string(raw, "name", rules.collective, -1)[found].astype(np.int8)
    result.note(
        "host_ledger",
        "the rank has no device row: its ledger is of host time, with "
        f"{int(found.sum())} annotated communications and no compute kernel",
        touches=("ledger", "overlap"),
    )


def _flags(raw: Raw, events: Columns, categories: np.ndarray, rules: Rules) -> np.ndarray:
    """FLAG_FUSED, FLAG_DEVICE_COPY and FLAG_GRAPH."""
    flags = np.zeros(raw.rows, np.int32)
    comm = np.flatnonzero(events["kind"] == COMM)
    flags[comm] |= FLAG_FUSED * _chosen(raw, comm, rules.fused)
    copies = np.flatnonzero(events["kind"] == MEMCPY)
    flags[copies] |= FLAG_DEVICE_COPY * _chosen(raw, copies, lambda name: "DtoD" in name or "Device -> Device" in name)
    launches = np.flatnonzero((categories == "launch") & (events["launch_id"] >= 0))
    graphs = launches[_chosen(raw, launches, lambda name: "GraphLaunch" in name).astype(bool)]
    if len(graphs):
        device = np.isin(events["launch_id"], events["launch_id"][graphs]) & (events["kind"] != HOST)
        flags[device] |= FLAG_GRAPH
    return flags


def _chosen(raw: Raw, rows: np.ndarray, rule: Any) -> np.ndarray:
    """1 where the name of a row fits, else 0."""
    codes, inverse = np.unique(raw.columns["name"][rows], return_inverse=True)
    return np.array([int(code >= 0 and rule(raw.strings[code])) for code in codes.tolist()], np.int32)[inverse]


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
