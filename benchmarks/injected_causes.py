"""Causes injected into real training: how much of each the analysis finds, as medians over 20 steps.

`python benchmarks/injected_causes.py` prints a Markdown table; `--write` puts it, dated, into docs/injected_causes.md.
Run it on a machine that does nothing else: a few minutes, two ranks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
BUCKET_MS = 20  # well above what an operation costs on this machine by itself
MS = 10**6
WITHIN = 0.2
"""A measured change may be off by this share of what was injected."""


@dataclass(frozen=True)
class Case:
    """`options` of both runs, `without` and `injected` of one. `rank` must change by `amount_ms` in `term`.

    `first`: how the first finding of the injected run begins; `cause_named`: what it or the first straggler says beside.
    """

    cause: str
    options: Sequence[str]
    injected: Sequence[str]
    term: str
    first: str
    cause_named: str = ""
    rank: int | None = None  # None: mean over ranks
    amount_ms: float | Callable[[Report, Report], float] | None = None  # of (without, with); None: not known beforehand
    without: Sequence[str] = ()
    axis: str = ""  # operation class that changes most in the comparison with the run without


def bucket_latency(base: Report, injected: Report) -> float:
    """Each of the operations that the small buckets add crosses the slow link once."""
    each = [float(report.alpha_beta.fits["operations_per_step"].iloc[0]) for report in (base, injected)]
    return (each[1] - each[0]) * BUCKET_MS


def hidden_before(base: Report, injected: Report) -> float:
    """What was hidden under backward is exposed after it."""
    return float(medians(base, None)["hidden_comm_ns"]) / MS


WIDE_EXPERTS = ["--preset", "tiny-moe", "--dp", "2", "--ep", "2", "--hidden", "256", "--expert-ffn", "1024"]
LONG_BACKWARD = ["--dp", "2", "--microbatches", "1", "--microbatch-size", "4", "--seq", "256", "--bucket-mb", "0.5"]

CASES = (
    Case(
        "slow rank",
        ["--dp", "2"],
        ["--slow-rank", "1", "--slow-ms", "100"],
        "compute",
        "Rank 1 (dp1) keeps others waiting",
        "slower compute",
        1,
        100,
    ),
    Case(
        "slow stage",
        ["--pp", "2"],
        ["--slow-rank", "1", "--slow-ms", "100"],
        "compute",
        "Rank 1 (pp1) keeps others waiting",
        "slower compute",
        1,
        100,
    ),
    Case(
        "slow link",
        ["--pp", "2", "--schedule", "naive"],
        ["--slow-link", "0-1", "--slow-link-ms", "60"],
        "visible_comm",
        "The pp link from rank 0 to rank 1 (stage 0 to stage 1) is slow",
        rank=1,
        amount_ms=4 * 60,
        axis="pp receive",
    ),
    Case(
        "late host",
        ["--dp", "2"],
        ["--late-rank", "1", "--late-ms", "100"],
        "idle",
        "Rank 1 (dp1) keeps others waiting",
        "late host",
        1,
        100,
    ),
    Case(
        "skewed experts",
        [*WIDE_EXPERTS, "--layers", "2", "--microbatches", "2"],
        ["--routing-skew", "3"],
        "compute",
        "Rank 0 (dp0 ep0) keeps others waiting",
        "expert load",
        rank=0,
        without=["--routing-skew", "0"],
    ),
    Case(
        "tiny buckets",
        ["--dp", "2", "--microbatches", "1", "--no-overlap", "--slow-link", "0-1", "--slow-link-ms", str(BUCKET_MS)],
        ["--bucket-mb", "0.001"],
        "visible_comm",
        "The dp all-reduce is exposed",
        "latency bound",
        amount_ms=bucket_latency,
        axis="dp all_reduce",
    ),
    Case(
        "no overlap",
        [*LONG_BACKWARD, "--slow-link", "0-1", "--slow-link-ms", "60"],
        ["--no-overlap"],
        "visible_comm",
        "The dp all-reduce is exposed",
        amount_ms=hidden_before,
        axis="dp all_reduce",
    ),
)
"""One program a cause: tests/test_injected_measured.py asserts what is named first, this file measures by how much."""


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
    amount = case.amount_ms(base, injected) if callable(case.amount_ms) else case.amount_ms
    if amount is not None:
        ratio = change / (amount * MS)
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
