"""Hand-made trace files: rows in, files out, so that a test says what is in them and nothing else."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.analysis.run import Run
from stepscope.tracer.schema import KINDS, RUN_FILE, GroupMeta, RunMeta, rank_file

BASE_NS = 1_700_000_000_000_000_000


def row(
    name: str, start_us: float, dur_us: float, cat: str = "kernel", tid: Any = 7, pid: Any = 0, **args: Any
) -> dict:
    """One complete row; `args` with `_` for blanks where the key has them is the caller's business."""
    args = {"stream": tid, **args} if cat == "kernel" else args
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": dur_us, "args": args}


def step(number: int, start_us: float, dur_us: float, pid: Any = 0) -> dict:
    return row(f"ProfilerStep#{number}", start_us, dur_us, cat="user_annotation", tid=1, pid=pid)


def begin(number: int, start_us: float, pid: Any = 0) -> dict:
    place = {"ph": "i", "cat": "user_annotation", "name": "step begins", "pid": pid, "tid": 1, "s": "t"}
    return {**place, "ts": start_us, "args": {"step": number}}


def all_reduce(start_us: float, dur_us: float, seq: int, op_id: int, tid: int = 20, **args: Any) -> dict:
    facts = {
        "Collective name": "allreduce",
        "In msg nelems": 256,
        "Out msg nelems": 256,
        "dtype": "float32",
        "Group size": 2,
        "Process Group Name": "dp_0",
        "Process Group Description": "mesh_dp",
        "Process Group Ranks": "[0, 1]",
        "Seq": seq,
        "axis": "dp",
        "strategy": "dp",
        "bytes": 1024,
        "op_id": op_id,
        "issue_ns": int(start_us * 1000),
    }
    return row("all_reduce", start_us, dur_us, tid=tid, **(facts | args))


def thread(name: str, tid: int, pid: Any = 0) -> dict:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def header(rank: int, world_size: int = 2) -> dict:
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size},
        "baseTimeNanoseconds": BASE_NS,
        "displayTimeUnit": "ns",
    }


def members(head: dict, steps: list[list[dict]]) -> list[bytes]:
    """The gzip members of a rank file, as they are written: header, one a step, the closing brackets."""
    start = json.dumps(head)[:-1] + ', "traceEvents": [\n'
    texts, first = [start], True
    for rows in steps:
        body = ",\n".join(json.dumps(one) for one in rows)
        texts.append(body if first else ",\n" + body)
        first = False
    return [gzip.compress(text.encode()) for text in [*texts, "\n]}\n"]]


def usual_steps(rank: int, count: int = 3, step_us: float = 1000.0) -> list[list[dict]]:
    """Steps of 1 ms: forward 100-400, backward 400-700 beside an all-reduce 600-800 that is waited for from 700 on."""
    steps = []
    for k in range(count):
        t = 10 + k * step_us
        rows = [
            step(k, t, step_us - 50, pid=rank),
            row("block", t + 100, 300, pid=rank, phase="forward", stage=0, chunk=0, microbatch=1, layer=2),
            row("block", t + 400, 300, pid=rank, phase="backward", stage=0, chunk=0, microbatch=1, layer=2),
            row("wait all_reduce", t + 700, 100, cat="wait", pid=rank, waits_for=10 * k),
            all_reduce(t + 600, 200, k, 10 * k) | {"pid": rank},
            {
                "ph": "C",
                "name": "tokens_per_expert",
                "pid": rank,
                "tid": 0,
                "ts": t + 900,
                "args": {"expert 0": k, "expert 1": 2 * k},
            },
        ]
        steps.append(rows)
    steps[0] = [thread("compute", 7, rank), thread("dp", 20, rank), *steps[0]]
    return steps


def meta(world_size: int = 2, **changes: Any) -> RunMeta:
    groups = (GroupMeta("dp_0", "dp", tuple(range(world_size))),)
    usual = RunMeta("id", "usual", complete=True, world_size=world_size, mesh={"dp": world_size}, groups=groups)
    return replace(usual, **changes)


def write_run(path: Path, ranks: tuple[int, ...] = (0, 1), count: int = 3, **changes: Any) -> Path:
    """A run directory of `usual_steps`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / RUN_FILE).write_text(meta(**changes).to_json())
    for rank in ranks:
        (path / rank_file(rank)).write_bytes(
            b"".join(members(header(rank, changes.get("world_size", 2)), usual_steps(rank, count)))
        )
    return path


def write(path: Path, rows: list[dict], **header: Any) -> Path:
    """A foreign trace in JSON."""
    path.write_text(json.dumps({**header, "traceEvents": rows}))
    return path


def events_of(run: Run, rank: int = 0) -> list[tuple[str, str, int, int]]:
    """(name, kind, start, duration) in ns, in the store's order."""
    events, strings = run.columns(rank), run.strings(rank)
    return [
        (strings[name], KINDS[kind], int(start), int(dur))
        for name, kind, start, dur in zip(*(events[c] for c in ("name_id", "kind", "start_ns", "dur_ns")), strict=True)
    ]


def codes(run: Run) -> list[str]:
    """What the health report is about."""
    return [item.code for item in run.health.items]


def call(name: str, start: float, dur: float, correlation: int, tid: int = 1) -> dict:
    """A call that launches device work."""
    return row(name, start, dur, cat="cuda_runtime", tid=tid, pid=99, correlation=correlation)
