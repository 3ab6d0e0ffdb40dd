"""Run directories written by stepscope: run.json and one trace a rank -> the column store, built once."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import (
    Entry,
    Plan,
    Task,
    fingerprint,
    meta_from_ranks,
)
from stepscope.analysis.ingest.rules import BUILT_IN, built_in_digest
from stepscope.analysis.records import HealthItem
from stepscope.tracer.schema import RUN_FILE, RunMeta, rank_file

_RANK_FILE = re.compile(r"rank_(\d{5,})\.trace\.json(?:\.gz)?\Z")


def is_run_directory(path: Path) -> bool:
    """Does the directory hold a run of ours?"""
    return path.is_dir() and ((path / RUN_FILE).is_file() or bool(rank_files(path)))


def rank_files(path: Path) -> list[tuple[int, Path]]:
    """(rank, file) of every rank file in a run directory, by rank."""
    found = ((_RANK_FILE.match(file.name), file) for file in path.iterdir())
    return sorted((int(match.group(1)), file) for match, file in found if match)


def plan_run(path: Path) -> Plan:
    """How to read the run directory `path`. StepscopeError when there is nothing to read, or one rank twice."""
    path = path.resolve()
    files = rank_files(path)
    if not files:
        raise StepscopeError(f"{path} has no rank file ({rank_file(0)}): did the run end before its first step?")
    for (rank, file), (next_rank, next_file) in pairwise(files):
        if rank == next_rank:
            raise StepscopeError(f"{file.name} and {next_file.name} are both rank {rank}: remove one of them")
    watched = [path / RUN_FILE, *(file for _, file in files)]
    sources: dict[str, Any] = {file.name: fingerprint(file) for file in watched if _size(file) is not None}
    sources[BUILT_IN] = built_in_digest()
    return Plan(path, True, sources, partial(_tasks, files), read_rank, partial(_describe, path))


def _tasks(files: list[tuple[int, Path]], directory: Path, build: str) -> list[Task]:
    return [Task("run", str(file), rank, directory, build, _size(file) or 0) for rank, file in files]


def _size(file: Path) -> int | None:
    """Bytes of a file; None where a name leads to nothing (a link whose target is gone): reading it will say so."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def read_rank(task: Task) -> list[Entry]:
    """Read one rank file and write its part of the store.

    A file that cannot be read as a trace is no error: the entry says `broken` and the run goes on without the rank.
    """
    assert task.rank is not None
    from stepscope.analysis.ingest.scanned import read_scanned  # LLVM: later opens need it not

    return read_scanned(task, ours=True)


def _describe(path: Path, entries: list[Entry], health: list[HealthItem]) -> RunMeta:
    """run.json, or as much of it as the rank files say themselves."""
    try:
        meta = RunMeta.from_json((path / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "run.json is missing"
    except UnicodeDecodeError:
        why = "run.json is no UTF-8 text"
    except (OSError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else f"run.json cannot be read ({error.strerror})"
    else:
        if not meta.complete:
            text = "the run did not finish, or is still running: its last step may be missing on some ranks"
            health.append(HealthItem("incomplete_run", text, file=RUN_FILE, touches=("summary",)))
        return meta
    text = f"{why}: mesh, groups and plan are taken from the rank files as far as they tell them"
    health.append(HealthItem("no_run_json", text, file=RUN_FILE, touches=("pipeline", "summary")))
    return meta_from_ranks(path.name, entries, "measured")
