"""Runs that were kept: the store of somebody's traces as a run directory, which needs the traces no more.

    RUN/run.json        what the run is
    RUN/store/          its column store (docs/column_store.md)

It lies in a directory of its own name because, unlike a `.stepscope` directory, it cannot be made again by itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import store
from stepscope.analysis.ingest.build import ProgressCall, build, out_of_space
from stepscope.analysis.ingest.plans import as_paths, plan_of
from stepscope.analysis.run import Run
from stepscope.tracer.schema import RUN_FILE, RunMeta

KEPT_DIRECTORY = "store"


def is_kept(path: Path) -> bool:
    """Is the directory a run that was kept?"""
    return (path / KEPT_DIRECTORY).is_dir() and (path / RUN_FILE).is_file()


def open_kept(path: Path) -> Run:
    """The run; StepscopeError where its store is damaged or of another version: there is nothing to read it from anew."""
    path = path.resolve()
    manifest = store.read_manifest(path / KEPT_DIRECTORY)
    if manifest is None:
        raise StepscopeError(
            f"{path / KEPT_DIRECTORY} is damaged, or another version of stepscope wrote it: import the traces again"
        )
    run = store.open_store(path / KEPT_DIRECTORY, manifest, path)
    run.meta = RunMeta.from_json((path / RUN_FILE).read_text(encoding="utf-8"))
    return run


def keep(
    path: str | Path | Sequence[str | Path],
    out: Path,
    progress: ProgressCall | None = None,
    rules: str | Path | None = None,
    engine: str | None = None,
    workers: int | None = None,
) -> Run:
    """Read traces (as `open_run`) into the new run directory `out`, and open that.

    It is whole or absent, also after Ctrl-C. StepscopeError where `out` holds something already.
    """
    from stepscope.tracer.writer import write_meta  # only where something is kept

    out = out.expanduser().absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StepscopeError(f"{out} is there already: name a directory that is new or empty (--out)")
    plan = plan_of(as_paths(path), rules)
    out.parent.mkdir(parents=True, exist_ok=True)
    store.remove_abandoned(out.parent / f".{out.name}")
    under_way = Path(tempfile.mkdtemp(prefix=f".{out.name}.new-", dir=out.parent))
    try:
        run = build(plan, under_way / KEPT_DIRECTORY, progress, engine=engine, workers=workers)
        write_meta(under_way, replace(run.meta, name=out.name))
        under_way.chmod(0o777 & ~store.umask())
        os.replace(under_way, out)
    except (OSError, RuntimeError) as error:
        if not out_of_space(error):
            raise
        raise StepscopeError(f"no space left for {out}: free some, or name a directory on another disk") from error
    finally:
        shutil.rmtree(under_way, ignore_errors=True)
    return open_kept(out)
