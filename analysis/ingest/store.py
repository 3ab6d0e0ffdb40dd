"""The column store of one run: Parquet files that every later open reads instead of the traces (docs/column_store.md).

A store is built in a temporary directory and renamed into place, so that it is whole or absent. Each of its files carries
the store's build id: a reader that meets a file of another build (somebody rebuilt the store meanwhile) says so instead of
mixing two states.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.records import Health, HealthItem
from stepscope.analysis.run import Columns, RankData, Run, empty_columns
from stepscope.tracer.schema import COUNTER_COLUMNS, EVENT_COLUMNS, MANIFEST_FILE, STORE_DIRECTORY, Lane, RunMeta

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# pyarrow is imported where columns are read or written: opening a store needs its manifest alone

STORE_VERSION = 4
"""Counted up whenever a reader would fill the columns differently: older stores are rebuilt."""

MANY_ROWS = 1 << 20
"""Columns of more rows than these are worth threads, which cost more than they save of fewer."""

ABANDONED_S = 3600
"""A temporary store that nobody touched for so long was left by a process that was killed."""


class Builder:
    """Writes one store; `commit` puts it into place, leaving without it removes every trace of it."""

    def __init__(self, place: Path) -> None:
        """`place`: where the store shall be; its parent must exist and be writable (OSError)."""
        self.place = place
        self.build = uuid.uuid4().hex
        self.path = Path(tempfile.mkdtemp(prefix=f"{place.name}.new-", dir=place.parent))

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in range(50):  # a worker elsewhere may be writing its rank still: without the directory it ends
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(0.1)

    def commit(self, manifest: dict[str, Any]) -> Path:
        """Write the manifest and rename the store into place, in front of an older one.

        A store of the same sources that another process finished meanwhile is as good: then ours is dropped.
        """
        manifest = {"store_version": STORE_VERSION, "build": self.build, **manifest}
        (self.path / MANIFEST_FILE).write_text(json.dumps(manifest, allow_nan=False), encoding="utf-8")
        self.path.chmod(0o777 & ~umask())
        old = Path(f"{self.place}.old-{self.build}")
        for _ in range(10):
            try:
                self.path.rename(self.place)
                return self.place
            except OSError:
                present = read_manifest(self.place)
                if present is not None and present["sources"] == manifest["sources"] and not manifest["replace"]:
                    return self.place
                try:
                    self.place.rename(old)
                except FileNotFoundError:  # another process has just taken it away: try again
                    continue
                shutil.rmtree(old, ignore_errors=True)
        raise StepscopeError(f"{self.place} keeps being replaced by another process: try again")


def umask() -> int:
    """The permissions that this process takes off what it makes."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UNDER_WAY = r"\.(?:new-[a-z0-9_]{8}|old-[0-9a-f]{32})"
"""How the name of a store goes on while it is built, and while it gives way to another."""


def remove_abandoned(place: Path) -> None:
    """Remove what killed processes left beside `place`; in the cache directory that of all stores."""
    name = re.escape(place.name)
    if _IN_CACHE.fullmatch(place.name):
        name = _IN_CACHE.pattern
    for left in place.parent.iterdir():
        try:
            if re.fullmatch(name + _UNDER_WAY, left.name) and time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:
            continue


_IN_CACHE = re.compile(r"(?s:.+)-[0-9a-f]{16}")
"""Names of stores in the cache directory."""


def writable_place(source: Path, inside: bool) -> Path:
    """Where the store of `source` belongs: inside a run directory if one may write there, else in the cache directory."""
    if inside and os.access(source, os.W_OK) and _can_create(source):
        return source / STORE_DIRECTORY
    return cache_place(source)


def cache_place(source: Path) -> Path:
    """The store's place in the user's cache directory (`XDG_CACHE_HOME`), one a source path."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepscope"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StepscopeError(
            f"cannot write {root} ({error.strerror}): set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    name = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]  # a name need not be text
    shown = source.name[:40].encode("utf-8", "replace").decode("utf-8")
    return root / f"{shown or 'run'}-{name}"


def _can_create(directory: Path) -> bool:
    """Access bits do not tell of a read-only mount or a full quota: only trying does."""
    try:
        with tempfile.TemporaryDirectory(prefix=f"{STORE_DIRECTORY}.new-", dir=directory):
            return True
    except OSError:
        return False


def events_file(rank: int) -> str:
    """Name of one rank's event file."""
    return f"rank_{rank:05d}.events.parquet"


def strings_file(rank: int) -> str:
    """Name of one rank's string table."""
    return f"rank_{rank:05d}.strings.parquet"


def counters_file(rank: int) -> str:
    """Name of one rank's counter file."""
    return f"rank_{rank:05d}.counters.parquet"


# -- reading -----------------------------------------------------------------------------------------------------------


