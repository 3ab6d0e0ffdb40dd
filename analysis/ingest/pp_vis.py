"""Per-rank pipeline dumps (`pp_rank_0.json`, ... of pp-vis): start and end of every forward and backward, in ms.

They hold no communication. The i-th forward (and the i-th backward) of an iteration is that of microbatch i, where the
stages have one chunk each.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import Entry, Task, broken, written
from stepscope.analysis.ingest.formats import CONFIG
from stepscope.analysis.ingest.names_of_files import beside, file_name
from stepscope.analysis.ingest.operations import Kind, Rows, begins_of, lay_out, rank_file
from stepscope.analysis.ingest.source import ByteSource
from stepscope.analysis.units import counted

FIELDS = ("fwd_start", "fwd_end", "bwd_start", "bwd_end")
_MOST_STAGES = 1 << 15
"""No pipeline has more: a larger number in a file's name is no rank (a date, say), in the configuration no size."""

_MOST_MS = 4e12
"""So far from 0 may a time be, so that its nanoseconds fit."""

_KINDS = {"forward": Kind("compute", "forward"), "backward": Kind("compute", "backward")}


def is_dump(content: Any) -> bool:
    """Is this parsed JSON a rank's dump: iterations that hold lists of starts and ends?"""
    if not isinstance(content, dict) or not content:
        return False
    iterations = [value for key, value in content.items() if str(key).isdigit()]
    return bool(iterations) and all(isinstance(one, dict) and set(FIELDS) <= set(one) for one in iterations)


def read_file(task: Task) -> list[Entry]:
    """All stages of one job. A stage whose dump cannot be read is `broken`; the rest of the job is laid out without it."""
    config = _config(task.path)
    chunks = _whole(config, "vp_size", 1)
    ranks: dict[int, Rows] = {}
    files: dict[int, str] = {}
    odd: dict[int, list[str]] = {}
    lost: list[Entry] = []
    highest = 0
    for index, path in enumerate((task.path, *task.others)):
        found = re.search(r"(\d+)(?!.*\d)", file_name(path).removesuffix(".gz"))
        rank = int(found.group(1)) if found and int(found.group(1)) < _MOST_STAGES else index
        highest = max(highest, rank)
        if rank in files:
            raise StepscopeError(f"{files[rank]} and {path} are both rank {rank}: remove one of them")
        try:
            ranks[rank], odd[rank] = _rows(_content(path), chunks)
            files[rank] = path
        except (StepscopeError, OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            lost += broken(Task(task.format, path, rank, task.directory, task.build), str(error))
    spans, begins = lay_out(ranks), begins_of(ranks)
    stages = _whole(config, "pp_size", highest + 1)  # those that cannot be read, or are not here, are stages too
    entries = []
    for rank, rows in sorted(ranks.items()):
        result = rank_file(rows, _KINDS, spans, begins, stage=rank % stages)
        if len(ranks) <= stages:
            result.facts |= {"mesh": {"pp": stages}, "coords": {"pp": rank}}
            result.facts["table"] = _actions(rows) if chunks == 1 else []
        if odd[rank]:
            said = counted(len(odd[rank]), "operation ends before it starts", "operations end before they start")
            result.note("negative_duration", f"{said} (first: {odd[rank][0]}): kept with length 0", ("ledger",))
        own = Task(task.format, files[rank], rank, task.directory, task.build)
        entries.append(written(own, rank, result))
    return entries + lost


def _rows(content: Any, chunks: int) -> tuple[Rows, list[str]]:
    """One stage's operations in program order, and which of them end before they start; ValueError says what is wrong."""
    if not is_dump(content):
        raise ValueError(f"it has no iterations with {', '.join(FIELDS)}")
    rows, odd = Rows(), []
    for step, iteration in sorted((int(key), value) for key, value in content.items() if str(key).isdigit()):
        operations = []
        for name, prefix in (("forward", "fwd"), ("backward", "bwd")):
            starts, ends = iteration[f"{prefix}_start"], iteration[f"{prefix}_end"]
            if len(starts) != len(ends):
                raise ValueError(f"iteration {step} has {len(starts)} starts and {len(ends)} ends of {name}")
            for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if not all(isinstance(time, int | float) and abs(time) <= _MOST_MS for time in (start, end)):
                    raise ValueError(
                        f"{name} {index} of iteration {step} is from {start} to {end} ms, which is no time"
                    )
                operations.append((round(start * 1e6), round(end * 1e6), name, index if chunks == 1 else -1))
                if end < start:
                    odd.append(f"{name} {index} of iteration {step}, {start:g} to {end:g} ms")
        for start, end, name, microbatch in sorted(operations):
            rows.step.append(step)
            rows.start.append(start)
            rows.end.append(max(start, end))
            rows.name.append(name)
            rows.microbatch.append(microbatch)
            rows.chunk.append(0 if chunks == 1 else -1)
            rows.group.append("")
            rows.peer.append(-1)
            rows.seq.append(-1)
    if not rows.step:
        raise ValueError("it has no operation")
    return rows, odd


def _actions(rows: Rows) -> list[list[Any]]:
    """The order of computations in the first iteration: phase, chunk, microbatch."""
    first = rows.step[0] if rows.step else -1
    listed = zip(rows.step, rows.name, rows.chunk, rows.microbatch, strict=True)
    return [[name, chunk, microbatch] for step, name, chunk, microbatch in listed if step == first]


def _whole(config: dict[str, Any], key: str, otherwise: int) -> int:
    """A positive whole number of the configuration."""
    value = config.get(key)
    return value if type(value) is int and 0 < value <= _MOST_STAGES else otherwise


def _content(path: str) -> Any:
    """The JSON of one file, compressed or not. StepscopeError or ValueError says what is wrong."""
    with ByteSource(path) as source:
        data = source.read()
        if source.cut is not None:
            raise StepscopeError(source.cut)
    return json.loads(data.decode("utf-8-sig"))


def _config(dump: str) -> dict[str, Any]:
    """The job's configuration, which lies beside its dumps."""
    try:
        content = _content(beside(dump, CONFIG))
    except (StepscopeError, OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
