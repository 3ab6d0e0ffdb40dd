"""`stepscope analyze`: where the time of a run's steps went, who caused it, and what to try."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.commands.console import Quiet, console, say_next
from stepscope.commands.progress import reading
from stepscope.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="A run directory, or the traces of one run: files, directories, globs, URLs.",
        show_default=False,
    ),
]
"""What one run is read from."""

EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Where a first read runs: serial, processes, dask (with --scheduler). By size unless given.",
        show_default=False,
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="With --engine dask: its scheduler, tcp://host:port; the workers must see the same files.",
        show_default=False,
    ),
]

RulesFile = Annotated[
    Path | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        help="What counts as what: rules of your own (TOML), in front of ours.",
        show_default=False,
    ),
]

Refresh = Annotated[
    bool, typer.Option("--refresh", help="Read the traces anew, also where the columns of an earlier read are kept.")
]

JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write the public JSON format; - is standard output, with nothing else on it."
    ),
]


def write_text(target: str | Path, text: str) -> None:
    """Write a result to a file, `-` being standard output; OSError says which file could not be written."""
    if str(target) == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def refuse_two_on_stdout(targets: dict[str, str | Path | None]) -> None:
    """BadParameter where two results, by option, shall both go to standard output."""
    there = [option for option, target in targets.items() if str(target) == "-"]
    if len(there) > 1:
        raise typer.BadParameter(f"{' - and '.join(there)} - both want standard output: give one of them a file")


def engine_of(engine: str | None, scheduler: str | None) -> str | None:
    """What `open_run` calls the engine; BadParameter for what is none."""
    if (engine == "dask") != (scheduler is not None):
        raise typer.BadParameter("--engine dask and --scheduler tcp://host:port belong together")
    if engine not in (None, "serial", "processes", "dask"):
        raise typer.BadParameter(f"there is no engine {engine}: write serial, processes or dask")
    return f"dask@{scheduler}" if engine == "dask" else engine


def analyze(
    paths: Paths,
    json_file: JsonFile = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the report as one self-contained page.", show_default=False),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=0.0, help="Peak of one device in TFLOP/s, for MFU.", show_default=False),
    ] = None,
    rules: RulesFile = None,
    refresh: Refresh = False,
    engine: EngineName = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Say where the time of a run's steps went, who caused it, and what to try.

    The health report comes first. Then the mean step in six terms that sum to it exactly, the same by rank, the
    pipeline's bubble beside theory, overlap, stragglers and findings.

    Exit status: 0 clean; 1 could not read it; 3 done, but the health report touches figures.

    Examples:

        stepscope analyze runs/a

        stepscope analyze runs/a --html report.html

        stepscope analyze runs/a --json - | jq .summary

        stepscope analyze traces/rank-*.json.gz --rules my.toml
    """
    on = engine_of(engine, scheduler)
    refuse_two_on_stdout({"--json": json_file, "--html": html_file})
    from stepscope.analysis.ingest import open_run
    from stepscope.analysis.report import analyze as report_on

    with reading(quiet) as progress:
        run = open_run(paths, progress, refresh, rules, on)
    report = report_on(run, peak_flops=None if peak_tflops is None else peak_tflops * 1e12)
    if json_file is not None:
        write_text(json_file, report.json_text())
    if html_file is not None:
        from stepscope.analysis.report.html import to_html

        write_text(html_file, to_html(report))
    if "-" not in (json_file, str(html_file)):
        from stepscope.analysis.report.terminal import print_report

        show(lambda out: print_report(report, out))
        say_next(*_next(paths, html_file), quiet=quiet)
    return ExitCode.OK if report.health.status == "ok" else ExitCode.TOUCHED


def show(printing: Callable[[Console], None]) -> None:
    """Print on standard output what `printing` puts on a console.

    Through a buffer: rich would turn a reader that closed the pipe into status 1; so it is the usual BrokenPipeError.
    """
    out = console()
    with out.capture() as captured:
        printing(out)
    sys.stdout.write(captured.get())


def _next(paths: list[str], html_file: Path | None) -> list[str]:
    """What a person would type after this."""
    given = shlex.join(paths)
    page = [] if html_file is not None else [f"stepscope analyze {given} --html report.html"]
    if len(paths) > 1:
        return [*page, f"stepscope import {given} --out RUN"]
    return [f"stepscope compare {given} OTHER", f"stepscope dashboard {given}", *page]
