"""`stepscope doctor`: is this trace whole, and which figures rest on something repaired or missing?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.commands.analyze import (
    EngineName,
    JsonFile,
    Paths,
    Refresh,
    RulesFile,
    Scheduler,
    engine_of,
    show,
    write_text,
)
from stepscope.commands.console import Quiet, say_next
from stepscope.commands.progress import reading
from stepscope.exit_codes import ExitCode

if TYPE_CHECKING:
    from stepscope.analysis.run import Run


def doctor(
    paths: Paths,
    json_file: JsonFile = None,
    rules: RulesFile = None,
    refresh: Refresh = False,
    engine: EngineName = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Say what is wrong with a run's traces, and which figures that touches: the health report alone, in full.

    Reads, matches and decomposes as `stepscope analyze` does, and prints every item with its file and byte offset: what
    was repaired, missing, cut, implausible or inferred, and the files that were ignored.

    Exit status: 0 nothing touches the figures; 1 could not read it; 3 figures are touched.

    Examples:

        stepscope doctor runs/a

        stepscope doctor traces/ --json - | jq .health.items
    """
    on = engine_of(engine, scheduler)
    from stepscope.analysis.ingest import open_run

    with reading(quiet) as progress:
        run = open_run(paths, progress, refresh, rules, on)
    return examine(run, json_file, quiet)


def examine(run: Run, json_file: str | None, quiet: bool, *then: str) -> ExitCode:
    """Print (or write) the health of a run; `then` names what to type next. The exit status says whether it touches figures."""
    from stepscope.analysis.ledger.decompose import decompose
    from stepscope.analysis.report.health import health_json, print_health
    from stepscope.analysis.report.model import dumps

    decompose(run)  # what clocks, steps and matching find, it adds to the run's health
    if json_file is not None:
        write_text(json_file, dumps(health_json(run)))
    if json_file != "-":
        show(lambda out: print_health(run, out))
        say_next(*then, quiet=quiet)
    return ExitCode.OK if run.health.status == "ok" else ExitCode.TOUCHED
