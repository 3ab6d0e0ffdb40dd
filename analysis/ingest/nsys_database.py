"""One Nsight Systems export as a database: its tables and columns, whichever its version has, and what was recorded where."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

KERNELS, GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES, FILLS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
WAITS, CALLS, NVTX = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
STRINGS, ENVIRONMENT, SESSION = "StringIds", "TARGET_INFO_SYSTEM_ENV", "TARGET_INFO_SESSION_START_TIME"

_RANK = re.compile(r"(?:^|;)(?:RANK|OMPI_COMM_WORLD_RANK|PMI_RANK|SLURM_PROCID)=(\d{1,9})(?=;|\Z)")
_WORLD = re.compile(r"(?:^|;)(?:WORLD_SIZE|OMPI_COMM_WORLD_SIZE|PMI_SIZE)=(\d{1,9})(?=;|\Z)")
_ROWS = 1 << 16  # fetched at a time


class Device(NamedTuple):
    """One device that one process ran kernels on: a rank."""

    device: int
    process: int  # its global id, -1 where the export does not say
    kernels: int


class Summary(NamedTuple):
    """What tells one recording from another."""

    devices: tuple[Device, ...]
    host: str
    session: int  # when it began, ns since the epoch; 0 where the export does not say
    rank: int | None  # that the environment of the program names
    world_size: int | None


class Database:
    """One export, read only; sqlite3.Error where it is none."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._connection = connection
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self.tables = {str(name) for (name,) in tables}
        self._columns: dict[str, set[str]] = {}

    def has(self, table: str, column: str) -> bool:
        """Is there such a column?"""
        if table not in self._columns:
            self._columns[table] = {str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")')}
        return column in self._columns[table]

    def rows(self, table: str, columns: tuple[str, ...], where: str = "", order: str = "") -> Iterator[list[Any]]:
        """Rows of a table that the export may lack, some at a time; a column that it lacks is NULL."""
        if table not in self.tables:
            return
        listed = ", ".join(f'"{name}"' if self.has(table, name) else "NULL" for name in columns)
        cursor = self._connection.execute(
            f'SELECT {listed} FROM "{table}"' + (f" WHERE {where}" if where else "") + (order and f" ORDER BY {order}")
        )
        while rows := cursor.fetchmany(_ROWS):
            yield rows

    def summary(self) -> Summary:
        """The devices, by number and process, and where and when they were recorded."""
        counts: dict[tuple[int, int], int] = {}
        for table in (KERNELS, GRAPHS):
            if table not in self.tables:
                continue
            process = "globalPid" if self.has(table, "globalPid") else "-1"
            for device, owner, count in self._connection.execute(
                f"SELECT deviceId, {process}, COUNT(*) FROM {table} GROUP BY 1, 2"
            ):
                place = (int(device), -1 if owner is None else int(owner))
                counts[place] = counts.get(place, 0) + int(count)
        facts = {str(name): str(value) for rows in self.rows(ENVIRONMENT, ("name", "value")) for name, value in rows}
        [[session]] = [*self.rows(SESSION, ("utcEpochNs",)), [(None,)]][:1]
        environment = facts.get("DeviceEnvironment", "")
        return Summary(
            tuple(Device(*place, count) for place, count in sorted(counts.items())),
            facts.get("Hostname", ""),
            int(session[0] or 0),
            _the_one(_RANK.findall(environment)),
            _the_one(_WORLD.findall(environment)),
        )


def _the_one(numbers: list[str]) -> int | None:
    """The number that all agree on."""
    return int(numbers[0]) if len(set(numbers)) == 1 else None


@contextmanager
def opened(path: str) -> Iterator[Database]:
    """The export; sqlite3.Error when it is none."""
    with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)) as connection:
        yield Database(connection)
