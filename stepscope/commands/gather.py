"""`stepscope gather`: one run directory out of those that every host wrote on its own disk."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.commands.console import Quiet, say_next
from stepscope.exit_codes import ExitCode


def gather(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="The run directories of all hosts.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run directory to make.", show_default=False)],
    quiet: Quiet = False,
) -> ExitCode:
    """Put together a run whose hosts wrote on disks of their own.

    Copies every rank's file and one run.json. All must be of one run, and no rank may be there twice; ranks that should
    have recorded and have no file are named.

    Exit status: 0 whole; 1 could not; 3 made, but ranks are missing.

    Example: `stepscope gather node0/runs/a node1/runs/a --out runs/a`
    """
    from stepscope.analysis.ingest.collect import collect
    from stepscope.parallel_runtime.naming import claim
    from stepscope.parallel_runtime.recording import shorten

    found = collect(directories)
    found.copy_to(claim(out))
    if not quiet:
        print(f"{len(found.files)} ranks of {found.meta.world_size} in {out}")
    if found.missing:
        print(f"missing: rank {shorten(found.missing)}: is a host's directory not among them?", file=sys.stderr)
    say_next(f"stepscope analyze {shlex.quote(str(out))}", quiet=quiet)
    return ExitCode.TOUCHED if found.missing else ExitCode.OK
