"""From what a file says (`Raw`) to what it means: the column store's rows, lanes, strings and counters of one rank.

A file is looked at twice, some rows at a time: while it is scanned (survey.py), and when all of it is known, here. Its rows
then lie in a spool, each chunk sorted, and are merged into the store's order (merge.py). Everything works on whole columns and
on distinct strings, never on single events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from stepscope.analysis.ingest import damage, doubts
from stepscope.analysis.ingest.communication import Filler
from stepscope.analysis.ingest.impossible import cut_impossible
from stepscope.analysis.ingest.lanes import LaneTable
from stepscope.analysis.ingest.launches import LaunchCheck
from stepscope.analysis.ingest.merge import Runs
from stepscope.analysis.ingest.raw import MISSING, Interner, Question, Raw, is_constant, own
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.ingest.spool import Spool
from stepscope.analysis.ingest.survey import COMM, HOST, MEMCPY, Survey
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Columns, RankData, empty_columns
from stepscope.tracer.schema import (
    AXES,
    COUNTER_COLUMNS,
    EVENT_COLUMNS,
    FLAG_DEVICE_COPY,
    FLAG_FUSED,
    FLAG_GRAPH,
    FLAG_PARTIAL,
    PHASES,
    STEP_ANNOTATION,
    STRATEGIES,
    Lane,
    code_of,
)


@dataclass
class RankFile:
    """One rank as read from one file: its data, what to say about it, and the facts that the run is put together from."""

    data: RankData
    health: list[HealthItem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, code: str, text: str, touches: tuple[str, ...] = (), offset: int | None = None) -> None:
        """Add a health item."""
        self.health.append(HealthItem(code, text, offset=offset, touches=touches))


class Writer(Protocol):
    """Where the rows of a rank go, in the store's order."""

    def append(self, columns: Columns) -> None:
        """The next rows."""

    def finish(self, strings: tuple[str, ...], lanes: tuple[Lane, ...], counters: Columns) -> RankData:
        """There are no more; what is kept of the rank in memory."""


class InMemory:
    """A writer that keeps everything."""

    def __init__(self) -> None:
        self._parts: list[Columns] = []

    def append(self, columns: Columns) -> None:
        """As Writer."""
        self._parts.append(columns)

    def finish(self, strings: tuple[str, ...], lanes: tuple[Lane, ...], counters: Columns) -> RankData:
        """As Writer."""
        parts, self._parts = self._parts, []
        if not parts:
            return RankData(empty_columns(EVENT_COLUMNS), strings, lanes, counters)
        count = sum(len(part["start_ns"]) for part in parts)
        events = {
            name: np.broadcast_to(parts[0][name][:1], count)
            if all(is_constant(part[name]) and part[name][0] == parts[0][name][0] for part in parts)
            else np.concatenate([part[name] for part in parts])
            for name in EVENT_COLUMNS
        }
        return RankData(events, strings, lanes, counters)


def normalize(raw: Raw, rules: Rules, ours: bool) -> RankFile:
    """One file's rows in the store's columns, sorted, all in memory. The `rank` column is left at -1: the caller knows it."""
    with Normalizer(rules, ours) as normalizer:
        normalizer.add(raw)
        normalizer.understand(raw)
        return normalizer.write(InMemory())


