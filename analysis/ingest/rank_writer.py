"""The files of one rank in the column store: rows in row groups, the texts that they point to, counter samples."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.analysis.ingest.store import counters_file, events_file, plain_memory, strings_file
from stepscope.analysis.run import Columns, RankData
from stepscope.tracer.schema import COUNTER_COLUMNS, EVENT_COLUMNS, Lane

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP = 65536

DELTA_COLUMNS = ("start_ns", "issue_ns", "time_ns")
"""Times, sorted or nearly so: differences pack best. All else is small plain, and sooner written than with a dictionary."""


def write_rank(directory: Path, build: str, rank: int, data: RankData) -> dict[str, Any]:
    """Write one rank's three files; returns its manifest entry (rows, lanes, constant columns)."""
    rows = len(data.events["start_ns"])
    constants = {}
    arrays = {}
    for name in EVENT_COLUMNS:
        values = data.events[name]
        if rows and (values.strides == (0,) or (values == values[0]).all()):
            constants[name] = int(values[0])
        elif rows:
            arrays[name] = values
    with _Parquet(directory / events_file(rank), build, tuple(arrays)) as file:
        for at in range(0, rows if arrays else 0, ROW_GROUP):
            file.write({name: values[at : at + ROW_GROUP] for name, values in arrays.items()})
    return _beside(directory, build, rank, data, rows, constants)


def _beside(
    directory: Path, build: str, rank: int, data: RankData, rows: int, constants: dict[str, int]
) -> dict[str, Any]:
    """Write what goes with the events; the manifest entry."""
    with _Parquet(directory / strings_file(rank), build, ("text",)) as file:
        file.write({"text": data.strings})
    with _Parquet(directory / counters_file(rank), build, tuple(COUNTER_COLUMNS)) as file:
        file.write(data.counters)
    return {
        "rank": rank,
        "rows": rows,
        "counters": len(data.counters["time_ns"]),
        "constants": constants,
        "lanes": [list(lane) for lane in data.lanes],
    }


class RankWriter:
    """Writes one rank whose rows come some at a time, in the store's order."""

    def __init__(self, directory: Path, build: str, rank: int, constants: dict[str, int]) -> None:
        """`constants`: columns that have one value in all rows."""
        self.directory, self._build, self._rank, self._constants = directory, build, rank, constants
        self._columns = tuple(name for name in EVENT_COLUMNS if name not in constants)
        self._file = _Parquet(directory / events_file(rank), build, self._columns)
        self._waiting: list[Columns] = []
        self._waiting_rows = self._rows = 0
        self.entry: dict[str, Any] = {}  # for the manifest, once finished

    def __enter__(self) -> RankWriter:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def append(self, columns: Columns) -> None:
        """The next rows."""
        at, count = 0, len(columns["start_ns"])
        while at < count:
            size = min(count - at, ROW_GROUP - self._waiting_rows)
            self._waiting.append({name: columns[name][at : at + size] for name in self._columns})
            self._waiting_rows += size
            at += size
            if self._waiting_rows == ROW_GROUP:
                self._write()

    def finish(self, strings: tuple[str, ...], lanes: tuple[Lane, ...], counters: Columns) -> RankData:
        """There are no more rows; `entry` is there. What is kept in memory is everything but the rows."""
        self._write()
        data = RankData({}, strings, lanes, counters)
        self.entry = _beside(self.directory, self._build, self._rank, data, self._rows, self._constants)
        return data

    def _write(self) -> None:
        if self._waiting_rows:
            parts, self._waiting = self._waiting, []
            self._rows += self._waiting_rows
            self._waiting_rows = 0
            self._file.write({name: np.concatenate([part[name] for part in parts]) for name in self._columns})


class _Parquet:
    """One file of the store: whole or absent, for a rank whose worker died, or seemed to, is written again."""

    def __init__(self, path: Path, build: str, columns: tuple[str, ...]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        self._under_way = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        types = {**EVENT_COLUMNS, **COUNTER_COLUMNS}
        fields = [(name, pa.type_for_alias(types[name]) if name in types else pa.string()) for name in columns]
        self._schema = pa.schema(fields, {"stepscope_build": build})
        delta = {name: "DELTA_BINARY_PACKED" for name in columns if name in DELTA_COLUMNS}
        with plain_memory():
            self._writer = pq.ParquetWriter(
                self._under_way,
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
                column_encoding=delta or None,
                write_statistics=False,  # nobody asks for them: rows are found by their order
            )

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            with plain_memory():
                self._writer.close()
            os.replace(self._under_way, self._path)
            return
        with suppress(OSError):  # a full disk has been told of already
            self._writer.close()
        self._under_way.unlink(missing_ok=True)

    def write(self, columns: dict[str, Any]) -> None:
        """A row group."""
        with plain_memory():
            self._writer.write_table(self._table(columns), row_group_size=ROW_GROUP)

    def _table(self, columns: dict[str, Any]) -> pa.Table:
        import pyarrow as pa

        # of buffers: pa.array would import pandas to see whether this is a series of its
        arrays = []
        for field in self._schema:
            values = columns[field.name]
            parts = [np.ascontiguousarray(values)] if isinstance(values, np.ndarray) else _text_buffers(values)
            arrays.append(pa.Array.from_buffers(field.type, len(values), [None, *map(pa.py_buffer, parts)]))
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _text_buffers(texts: Sequence[str]) -> list[Any]:
    """Where each text ends, and all of them one behind the other."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return [ends.astype(np.int32), b"".join(encoded)]  # names are capped far below 2 GB (scanner/events.py)
