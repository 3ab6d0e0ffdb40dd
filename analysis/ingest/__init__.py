"""Every way into the analysis: one door for whatever a trace looks like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.analysis.ingest.build import Progress, ProgressCall, open_or_build
from stepscope.analysis.ingest.foreign import plan_foreign
from stepscope.analysis.ingest.runs import is_run_directory, plan_run
from stepscope.analysis.run import Run

__all__ = ["Progress", "ProgressCall", "open_run"]


def open_run(
    path: str | Path | Sequence[str | Path],
    progress: ProgressCall | None = None,
    refresh: bool = False,
    rules: str | Path | None = None,
    engine: str | None = None,
    workers: int | None = None,
) -> Run:
    """Open a run: the first time its traces are read into a column store, later only the store is opened.

    `path`: a run directory, or traces of other programs as files, directories, globs, URLs, or a list of these.
    `progress` is called with a `Progress` before the first and after each file that has to be read. `refresh` reads the
    traces anew. `rules` is a user's classification file (rules.toml), `engine` and `workers` as in `engine.map_ranks`.
    Problems that leave something to analyse are in `run.health`; StepscopeError is for those that do not.
    """
    paths = [str(path)] if isinstance(path, str | Path) else [str(one) for one in path]
    alone = Path(paths[0]).expanduser() if len(paths) == 1 else None
    if alone is not None and is_run_directory(alone):
        return open_or_build(plan_run(alone), progress, refresh, engine, workers)
    plan = plan_foreign(paths, str(rules) if rules is not None else None)
    return open_or_build(plan, progress, refresh, engine, workers)
