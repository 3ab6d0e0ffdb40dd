"""Hand-made runs: a few lines say what happened when, `Timeline.run()` gives the `Run` that an analysis reads.

    t = Timeline(world=2, mesh={"pp": 2})
    t.step(0, 100)                                    # on all ranks
    t.compute(0, 0, 80)                               # rank, start, end
    t.message(80, 85, 10, 90, source=0, destination=1)
    run = t.run()

Times are nanoseconds; `origin` is added to all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.analysis.run import RankData, Run, empty_columns, sort_events
from stepscope.tracer.schema import (
    AXES,
    COLLECTIVES,
    COUNTER_COLUMNS,
    EVENT_COLUMNS,
    KINDS,
    PHASES,
    STEP_ANNOTATION,
    STRATEGIES,
    ClockMeta,
    GroupMeta,
    Lane,
    RunMeta,
    code_of,
)

VOCABULARIES = {"phase": PHASES, "axis": AXES, "strategy": STRATEGIES, "collective": COLLECTIVES}
TEXTS = {"group": "group_id", "name": "name_id", "dtype": "dtype_id", "grid": "grid_id"}
ROLES = {"compute": "compute", "comm": "comm", "wait": "compute", "memcpy": "memcpy", "host": "host"}


def _role(row: Mapping[str, Any]) -> str:
    return str(row.get("role") or ROLES[row["kind"]])


@dataclass
class Timeline:
    """Rows of all ranks as they are told; see the module's head."""

    world: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    origin: int = 0
    source: str = "measured"
    hosts: Sequence[str] = ()
    clock: Sequence[ClockMeta] = ()
    groups: list[GroupMeta] = field(default_factory=list)
    present: Sequence[int] | None = None  # ranks that were recorded; None: all
    rows: list[dict[str, Any]] = field(default_factory=list)
    counters: list[tuple[int, int, str, str, int]] = field(default_factory=list)  # rank, time, name, key, value

    def row(self, rank: int, kind: str, start: int, end: int, stream: str = "", **columns: Any) -> dict[str, Any]:
        """Any row. `columns`: names of the store's columns, words instead of codes, `group`, `name`, `dtype` as text;
        `role`: of the lane, where the kind does not tell it."""
        stream = stream or {"host": "thread", "memcpy": "compute", "wait": "compute"}.get(kind, kind)
        entry = {"rank": rank, "kind": kind, "start": start, "end": end, "stream": stream, **columns}
        self.rows.append(entry)
        return entry

    def counter(self, rank: int, at: int, name: str, value: int, key: str = "value") -> None:
        """A counter sample."""
        self.counters.append((rank, at, name, key, value))

    def step(self, start: int, end: int, number: int = 0, ranks: Sequence[int] | None = None, **columns: Any) -> None:
        """A step annotation, on all ranks unless told."""
        for rank in range(self.world) if ranks is None else ranks:
            self.row(rank, "host", start, end, name=f"{STEP_ANNOTATION}{number}", **columns)

    def compute(self, rank: int, start: int, end: int, **columns: Any) -> None:
        """A computation."""
        self.row(rank, "compute", start, end, **{"name": "gemm", **columns})

    def memcpy(self, rank: int, start: int, end: int, **columns: Any) -> None:
        """A memory copy."""
        self.row(rank, "memcpy", start, end, **{"name": "copy", **columns})

    def wait(self, rank: int, start: int, end: int, op_id: int) -> None:
        """A wait row of the training thread."""
        self.row(rank, "wait", start, end, op_id=op_id, name="wait")

    def launch(self, rank: int, at: int, launch_id: int) -> None:
        """The host's call that launched a device row."""
        self.row(rank, "host", at, at + 1, launch_id=launch_id, name="cudaLaunchKernel")

    def comm(self, rank: int, start: int, end: int, collective: str = "all_reduce", **columns: Any) -> dict[str, Any]:
        """One rank's part of a communication; `group` must be known to run.json or the ranks stay unknown."""
        return self.row(rank, "comm", start, end, collective=collective, **{"name": collective, **columns})

    def group(self, name: str, axis: str, *ranks: int) -> str:
        """A process group of run.json."""
        self.groups.append(GroupMeta(name, axis, ranks))
        return name

    def collective(
        self, group: str, seq: int, parts: Mapping[int, tuple[int, int]], collective: str = "all_reduce", **columns: Any
    ) -> None:
        """One communication on several ranks: rank -> (start, end)."""
        for rank, (start, end) in parts.items():
            self.comm(rank, start, end, collective, group=group, seq=seq, **columns)

    def message(
        self,
        send: tuple[int, int] | None,
        receive: tuple[int, int] | None,
        source: int,
        destination: int,
        group: str,
        seq: int = 0,
        **columns: Any,
    ) -> None:
        """A send and its receive, (start, end) each; None: not recorded."""
        words = {"group": group, "seq": seq, "axis": "pp", **columns}
        if send:
            self.comm(source, *send, "send", peer=destination, **{"stream": "send", **words})
        if receive:
            self.comm(destination, *receive, "receive", peer=source, **{"stream": "receive", **words})

    def coords(self) -> tuple[dict[str, int], ...]:
        """Coordinates of each rank, first axis outermost."""
        if not self.mesh:
            return ()
        places = itertools.product(*(range(size) for size in self.mesh.values()))
        return tuple(dict(zip(self.mesh, place, strict=True)) for place in places)

    def run(self) -> Run:
        """The run."""
        meta = RunMeta(
            run_id="hand",
            name="hand-made",
            source=self.source,
            world_size=self.world,
            mesh=dict(self.mesh),
            coords=self.coords(),
            groups=tuple(self.groups),
            hosts=tuple(self.hosts),
            clock=tuple(self.clock),
        )
        ranks = range(self.world) if self.present is None else self.present
        return Run.from_memory(meta, {rank: self._data(rank) for rank in ranks})

    def _data(self, rank: int) -> RankData:
        rows = [row for row in self.rows if row["rank"] == rank]
        roles: dict[tuple[str, bool], str] = {}
        for row in rows:
            roles.setdefault((row["stream"], _role(row) == "host"), _role(row))
        lanes = tuple(
            Lane(i, name, role, stream=-1 if host else i, pid="0", tid=str(i))
            for i, ((name, host), role) in enumerate(roles.items())
        )
        place = {key: i for i, key in enumerate(roles)}
        strings: dict[str, int] = {}
        events = empty_columns(EVENT_COLUMNS, len(rows))
        for i, row in enumerate(rows):
            events["rank"][i] = rank
            events["lane"][i] = place[row["stream"], _role(row) == "host"]
            events["start_ns"][i] = row["start"] + self.origin
            events["dur_ns"][i] = row["end"] - row["start"]
            events["kind"][i] = KINDS.index(row["kind"])
            events["flags"][i] = 0
            for name, value in row.items():
                if name in VOCABULARIES:
                    events[name][i] = code_of(VOCABULARIES[name], value)
                elif name in TEXTS:
                    events[TEXTS[name]][i] = strings.setdefault(value, len(strings))
                elif name in EVENT_COLUMNS and name not in ("rank", "kind"):
                    events[name][i] = value
        mine = [sample for sample in self.counters if sample[0] == rank]
        counters = empty_columns(COUNTER_COLUMNS, len(mine))
        for i, (_, at, name, key, value) in enumerate(mine):
            counters["time_ns"][i] = at + self.origin
            counters["name_id"][i] = strings.setdefault(name, len(strings))
            counters["key_id"][i] = strings.setdefault(key, len(strings))
            counters["value"][i] = value
        return RankData(sort_events(events), tuple(strings), lanes, counters)


def terms(ledger_row: Any) -> dict[str, int]:
    """The terms of a ledger row that are not zero, without `_ns`."""
    names = ("compute", "visible_comm", "bubble", "imbalance", "memcpy", "idle")
    return {name: int(ledger_row[f"{name}_ns"]) for name in names if ledger_row[f"{name}_ns"]}
