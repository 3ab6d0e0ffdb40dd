"""What does the analysis cost beside the reading? The same processes read a trace and then analyse all of it.

    STEPSCOPE_CORPUS=traces python benchmarks/analysis_cost.py            one and two million events of each kind of trace
    python benchmarks/analysis_cost.py --write docs/analysis_cost.md      puts the table into the page

One rank and eight ranks are made from real traces, a run of our own from a sample: each repeated in time with its ids
counted on (see ingest.py). What counts are ratios within one process, in CPU time, medians of some processes; nothing is
read from an earlier store. `analysis` is everything after reading: ledger, matching, overlap, causes, findings, the
report on a terminal; the JSON stands beside it, for most of its time is writing text. What both import first (numpy, pandas,
pyarrow, rich) costs the same whatever is read, and stands apart.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingest import make_rank, write_into

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "sample_traces" / "dp2_pp2_1f1b"
PROGRAM = """
import json, sys, time
from io import StringIO
import pyarrow.parquet
from rich.console import Console
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.report import analyze
from stepscope.analysis.report.terminal import print_report
marks = [time.process_time()]
run = open_run(sys.argv[1], engine="serial")
marks.append(time.process_time())
decomposition = decompose(run)
marks.append(time.process_time())
report = analyze(run, decomposition=decomposition)
marks.append(time.process_time())
print_report(report, Console(file=StringIO(), width=120))
marks.append(time.process_time())
assert len(report.json_text()) > 1000
marks.append(time.process_time())
print(json.dumps(marks))
"""
LIMIT = 0.5
"""Per million events the analysis shall cost at most this share of the reading."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one trace, medians: start and imports, reading, ledger, causes, terminal, JSON."""

    kind: str
    events: int
    imported: float
    read: float
    ledger: float
    causes: float
    shown: float
    written: float

    @property
    def analysis(self) -> float:
        """All of it but the JSON."""
        return self.ledger + self.causes + self.shown


def measure(kind: str, events: int, trace: Path, repeats: int) -> Cost:
    """Read and analyse it in processes of their own, each with an empty cache."""
    rows = []
    for _ in range(repeats):
        shutil.rmtree(trace / ".stepscope", ignore_errors=True)
        with tempfile.TemporaryDirectory() as cache:
            kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(trace.parent / "byte-code")}
            environment = {**os.environ, **kept, "XDG_CACHE_HOME": cache}
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, str(trace)], env=environment, capture_output=True, text=True
            )
        if done.returncode:
            sys.exit(f"{kind}: {done.stderr[-3000:]}")
        marks = json.loads(done.stdout.splitlines()[-1])
        rows.append([marks[0], *(later - before for before, later in itertools.pairwise(marks))])
    return Cost(kind, events, *(statistics.median(column) for column in zip(*rows, strict=True)))


# -- the traces --------------------------------------------------------------------------------------------------------


def one_rank(corpus: Path, out: Path, events: int) -> int:
    """One A100 of a data-parallel job, in one file."""
    return make_rank(corpus / "kineto-nccl-a100" / "nccl_data.json.gz", out, events)


