"""Which reader is asked: a run directory of ours, or traces of other programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from pathlib import Path

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import Plan
from stepscope.analysis.ingest.foreign import plan_foreign
from stepscope.analysis.ingest.runs import is_run_directory, plan_run


def as_paths(path: str | Path | Sequence[str | Path]) -> list[str]:
    """One path or several, as a list. StepscopeError for none, and for what is no path."""
    if isinstance(path, str | PathLike):
        path = [path]
    if not isinstance(path, Iterable) or isinstance(path, bytes):
        raise StepscopeError(f"{_shown(path)} is no path: give a run directory or traces, as text or pathlib.Path")
    paths = []
    for one in path:
        text = fspath(one) if isinstance(one, str | PathLike) else one
        if not isinstance(text, str) or not text:
            raise StepscopeError(f"{_shown(one)} is no path: give a run directory or traces, as text or pathlib.Path")
        paths.append(text)
    if not paths:
        raise StepscopeError("no path is given: name a run directory or traces")
    return paths


def _shown(value: object) -> str:
    """What was given, in a few words."""
    return (
        repr(value)
        if isinstance(value, str | bytes | int | float | None)
        else f"an object of type {type(value).__name__}"
    )


def plan_of(paths: list[str], rules: str | Path | None) -> Plan:
    """How to read what `paths` name. StepscopeError when that is no run, or more than one."""
    directories = [path for path in paths if "://" not in path and is_run_directory(Path(path).expanduser())]
    if directories and len(paths) > 1:
        raise StepscopeError(
            f"{directories[0]} is a whole run: read one run at a time, or see what differs with "
            f"`stepscope compare {' '.join(paths[:2])}`"
        )
    if directories and rules is not None:
        raise StepscopeError(
            f"{directories[0]} is a run of stepscope, whose rows say themselves what they are: leave out --rules"
        )
    if directories:
        return plan_run(Path(directories[0]).expanduser())
    # workers elsewhere may be in another directory
    return plan_foreign(paths, str(Path(rules).expanduser().absolute()) if rules is not None else None)
