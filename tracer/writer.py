"""The crash-safe writer of a run directory: rank files, and run.json.

A rank file is a gzip file of several members: the header, then one member a step, written and synced by a background
thread while the next step runs. A killed process loses at most what that thread has not written yet; everything before
opens as it is, only the closing brackets are missing. A failing disk ends the recording with one warning and never the
training.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from stepscope.tracer.row_text import RowText, clean
from stepscope.tracer.rows import BeginRow, Row
from stepscope.tracer.schema import RUN_FILE, RunMeta, rank_file

_log = logging.getLogger(__name__)

COMPRESSION_LEVEL = 3
REST_S = 0.001
"""How long the writing thread sleeps after each few rows while training goes on; less the more steps wait for it."""
BACKLOG_STEPS = 256
"""Steps that may wait to be written; beyond, steps are dropped and counted (memory stays bounded)."""
CLOSE_TIMEOUT_S = 60.0
CLOSE_GRACE_S = 2.0

Chunks = Iterable[Sequence[Row]]


def open_exclusively(path: Path) -> BinaryIO:
    """Create `path` for writing, unbuffered. ValueError when it exists: two processes never write one file."""
    try:
        return open(path, "xb", buffering=0)
    except FileExistsError as error:
        raise ValueError(
            f"{path} exists: another process writes it, or an earlier run did; record into a new directory"
        ) from error


class RankWriter:
    """Writes one rank's trace file from rows. `submit` costs the caller a queue's put; the rest runs on one thread."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        meta: RunMeta,
        base_ns: int | None = None,
        open_file: Callable[[Path], BinaryIO] = open_exclusively,
    ) -> None:
        """`meta` gives world size, backend, groups and coordinates for the header.

        `base_ns`: epoch nanoseconds that all times of the file are relative to. Pass the same to all ranks of a run, so
        that tools which ignore it still see the ranks aligned; without it, the start of the current hour (UTC).
        Raises ValueError when the file exists, OSError when it cannot be created.
        """
        self.path = Path(directory) / rank_file(rank)
        self.base_ns = base_ns if base_ns is not None else time.time_ns() // 3_600_000_000_000 * 3_600_000_000_000
        self.dropped = 0
        self._rank = rank
        self._text = RowText(rank, self.base_ns)
        self._file = open_file(self.path)
        self._good = 0  # bytes of whole members
        self._failed = self._closing = self._closed = False
        self._cpu_ns = 0
        self._queue: queue.SimpleQueue[tuple[Chunks, int] | BeginRow | None] = queue.SimpleQueue()
        self._start(meta)
        self._thread = threading.Thread(target=self._run, name=f"trace writer {rank}", daemon=True)
        self._thread.start()

    # -- called by the recorder --------------------------------------------------------------------------------------

    def begin(self, row: BeginRow) -> None:
        """A step has begun: noted in the file at once, so that a killed rank's file names the step in flight."""
        if not self._failed:
            self._queue.put(row)

    def submit(self, chunks: Chunks, steps: int = 1) -> None:
        """The rows of one step (`steps` 0: of none), in short lists, drained on the writing thread in this order."""
        if self._failed or self._queue.qsize() > 2 * BACKLOG_STEPS:
            self.dropped += steps
            return
        self._queue.put((chunks, steps))

    def cpu_ns(self) -> int:
        """CPU time that the writing thread has used so far."""
        return self._cpu_ns

    def close(self) -> None:
        """Write what was submitted, complete the file (safe to call twice). A failed recording stays incomplete."""
        if self._closed:
            return
        self._closed = self._closing = True
        self._queue.put(None)
        try:
            self._thread.join(CLOSE_TIMEOUT_S)
        except BaseException:  # told to end while ending (a signal): what was recorded is still worth a moment
            self._thread.join(CLOSE_GRACE_S)
            raise
        if self._thread.is_alive():
            self._fail(TimeoutError(f"not written within {CLOSE_TIMEOUT_S:.0f} s"))

    # -- the writing thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            chunks, steps = ([[item]], 0) if isinstance(item, BeginRow) else item
            if self._failed:
                self.dropped += steps
                continue
            try:
                # at the end all goes out at once and is synced once: whoever ends a rank may not wait for long
                self._member(chunks, sync=not (self._closing or isinstance(item, BeginRow)))
            except Exception as error:  # whatever it is, it must not reach the training
                self.dropped += steps
                self._fail(error)
            self._cpu_ns = time.thread_time_ns()
        self._finish()

    def _member(self, chunks: Chunks, sync: bool) -> None:
        """One gzip member: every row after a comma, because the header ends with a row."""
        compressor = _compressor()
        parts = []
        for chunk in chunks:
            text = "".join([f",\n{text}" for row in chunk for text in self._text.texts(row)])
            parts.append(compressor.compress(text.encode()))
            if not self._closing:
                time.sleep(REST_S / (1 + self._queue.qsize()))
        parts.append(compressor.flush())
        self._append(b"".join(parts), sync)

    def _append(self, data: bytes, sync: bool) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        if sync:
            os.fsync(self._file.fileno())
        self._good += len(data)

    def _fail(self, error: Exception) -> None:
        """End the recording: one warning, and the file cut back to its last whole member."""
        self._failed = True
        _log.warning(
            "recording of rank %d ended, training goes on: %s: %s (%s keeps the steps before)",
            self._rank,
            type(error).__name__,
            error,
            self.path,
        )
        try:
            self._file.truncate(self._good)
        except (OSError, ValueError):
            _log.debug("could not cut %s back to %d bytes", self.path, self._good)

    def _finish(self) -> None:
        try:
            if not self._failed:
                self._append(_gzip(b"\n]}\n"), sync=True)
        except OSError as error:
            self._fail(error)
        finally:
            self._file.close()

    # -- the header --------------------------------------------------------------------------------------------------

    def _start(self, meta: RunMeta) -> None:
        """Write the header; a disk that fails already here ends the recording like one that fails later."""
        coords = meta.coords[self._rank] if self._rank < len(meta.coords) else {}
        rows = self._text.process_texts(", ".join(f"{axis} {index}" for axis, index in coords.items()))
        text = header(meta, self._rank, self.base_ns) + ",\n".join(rows)
        try:
            self._append(_gzip(text.encode()), sync=True)
        except OSError as error:
            self._fail(error)


