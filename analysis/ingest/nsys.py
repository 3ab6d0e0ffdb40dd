"""Nsight Systems exports (`nsys export --type sqlite`): kernels, copies, runtime calls and NVTX ranges; one rank a device."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from stepscope.analysis.ingest.build import Entry, Task, broken, rules_of, written
from stepscope.analysis.ingest.normalize import normalize
from stepscope.analysis.ingest.raw import MISSING, NUMBERS, TEXTS, Interner, Raw, blank

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"

_PROCESS = ~0xFFFFFF
"""A global thread id without its last 24 bits is the global process id."""

_NO_STREAM = 0xFFFFFFFF  # of a synchronisation with the whole device
_NVTX_RANGES = (59, 60)  # push-pop and start-end
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
_NUMBERED = re.compile(r", (?:op_id|seq) = .*\Z")

Row = tuple[Any, ...]


@contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    """The database, read only; sqlite3.Error when it is none."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        yield connection


def devices(path: str) -> list[tuple[int, int]]:
    """(device, global process id) of everything that ran kernels, in that order: the ranks of the file."""
    with opened(path) as connection:
        found = connection.execute(f"SELECT DISTINCT deviceId, globalPid FROM {KERNELS} ORDER BY 1, 2").fetchall()
    return [(int(device), int(process)) for device, process in found]


def why_not(path: str) -> str:
    """Empty for an export that can be read, else what is the matter."""
    try:
        with opened(path) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        return f"it is no readable SQLite database ({error})"
    if "StringIds" not in names:
        return "it is a SQLite database of something else than Nsight Systems"
    return "" if KERNELS in names else "it is an Nsight Systems export without GPU kernels"


def read_file(task: Task) -> list[Entry]:
    """Every device of one export as a rank, counted from the task's rank."""
    try:
        found = devices(task.path)
        entries = []
        for index, (device, process) in enumerate(found):
            raw = _Reader(task.path, device, process).read()
            result = normalize(raw, rules_of(task), ours=False)
            result.facts["place"] = f"device {device} of process {(process >> 24) & 0xFFFFFF}"
            entries.append(written(task, (task.rank or 0) + index, result))
        return entries or broken(task, "no device ran a kernel")
    except sqlite3.Error as error:
        return broken(task, f"SQLite says: {error}")


class _Reader:
    """One device's rows in the form that every reader gives."""

    def __init__(self, path: str, device: int, process: int) -> None:
        self._path, self._device, self._process = path, device, process
        self._names = Interner()
        self._parts: list[dict[str, np.ndarray]] = []

    def read(self) -> Raw:
        with opened(self._path) as connection:
            self._known = {
                name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            self._texts: dict[int, str] = dict(connection.execute("SELECT id, value FROM StringIds"))
            self._device_rows(connection)
            self._host_rows(connection)
            start = self._select(connection, "TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), "")
        header = {"baseTimeNanoseconds": int(start[0][0]) if start else 0, "distributedInfo": {"backend": "nccl"}}
        rows = sum(len(part["ts"]) for part in self._parts)
        columns = {}
        for name in (*NUMBERS, *TEXTS):
            given = [part.get(name) for part in self._parts]
            if all(values is None for values in given):
                columns[name] = blank(name, rows)
                continue
            missing = blank(name, 1)[0]
            filled = [
                np.full(len(part["ts"]), missing) if values is None else values
                for part, values in zip(self._parts, given, strict=True)
            ]
            columns[name] = np.concatenate(filled).astype(np.int32 if name in TEXTS else np.int64)
        return Raw(columns, self._names.strings, header)

    def _device_rows(self, connection: sqlite3.Connection) -> None:
        where = f"WHERE deviceId = {self._device} AND globalPid = {self._process}"
        common = ("start", "end", "streamId", "correlationId")
        kernels = self._select(connection, KERNELS, (*common, "demangledName"), where)
        self._add("kernel", kernels, [self._texts.get(row[4], "?") for row in kernels])
        copies = self._select(connection, "CUPTI_ACTIVITY_KIND_MEMCPY", (*common, "bytes", "copyKind"), where)
        names = [f"Memcpy {_COPIES.get(row[5], 'other')}" for row in copies]
        self._add("gpu_memcpy", copies, names, sizes=[row[4] for row in copies])
        fills = self._select(connection, "CUPTI_ACTIVITY_KIND_MEMSET", (*common, "bytes"), where)
        self._add("gpu_memset", fills, ["Memset"] * len(fills), sizes=[row[4] for row in fills])
        waits = self._select(connection, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", common, where)
        self._add("cuda_sync", waits, ["synchronisation"] * len(waits))

    def _host_rows(self, connection: sqlite3.Connection) -> None:
        where = f"WHERE (globalTid & {_PROCESS}) = {self._process}"
        calls = self._select(
            connection, "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId"), where
        )
        names = [re.sub(r"_v\d+\Z", "", self._texts.get(row[4], "?")) for row in calls]
        self._add("cuda_runtime", calls, names, host=True)
        ranges = f"{where} AND eventType IN {_NVTX_RANGES} AND start IS NOT NULL AND end IS NOT NULL"
        marks = self._select(connection, "NVTX_EVENTS", ("start", "end", "globalTid", "textId", "text"), ranges)
        names = [_NUMBERED.sub("", row[4] if row[4] is not None else self._texts.get(row[3], "?")) for row in marks]
        self._add("user_annotation", [(*row[:3], None) for row in marks], names, host=True)

    def _select(self, connection: sqlite3.Connection, table: str, columns: tuple[str, ...], where: str) -> list[Row]:
        """Rows of a table that the export may lack, in time order."""
        if table not in self._known:
            return []
        ordered = f"{where} ORDER BY start" if "start" in columns else where
        return connection.execute(f"SELECT {', '.join(columns)} FROM {table} {ordered}").fetchall()

    def _add(
        self, category: str, rows: list[Row], names: list[str], sizes: list[Any] | None = None, host: bool = False
    ) -> None:
        """Rows of (start, end, stream or thread, correlation) with their names."""
        if not rows:
            return
        code = self._names.code
        process = (self._process >> 24) & 0xFFFFFF
        lanes = [_thread(row[2]) if host else _stream(row[2]) for row in rows]
        part: dict[str, Any] = {
            "ts": [row[0] for row in rows],
            "dur": [row[1] - row[0] for row in rows],
            "correlation": [MISSING if row[3] is None else row[3] for row in rows],
            "ph": [code("X")] * len(rows),
            "cat": [code(category)] * len(rows),
            "name": [code(name) for name in names],
            "pid": [code(f"{process}" if host else f"{self._device}")] * len(rows),
            "tid": [code(lane) for lane in lanes],
        }
        if not host:
            part["stream"] = [MISSING if row[2] is None or row[2] == _NO_STREAM else row[2] for row in rows]
        if sizes is not None:
            part["bytes"] = [MISSING if size is None else size for size in sizes]
        self._parts.append({name: np.array(values, np.int64) for name, values in part.items()})


def _thread(global_id: int) -> str:
    return f"{global_id & 0xFFFFFF}"


def _stream(number: int | None) -> str:
    return "device" if number is None or number == _NO_STREAM else f"stream {number}"