class Normalizer:
    """Takes the chunks of one file as they are scanned (`add`), then `understand`s and `write`s them. Use as a context manager."""

    def __init__(self, rules: Rules, ours: bool, directory: Path | None = None, memory: int | None = None) -> None:
        """`ours`: written by stepscope, whose rows are in step order and never implausible, and whose names follow no
        kernel's naming. `directory`, `memory`: as Spool."""
        self._rules, self._ours = rules, ours
        self._raw_rows, self._rows = Spool(directory, memory), Spool(directory, memory)
        self._survey = Survey(rules, ours, self._raw_rows)
        self._names = Interner()
        self._ask = _Questions(rules, self._names)
        self._found, self._launches = LaneTable(), LaunchCheck()
        self._runs = Runs(self._rows)
        self._result = RankFile(RankData({}))
        self._step_rows = self._host_comm = 0
        self.seen = 0  # rows that were added, whatever became of them

    def __enter__(self) -> Normalizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raw_rows.__exit__(kind, value, trace)
        self._rows.__exit__(kind, value, trace)

    @property
    def constants(self) -> dict[str, int]:
        """Columns that have one value in all rows, once they are understood."""
        return self._runs.constants

    @property
    def strings(self) -> list[str]:
        """The rank's string table, once all rows are understood."""
        return self._names.strings

    def add(self, chunk: Raw) -> None:
        """The next rows of the file."""
        self.seen += chunk.rows
        self._survey.add(chunk)

    def understand(self, beside: Raw) -> None:
        """All rows were added; `beside`: what else the file says."""
        note, survey = self._result.note, self._survey
        for repair in beside.repairs:
            touched = ("ledger",) if repair.code in ("lost_event", "long_event", "too_many_texts") else ()
            note(repair.code, f"{repair.times} {repair.text}", touched, repair.offset)
        survey.report(note)
        if survey.steps is not None:
            survey.steps.settle(beside, note)
        if survey.calls is not None:
            survey.calls.settle()
            if survey.calls.bare:
                survey.calls.look_around(survey.peek(beside))
        filler = Filler(self._rules, self._names, survey.calls, beside.header)
        graphs = survey.graphs.ids()
        for chunk, kinds in survey.rows(beside):
            self._understand(chunk, kinds, filler, graphs)
        if not survey.device_rows and self._runs.rows:
            self._note_host_ledger()
        self._lanes, self._order = self._found.finish(beside.thread_names)
        if not self._ours:
            cut_impossible(self._runs, self._lanes, self._order, self._names.strings, note)
            self._launches.report(note)
            if beside.cut is not None and not self._step_rows and self._runs.rows:
                self._runs.flag(*self._runs.latest, FLAG_PARTIAL)
        self._counters = _counters(beside, self._names)
        self._result.facts = self._facts(beside, list(filler.groups.values()))
        self._beside = beside

    def write(self, writer: Writer) -> RankFile:
        """Write what was understood; gives the rank's health and facts."""
        strings, note = self._names.strings, self._result.note
        recognised = doubts.Recognised(self._lanes, strings, world_size(self._beside))
        for rows in self._runs.merged(self._order):
            if not self._ours:
                recognised.add(rows)
            writer.append(rows)
        if not self._ours:
            recognised.report(note)
        if self._beside.cut is not None:
            damage.report_cut(self._beside, self._ours, note)
        self._result.data = writer.finish(tuple(strings), self._lanes, self._counters)
        return self._result

    def _understand(self, chunk: Raw, kinds: np.ndarray, filler: Filler, graphs: np.ndarray) -> None:
        """One chunk's rows in the store's columns, sorted, into the spool."""
        events = self._ask.plain_columns(chunk)
        events["kind"] = kinds
        device = kinds != HOST
        if not self._survey.device_rows:
            self._host_comm += self._ask.host_communication(chunk, events)
        filler.fill(chunk, events)
        events["flags"] = self._flags(chunk, events, device, graphs)
        events["lane"] = self._found.add(chunk, events, device)
        if not self._ours:
            self._launches.add(events, self._names.strings, device)
        self._runs.append(events)

    def _flags(self, chunk: Raw, events: Columns, device: np.ndarray, graphs: np.ndarray) -> np.ndarray:
        """FLAG_FUSED, FLAG_DEVICE_COPY, FLAG_GRAPH and FLAG_PARTIAL."""
        flags = self._ask.flags(chunk, events)
        if len(graphs):
            flags[device & np.isin(events["launch_id"], graphs)] |= FLAG_GRAPH
        if self._ours:
            flags[(chunk.columns["partial"] > 0) | (chunk.columns["unfinished"] > 0)] |= FLAG_PARTIAL
        elif chunk.cut is not None:  # a foreign file is in no time order: all its steps are touched
            steps = (events["kind"] == HOST) & self._ask.is_step(chunk.strings, chunk.columns["name"])
            flags[steps] |= FLAG_PARTIAL
            self._step_rows += int(steps.sum())
        return flags

    def _note_host_ledger(self) -> None:
        self._result.note(
            "host_ledger",
            "the rank has no device row: its ledger is of host time, with "
            f"{self._host_comm} annotated communications and no compute kernel",
            touches=("ledger", "overlap"),
        )

    def _facts(self, beside: Raw, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """What the run is put together from, in JSON's types."""
        info = beside.header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        return {
            "rank": embedded_rank(beside),
            "world_size": world_size(beside),
            "backend": str(info.get("backend", "")),
            "host": str(beside.header.get("host_name", "")),
            "rows": self._runs.rows,
            "device_rows": self._runs.device_rows,
            "first_ns": self._runs.first_ns,
            "last_ns": self._runs.last_ns,
            "groups": groups,
            "cut": beside.cut is not None,
        }


def embedded_rank(raw: Raw) -> int | None:
    """Which rank the header says the file is of."""
    info = raw.header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) else None


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


class _Questions:
    """What is asked of the texts of one file's rows."""

    def __init__(self, rules: Rules, names: Interner) -> None:
        self._code = Question(names.code, -1, np.int32)
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
        for ours, theirs in _COPIED:
            if not is_constant(source[theirs]) or source[theirs][0] >= 0:
                events[ours] = bounded(source[theirs], EVENT_COLUMNS[ours])
        if not is_constant(events["launch_id"]):
            events["launch_id"][events["launch_id"] == 0] = -1  # 0: launched by no call
        for ours, theirs, base in (("issue_ns", "issue_ns", base_ns(raw)), ("op_id", "waits_for", 0)):
            if is_constant(source[theirs]) and source[theirs][0] == MISSING:
                continue
            given = source[theirs] != MISSING
            own(events, ours)[given] = source[theirs][given] + base
        for column, question in self._vocabularies.items():
            events[column] = question(raw.strings, source[column])
        events["name_id"] = self._code(raw.strings, source["name"])
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


_COPIED = (
    *((name, name) for name in ("stage", "chunk", "microbatch", "layer", "bytes", "op_id")),
    ("launch_id", "correlation"),
)
"""Column of ours, column of the file."""


def _within_a_device(name: str) -> bool:
    return "DtoD" in name or "Device -> Device" in name


def bounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As `dtype`; missing, negative and too large values become -1."""
    usable = (values >= 0) & (values <= np.iinfo(dtype).max)
    return np.where(usable, values, -1).astype(dtype)


def _counters(raw: Raw, names: Interner) -> Columns:
    samples = sorted(raw.counters, key=lambda sample: (sample.name, sample.key, sample.time_ns))
    columns = empty_columns(COUNTER_COLUMNS, len(samples))
    if samples:
        columns["time_ns"] = np.array([sample.time_ns for sample in samples], np.int64) + base_ns(raw)
        columns["name_id"] = np.array([names.code(sample.name) for sample in samples], np.int32)
        columns["key_id"] = np.array([names.code(sample.key) for sample in samples], np.int32)
        columns["value"] = np.array([sample.value for sample in samples], np.int64)
    return columns