def eight_ranks(corpus: Path, out: Path, events: int) -> int:
    """A recommendation model on eight GPUs, whose communications are matched by time."""
    out.mkdir()
    ranks = sorted((corpus / "kineto-dlrm-8rank").glob("*.json.gz"))
    return sum(make_rank(file, out / file.name, events // len(ranks), rank) for rank, file in enumerate(ranks))


def own_run(corpus: Path, out: Path, events: int) -> int:
    """Four ranks of a tiny model, two stages by two replicas: a thousand events and 43 communications a step."""
    out.mkdir()
    shutil.copy(SAMPLE / "run.json", out)
    files = sorted(SAMPLE.glob("rank_*.trace.json.gz"))
    texts = [gzip.decompress(file.read_bytes()).decode() for file in files]
    counted = re.compile(r'("ts":|"issue_ns":|"op_id":|"waits_for":|"Seq":|"id":|ProfilerStep#)(\d+)')
    highest: dict[str, int] = {}
    lowest = min(int(number) for text in texts for key, number in counted.findall(text) if key == '"ts":')
    for text in texts:
        for key, number in counted.findall(text):
            highest[key] = max(highest.get(key, 0), int(number))
    span = highest['"ts":'] - lowest + 10_000
    stride = {key: number + 1 for key, number in highest.items()} | {'"ts":': span, '"issue_ns":': span * 1000}
    stride['"waits_for":'] = stride['"op_id":'] = max(stride['"waits_for":'], stride['"op_id":'])
    per_copy = sum(text.count('"ph"') for text in texts)
    copies = -(-events // per_copy)
    for file, text in zip(files, texts, strict=True):
        begin, end = text.index("[", text.index('"traceEvents"')) + 1, text.rindex("]}")
        pieces = counted.split(text[begin:end].strip("\n"))
        static, keys, numbers = pieces[0::3], pieces[1::3], [int(number) for number in pieces[2::3]]
        with gzip.open(out / file.name, "wt", compresslevel=1) as made:
            made.write(text[:begin])
            for copy in range(copies):
                rows = zip(keys, numbers, static[1:], strict=True)
                body = "".join(f"{key}{number + copy * stride[key]}{rest}" for key, number, rest in rows)
                made.write(f"\n{static[0]}{body}" + ("," if copy + 1 < copies else ""))
            made.write(text[end:])
    return copies * per_copy


KINDS: dict[str, Callable[[Path, Path, int], int]] = {
    "one A100": one_rank,
    "eight GPUs": eight_ranks,
    "own run, four ranks": own_run,
}


# -- the table ---------------------------------------------------------------------------------------------------------


def table(costs: list[Cost]) -> str:
    """Markdown: each trace, and what a million events more cost."""
    lines = [
        "| trace | events | imports | reading | analysis | of the reading | ledger | causes | shown | JSON |",
        f"|{'---|' * 10}",
    ]

    def row(kind: str, events: str, numbers: list[float]) -> str:
        imported, read, ledger, causes, shown, written = numbers
        whole = ledger + causes + shown
        parts = " | ".join(f"{number:.2f}" for number in (ledger, causes, shown, written))
        return f"| {kind} | {events} | {imported:.2f} | {read:.2f} | {whole:.2f} | {whole / read:.0%} | {parts} |"

    for kind in dict.fromkeys(cost.kind for cost in costs):
        of = [cost for cost in costs if cost.kind == kind]
        figures = [[one.imported, one.read, one.ledger, one.causes, one.shown, one.written] for one in of]
        lines += [row(kind, f"{one.events:,}", numbers) for one, numbers in zip(of, figures, strict=True)]
        if len(of) > 1:
            millions = (of[-1].events - of[0].events) / 1e6
            more = [(last - first) / millions for first, last in zip(figures[0], figures[-1], strict=True)]
            lines.append(row(f"{kind}, a million more", "", more))
    return "\n".join(lines)


def main() -> None:
    """Make the traces, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 2_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, help="a page with marks that takes the table")
    options = parser.parse_args()
    folder = os.environ.get("STEPSCOPE_CORPUS")
    if not folder or not Path(folder).is_dir():
        print("skipped: name the folder of real traces in STEPSCOPE_CORPUS")
        return
    subprocess.run(
        [sys.executable, "-c", "from stepscope.analysis.ingest.reading import prepare; prepare()"], check=True
    )
    costs = []
    with tempfile.TemporaryDirectory() as work:
        for kind, make in KINDS.items():
            for wanted in options.events:
                trace = Path(work) / f"{kind.replace(' ', '_')}-{wanted}"
                trace = trace.with_suffix(".json.gz") if make is one_rank else trace
                events = make(Path(folder), trace, wanted)
                costs.append(measure(kind, events, trace, options.repeats))
                print(costs[-1], file=sys.stderr)
                if trace.is_dir():
                    shutil.rmtree(trace)
                else:
                    trace.unlink()
    print(table(costs))
    if options.write:
        write_into(options.write, table(costs))


if __name__ == "__main__":
    main()
