"""Causes injected into real training: how much of each the analysis finds, as medians over 20 steps.

`python benchmarks/injected_causes.py` prints a Markdown table; `--write` puts it, dated, into docs/injected_causes.md.
Run it on a machine that does nothing else: a few minutes, two ranks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.summary import counted_rows
from stepscope.analysis.ingest import open_run
from stepscope.analysis.report import Report, analyze

PAGE = Path(__file__).resolve().parent.parent / "docs" / "injected_causes.md"
BEGIN = "<!-- measured by `python benchmarks/injected_causes.py --write` -->"
END = "<!-- end of what is measured -->"
WARM_UP = 1
MS = 10**6
WITHIN = 0.2
"""A measured change may be off by this share of what was injected."""


@dataclass(frozen=True)
class Case:
    """`options` of both runs, `without` and `injected` of one. `rank` must change by `amount_ms` in `term`."""

    cause: str
    options: Sequence[str]
    injected: Sequence[str]
    term: str
    rank: int | None = None  # None: mean over ranks
    amount_ms: float | None = None  # None: not known beforehand
    without: Sequence[str] = ()


CASES = (
    Case("slow rank", ["--dp", "2"], ["--slow-rank", "1", "--slow-ms", "40"], "compute", 1, 40),
    Case("slow stage", ["--pp", "2"], ["--slow-rank", "1", "--slow-ms", "40"], "compute", 1, 40),
    Case("late host", ["--dp", "2"], ["--late-rank", "1", "--late-ms", "40"], "idle", 1, 40),
    Case(
        "skewed experts",
        ["--preset", "tiny-moe", "--dp", "2", "--ep", "2"],
        ["--routing-skew", "2"],
        "imbalance",
        without=["--routing-skew", "0"],
    ),
    Case("tiny buckets", ["--dp", "2", "--no-overlap"], ["--bucket-mb", "0.004"], "visible_comm"),
    Case("no overlap", ["--dp", "2"], ["--no-overlap"], "visible_comm"),
)


def train(out: Path, options: Sequence[str], steps: int) -> Report:
    """One recorded run of `steps` steps beside the first ones, analysed."""
    command = [sys.executable, "-m", "stepscope", "run", "--device", "cpu", "--quiet", "--out", str(out)]
    subprocess.run([*command, "--steps", str(steps + WARM_UP), *options], check=True, stdout=subprocess.DEVNULL)
    return analyze(open_run(out))


def medians(report: Report, rank: int | None) -> pd.Series:
    """Median over steps of every term of one rank, or of the mean over ranks, ns."""
    rows = counted_rows(report.ledger)
    rows = rows[rows["step"].map(lambda step: int(step) >= WARM_UP)]
    rows = rows if rank is None else rows[rows["rank"] == rank]
    columns = [name for name in rows.columns if name.endswith("_ns")]
    return rows.groupby("step")[columns].mean().median()


def row(case: Case, folder: Path, steps: int) -> list[str]:
    """The cells of one cause."""
    place = folder / case.cause.replace(" ", "_")
    base = train(place.with_suffix(".base"), [*case.options, *case.without], steps)
    injected = train(place.with_suffix(".injected"), [*case.options, *case.injected], steps)
    before, after = medians(base, case.rank), medians(injected, case.rank)
    change = float(after[f"{case.term}_ns"] - before[f"{case.term}_ns"])
    whole = float(medians(injected, None)["step_ns"] - medians(base, None)["step_ns"])
    share = verdict = units.DASH
    if case.amount_ms is not None:
        ratio = change / (case.amount_ms * MS)
        share, verdict = units.share(ratio), "yes" if abs(ratio - 1) <= WITHIN else "no"
    first = injected.findings[0].text.partition(";")[0] if injected.findings else "none"
    where = "mean" if case.rank is None else f"rank {case.rank}"
    return [
        case.cause,
        f"`{' '.join([*case.options, *case.injected])}`",
        first,
        f"{case.term.replace('_', ' ')} of {where} {units.signed_duration(change)}",
        share,
        verdict,
        units.signed_duration(whole),
    ]


def table(steps: int) -> str:
    """The whole table, dated."""
    heads = ["cause", "options", "first finding", "term", "of what was injected", "within 20 %", "step"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            lines.append(f"| {' | '.join(row(case, Path(folder), steps))} |")
            print(lines[-1], flush=True)
    return f"Measured on {date.today().isoformat()}, medians over {steps} steps:\n\n" + "\n".join(lines)


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="Steps that count, after one that does not.")
    parser.add_argument("--write", action="store_true", help="Put the table into docs/injected_causes.md.")
    chosen = parser.parse_args()
    made = table(chosen.steps)
    print(f"\n{made}")
    if chosen.write:
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise ValueError(f"{PAGE} needs the lines {BEGIN!r} and {END!r}")
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
