"""From what a file says (`Raw`) to what it means: the column store's rows, lanes, strings and counters of one rank.

A file is looked at twice, some rows at a time: while it is scanned (survey.py), and when all of it is known, here. Its rows
then lie in a spool, each chunk sorted, and are merged into the store's order (merge.py). Everything works on whole columns and
on distinct strings, never on single events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
from stepscope.analysis.ingest.plain_columns import Lookups, counter_columns, embedded_rank, odd_header, world_size
from stepscope.analysis.ingest.raw import Interner, Raw, is_constant
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.ingest.spool import Spool
from stepscope.analysis.ingest.survey import HOST, Survey
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Columns, RankData, empty_columns
from stepscope.tracer.schema import (
    EVENT_COLUMNS,
    FLAG_GRAPH,
    FLAG_PARTIAL,
    Lane,
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
        self._ask = Lookups(rules, self._names)
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
            note(repair.code, repair.said, touched, repair.offset)
        for said in odd_header(beside):
            note("odd_header", f"the file's header says {said}, which cannot be: taken as not said", ("ledger",))
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
        if contradictions := filler.contradictions():
            listed = ", ".join(one[:60] for one in contradictions[:5]) + (", ..." if len(contradictions) > 5 else "")
            said = (
                f"rows of one process group name several mesh axes: {listed}; the group counts as of the first of them"
            )
            note("several_axes", said, touches=("ledger", "collectives"))
        self._lanes, self._order = self._found.finish(beside.thread_names)
        if not self._ours:
            cut_impossible(self._runs, self._lanes, self._order, self._names.strings, note)
            self._launches.report(note, self._calls())
            if beside.cut is not None and not self._step_rows and self._runs.rows:
                self._runs.flag(*self._runs.latest, FLAG_PARTIAL)
        self._counters = counter_columns(beside, self._names)
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

    def _calls(self) -> Iterator[Columns]:
        """Launch ids and starts of all host rows."""
        for lane in self._lanes:
            if lane.role == "host":
                yield from self._runs.unordered(self._order[lane.index], ("launch_id", "start_ns"))

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
