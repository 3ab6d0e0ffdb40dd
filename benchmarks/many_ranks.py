"""A run of a thousand ranks, end to end on one machine: how long, how much CPU time, how much memory over all processes?

    python benchmarks/many_ranks.py                       64 and 1024 ranks made from a sample run
    python benchmarks/many_ranks.py --ranks 256 --keep D  the run stays in D (to look at it, to open it elsewhere)
    python benchmarks/many_ranks.py --dask                64 ranks on a Dask cluster of two workers, one of them killed

The run is made from a small recorded one: its data-parallel axis is repeated, rank numbers and groups are written anew, and
each copy's clock is a microsecond ahead of the one before, which run.json says. Memory is the proportional set size summed
over the command and all that it starts, read five times a second.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[1] / "sample_traces" / "dp2_pp2_1f1b"
COMMAND = [sys.executable, "-m", "stepscope"]
SHIFT_NS = 1000


def make_run(source: Path, out: Path, ranks: int) -> int:
    """Write a run of `ranks` ranks: the one in `source`, repeated along its data-parallel axis. Returns the number of its events.

    ValueError where `ranks` is no multiple of the source's.
    """
    meta = json.loads((source / "run.json").read_text(encoding="utf-8"))
    copies, rest = divmod(ranks, meta["world_size"])
    if rest:
        raise ValueError(f"{ranks} ranks are no multiple of the {meta['world_size']} in {source}")
    axes = list(meta["mesh"])
    mesh = meta["mesh"] | {"dp": meta["mesh"]["dp"] * copies}

    def place(rank: int, copy: int) -> dict[str, int]:
        old = meta["coords"][rank]
        return {**old, "dp": copy * meta["mesh"]["dp"] + old["dp"]}

    def number(rank: int, copy: int) -> int:
        at, coords = 0, place(rank, copy)
        for axis in axes:
            at = at * mesh[axis] + (coords[axis] if mesh[axis] > 1 else 0)
        return at

    def group(one: dict, copy: int) -> dict:
        """The group of copy `copy` that `one` becomes: joined over all copies where it runs along dp."""
        if "dp" in one["axis"].split("_"):
            members = sorted(number(rank, c) for c in range(copies) for rank in one["ranks"])
            return {**one, "ranks": members}
        return {**one, "name": f"{one['name']}.{copy}", "ranks": [number(rank, copy) for rank in one["ranks"]]}

    out.mkdir(parents=True)
    groups: dict[str, dict] = {}
    coords: list[dict[str, int]] = [{}] * ranks
    origin, shifts = [0] * ranks, [0] * ranks
    rows = 0
    for rank in range(meta["world_size"]):
        text = gzip.decompress((source / f"rank_{rank:05d}.trace.json.gz").read_bytes()).decode()
        rows += copies * text.count('"ph":')
        for copy in range(copies):
            new = number(rank, copy)
            coords[new], origin[new], shifts[new] = place(rank, copy), rank, copy * SHIFT_NS
            mine = {one["name"]: group(one, copy) for one in meta["groups"] if rank in one["ranks"]}
            groups |= {one["name"]: one for one in mine.values()}
            written = renumbered(text, rank, new, ranks, mine, {r: number(r, copy) for r in range(len(meta["coords"]))})
            written = shifted(written, shifts[new])
            (out / f"rank_{new:05d}.trace.json.gz").write_bytes(gzip.compress(written.encode(), 1))
    meta |= {"name": f"{ranks} ranks", "run_id": f"many-{ranks}", "world_size": ranks, "mesh": mesh, "coords": coords}
    meta |= {"hosts": [f"host{rank // 8}" for rank in range(ranks)], "groups": list(groups.values())}
    meta |= {"clock": [{"offset_ns": -shift, "drift_ppm": 0.0, "bound_ns": 0} for shift in shifts]}
    meta |= {"pipeline_table": [meta["pipeline_table"][rank] for rank in origin]}
    (out / "run.json").write_text(json.dumps(meta), encoding="utf-8")
    return rows


def renumbered(text: str, rank: int, new: int, world: int, groups: dict[str, dict], numbers: dict[int, int]) -> str:
    """The rank file's text with the numbers and groups of another rank."""
    header, separator, rows = text.partition('"traceEvents"')
    info = json.loads(header.rstrip().rstrip(",") + "}")
    info["distributedInfo"] |= {"rank": new, "world_size": world}
    for entry in info["distributedInfo"]["pg_config"]:
        one = groups[entry["pg_name"]]
        entry |= {"pg_name": one["name"], "ranks": one["ranks"], "pg_size": len(one["ranks"])}
    for name, one in groups.items():
        rows = re.sub(
            rf'"Group size":\d+,"Process Group Name":"{re.escape(name)}",("Process Group Description":"[^"]*"),'
            r'"Process Group Ranks":"[^"]*"',
            f'"Group size":{len(one["ranks"])},"Process Group Name":"{one["name"]}",\\1,'
            f'"Process Group Ranks":"{json.dumps(one["ranks"])}"',
            rows,
        )
    rows = re.sub(r'"(Src|Dst) Rank":(\d+)', lambda found: f'"{found[1]} Rank":{numbers[int(found[2])]}', rows)
    rows = rows.replace(f'"pid":{rank},', f'"pid":{new},')
    return json.dumps(info)[:-1] + ", " + separator + rows


