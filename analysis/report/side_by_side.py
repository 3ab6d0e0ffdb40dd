"""Many runs in one table, one row a run: the mean step, its six terms, tokens per second and time per token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from stepscope.analysis import units
from stepscope.analysis.causes.summary import TERM_COLUMNS
from stepscope.analysis.records import TERMS
from stepscope.analysis.report.model import Report
from stepscope.analysis.report.terminal import clean
from stepscope.analysis.report.view import SHORT_LABELS

TEXT_COLUMNS = 2
"""Letter and name; every other column is a number."""


def letters(count: int) -> list[str]:
    """A, B, C, ... Z, AA, AB: what a table calls its runs."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return [alphabet[i] if i < 26 else alphabet[i // 26 - 1] + alphabet[i % 26] for i in range(count)]


def heads_and_rows(reports: Sequence[Report], names: Sequence[str] | None = None) -> tuple[list[str], list[list[str]]]:
    """The heads and one row of cells a report, times in one unit each column block; undefined is a dash.

    `names`: what the runs are called, their own names by default. `vs A` is the step's change against the first report.
    """
    times = [[_mean(report, name) for name in ("step_ns", *TERM_COLUMNS)] for report in reports]
    tokens = [per_token(report) for report in reports]
    scale = units.time_scale([time for line in times for time in line])
    token_scale = units.time_scale(tokens)
    heads = ["", "run", f"step, {scale.unit}", *(SHORT_LABELS.get(term, term) for term in TERMS)]
    heads += ["tokens/s", f"{token_scale.unit} a token", "vs A"]
    base, rows = times[0][0] if times else None, []
    for place, (report, line) in enumerate(zip(reports, times, strict=True)):
        change = None if place == 0 or not base or line[0] is None else line[0] / base - 1
        rows.append(
            [
                letters(len(reports))[place],
                clean(names[place] if names else report.name, 60),
                *(scale(time) for time in line),
                units.count(report.throughput.tokens_per_s),
                token_scale(tokens[place]),
                units.signed_share(change),
            ]
        )
    return heads, rows


def _mean(report: Report, name: str) -> float | None:
    return float(report.means.values[name]) if report.means.values else None


def per_token(report: Report) -> float | None:
    """Mean step time for each token of the global batch, ns; None where the run does not say its batch."""
    step, tokens = report.means.step_ns, report.throughput.tokens_per_step
    return float(step / tokens) if step and tokens else None


def table(reports: Sequence[Report], names: Sequence[str] | None = None) -> Table:
    """The table for a terminal; names wrap where it is narrow."""
    heads, rows = heads_and_rows(reports, names)
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, head in enumerate(heads):
        number = place >= TEXT_COLUMNS
        drawn.add_column(
            head.replace(" ", "\n") if number else head,
            justify="right" if number else "left",
            no_wrap=place != 1,
            overflow="fold",
        )
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
