"""Every way into the analysis: one door for whatever a trace looks like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import Progress, ProgressCall, open_or_build
from stepscope.analysis.ingest.keep import is_kept, open_kept
from stepscope.analysis.ingest.plans import as_paths, plan_of
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
    `progress` is called with a `Progress` before, while and after files are read. `refresh` reads the
    traces anew. `rules` is a user's classification file (rules.toml), `engine` and `workers` as in `engine.map_ranks`.
    Problems that leave something to analyse are in `run.health`; StepscopeError is for those that do not.
    """
    paths = as_paths(path)
    if len(paths) == 1 and "://" not in paths[0] and is_kept(Path(paths[0]).expanduser()):
        if rules is not None:
            raise StepscopeError(
                f"{paths[0]} was imported, and what counts as what was decided then: import the traces again with --rules"
            )
        return open_kept(Path(paths[0]).expanduser())
    return open_or_build(plan_of(paths, rules), progress, refresh, engine, workers)
