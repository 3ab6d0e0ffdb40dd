"""Nsight Systems exports (`nsys export --type sqlite`): kernels, copies, runtime calls and NVTX ranges; one rank a device.

An export holds only the tables that something was recorded for, and older versions lack columns: what is not there is
missing, not an error. Times are ns since the session began.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import names_of_files
from stepscope.analysis.ingest.build import Entry, Task, broken, rules_of, with_facts
from stepscope.analysis.ingest.normalize import Normalizer, RankFile
from stepscope.analysis.ingest.nsys_database import (
    CALLS,
    COPIES,
    FILLS,
    GRAPHS,
    KERNELS,
    NVTX,
    STRINGS,
    WAITS,
    Database,
    Device,
    Summary,
    opened,
)
from stepscope.analysis.ingest.nvtx_steps import Found, Range, Step, steps_of
from stepscope.analysis.ingest.rank_writer import RankWriter
from stepscope.analysis.ingest.raw import MISSING, NUMBERS, TEXTS, Interner, Raw, blank
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.run import Columns
from stepscope.analysis.units import counted
from stepscope.tracer.schema import FLAG_PARTIAL, STEP_ANNOTATION

_PROCESS = ~0xFFFFFF
"""A global thread id without its last 24 bits is the global process id."""

_NO_STREAM = 0xFFFFFFFF  # of a synchronisation with the whole device
_NVTX_RANGES = (59, 60, 70, 71)  # push-pop and start-end, in the program and of imported text
_NVTX_MARKS = (34, 65)
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
_NUMBERED = re.compile(r", (?:op_id|seq) = .*\Z")
_SAID = {
    CALLS: "runtime calls, so that rows are not joined to what launched them",
    NVTX: "NVTX ranges, so that the whole recording is one step",
}
"""Tables that an export may lack, and what that means; without the others there was no such row."""


UNREADABLE = "it is no readable SQLite database"


DAMAGED = (sqlite3.Error, TypeError, ValueError, OverflowError)
"""What reading an export raises; but for the first, where it holds NULL or text, or no 64 bits, for a number."""


def why_not(path: str) -> str:
    """Empty for an export that can be read, else what is the matter."""
    try:
        with opened(path) as database:
            if STRINGS not in database.tables:
                return "it is a SQLite database of something else than Nsight Systems"
            if database.tables & {KERNELS, GRAPHS}:
                return ""
            return "it is an Nsight Systems export without GPU kernels (record with --trace=cuda,nvtx)"
    except DAMAGED as error:
        return f"{UNREADABLE} ({error})"


def first_ranks(files: list[str], rules: Rules) -> dict[str, int]:
    """The rank of each export's first device, of files in order.

    Exports of one device each take the ranks that the user or their names give, else those that their environments name.
    Otherwise ranks are counted on from file to file, or from where the user begins one. StepscopeError where two are of
    one recording.
    """
    summaries = {}
    for file in files:
        try:
            with opened(file) as database:
                summaries[file] = database.summary()
        except DAMAGED:  # reading it will say so
            summaries[file] = Summary((), "", 0, None, None)
    _refuse_duplicates(summaries)
    if all(len(summary.devices) == 1 for summary in summaries.values()):
        by_name = {file: names_of_files.rank_in(rules, file) for file in files}
        by_environment = {file: summary.rank for file, summary in summaries.items()}
        for given in (by_name, by_environment):
            ranks = {file: rank for file, rank in given.items() if rank is not None}
            if len(ranks) == len(files) == len(set(ranks.values())):
                return ranks
    first, hints = 0, {}
    for file in files:
        told = rules.rank(Path(file).name)
        hints[file] = first if told is None else told
        first = hints[file] + len(summaries[file].devices)
    return hints


def _refuse_duplicates(summaries: dict[str, Summary]) -> None:
    """Two exports of the same device and process of one session hold one rank twice."""
    seen: dict[tuple[Any, ...], str] = {}
    for file, summary in summaries.items():
        for place in summary.devices:
            key = (summary.host, summary.session, *place[:2])
            if summary.session and seen.setdefault(key, file) != file:
                raise StepscopeError(
                    f"{seen[key]} and {file} are of the same recording (device {place.device}, host "
                    f"{summary.host or 'unknown'}): give one of them"
                )


def read_file(task: Task) -> list[Entry]:
    """Every device of one export as a rank, counted from the task's rank."""
    try:
        with opened(task.path) as database:
            summary = database.summary()
            first = task.rank or 0
            entries = [
                _read_rank(task, first + index, database, summary, place) for index, place in enumerate(summary.devices)
            ]
        return entries or broken(task, "no device ran a kernel")
    except sqlite3.Error as error:
        return broken(replace(task, rank=None), f"SQLite says: {error}")
    except DAMAGED as error:
        return broken(replace(task, rank=None), f"a value in it is none that any version writes: {error}")


