"""Tables of operations whose clock starts anew in every step, laid out as one run: what ndtimeline and pp-vis have in common.

Steps are put one after another: step k begins where the longest rank of the step before ended. Every rank gets the same
window for a step (an annotation), from the first start to the last end over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.damage import FARTHEST_NS
from stepscope.analysis.ingest.normalize import RankFile
from stepscope.analysis.ingest.raw import Interner
from stepscope.analysis.run import RankData, empty_columns, sort_events
from stepscope.tracer.schema import (
    AXES,
    COLLECTIVES,
    EVENT_COLUMNS,
    KINDS,
    PHASES,
    STEP_ANNOTATION,
    STRATEGIES,
    Lane,
    code_of,
)


@dataclass(frozen=True)
class Kind:
    """What an operation of one type is."""

    kind: str
    phase: str = "other"
    collective: str = ""
    axis: str = ""
    strategy: str = ""
    lane: str = "compute"


@dataclass
class Rows:
    """One rank's operations, a value each: times in ns, relative to the step's begin."""

    step: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    group: list[str] = field(default_factory=list)
    peer: list[int] = field(default_factory=list)
    seq: list[int] = field(default_factory=list)


Spans = dict[int, tuple[int, int]]
"""Step -> absolute begin and end of its window."""


def lay_out(ranks: dict[int, Rows]) -> Spans:
    """The window of every step. StepscopeError where all steps together do not fit in 64 bits of nanoseconds."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for rows in ranks.values():
        for step, start, end in zip(rows.step, rows.start, rows.end, strict=True):
            first[step] = min(start, first.get(step, start))
            last[step] = max(end, last.get(step, end))
    spans, at = {}, 0
    for step in sorted(first):
        spans[step] = (at, at + last[step] - first[step])
        at = spans[step][1]
    if at > FARTHEST_NS:
        raise StepscopeError(
            f"the steps are {at // 10**9} s long together, which cannot be: is one of the times no time, or in another unit?"
        )
    return spans


def rank_file(rows: Rows, kinds: dict[str, Kind], spans: Spans, begins: dict[int, int], stage: int) -> RankFile:
    """The rank's rows and step annotations in the store's columns.

    `begins`: earliest start over all ranks in each step, which becomes the window's begin.
    """
    names = Interner()
    known = [kinds[name] for name in rows.name]
    used = sorted({(kind.kind != "compute", kind.lane) for kind in known if kind.kind != "host"})
    titles = [lane for _, lane in used]
    host = len(titles)
    lanes = [_lane(index, title, known) for index, title in enumerate(titles)]
    lanes.append(Lane(host, "host", "host"))
    count, steps = len(rows.step), sorted(set(rows.step))
    events = empty_columns(EVENT_COLUMNS, count + len(steps))
    offset = [spans[step][0] - begins[step] for step in rows.step]
    values: dict[str, list[Any]] = {
        "lane": [host if kind.kind == "host" else titles.index(kind.lane) for kind in known],
        "start_ns": [start + base for start, base in zip(rows.start, offset, strict=True)],
        "dur_ns": [end - start for start, end in zip(rows.start, rows.end, strict=True)],
        "kind": [code_of(KINDS, kind.kind) for kind in known],
        "phase": [code_of(PHASES, kind.phase) for kind in known],
        "stage": [stage] * count,
        "chunk": rows.chunk,
        "microbatch": rows.microbatch,
        "axis": [code_of(AXES, kind.axis) for kind in known],
        "strategy": [code_of(STRATEGIES, kind.strategy) for kind in known],
        "collective": [code_of(COLLECTIVES, kind.collective) for kind in known],
        "group_id": [names.code(group) if group else -1 for group in rows.group],
        "peer": rows.peer,
        "seq": rows.seq,
        "name_id": [names.code(name) for name in rows.name],
        "op_id": [index if kind.kind == "comm" else -1 for index, kind in enumerate(known)],
        "flags": [0] * count,
    }
    for name, column in values.items():
        events[name][:count] = column
    for index, step in enumerate(steps, count):
        begin, end = spans[step]
        events["lane"][index], events["kind"][index] = host, code_of(KINDS, "host")
        events["start_ns"][index], events["dur_ns"][index] = begin, end - begin
        events["name_id"][index] = names.code(f"{STEP_ANNOTATION}{step}")
        events["flags"][index] = 0
    events = sort_events(events)
    return RankFile(RankData(events, tuple(names.strings), tuple(lanes)), facts=_facts(events))


def begins_of(ranks: dict[int, Rows]) -> dict[int, int]:
    """Step -> earliest start over all ranks, in the step's own clock."""
    begins: dict[int, int] = {}
    for rows in ranks.values():
        for step, start in zip(rows.step, rows.start, strict=True):
            begins[step] = min(start, begins.get(step, start))
    return begins


def _lane(index: int, title: str, known: list[Kind]) -> Lane:
    one = next(kind for kind in known if kind.lane == title)
    return Lane(index, title, "comm" if one.kind == "comm" else "compute", one.axis, index)


def _facts(events: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        "rank": None,
        "world_size": None,
        "backend": "",
        "host": "",
        "rows": len(events["start_ns"]),
        "device_rows": int((events["kind"] != code_of(KINDS, "host")).sum()),
        "first_ns": int(events["start_ns"].min()),
        "last_ns": int((events["start_ns"] + events["dur_ns"]).max()),
        "groups": [],
        "cut": False,
    }
