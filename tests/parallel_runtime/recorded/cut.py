"""Cuts one step's device times out of a Kineto trace: when each piece of device work was launched, began and ended.

    python tests/parallel_runtime/recorded/cut.py TRACE.json.gz STEP > FILE.csv     one step of one rank
    python tests/parallel_runtime/recorded/cut.py FOLDER > FILE.csv                 the collectives of all ranks, rank before launch

One row of host time (nanoseconds since the step began on the host), in that order:

    launch, stream, start, end, kernel | copy | COLLECTIVE:BYTES      work of the device
    call, , , , wait                                                  a stream was told to wait for an event

Nothing but these numbers is taken: no names of kernels, hosts or people. Times stand in the trace as microseconds with three
decimals, and are read as text: a float has no room for them.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
ELEMENT_BYTES = {"Float": 4, "Long": 8}
HEADER = "host,stream,start,end,what"


def nanoseconds(text: str) -> int:
    """`12.345` microseconds are 12345."""
    whole, _, part = text.partition(".")
    return int(whole) * 1000 + int((part + "000")[:3])


def what(event: dict[str, Any]) -> str:
    """Kind of a piece of device work; a collective with its message size."""
    collective, arguments = event["args"].get("Collective name"), event["args"]
    if collective is None:
        return WORK[event["cat"]]
    return f"{collective}:{int(arguments['In msg nelems']) * ELEMENT_BYTES[arguments['dtype']]}"


def cut(trace: Path, step: str) -> str:
    """The CSV of step `step` ("ProfilerStep#5"): all device work that the host launched in it."""
    events = json.loads(gzip.decompress(trace.read_bytes()), parse_float=str, parse_int=str)["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    (window,) = (e for e in events if e["name"] == step and e.get("cat") == "user_annotation")
    begin = nanoseconds(window["ts"])
    end = begin + nanoseconds(window["dur"])
    calls = {e["args"]["correlation"]: nanoseconds(e["ts"]) for e in events if e.get("cat") == "cuda_runtime"}
    rows: list[tuple[int, str]] = []
    for event in events:
        start = nanoseconds(event["ts"])
        if event["name"] == "cudaStreamWaitEvent" and begin <= start < end:
            rows.append((start - begin, f"{start - begin},,,,wait"))
        launch = calls.get(event.get("args", {}).get("correlation"), -1) if event.get("cat") in WORK else -1
        if begin <= launch < end:
            stop = start + nanoseconds(event["dur"])
            times = f"{launch - begin},{event['args']['stream']},{start - begin},{stop - begin}"
            rows.append((launch - begin, f"{times},{what(event)}"))
    return "\n".join([HEADER, *(text for _, text in sorted(rows, key=lambda row: row[0]))]) + "\n"


def cut_collectives(folder: Path) -> str:
    """The CSV of the NCCL kernels of all ranks of an older trace (`workerN_...`, kernels without arguments), on one clock that
    begins with the first launch."""
    rows: list[tuple[int, int, list[int], str]] = []
    for trace in folder.glob("worker*.json.gz"):
        rank = int(trace.name.removeprefix("worker").partition("_")[0])
        events = json.loads(gzip.decompress(trace.read_bytes()), parse_float=str, parse_int=str)["traceEvents"]
        events = [event for event in events if event.get("ph") == "X" and "correlation" in event.get("args", {})]
        calls = {e["args"]["correlation"]: nanoseconds(e["ts"]) for e in events if e["name"] == "cudaLaunchKernel"}
        for event in events:
            if event["name"].startswith("ncclKernel_"):
                start, launch = nanoseconds(event["ts"]), calls[event["args"]["correlation"]]
                kind = event["name"].removeprefix("ncclKernel_").partition("_")[0].lower()
                times = [launch, start, start + nanoseconds(event["dur"])]
                rows.append((rank, int(event["args"]["stream"]), times, kind))
    begin = min(times[0] for _, _, times, _ in rows)
    lines = (
        f"{rank},{times[0] - begin},{stream},{times[1] - begin},{times[2] - begin},{kind}"
        for rank, stream, times, kind in sorted(rows, key=lambda row: (row[0], row[2]))
    )
    return "\n".join([f"rank,{HEADER}", *lines]) + "\n"


if __name__ == "__main__":
    source = Path(sys.argv[1])
    sys.stdout.write(cut_collectives(source) if source.is_dir() else cut(source, sys.argv[2]))
