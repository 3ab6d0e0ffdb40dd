"""How fast, and in how much memory, is a trace read? The same files through stepscope and through HolisticTraceAnalysis.

    python benchmarks/ingest.py --trace nccl_data.json.gz                    one rank of 1 M events, all readers
    STEPSCOPE_CORPUS=traces python benchmarks/ingest.py                      the same, the trace found in its folder
    python benchmarks/ingest.py --trace T --events 1000000 10000000 --no-hta the size of it
    python benchmarks/ingest.py --trace T --write docs/reading_speed.md      puts the table into the page

The ranks are made from a real trace, repeated in time with its ids counted on. Every reader runs in a process of its own
that parses, decomposes and computes overlap; what is compared is the CPU time and the peak memory of that process, and
only as ratios of one run. HTA (`traceinsight` 0.6.1 and `holistictraceanalysis` 0.5.0) lives in environments of its own,
which are made where there are none.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HTA = {"HTA 0.6.1": "traceinsight==0.6.1", "HTA 0.5.0": "holistictraceanalysis==0.5.0"}
MARKS = ("<!-- table: begin -->", "<!-- table: end -->")

OURS = """
import sys
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.overlap import overlap
run = open_run(sys.argv[1], engine="serial")
decomposition = decompose(run)
overlap(run, decomposition)
assert len(decomposition.ledger) and decomposition.ledger["step_ns"].sum() > 0
"""
OPEN_ONLY = """
import sys
from stepscope.analysis.ingest import open_run
assert open_run(sys.argv[1]).ranks
"""
THEIRS = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
assert len(analysis.get_temporal_breakdown(visualize=False))
assert len(analysis.get_comm_comp_overlap(visualize=False))
"""


@dataclass(frozen=True)
class Measured:
    """One process: what it did, of how many events, in how many CPU seconds and MB at most."""

    reader: str
    events: int
    cpu_s: float
    peak_mb: float


def make_rank(source: Path, out: Path, events: int) -> int:
    """Write a trace of at least `events` events: `source` repeated, stamps, ids and step numbers counted on.

    The text between the numbers stays what it is, so that the file looks as its writer writes.
    """
    text = gzip.decompress(source.read_bytes()).decode()
    begin = text.index("[", text.index('"traceEvents"'))
    _, end = json.JSONDecoder(strict=False).raw_decode(text, begin)
    begin, end = begin + 1, end - 1  # between the brackets
    body, per_copy = text[begin:end], text.count('"ph":', begin, end)
    counted = re.compile(r'("ts": |"correlation": |"External id": |"id": |ProfilerStep#)(\d+)')
    pieces = counted.split(body)
    static, keys, numbers = pieces[0::3], pieces[1::3], [int(number) for number in pieces[2::3]]
    stamps = [number for key, number in zip(keys, numbers, strict=True) if key == '"ts": ']
    steps = len({number for key, number in zip(keys, numbers, strict=True) if key == "ProfilerStep#"}) or 1
    largest = max(number for key, number in zip(keys, numbers, strict=True) if key not in ('"ts": ', "ProfilerStep#"))
    strides = {'"ts": ': max(stamps) - min(stamps) + 1000, "ProfilerStep#": steps}
    copies = -(-events // per_copy)
    with gzip.open(out, "wt", compresslevel=1) as file:
        file.write(text[:begin])
        for copy in range(copies):
            shift = [copy * strides.get(key, largest + 1) for key in keys]
            joined = (
                f"{key}{number + by}{rest}"
                for key, number, by, rest in zip(keys, numbers, shift, static[1:], strict=True)
            )
            file.write(static[0] + "".join(joined))
            if copy + 1 < copies:
                file.write(",")
        file.write(text[end:])
    return copies * per_copy


def measure(reader: str, events: int, python: Path, program: str, trace: Path, environment: dict[str, str]) -> Measured:
    """Run a program on the trace in a process of its own."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(python), "-c", program, str(trace)], env={**os.environ, **environment}, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{reader} failed:\n{log.read().decode(errors='replace')[-3000:]}")
    return Measured(reader, events, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def ours(trace: Path, events: int, work: Path, cold: bool) -> list[Measured]:
    """First read (cold and warm), second read, second open."""
    python, results = Path(sys.executable), []
    first = {"XDG_CACHE_HOME": str(work / f"cache-{events}")}
    if cold:
        compiled = {"NUMBA_CACHE_DIR": str(work / "numba-cold"), "XDG_CACHE_HOME": str(work / "cache-cold")}
        results.append(measure("stepscope, first ever (compiles)", events, python, OURS, trace, compiled))
    else:
        warm_up = "from stepscope.analysis.ingest.reading import prepare; prepare()"
        measure("prepare", events, python, warm_up, trace, {})
    results.append(measure("stepscope, first read", events, python, OURS, trace, first))
    results.append(measure("stepscope, second read", events, python, OURS, trace, first))
    results.append(measure("stepscope, second open alone", events, python, OPEN_ONLY, trace, first))
    return results


def hta_python(name: str, work: Path) -> Path:
    """The interpreter of an environment that holds this version of HTA."""
    place = work / f"hta-{HTA[name].split('==')[1]}"
    python = place / "bin" / "python"
    if not python.exists():
        print(f"making an environment for {HTA[name]} in {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", HTA[name]], check=True)
    return python


def table(results: list[Measured]) -> str:
    """Markdown; ratios against the warm first read of the same number of events."""
    base = {one.events: one for one in results if one.reader == "stepscope, first read"}
    lines = ["| reader | events | CPU-s | ratio | peak MB | ratio |", "|---|---|---|---|---|---|"]
    for one in results:
        against = base[one.events]
        lines.append(
            f"| {one.reader} | {one.events:,} | {one.cpu_s:.2f} | {one.cpu_s / against.cpu_s:.2f} "
            f"| {one.peak_mb:.0f} | {one.peak_mb / against.peak_mb:.2f} |"
        )
    return "\n".join(lines)


def write_into(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


def default_trace() -> Path | None:
    """The trace of the public corpus, where STEPSCOPE_CORPUS names its folder."""
    folder = os.environ.get("STEPSCOPE_CORPUS")
    trace = Path(folder) / "kineto-nccl-a100" / "nccl_data.json.gz" if folder else None
    return trace if trace is not None and trace.exists() else None


def main() -> None:
    """Make the ranks, run the readers, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=default_trace(), help="a real Kineto trace (.json.gz) to repeat")
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-bench")
    parser.add_argument("--no-hta", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--write", type=Path, help="a page with marks that takes the table")
    options = parser.parse_args()
    if options.trace is None:
        print("skipped: name a trace with --trace, or the folder of real traces in STEPSCOPE_CORPUS")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    results: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=options.work) as place:
        for index, wanted in enumerate(options.events):
            trace = Path(place) / f"rank0-{wanted}.json.gz"
            events = make_rank(options.trace, trace, wanted)
            results += ours(trace, events, Path(place), cold=index == 0)
            if not options.no_hta and index == 0:
                for name in HTA:
                    results.append(measure(name, events, hta_python(name, options.work), THEIRS, trace, {}))
            trace.unlink()
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    if options.write:
        write_into(options.write, table(results))


if __name__ == "__main__":
    main()
