"""Every strategy learns, and leaves a record that nothing is wrong with: `stepscope run`, then `stepscope analyze`.

    python benchmarks/strategies.py [--steps 50] [--only zero3] [--out DIRECTORY]

Trains the preset `tiny` (`tiny-moe` for experts) on each layout as a person would, 50 steps of the same batches, and
prints one line of a Markdown table for each: loss of the first and of the last step, and the exit status of `analyze` (0:
no complaint about its health). Ends with status 1 if a loss did not fall clearly or a status is not 0. Layouts of eight
ranks come last but for those of experts. Losses are equal where only the layout differs, up to the precision of float32:
`dp` changes the batch, the rest does not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

STEPSCOPE = (sys.executable, "-m", "stepscope")
FALL = 0.9  # of the first loss, after 50 steps; a run that learns nothing stays at 1
FALL_OF_A_STEP = 0.002  # what a shorter run has to show for each step

LAYOUTS = {
    "one rank": "",
    "dp2": "--dp 2",
    "dp2, no overlap": "--dp 2 --no-overlap",
    "zero1 dp2": "--dp 2 --zero 1",
    "zero2 dp2": "--dp 2 --zero 2",
    "zero3 dp2": "--dp 2 --zero 3",
    "zero3 dp2, offload": "--dp 2 --zero 3 --offload cpu",
    "zero3 dp4, two copies": "--dp 4 --zero 3 --replicate 2",
    "tp2": "--tp 2",
    "tp2 sp": "--tp 2 --sp",
    "cp2 ring": "--cp 2",
    "cp2 ulysses": "--cp 2 --cp-mode ulysses",
    "cp2 all-gather": "--cp 2 --cp-mode allgather",
    "pp2 gpipe": "--pp 2 --schedule gpipe",
    "pp2 1f1b": "--pp 2",
    "pp2 interleaved": "--pp 2 --schedule interleaved --chunks 2",
    "pp2 zb-h1": "--pp 2 --schedule zb-h1",
    "dp2 tp2 pp2": "--dp 2 --tp 2 --pp 2",
    "dp2 tp2 sp pp2": "--dp 2 --tp 2 --sp --pp 2",
    "dp2 cp2 tp2": "--dp 2 --cp 2 --tp 2",
    "zero3 dp2 tp2 pp2": "--dp 2 --zero 3 --tp 2 --pp 2",
    "experts, one rank": "--preset tiny-moe",
    "ep2 tp2 sp": "--preset tiny-moe --tp 2 --sp --ep 2",
    "ep2 cp2": "--preset tiny-moe --cp 2 --ep 2",
    "ep2 dp2": "--preset tiny-moe --dp 2 --ep 2",
    "zero1 ep2 dp2 pp2": "--preset tiny-moe --dp 2 --ep 2 --pp 2 --zero 1",
}


@dataclass(frozen=True)
class Outcome:
    """What one layout gave; `complaint` is empty where all is well."""

    first: float
    last: float
    status: int
    complaint: str


def try_layout(arguments: list[str], steps: int, path: Path) -> Outcome:
    """Run and analyze once; RuntimeError where the run itself fails."""
    training = [*STEPSCOPE, "run", *arguments, "--steps", str(steps), "--out", str(path)]
    done = subprocess.run(training, capture_output=True, text=True)
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", done.stdout, re.M)]
    if done.returncode or len(losses) != steps:
        raise RuntimeError(f"{' '.join(training)} ended with {done.returncode}\n{done.stderr}")
    report = subprocess.run([*STEPSCOPE, "analyze", str(path), "--quiet"], capture_output=True, text=True)
    complaint = "" if report.returncode == 0 else "\n".join((report.stdout + report.stderr).splitlines()[:8])
    if not losses[-1] < losses[0] * max(FALL, 1 - FALL_OF_A_STEP * steps):
        complaint += f"\nthe loss went from {losses[0]} to {losses[-1]}"
    return Outcome(losses[0], losses[-1], report.returncode, complaint)


def main() -> int:
    """Print the table; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description="Every strategy learns, and its record is healthy.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="*", default=[], help="layouts whose name contains one of these words")
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    chosen = parser.parse_args()
    names = [name for name in LAYOUTS if not chosen.only or any(word in name for word in chosen.only)]
    wrong = []
    print("| layout | options | first loss | last loss | `analyze` |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(names):
            path = (chosen.out or Path(temporary)) / f"{number:02}"
            outcome = try_layout(LAYOUTS[name].split(), chosen.steps, path)
            options = f"`{LAYOUTS[name]}`" if LAYOUTS[name] else ""
            print(f"| {name} | {options} | {outcome.first:.3f} | {outcome.last:.3f} | {outcome.status} |", flush=True)
            if outcome.complaint:
                wrong.append(f"{name}: {outcome.complaint}")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
