"""Every way into the analysis: one door for whatever a trace looks like."""

from __future__ import annotations

from pathlib import Path

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.runs import Progress, ProgressCall, is_run_directory, open_run_directory
from stepscope.analysis.run import Run

__all__ = ["Progress", "ProgressCall", "open_run"]


def open_run(path: str | Path, progress: ProgressCall | None = None, refresh: bool = False) -> Run:
    """Open a run: the first time its traces are read into a column store, later only the store is opened.

    `progress` is called with a `Progress` before the first and after each rank that has to be read. `refresh` reads the
    traces anew. Problems that leave something to analyse are in `run.health`; StepscopeError is for those that do not.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise StepscopeError(f"there is no {path}: give a run directory or a trace")
    if is_run_directory(place):
        return open_run_directory(place, progress, refresh)
    raise StepscopeError(f"{path} is not a run directory: it has neither run.json nor rank files")