def header(meta: RunMeta, rank: int, base_ns: int) -> str:
    """What stands before the rows, up to and with `"traceEvents": [`; keys and spacing as torch.profiler writes them."""
    groups = [group for group in meta.groups if rank in group.ranks]
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": clean(meta.backend),
            "rank": rank,
            "world_size": meta.world_size,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": clean(group.name),
                    "pg_desc": f"mesh_{clean(group.axis)}",
                    "backend_config": clean(meta.backend),
                    "pg_size": len(group.ranks),
                    "ranks": list(group.ranks),
                }
                for group in groups
            ],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
    }
    return json.dumps(head, allow_nan=False)[:-1] + ', "traceEvents": [\n'


def _compressor() -> Any:
    return zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, 31)  # 31: a gzip header and trailer around it


def _gzip(data: bytes) -> bytes:
    compressor = _compressor()
    return compressor.compress(data) + compressor.flush()


# -- run.json ----------------------------------------------------------------------------------------------------------


def write_meta(directory: Path, meta: RunMeta) -> Path:
    """Write run.json whole or not at all: temporary file, sync, rename. Raises OSError, ValueError for NaN in `meta`."""
    directory = Path(directory)
    path = directory / RUN_FILE
    temporary = directory / f".{RUN_FILE}.{os.getpid()}.tmp"
    text = meta.to_json()
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(directory)
    return path


def _sync_directory(directory: Path) -> None:
    """Make the renamed entry itself durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_chunks(rows: Iterable[Row], size: int = 256) -> Iterator[list[Row]]:
    """Rows that are already there (a simulated run's) in the short lists that `RankWriter.submit` takes."""
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
