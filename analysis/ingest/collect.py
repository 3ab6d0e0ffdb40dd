"""One run whose hosts wrote on disks of their own: their directories put together into one.

Nothing is changed on the way: rank files are copied as they are, run.json is the one of the host that ended the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.runs import rank_files
from stepscope.analysis.units import counted
from stepscope.tracer.schema import RUN_FILE, RunMeta
from stepscope.tracer.writer import write_meta


@dataclass(frozen=True)
class Collection:
    """What belongs together: the run, each rank's file, and the ranks that should have one and have none."""

    meta: RunMeta
    files: dict[int, Path]
    missing: tuple[int, ...]

    def copy_to(self, out: Path) -> None:
        """Copy into the directory `out`: each file whole or not at all, run.json last. Raises OSError."""
        for file in self.files.values():
            temporary = out / f".{file.name}.{os.getpid()}.tmp"
            try:
                shutil.copyfile(file, temporary)
                os.replace(temporary, out / file.name)
            finally:
                temporary.unlink(missing_ok=True)
        write_meta(out, self.meta)


def collect(directories: Sequence[Path]) -> Collection:
    """Look at all of them before anything is copied.

    StepscopeError where a directory is none of ours, where they are of different runs, or where two files are one rank.
    """
    metas = {directory: _meta(directory) for directory in directories}
    first = directories[0]
    for directory, meta in metas.items():
        if meta.run_id != metas[first].run_id:
            raise StepscopeError(
                f"{first} and {directory} are of different runs ({metas[first].name}, {metas[first].run_id}; {meta.name},"
                f" {meta.run_id}): gather the directories of one run"
            )
    files: dict[int, Path] = {}
    for directory in directories:
        for rank, file in rank_files(directory):
            other = files.setdefault(rank, file)
            if other is not file:
                raise StepscopeError(f"{other} and {file} are both rank {rank}: leave one of them out")
    if not files:
        raise StepscopeError(
            f"no rank file in {', '.join(map(str, directories))}: did the run end before its first step?"
        )
    meta = next((meta for meta in metas.values() if meta.complete), metas[first])
    unknown = sorted(set(files) - set(range(meta.world_size)))
    if unknown:
        raise StepscopeError(
            f"{files[unknown[0]]} is rank {unknown[0]} of a run of {counted(meta.world_size, 'rank')}: remove it"
        )
    return Collection(meta, dict(sorted(files.items())), tuple(sorted(set(recorded_ranks(meta)) - set(files))))


def recorded_ranks(meta: RunMeta) -> tuple[int, ...]:
    """The ranks that were to record: all, unless run.json says which."""
    chosen = meta.recorder.get("ranks")
    return tuple(range(meta.world_size)) if chosen is None else tuple(chosen)


def _meta(directory: Path) -> RunMeta:
    try:
        return RunMeta.from_json((directory / RUN_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StepscopeError(f"{directory} has no {RUN_FILE}: it is no directory of a run of stepscope") from None
    except ValueError as error:
        raise StepscopeError(f"{directory / RUN_FILE}: {error}") from error