def _read_rank(task: Task, rank: int, database: Database, summary: Summary, place: Device) -> Entry:
    """One device, in bounded memory."""
    rules = rules_of(task)
    with Normalizer(rules, False, task.directory) as normalizer:
        reader = _Reader(database, place, summary, rules, normalizer.add)
        steps = reader.read()
        normalizer.understand(reader.raw({}, 0))
        constants = normalizer.constants | {"rank": rank}
        if any(step.partial for step in steps):
            constants.pop("flags", None)
        with RankWriter(task.directory, task.build, rank, constants) as writer:
            result = normalizer.write(_WithPartialSteps(writer, steps, normalizer.strings))
        reader.report(result)
        for table, what in _SAID.items():
            if table not in database.tables:
                result.note("missing_table", f"the export has no {what}")
        name = f"device {place.device}" + (f" of process {_pid(place.process)}" if place.process >= 0 else "")
        result.facts["place"] = f"{name}, {counted(place.kernels, 'kernel', 'kernels')}"
        return with_facts(task, rank, result, writer.entry)


class _WithPartialSteps:
    """A writer that flags the annotations of steps that the recording ended in."""

    def __init__(self, writer: RankWriter, steps: tuple[Step, ...], strings: list[str]) -> None:
        names = {f"{STEP_ANNOTATION}{step.number}" for step in steps if step.partial}
        self._codes = [code for code, text in enumerate(strings) if text in names]
        self._writer = writer
        self.finish = writer.finish

    def append(self, columns: Columns) -> None:
        """The next rows."""
        if self._codes:
            flags = np.where(
                np.isin(columns["name_id"], self._codes), columns["flags"] | FLAG_PARTIAL, columns["flags"]
            )
            columns = columns | {"flags": flags}
        self._writer.append(columns)


