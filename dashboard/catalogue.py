"""The runs under the root directory: found anew at each look, opened once, a broken one keeping its error to itself."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.analysis.errors import StepscopeError
from stepscope.dashboard.loaded import LoadedRun, Progress, Summary, load
from stepscope.dashboard.security import inside
from stepscope.tracer.schema import RUN_FILE, STORE_DIRECTORY, RunMeta

MAX_DEPTH = 4
"""Run directories are looked for this deep below the root."""

MAX_LOADED = 6
"""So many runs stay laid out in memory; the one not used for longest goes first."""

TRACE_SUFFIXES = (".json.gz", ".trace.json")


class Cancelled(Exception):
    """The person no longer wants this run."""


@dataclass(frozen=True)
class Found:
    """One run directory: `stamp` changes when its content does, and is empty where it cannot be listed.

    `error`: why the directory cannot be listed, or run.json not be read; the ranks may then still speak for the run.
    """

    id: str
    path: Path
    stamp: tuple[int, ...]
    meta: RunMeta | None
    error: str = ""


@dataclass
class Opening:
    """A run being opened by a thread of its own."""

    stamp: tuple[int, ...]
    text: str = "waiting"
    share: float = 0.0
    loaded: LoadedRun | None = None  # forgotten again when too many runs are in memory
    summary: Summary | None = None  # stays
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    cancel: threading.Event = field(default_factory=threading.Event)

    def progress(self, text: str, share: float) -> None:
        """Note how far it is; raises Cancelled when nobody waits any more."""
        if self.cancel.is_set():
            raise Cancelled
        self.text, self.share = text, min(max(share, 0.0), 1.0)


def open_and_load(run_id: str, path: Path, progress: Progress) -> LoadedRun:
    """Read a run directory into its column store, analyse it and lay it out."""
    from stepscope.analysis.ingest import Progress as Read
    from stepscope.analysis.ingest import open_run

    def reading(told: Read) -> None:
        progress(f"reading file {told.files_done + 1} of {told.files}", told.bytes_done / max(told.bytes, 1))

    return load(run_id, open_run(path, reading), progress)


class Catalogue:
    """Every run under `root`. Safe between threads; `opener` is what reads, analyses and lays out one run."""

    def __init__(self, root: Path, opener: Callable[[str, Path, Progress], LoadedRun] = open_and_load) -> None:
        self.root = root.resolve()
        self._opener = opener
        self._openings: OrderedDict[str, Opening] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # one run is opened at a time: two would only slow each other

    def found(self) -> list[Found]:
        """All runs, the newest first."""
        runs = [self._describe(path) for path in self._directories()]
        return sorted(runs, key=lambda run: (-(run.stamp[0] if run.stamp else 0), run.id))

    def _directories(self) -> list[Path]:
        directories = []
        depth_of_root = len(self.root.parts)
        for here, below, files in os.walk(self.root):
            if is_run(files):
                directories.append(Path(here))
                below.clear()
                continue
            deep = len(Path(here).parts) - depth_of_root >= MAX_DEPTH
            below[:] = [] if deep else sorted(d for d in below if d != STORE_DIRECTORY and not d.startswith("."))
        return directories

    def _describe(self, path: Path) -> Found:
        run_id = path.relative_to(self.root).as_posix() if path != self.root else path.name
        try:
            names = [n for n in sorted(os.listdir(path)) if n == RUN_FILE or n.endswith(TRACE_SUFFIXES)]
        except OSError as error:
            return Found(run_id, path, (), None, f"cannot be listed: {error.strerror}")
        stats = [status for name in names if (status := _status(path / name)) is not None]
        stamp = (max((s.st_mtime_ns for s in stats), default=0), len(stats), sum(s.st_size for s in stats))
        try:
            return Found(run_id, path, stamp, RunMeta.from_json((path / RUN_FILE).read_text("utf-8")))
        except FileNotFoundError:
            return Found(run_id, path, stamp, None, "")
        except UnicodeDecodeError:
            return Found(run_id, path, stamp, None, "run.json is no UTF-8 text")
        except OSError as error:
            return Found(run_id, path, stamp, None, f"run.json cannot be read: {error.strerror}")
        except ValueError as error:
            return Found(run_id, path, stamp, None, str(error))

    def find(self, run_id: str) -> Found | None:
        """One run by its id; None for one that is not there or lies outside the root."""
        path = self.root if run_id == self.root.name and is_run(_files(self.root)) else inside(self.root, run_id)
        if path is None or not is_run(_files(path)):
            return None
        return self._describe(path)

    def open(self, run_id: str) -> Opening | None:
        """The run, opening it when that has not begun or its files have changed; None for an unknown id."""
        found = self.find(run_id)
        if found is None:
            return None
        with self._lock:
            opening = self._openings.get(run_id)
            gone = opening is not None and opening.summary is not None and opening.loaded is None
            if opening is None or opening.stamp != found.stamp or opening.cancel.is_set() or gone:
                opening = Opening(found.stamp)
                self._openings[run_id] = opening
                threading.Thread(target=self._work, args=(found, opening), name=f"open {run_id}", daemon=True).start()
            self._openings.move_to_end(run_id)
            self._evict()
        return opening

    def glance(self, found: Found) -> Opening | None:
        """The run's summary, or how far it is; begins to open a run that nobody has opened, but none anew."""
        with self._lock:
            opening = self._openings.get(found.id)
        return opening if opening is not None and opening.stamp == found.stamp else self.open(found.id)

    def loaded(self, run_id: str) -> LoadedRun | None:
        """The run when it is already laid out, else None."""
        with self._lock:
            opening = self._openings.get(run_id)
            if opening is not None:
                self._openings.move_to_end(run_id)
        return opening.loaded if opening else None

    def cancel(self, run_id: str) -> None:
        """Stop opening a run."""
        with self._lock:
            opening = self._openings.get(run_id)
        if opening and not opening.done.is_set():
            opening.cancel.set()

    def _evict(self) -> None:
        ready = [run_id for run_id, opening in self._openings.items() if opening.loaded is not None]
        for run_id in ready[: max(0, len(ready) - MAX_LOADED)]:
            self._openings[run_id].loaded = None

    def _work(self, found: Found, opening: Opening) -> None:
        try:
            with self._turn:
                opening.progress("reading the rank files", 0.0)
                loaded = self._opener(found.id, found.path, opening.progress)
            opening.summary, opening.loaded = loaded.summary(), loaded
            with self._lock:
                self._evict()
        except Cancelled:
            opening.error = "opening was cancelled"
        except (StepscopeError, ValueError, OSError) as error:
            opening.error = str(error)
        except Exception as error:
            # a bug of ours must end on this run's own card, with its kind, and harm no other run
            opening.error = f"internal error ({type(error).__name__}): {error}"
        finally:
            opening.done.set()


def _files(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _status(file: Path) -> os.stat_result | None:
    """Of the file, or of the link itself where that leads nowhere; None for one that has just gone."""
    for look in (file.stat, file.lstat):
        try:
            return look()
        except OSError:
            continue
    return None


def is_run(files: list[str]) -> bool:
    """Whether a directory with these files is a run: it has run.json or rank files."""
    return RUN_FILE in files or any(name.endswith(TRACE_SUFFIXES) for name in files)
