"""HolisticTraceAnalysis on our rank files, beside our own ledger: do both say the same where they mean the same?

    python benchmarks/hta_breakdown.py                                     records two runs, then compares
    python benchmarks/hta_breakdown.py runs/a runs/b                       compares recorded runs
    python benchmarks/hta_breakdown.py --write docs/hta_comparison.md      puts the table into the page

HTA (`traceinsight` on PyPI) lives in an environment of its own: `--hta-python` names its interpreter, and the
environment is made where there is none. It runs on the files as they are. Exits with 1 where the two disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HTA = "traceinsight==0.6.1"
LAYOUTS = {
    "dp4": ["--dp", "4", "--microbatches", "2"],
    "dp2-pp2-1f1b": ["--dp", "2", "--pp", "2", "--schedule", "1f1b", "--microbatches", "8"],
}
TOLERANCE_NS = 1000
"""HTA adds float microseconds: a thousand rows of a trace may be off by some nanoseconds each."""
TERMS = {"compute": "compute", "non_compute": "non-compute", "idle": "idle", "kernel": "whole span"}
"""HTA's columns, and how the table calls them."""
MARKS = ("<!-- table: begin -->", "<!-- table: end -->")


def inside(request: dict[str, Any]) -> dict[str, Any]:
    """HTA's two tables; runs in HTA's environment, where stepscope is not installed."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1" if request["exact"] else "0"  # read when hta is imported
    import hta.utils.utils as utils
    from hta.trace_analysis import TraceAnalysis

    known, ours = utils.is_comm_kernel, set(request["communication"])
    utils.is_comm_kernel = lambda name: name in ours or known(name)  # by itself it knows `nccl*` only
    files = {int(rank): path for rank, path in request["files"].items()}
    analysis = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
    return {
        "breakdown": analysis.get_temporal_breakdown(visualize=False).to_dict("records"),
        "overlap": analysis.get_comm_comp_overlap(visualize=False).to_dict("records"),
    }


def hta_interpreter(python: Path) -> Path:
    """The interpreter of HTA's environment, which is made when it is not there."""
    if not python.exists():
        print(f"making an environment for {HTA} in {python.parent.parent}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", HTA], check=True)
    return python


def hta_tables(python: Path, run: Path, communication: list[str], exact: bool) -> dict[int, dict[str, float]]:
    """Rank -> HTA's numbers in us (overlap in percent), with nanoseconds kept or rounded as HTA does by default."""
    files = {str(int(path.name[5:10])): str(path) for path in sorted(run.glob("rank_*.trace.json.gz"))}
    request = json.dumps({"files": files, "communication": communication, "exact": exact})
    done = subprocess.run([str(python), __file__, "--inside", request], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"HTA failed on {run}:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    tables = {int(row["rank"]): dict(row) for row in answer["breakdown"]}
    for row in answer["overlap"]:
        tables[int(row["rank"])].update(row)
    return tables


def our_tables(run: Path) -> tuple[dict[int, dict[str, int]], list[str]]:
    """Rank -> our ledger summed over all steps, in ns; and the names of the communication rows."""
    import numpy as np

    from stepscope.analysis.ingest import open_run
    from stepscope.analysis.ledger.decompose import decompose
    from stepscope.tracer.schema import KINDS

    opened = open_run(run)
    terms = decompose(opened).ledger.groupby("rank").sum(numeric_only=True)
    tables, names = {}, set()
    for rank in opened.ranks:
        row = terms.loc[rank]
        exposed = int(row["visible_comm_ns"] + row["bubble_ns"] + row["imbalance_ns"])
        tables[rank] = {
            "compute": int(row["compute_ns"]),
            "non_compute": exposed + int(row["memcpy_ns"]),
            "idle": int(row["idle_ns"]),
            "kernel": int(row["step_ns"]),
            "hidden": int(row["hidden_comm_ns"] + row["hidden_wait_ns"]),
            "exposed": exposed,
        }
        columns = opened.columns(rank, "kind", "name_id")
        names |= {
            opened.strings(rank)[i] for i in np.unique(columns["name_id"][columns["kind"] == KINDS.index("comm")])
        }
    return tables, sorted(names)


def compare(python: Path, run: Path) -> Iterator[tuple[list[str], bool]]:
    """The table's rows of one run, and whether each agrees."""
    ours, names = our_tables(run)
    exact, rounded = (hta_tables(python, run, names, keep) for keep in (True, False))
    for rank, mine in ours.items():
        for term, label in TERMS.items():
            column = f"{term}_time(us)"
            cells, agrees = time_cells(mine[term], exact[rank][column] * 1000, rounded[rank][column] * 1000)
            yield [run.name, str(rank), label, *cells], agrees
        in_flight = mine["hidden"] + mine["exposed"]
        overlap = 100 * mine["hidden"] / in_flight if in_flight else float("nan")
        theirs, default = (table[rank]["comp_comm_overlap_pctg"] for table in (exact, rounded))
        cells = [f"{overlap:.2f} %", f"{theirs:.2f} %", f"{theirs - overlap:+.2f}", f"{default:.2f} %"]
        yield [run.name, str(rank), "overlap", *cells], abs(theirs - overlap) <= 0.0051  # HTA gives two decimals


def time_cells(ours: int, theirs: float, default: float) -> tuple[list[str], bool]:
    """Ours, HTA's, their difference, and HTA's as it comes with its distance from ours; all from ns."""
    distance = f"{100 * (default / ours - 1):+.2f} %" if ours else "-"
    cells = [
        f"{ours / 1e6:.6f}",
        f"{theirs / 1e6:.6f}",
        f"{round(theirs) - ours:+d} ns",
        f"{default / 1e6:.3f} ({distance})",
    ]
    return cells, abs(theirs - ours) < TOLERANCE_NS


def record(directory: Path) -> list[Path]:
    """Two short runs of four ranks."""
    for name, options in LAYOUTS.items():
        command = [sys.executable, "-m", "stepscope", "run", *options, "--steps", "6", "--out", str(directory / name)]
        subprocess.run([*command, "--quiet"], check=True)
    return [directory / name for name in LAYOUTS]


def table_of(rows: list[list[str]]) -> str:
    """A Markdown table."""
    head = ["run", "rank", "term", "stepscope, ms", "HTA, ns kept, ms", "difference", "HTA as it comes, ms"]
    lines = [head, ["---"] * 3 + ["---:"] * 4, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(page: Path, table: str) -> None:
    """Put the table between the page's marks."""
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> int:
    """Print the table; 1 where the two disagree."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories; without any, two runs are recorded")
    parser.add_argument("--hta-python", type=Path, default=cache / "stepscope" / "hta" / "bin" / "python")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(json.loads(options.inside)), default=float))
        return 0
    python = hta_interpreter(options.hta_python)
    with tempfile.TemporaryDirectory() as directory:
        runs = options.runs or record(Path(directory))
        compared = [row for run in runs for row in compare(python, run)]
    table = table_of([row for row, _ in compared])
    print(table)
    if options.write:
        write(options.write, table)
    wrong = sum(not agrees for _, agrees in compared)
    print(f"\n{len(compared) - wrong} of {len(compared)} numbers agree", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
