"""Columns of a rank that are too many to hold: in memory up to a limit, beyond it in a file without a name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from stepscope.analysis.ingest.raw import is_constant
from stepscope.analysis.run import Columns

MEMORY_BYTES = 16 << 20
"""Bytes of columns that a spool holds in memory."""


class _Stored(NamedTuple):
    """A column in the file."""

    offset: int
    dtype: np.dtype
    rows: int


class Spool:
    """Chunks of columns, in the order in which they came. Use as a context manager; the file goes with it."""

    def __init__(self, directory: Path | None = None, memory: int | None = None) -> None:
        """`directory`: where the file would lie (the system's temporary directory, unless told)."""
        self._directory = directory
        self._left = MEMORY_BYTES if memory is None else memory
        self._chunks: list[dict[str, np.ndarray | _Stored]] = []
        self._file: int | None = None
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._chunks = []
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __len__(self) -> int:
        return len(self._chunks)

    def append(self, columns: Columns) -> None:
        """Keep a chunk. Columns that are one value shown often (`raw.is_constant`) take no room."""
        self._chunks.append({})
        for name, values in columns.items():
            self.put(len(self._chunks) - 1, name, values)

    def put(self, chunk: int, name: str, values: np.ndarray) -> None:
        """Keep one column of a chunk, in place of what it was."""
        if is_constant(values) or values.nbytes <= self._left:
            self._left -= 0 if is_constant(values) else values.nbytes
            self._chunks[chunk][name] = values
            return
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix=".spool-", dir=self._directory)
            os.unlink(path)  # the file lives as long as it is open: nothing is left behind, whatever happens
        data = memoryview(np.ascontiguousarray(values).view(np.uint8).data)
        stored = _Stored(self._end, values.dtype, len(values))
        while len(data):
            written = os.pwrite(self._file, data, self._end)
            self._end, data = self._end + written, data[written:]
        self._chunks[chunk][name] = stored

    def names(self, chunk: int) -> list[str]:
        """The columns of a chunk."""
        return list(self._chunks[chunk])

    def column(self, chunk: int, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows `first` to `last` of one column. Not to be changed in place."""
        values = self._chunks[chunk][name]
        if isinstance(values, np.ndarray):
            return values[first:last]
        last = values.rows if last is None else min(last, values.rows)
        found = np.empty(max(last - first, 0), values.dtype)
        view = found.view(np.uint8).data
        at = values.offset + first * values.dtype.itemsize
        while len(view):
            assert self._file is not None
            got = os.preadv(self._file, [view], at)
            if not got:
                raise OSError(f"the temporary file of {len(self._chunks)} chunks ends early")
            at, view = at + got, view[got:]
        return found

    def take(self, chunk: int) -> Columns:
        """A whole chunk, which the spool gives up."""
        columns = {name: self.column(chunk, name) for name in self._chunks[chunk]}
        self._left += sum(
            values.nbytes
            for values in self._chunks[chunk].values()
            if isinstance(values, np.ndarray) and not is_constant(values)
        )
        self._chunks[chunk] = {}
        return columns