class _Reader:
    """One device's rows in the form that every reader gives."""

    def __init__(
        self, database: Database, place: Device, summary: Summary, rules: Rules, add: Callable[[Raw], None]
    ) -> None:
        self._database, self._place, self._rules, self._give = database, place, rules, add
        self._header: dict[str, Any] = {
            "baseTimeNanoseconds": summary.session,
            "distributedInfo": {"backend": "nccl", "world_size": summary.world_size},
            "host_name": summary.host,
        }
        self._names = Interner()
        self._ranges: list[Range] = []
        self._named: dict[str, bool] = {}
        self._found = Found()
        self._graphs = 0
        self._last = 0
        self._texts: dict[int, str] = {
            int(key): str(text) for rows in database.rows(STRINGS, ("id", "value")) for key, text in rows
        }

    def read(self) -> tuple[Step, ...]:
        """Give all rows on, some at a time; the steps."""
        self._device_rows()
        self._host_rows()
        self._found = steps_of(self._ranges, self._rules, self._last)
        self._add_steps(self._found.steps)
        return self._found.steps

    def raw(self, given: dict[str, Any], rows: int) -> Raw:
        """These columns, and the others without a value."""
        columns = {}
        for name in (*NUMBERS, *TEXTS):
            dtype = np.int32 if name in TEXTS else np.int64
            columns[name] = np.asarray(given[name], dtype) if name in given else blank(name, rows)
        return Raw(columns, self._names.strings, dict(self._header))

    def report(self, result: RankFile) -> None:
        """Say what is to be said of the rank."""
        if self._found.source and not self._found.source.startswith(STEP_ANNOTATION):
            result.note("steps_from_ranges", f"the steps are the NVTX ranges called {self._found.source!r}")
        if self._graphs:
            said = counted(self._graphs, "launch of a CUDA graph is", "launches of CUDA graphs are")
            result.note(
                "whole_graphs",
                f"{said} recorded as one row each: what communicates within them counts as compute; record with "
                "--cuda-graph-trace=node",
                touches=("compute_ns", "visible_comm_ns", "overlap_efficiency", "collectives"),
            )

    def _device_rows(self) -> None:
        where = f"deviceId = {self._place.device}"
        if self._place.process >= 0:
            where += f" AND globalPid = {self._place.process}"
        common = ("start", "end", "streamId", "correlationId")
        names = ("demangledName", "shortName", "mangledName")
        grid = ("gridX", "gridY", "gridZ")
        for rows in self._database.rows(KERNELS, (*common, *names, *grid), where, "start"):
            grids = [f"[{row[7]}, {row[8]}, {row[9]}]" for row in rows]
            self._add("kernel", rows, [self._text(*row[4:7]) for row in rows], grids=grids)
        for rows in self._database.rows(GRAPHS, (*common, "graphId"), where, "start"):
            self._graphs += len(rows)
            self._add("kernel", rows, [f"CUDA graph {row[4]}" for row in rows])
        for rows in self._database.rows(COPIES, (*common, "copyKind", "bytes"), where, "start"):
            copies = [f"Memcpy {_COPIES.get(row[4], 'other')}" for row in rows]
            self._add("gpu_memcpy", rows, copies, sizes=[row[5] for row in rows])
        for rows in self._database.rows(FILLS, (*common, "bytes"), where, "start"):
            self._add("gpu_memset", rows, ["Memset"] * len(rows), sizes=[row[4] for row in rows])
        for rows in self._database.rows(WAITS, common, where, "start"):
            self._add("cuda_sync", rows, ["synchronisation"] * len(rows))

    def _host_rows(self) -> None:
        own = f"(globalTid & {_PROCESS}) = {self._place.process}" if self._place.process >= 0 else ""
        for rows in self._database.rows(CALLS, ("start", "end", "globalTid", "correlationId", "nameId"), own, "start"):
            names = [re.sub(r"_v\d+\Z", "", self._text(row[4])) for row in rows]
            self._add("cuda_runtime", rows, names, host=True)
        columns = ("start", "end", "globalTid", "eventType", "text", "textId")
        for rows in self._database.rows(NVTX, columns, own and f"{own} AND start IS NOT NULL", "start"):
            marks = [self._range(row) for row in rows if row[3] is None or row[3] in (*_NVTX_RANGES, *_NVTX_MARKS)]
            self._ranges += [mark for mark in marks if self._is_step(mark.name)]
            whole = [mark for mark in marks if not mark.mark and mark.end >= 0]
            self._add(
                "user_annotation",
                [(mark.start, mark.end, mark.thread, None) for mark in whole],
                [mark.name for mark in whole],
                host=True,
            )

    def _range(self, row: tuple[Any, ...]) -> Range:
        """One row of NVTX_EVENTS; older exports write 0 where a range has no end."""
        start, end, thread, kind, text, text_id = row
        name = _NUMBERED.sub("", text or self._text(text_id))
        open_end = end is None or end < start
        return Range(name, int(thread or 0), int(start), -1 if open_end else int(end), kind in _NVTX_MARKS)

    def _is_step(self, name: str) -> bool:
        """As the rules say, asked once of each name."""
        if name not in self._named:
            self._named[name] = self._rules.step(name) is not None
        return self._named[name]

    def _text(self, *ids: Any) -> str:
        """The text of the first id that has one."""
        return next((self._texts[one] for one in ids if one is not None and one in self._texts), "?")

    def _add_steps(self, steps: tuple[Step, ...]) -> None:
        """The annotations that the rest of the program knows steps by, where they are not there already."""
        there = {one.name for one in self._ranges if one.end >= 0}
        new = [step for step in steps if f"{STEP_ANNOTATION}{step.number}" not in there]
        rows = [(step.start, step.end, step.thread, None) for step in new]
        self._add("user_annotation", rows, [f"{STEP_ANNOTATION}{step.number}" for step in new], host=True)

    def _add(
        self,
        category: str,
        rows: list[Any],
        names: list[str],
        sizes: list[Any] | None = None,
        grids: list[str] | None = None,
        host: bool = False,
    ) -> None:
        """Rows of (start, end, stream or thread, correlation, ...) with their names."""
        if not rows:
            return
        code = self._names.code
        count = len(rows)
        start, end, lane, call = ([row[i] for row in rows] for i in range(4))
        owner = f"{_pid(self._place.process)}" if host else f"{self._place.device}"
        part: dict[str, Any] = {
            "ts": start,
            "dur": np.subtract(end, start),
            "correlation": [MISSING if one is None else one for one in call],
            "ph": np.full(count, code("X")),
            "cat": np.full(count, code(category)),
            "name": [code(name) for name in names],
            "pid": np.full(count, code(owner)),
            "tid": [code(_thread(one) if host else _stream(one)) for one in lane],
        }
        if not host:
            part["stream"] = [MISSING if one is None or one == _NO_STREAM else one for one in lane]
        if grids is not None:
            part["grid"] = [code(grid) for grid in grids]
        if sizes is not None:
            part["bytes"] = [MISSING if size is None else size for size in sizes]
        self._last = max(self._last, int(max(end)))
        self._give(self.raw(part, count))


def _pid(process: int) -> int:
    return (process >> 24) & 0xFFFFFF if process >= 0 else 0


def _thread(global_id: int | None) -> str:
    return f"{(global_id or 0) & 0xFFFFFF}"


def _stream(number: int | None) -> str:
    return "device" if number is None or number == _NO_STREAM else f"stream {number}"
