"""Hand-made Nsight Systems exports: the tables and columns that its versions write, and rows into them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

SESSION_NS = 1_779_782_330_176_752_435

_DEVICE = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL"
_LAST = "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
_KERNEL = "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL"

NEW = {
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_DEVICE}, greenContextId INTEGER, {_LAST}, {_KERNEL}, mangledName INTEGER, gridX INTEGER, "
    "gridY INTEGER, gridZ INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_DEVICE}, greenContextId INTEGER, {_LAST}, bytes INTEGER, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_DEVICE}, greenContextId INTEGER, {_LAST}, value INTEGER, bytes INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_DEVICE}, {_LAST}, graphId INTEGER, graphExecId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, globalTid INTEGER,"
    " correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER, callchainId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,"
    " color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT",
}
"""Table -> columns, as schema 3.25 (2026) has them, without those that nobody reads."""

OLD = {
    name: columns.replace(", greenContextId INTEGER", "").replace(", mangledName INTEGER", "")
    for name, columns in NEW.items()
    if not name.startswith("TARGET_INFO") and "GRAPH" not in name
} | {
    "NVTX_EVENTS": "start INT NOT NULL, end INT NOT NULL, eventType INT NOT NULL, rangeId INT NOT NULL, category INT NOT"
    " NULL, color INT NOT NULL, text TEXT NOT NULL, globalTid INT NOT NULL, endGlobalTid INT NOT NULL, textId INT NOT NULL,"
    " domainId INT NOT NULL"
}
"""The same of 2019 to 2021: no session start, no environment, and NOT NULL where nothing is known (0 and empty text)."""


class Export:
    """One export under way; tables are made when the first row of theirs comes, as Nsight Systems does."""

    def __init__(self, path: Path, schema: dict[str, str] | None = None) -> None:
        self.path, self.schema = path, NEW if schema is None else schema
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._texts: dict[str, int] = {}

    def text(self, text: str) -> int:
        """Its id in StringIds."""
        return self._texts.setdefault(text, len(self._texts) + 1)

    def row(self, table: str, **values: Any) -> Export:
        """A row; columns that the schema lacks are left out."""
        self._rows.setdefault(table, []).append(values)
        return self

    def session(self, host: str = "node0", start_ns: int = SESSION_NS, **environment: Any) -> Export:
        """Where and when it was recorded, with what environment variables."""
        said = ";".join(f"{name}={value}" for name, value in environment.items())
        self.row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=start_ns)
        self.row("TARGET_INFO_SYSTEM_ENV", name="Hostname", value=host, devStateName="")
        return self.row("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value=f"PATH=/bin;{said}", devStateName="")

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        call: int = 0,
        device: int = 0,
        pid: int = 10,
        stream: int = 7,
        grid: tuple[int, int, int] | None = None,
    ) -> Export:
        """A kernel, launched by the call of this correlation id."""
        where = {"deviceId": device, "contextId": 1, "streamId": stream, "globalPid": pid << 24, "correlationId": call}
        names = {"demangledName": self.text(name), "shortName": self.text(name.partition("<")[0])}
        blocks = dict(zip(("gridX", "gridY", "gridZ"), grid or (), strict=False))
        return self.row("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, **where, **names, **blocks)

    def call(
        self, start: int, end: int, call: int, pid: int = 10, tid: int = 77, name: str = "cudaLaunchKernel_v7000"
    ) -> Export:
        """A runtime call."""
        thread = {"globalTid": pid << 24 | tid, "correlationId": call, "nameId": self.text(name)}
        return self.row("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, **thread, eventClass=0, returnValue=0)

    def range(
        self,
        name: str,
        start: int,
        end: int | None,
        pid: int = 10,
        tid: int = 77,
        kind: int = 59,
        registered: bool = False,
    ) -> Export:
        """An NVTX range (or, of kind 34, a mark), its name as text or as a registered string."""
        old = self.schema is OLD
        nothing: Any = 0 if old else None
        told = (
            {"text": "" if old else None, "textId": self.text(name)}
            if registered
            else {"text": name, "textId": nothing}
        )
        rest = {"rangeId": 0, "category": 0, "color": 0, "endGlobalTid": 0, "domainId": 0}
        end = 0 if end is None and old else end
        return self.row("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=pid << 24 | tid, **told, **rest)

    def write(self) -> Path:
        """The file."""
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
            database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(k, t) for t, k in self._texts.items()])
            for table, rows in self._rows.items():
                if table in self.schema:
                    database.execute(f"CREATE TABLE {table} ({self.schema[table]})")
                    _insert(database, table, rows)
        return self.path


def _insert(database: sqlite3.Connection, table: str, rows: Iterable[dict[str, Any]]) -> None:
    columns: Sequence[str] = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    marks = ", ".join("?" * len(columns))
    database.executemany(f"INSERT INTO {table} VALUES ({marks})", [[row.get(name) for name in columns] for row in rows])