def shifted(text: str, by_ns: int) -> str:
    """The text with another base for its stamps."""
    base = re.search(r'"baseTimeNanoseconds": (\d+)', text)
    assert base is not None, "our rank files have a base"
    return text.replace(base[0], f'"baseTimeNanoseconds": {int(base[1]) + by_ns}', 1)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One command: what it did, how long it took, and its peak over all processes."""

    what: str
    ranks: int
    rows: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    processes: int


def children_of(pid: int) -> list[int]:
    """The process and all below it that still live."""
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return list(dict.fromkeys(found))


def memory_mb(pids: list[int]) -> float:
    """Their proportional set sizes, summed; processes that have ended count nothing."""
    total = 0
    for pid in pids:
        try:
            found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        except OSError:
            continue
        total += int(found[1]) if found else 0
    return total / 1024


def measure(what: str, arguments: list[str], ranks: int, rows: int, environment: dict[str, str]) -> Measured:
    """Run a stepscope command; statuses 0 and 3 are what it may end with."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*COMMAND, *arguments], env={**os.environ, **environment}, stdout=log, stderr=log)
        peak, most = 0.0, 1
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            family = children_of(process.pid)
            peak, most = max(peak, memory_mb(family)), max(most, len(family))
            time.sleep(0.2)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3):
            log.seek(0)
            sys.exit(f"{what} ended with {process.returncode}:\n{log.read().decode(errors='replace')[-3000:]}")
    wall = time.monotonic() - began
    return Measured(what, ranks, rows, wall, usage.ru_utime + usage.ru_stime, peak, most)


def table(results: list[Measured]) -> str:
    """Markdown."""
    lines = ["| command | ranks | events | wall s | CPU-s | peak MB, all processes |", "|---|---|---|---|---|---|"]
    for one in results:
        lines.append(
            f"| {one.what} | {one.ranks} | {one.rows:,} | {one.wall_s:.1f} | {one.cpu_s:.1f} | {one.peak_mb:.0f} |"
        )
    return "\n".join(lines)


def end_to_end(run: Path, ranks: int, rows: int, cache: Path) -> list[Measured]:
    """First read and analysis, then the same from the store."""
    analyze = ["analyze", str(run), "--json", str(cache / "report.json"), "--quiet"]
    environment = {"XDG_CACHE_HOME": str(cache)}
    results = [measure("analyze, first read", analyze, ranks, rows, environment)]
    report = json.loads((cache / "report.json").read_text(encoding="utf-8"))
    if len(report["run"]["ranks"]) != ranks:
        sys.exit(f"the report has {len(report['run']['ranks'])} of {ranks} ranks")
    results.append(measure("analyze, from the store", analyze, ranks, rows, environment))
    results.append(measure("doctor, from the store", ["doctor", str(run), "--quiet"], ranks, rows, environment))
    return results


# -- Dask --------------------------------------------------------------------------------------------------------------


@contextmanager
def cluster(work: Path, workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and workers as a person starts them; (address, the workers)."""
    with (work / "dask.log").open("wb") as log:
        file = work / "scheduler.json"
        dask = [sys.executable, "-m", "dask"]
        options = ["--scheduler-file", str(file), "--no-dashboard"]
        scheduler = subprocess.Popen(
            [*dask, "scheduler", *options, "--host", "127.0.0.1", "--port", "0"], stdout=log, stderr=log
        )
        while not file.exists() or not file.read_text():
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        started = [
            subprocess.Popen(
                [*dask, "worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny"], stdout=log, stderr=log
            )
            for _ in range(workers)
        ]
        try:
            yield address, started
        finally:
            for process in (*started, scheduler):  # one at a time: a worker without its scheduler would wait for it
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def on_dask(run: Path, ranks: int, rows: int, work: Path) -> list[Measured]:
    """The run read on two workers, one of which is killed in the middle; the report must be that of this process."""
    first, second = work / "serial.json", work / "dask.json"
    environment = {"XDG_CACHE_HOME": str(work)}
    serial = ["analyze", str(run), "--engine", "serial", "--json", str(first), "--quiet"]
    results = [measure("analyze, serial", serial, ranks, rows, environment)]
    shutil.rmtree(run / ".stepscope")
    with cluster(work, 2) as (address, workers):
        watcher = subprocess.Popen([sys.executable, "-c", KILL, str(run), str(ranks), str(workers[0].pid)])
        command = ["analyze", str(run), "--engine", "dask", "--scheduler", address, "--json", str(second), "--quiet"]
        results.append(measure("analyze on 2 Dask workers, 1 killed", command, ranks, rows, environment))
        watcher.wait()
        if workers[0].wait(timeout=10) != -signal.SIGKILL:
            sys.exit("the worker was not killed in the middle: the run is too small")
    if json.loads(first.read_text()) != json.loads(second.read_text()):
        sys.exit("the reports differ")
    print(f"{ranks} ranks: one of two workers was killed, and the report is the same")
    return results


KILL = """
import os, signal, sys, time
from pathlib import Path
run, ranks, victim = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
until = time.monotonic() + 300
while time.monotonic() < until:
    done = len(list(run.glob(".stepscope.new-*/rank_*.counters.parquet")))
    if done >= ranks // 4:
        if done < ranks:
            os.kill(victim, signal.SIGKILL)
        break
    time.sleep(0.01)
"""
"""Kills a worker when a quarter of the ranks are written."""


def main() -> None:
    """Make the runs, read them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=SAMPLE, help="a small run directory to repeat")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--dask", action="store_true")
    parser.add_argument("--keep", type=Path, help="where the runs are made and stay")
    options = parser.parse_args()
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in options.ranks or ([64] if options.dask else [64, 1024]):
            run = (options.keep or Path(temporary)) / f"ranks-{ranks}"
            work = Path(temporary) / f"work-{ranks}"
            work.mkdir()
            rows = make_run(options.source, run, ranks)
            results += (on_dask if options.dask else end_to_end)(run, ranks, rows, work)
    print(table(results))


if __name__ == "__main__":
    main()
