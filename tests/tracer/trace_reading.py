"""Helpers of the tracer's tests: a clock that is set by hand, a meta of a small run, and strict reading of a rank file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepscope.tracer.clock import Clock
from stepscope.tracer.rows import BeginRow, CommSite, Row
from stepscope.tracer.schema import GroupMeta, RunMeta

EPOCH = 1_700_000_000_000_000_000


class HandClock:
    """Returns `now`, then moves on by `tick`."""

    def __init__(self, now: int = 0, tick: int = 0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> int:
        value = self.now
        self.now += self.tick
        return value

    def clock(self, offset_ns: int = EPOCH) -> Clock:
        return Clock(offset_ns, self)


class ListSink:
    """A recorder's writer that keeps the rows; `begun` holds the steps announced."""

    dropped = 0

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.begun: list[int] = []

    def begin(self, row: BeginRow) -> None:
        self.begun.append(row.step)

    def submit(self, chunks: Iterable[list[Row]], steps: int = 1) -> None:
        self.rows += [row for chunk in chunks for row in chunk]

    def close(self) -> None:
        return

    def cpu_ns(self) -> int:
        return 0


def small_meta(**changes: Any) -> RunMeta:
    facts: dict[str, Any] = {
        "run_id": "r1",
        "name": "dp2",
        "world_size": 2,
        "backend": "gloo",
        "groups": (GroupMeta("mesh_dp_0", "dp", (0, 1)), GroupMeta("other", "pp", (1,))),
        "coords": ({"pp": 0, "dp": 0}, {"pp": 0, "dp": 1}),
    }
    return RunMeta(**{**facts, **changes})


def all_reduce_site(**changes: Any) -> CommSite:
    site = CommSite("all_reduce", "dp", "dp", "mesh_dp_0", (0, 1), "dp", "float32", 4, 4, 16, name="all_reduce")
    return site._replace(**changes)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no strict JSON")


def strict(text: str) -> Any:
    """json.loads that refuses NaN and Infinity."""
    return json.loads(text, parse_constant=_refuse)


def read_strict(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return strict(file.read())


def rows_of(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [row for row in trace["traceEvents"] if row.get("cat") == category and row["ph"] == "X"]
