"""How fast, and in how much memory, is a trace read? The same files through stepscope and through HolisticTraceAnalysis.

    python benchmarks/ingest.py --trace nccl_data.json.gz                    a rank of 1 M events, eight, one of 10 M; all readers
    STEPSCOPE_CORPUS=traces python benchmarks/ingest.py                      the same, the trace found in its folder
    python benchmarks/ingest.py --trace T --sizes 8x1000000 --hta            other sizes (RANKSxEVENTS), without HTA
    python benchmarks/ingest.py --trace T --write docs/reading_speed.md      puts the table into the page

The ranks are made from a real trace, repeated in time with its ids counted on. Every reader runs in a process of its own
that parses, decomposes and computes overlap; what is compared is the CPU time and the peak memory of that process, and
only as ratios of one run; of what takes a second the median of three counts. CPU time is that of the process and of its
workers, peak memory that of its largest process. Byte code is kept by all of them, as it is wherever nothing forbids that,
and numpy has no threads for linear algebra, which none of them uses (the `stepscope` command does without them too). HTA
(`traceinsight` 0.6.1 and `holistictraceanalysis` 0.5.0) lives in environments of its own, which are made where there are
none.
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
MOST_FOR_HTA = 2_000_000
"""Events a rank beyond which HTA would not fit into the memory of a small machine."""

MARKS = ("<!-- table: begin -->", "<!-- table: end -->")

OURS = """
import json, sys, time
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.overlap import overlap_columns
begin = time.perf_counter()
run = open_run(sys.argv[1:])
opened = time.perf_counter()
decomposition = decompose(run)
overlapped = overlap_columns(decomposition)
assert len(run.ranks) == len(sys.argv) - 1
assert decomposition.columns["step_ns"].sum() > 0 and overlapped["transfer_ns"].sum() > 0
print(json.dumps({"open_s": opened - begin}))
"""
FRAMES = """
from stepscope.analysis.ledger.overlap import overlap
assert len(decomposition.ledger) and len(overlap(run, decomposition)) == len(overlapped["step"])
"""
THEIRS = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])))
assert len(analysis.get_temporal_breakdown(visualize=False))
assert len(analysis.get_comm_comp_overlap(visualize=False))
"""


@dataclass(frozen=True)
class Measured:
    """One process: what it did, of how many events, in how many CPU seconds and MB at most; how long opening took by the clock."""

    reader: str
    ranks: int
    events: int  # of a rank
    cpu_s: float
    peak_mb: float
    open_s: float | None = None


def make_rank(source: Path, out: Path, events: int, rank: int = 0) -> int:
    """Write a trace of at least `events` events: `source` repeated, stamps, ids and step numbers counted on, as a rank.

    The text between the numbers stays what it is, so that the file looks as its writer writes.
    """
    text = gzip.decompress(source.read_bytes()).decode()
    text = re.sub(r'("distributedInfo":\s*\{[^{}]*?"rank":\s*)\d+', rf"\g<1>{rank}", text, count=1)
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


def measure(
    reader: str, traces: list[Path], events: int, python: Path, program: str, environment: dict[str, str]
) -> Measured:
    """Run a program on the traces in a process of its own."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(python), "-c", program, *map(str, traces)],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
            stdout=out,
            stderr=log,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{reader} failed:\n{log.read().decode(errors='replace')[-3000:]}")
        out.seek(0)
        said = out.read().decode(errors="replace").strip().rpartition("\n")[2]
    open_s = json.loads(said)["open_s"] if said.startswith('{"open_s"') else None
    return Measured(reader, len(traces), events, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, open_s)


def ours(traces: list[Path], events: int, work: Path, cold: bool) -> list[Measured]:
    """First read (cold and warm), second read, and a first read whose ledger and overlap become DataFrames."""
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(work.parent / "byte-code")}
    results: list[Measured] = []

    def run(reader: str, program: str, store: str, **environment: str) -> Measured:
        environment |= kept | {"XDG_CACHE_HOME": str(work / store)}
        return measure(reader, traces, events, Path(sys.executable), program, environment)

    if cold:
        run("warm up", "import numba, pandas, stepscope.analysis.report", "none")
        results.append(
            run("stepscope, first ever (compiles)", OURS, "cold", NUMBA_CACHE_DIR=str(work / "machine-code"))
        )
    run("warm up", "from stepscope.analysis.ingest.reading import prepare; prepare()", "none")
    small = len(traces) * events < MOST_FOR_HTA
    results.append(middle([run("stepscope, first read", OURS, f"first-{i}") for i in range(3 if small else 1)]))
    results.append(middle([run("stepscope, second read", OURS, "first-0") for _ in range(3 if small else 1)]))
    if small:
        frames = [run("stepscope, first read, as DataFrames", OURS + FRAMES, f"frames-{i}") for i in range(3)]
        results.append(middle(frames))
    return results


def middle(results: list[Measured]) -> Measured:
    """The one of median CPU time."""
    return sorted(results, key=lambda one: one.cpu_s)[len(results) // 2]


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
    """Markdown; ratios against the warm first read of the same traces."""
    base = {(one.ranks, one.events): one for one in results if one.reader == "stepscope, first read"}
    lines = [
        "| reader | ranks | events a rank | CPU-s | ratio | peak MB | ratio | `open_run` s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        against = base[one.ranks, one.events]
        opened = "–" if one.open_s is None else f"{one.open_s:.3f}"
        lines.append(
            f"| {one.reader} | {one.ranks} | {one.events:,} | {one.cpu_s:.2f} | {one.cpu_s / against.cpu_s:.2f} "
            f"| {one.peak_mb:.0f} | {one.peak_mb / against.peak_mb:.2f} | {opened} |"
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


def size(text: str) -> tuple[int, int]:
    """`4x1000000` -> ranks, events of each."""
    ranks, _, events = text.partition("x")
    return int(ranks), int(events)


def main() -> None:
    """Make the ranks, run the readers, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=default_trace(), help="a real Kineto trace (.json.gz) to repeat")
    parser.add_argument(
        "--sizes",
        type=size,
        nargs="+",
        default=[(1, 1_000_000), (8, 1_000_000), (1, 10_000_000)],
        metavar="RANKSxEVENTS",
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-bench")
    parser.add_argument("--hta", nargs="*", choices=[*HTA], default=[*HTA], help="which of them (none: leave them out)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--write", type=Path, help="a page with marks that takes the table")
    options = parser.parse_args()
    if options.trace is None:
        print("skipped: name a trace with --trace, or the folder of real traces in STEPSCOPE_CORPUS")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    results: list[Measured] = []
    for ranks, wanted in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.work) as place:
            traces = [Path(place) / f"rank_{rank}.json.gz" for rank in range(ranks)]
            events = max(make_rank(options.trace, trace, wanted, rank) for rank, trace in enumerate(traces))
            results += ours(traces, events, Path(place), cold=not results)
            readers = options.hta if ranks == 1 else options.hta[:1]  # one of them is enough for many ranks
            for name in readers if wanted <= MOST_FOR_HTA else ():
                results.append(measure(name, traces, events, hta_python(name, options.work), THEIRS, {}))
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    if options.write:
        write_into(options.write, table(results))


if __name__ == "__main__":
    main()