def read_manifest(place: Path) -> dict[str, Any] | None:
    """The manifest of a store that this version reads, else None."""
    try:
        manifest = json.loads((place / MANIFEST_FILE).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("store_version") != STORE_VERSION:
            return None
        RunMeta.from_json(json.dumps(manifest.get("meta")))  # what cannot be is read anew
    except (OSError, ValueError):
        return None
    return manifest


def open_store(place: Path, manifest: dict[str, Any], path: Path) -> Run:
    """A run whose columns are read from the store when they are asked for. `path` is where the run came from."""
    meta = RunMeta.from_json(json.dumps(manifest["meta"]))
    health = Health([HealthItem(**{**item, "touches": tuple(item["touches"])}) for item in manifest["health"]])
    ranks = {entry["rank"]: entry for entry in manifest["ranks"]}
    reader = _Reader(place, manifest["build"], ranks)
    return Run(meta, ranks, reader.load, health, path, reader.pieces)


def meta_to_json(meta: RunMeta) -> dict[str, Any]:
    """What run.json would say, as the manifest keeps it."""
    whole: dict[str, Any] = json.loads(meta.to_json())
    return whole


def health_to_json(items: list[HealthItem]) -> list[dict[str, Any]]:
    """Health items as the manifest keeps them."""
    return [asdict(item) for item in items]


_POOL = Lock()
_within = 0  # how many threads are in plain_memory
_chosen: Any = None


@contextmanager
def plain_memory() -> Iterator[None]:
    """Let arrow take memory of the system itself, which gets it back: its own pools keep 40 MB for ever.

    The choice is the process's: the last thread that leaves gives back what was chosen before the first one came.
    """
    global _chosen, _within
    import pyarrow as pa

    with _POOL:
        if not _within:
            _chosen = pa.default_memory_pool()
            pa.set_memory_pool(pa.system_memory_pool())
        _within += 1
    try:
        yield
    finally:
        with _POOL:
            _within -= 1
            if not _within:
                pa.set_memory_pool(_chosen)


def _constant(name: str, value: int, rows: int) -> np.ndarray:
    """A column with one value in all rows."""
    return np.broadcast_to(np.array([value], EVENT_COLUMNS[name]), rows)


class _Reader:
    """Loads columns of one store; refuses to mix in files of another build."""

    def __init__(self, place: Path, build: str, ranks: dict[int, dict[str, Any]]) -> None:
        self._place, self._build, self._ranks = place, build, ranks

    def load(self, rank: int, columns: tuple[str, ...] | None) -> RankData:
        """As `Run` asks: some event columns alone, or (None) everything; no column names: all but the events."""
        entry = self._ranks[rank]
        events = self._events(rank, entry, tuple(EVENT_COLUMNS) if columns is None else columns)
        if columns:
            return RankData(events)
        strings = tuple(self._read(strings_file(rank), ["text"])["text"].to_pylist())
        table = self._read(counters_file(rank), list(COUNTER_COLUMNS))
        counters = {name: _numbers(table[name], dtype) for name, dtype in COUNTER_COLUMNS.items()}
        return RankData(events, strings, tuple(Lane(*lane) for lane in entry["lanes"]), counters)

    def pieces(
        self, rank: int, names: tuple[str, ...], rare: tuple[str, ...] = (), kinds: tuple[int, ...] = ()
    ) -> Iterator[Columns]:
        """Some event columns, a row group at a time; of a group without rows of `kinds` the `rare` ones are not read."""
        entry = self._ranks[rank]
        constants = entry["constants"]
        if not entry["rows"] or all(name in constants for name in names):
            yield self._events(rank, entry, (*names, *rare))
            return
        with self._opened(events_file(rank)) as parquet:
            for group in range(parquet.num_row_groups):
                piece = self._group(rank, parquet, group, names)
                if rare and any((piece["kind"] == kind).any() for kind in kinds):
                    piece |= self._group(rank, parquet, group, rare)
                else:
                    piece |= {name: _constant(name, -1, len(piece[names[0]])) for name in rare}
                yield piece

    def _group(self, rank: int, parquet: pq.ParquetFile, group: int, names: tuple[str, ...]) -> Columns:
        """Some columns of one row group."""
        import pyarrow as pa

        constants = self._ranks[rank]["constants"]
        stored = [name for name in names if name not in constants]
        try:  # iter_batches would hold buffers of all row groups
            with plain_memory():
                table = parquet.read_row_group(group, columns=stored, use_threads=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(events_file(rank)) from error
        rows = parquet.metadata.row_group(group).num_rows
        return {
            name: _constant(name, constants[name], rows)
            if name in constants
            else _numbers(table[name], EVENT_COLUMNS[name])
            for name in names
        }

    def _events(self, rank: int, entry: dict[str, Any], names: tuple[str, ...]) -> Columns:
        rows, constants = entry["rows"], entry["constants"]
        if not rows:
            return empty_columns({name: EVENT_COLUMNS[name] for name in names})
        stored = [name for name in names if name not in constants]
        table = self._read(events_file(rank), stored) if stored else {}
        return {
            name: np.full(rows, constants[name], EVENT_COLUMNS[name])
            if name in constants
            else _numbers(table[name], EVENT_COLUMNS[name])
            for name in names
        }

    def _read(self, file: str, columns: list[str]) -> pa.Table:
        import pyarrow as pa

        with self._opened(file) as parquet:
            try:
                with plain_memory():
                    return parquet.read(columns=columns, use_threads=parquet.metadata.num_rows > MANY_ROWS)
            except (OSError, pa.ArrowInvalid) as error:
                raise self._damaged(file) from error

    @contextmanager
    def _opened(self, file: str) -> Iterator[pq.ParquetFile]:
        """A file of this build."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with plain_memory():
                parquet = pq.ParquetFile(self._place / file)
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(file) from error
        with parquet:
            build = (parquet.schema_arrow.metadata or {}).get(b"stepscope_build", b"").decode()
            if build != self._build:
                raise StepscopeError(
                    f"the store {self._place} was rebuilt by another process meanwhile: open the run again"
                )
            yield parquet

    def _damaged(self, file: str) -> StepscopeError:
        return StepscopeError(
            f"the store {self._place} is incomplete or damaged ({file}): open the run again with --refresh, or, if it "
            "was imported, import the traces again"
        )


def _numbers(column: pa.ChunkedArray, dtype: str) -> np.ndarray:
    """A column of numbers without gaps. Its own `to_numpy` would import pandas, as long as reading half a million events."""
    pieces = [
        np.frombuffer(chunk.buffers()[1], dtype, len(chunk), chunk.offset * np.dtype(dtype).itemsize)
        for chunk in column.chunks
        if len(chunk)
    ]
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.empty(0, dtype), *pieces])
