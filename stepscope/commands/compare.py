"""`stepscope compare`: what changed between runs, term by term, and whether it is more than noise."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.commands.analyze import JsonFile, refuse_two_on_stdout, show, write_text
from stepscope.commands.console import Quiet, say_next
from stepscope.exit_codes import ExitCode

if TYPE_CHECKING:
    from stepscope.analysis.compare import Comparison


def per_cent(text: str) -> float:
    """`3%`, `3 %` or `0.03` as a fraction; BadParameter for anything else."""
    try:
        word = text.strip()
        value = float(word.removesuffix("%")) / 100 if word.endswith("%") else float(word)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no share: write 3% (or 0.03)") from None
    if not 0 <= value < float("inf") or (not text.strip().endswith("%") and value >= 1):
        raise typer.BadParameter(f"{text!r} is out of range: write 3% (or 0.03)")
    return value


def compare(
    paths: Annotated[
        list[str], typer.Argument(metavar="A B [C...]", help="Run directories; A is the base.", show_default=False)
    ],
    json_file: JsonFile = None,
    markdown_file: Annotated[
        str | None,
        typer.Option("--markdown", metavar="FILE|-", help="Write a table for a review comment.", show_default=False),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="End with 4 if a run is slower than A by this share (3%) or more.", show_default=False
        ),
    ] = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Say what changed between runs: deltas of the six terms that sum to the step's, each with its noise band.

    All runs stand in one table first (mean step, terms, tokens/s, time per token), then each beside A. Means are over
    ranks and whole steps, so runs of different size and length compare. The noise band is what the change would be
    if other steps had been recorded (95 %, bootstrap over steps, same runs: same band).

    Exit status: 0 done (also where health touches figures: see it in the output); 1 could not; with --fail-if-slower
    4 slower by that share, beyond the noise band; 5 the noise is too wide to tell.

    Examples:

        stepscope compare runs/a runs/b

        stepscope compare runs/main runs/change --fail-if-slower 3% --markdown comment.md
    """
    if len(paths) < 2:
        raise typer.BadParameter("compare needs two runs or more: stepscope compare A B")
    limit = None if fail_if_slower is None else per_cent(fail_if_slower)
    refuse_two_on_stdout({"--json": json_file, "--markdown": markdown_file})
    from stepscope.analysis.compare import compare as compared
    from stepscope.analysis.ingest import open_run
    from stepscope.analysis.report import dumps

    comparison = compared([open_run(path) for path in paths])
    alone = "-" in (json_file, markdown_file)
    if json_file is not None:
        write_text(json_file, dumps(comparison.to_json()))
    if markdown_file is not None:
        from stepscope.analysis.report.differences import markdown

        write_text(markdown_file, markdown(comparison))
    if not alone:
        from stepscope.analysis.report.differences import print_comparison

        show(lambda out: print_comparison(comparison, out))
    status = ExitCode.OK if limit is None else _judge(comparison, limit, quiet or alone)
    if not alone:
        say_next(*(f"stepscope analyze {shlex.quote(path)}" for path in paths[-1:]), quiet=quiet)
    return status


def _judge(comparison: Comparison, limit: float, silent: bool) -> ExitCode:
    """The exit status of --fail-if-slower over all runs: slower anywhere, else undecided anywhere, else fine."""
    from stepscope.analysis import units
    from stepscope.analysis.compare import SLOWER, UNDECIDED, verdict
    from stepscope.analysis.report.terminal import clean

    verdicts = [verdict(pair, limit) for pair in comparison.pairs]
    words = {SLOWER: "slower beyond the noise band", UNDECIDED: "the noise is too wide to tell: record more steps"}
    if not silent:
        for pair, found in zip(comparison.pairs, verdicts, strict=True):
            change = units.signed_share(pair.step.relative)
            print(f"{clean(pair.b)}: {change} (limit {units.share(limit)}): {words.get(found, 'not slower')}")
    if SLOWER in verdicts:
        return ExitCode.SLOWER
    return ExitCode.UNDECIDED if UNDECIDED in verdicts else ExitCode.OK
