"""`stepscope import`: keep the traces of one run as a run directory of ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepscope.commands.analyze import EngineName, JsonFile, Paths, RulesFile, Scheduler, engine_of
from stepscope.commands.console import Quiet
from stepscope.commands.doctor import examine
from stepscope.commands.progress import reading
from stepscope.exit_codes import ExitCode


def import_(
    paths: Paths,
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run directory to make.", show_default=False)],
    rules: RulesFile = None,
    json_file: JsonFile = None,
    engine: EngineName = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Keep the traces of one run as a run directory: columns in place of text.

    The directory opens at once, everywhere a run does (analyze, compare, dashboard), and needs the traces no more. What
    is read, repaired and ignored is printed as by `stepscope doctor`.

    Exit status: 0 kept; 1 could not; 3 kept, but the health report touches figures.

    Examples:

        stepscope import traces/rank-*.json.gz --out runs/a100

        stepscope import export.sqlite --out runs/nsys --rules my.toml
    """
    on = engine_of(engine, scheduler)
    from stepscope.analysis.ingest.keep import keep

    with reading(quiet) as progress:
        run = keep(paths, out, progress, rules, on)
    return examine(run, json_file, quiet, f"stepscope analyze {shlex.quote(str(out))}")
