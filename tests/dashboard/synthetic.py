"""Runs made up for the dashboard's tests and benchmark: a 1F1B pipeline with data parallelism, and big random ones.

`pipeline` is a small discrete simulation with a slow rank: every row of it is consistent with every other, so that the
real ledger can be asked about it. `random_run` has as many rows as asked for and no story.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from stepscope.analysis.run import RankData, Run, empty_columns, sort_events
from stepscope.tracer.schema import (
    AXES,
    COLLECTIVES,
    EVENT_COLUMNS,
    KINDS,
    PHASES,
    STRATEGIES,
    GroupMeta,
    Lane,
    RunMeta,
    code_of,
)

EPOCH = 1_700_000_000_000_000_000
STREAMS = {
    "compute": 7,
    "pp.forward.send": 20,
    "pp.forward.receive": 21,
    "pp.backward.send": 22,
    "pp.backward.receive": 23,
    "dp": 24,
    "world": 25,
}
LANES = {name: i for i, name in enumerate([*STREAMS, "host"])}


class RankRows:
    """Rows of one rank while they are made."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rows: list[dict[str, int]] = []
        self.strings: dict[str, int] = {}

    def text(self, word: str) -> int:
        return self.strings.setdefault(word, len(self.strings))

    def add(self, lane: str, kind: str, name: str, start: float, end: float, **columns: Any) -> None:
        words = {
            "phase": PHASES,
            "axis": AXES,
            "strategy": STRATEGIES,
            "collective": COLLECTIVES,
        }
        row = {
            "rank": self.rank,
            "lane": LANES[lane],
            "kind": code_of(KINDS, kind),
            "name_id": self.text(name),
            "start_ns": EPOCH + int(start),
            "dur_ns": int(end) - int(start),
        }
        for column, value in columns.items():
            if column in words:
                row[column] = code_of(words[column], value)
            elif column == "group":
                row["group_id"] = self.text(value)
            else:
                row[column] = value
        self.rows.append(row)

    def data(self) -> RankData:
        frame = pd.DataFrame(self.rows)
        events = empty_columns(EVENT_COLUMNS, len(frame))
        for name in frame.columns:
            values = frame[name].fillna(-1).to_numpy()
            events[name] = values.astype(EVENT_COLUMNS[name])
        events["flags"] = np.zeros(len(frame), np.int32)
        lanes = [
            Lane(
                i,
                name,
                "host" if name == "host" else "compute" if name == "compute" else "comm",
                name.split(".")[0] if name in STREAMS and name != "compute" else "",
                STREAMS.get(name, -1),
            )
            for name, i in LANES.items()
        ]
        return RankData(sort_events(events), tuple(self.strings), tuple(lanes))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Forward and backward order of one stage."""
    warm = min(stages - stage - 1, microbatches)
    order = [("forward", i) for i in range(warm)]
    forward, backward = warm, 0
    while backward < microbatches:
        if forward < microbatches:
            order.append(("forward", forward))
            forward += 1
        order.append(("backward", backward))
        backward += 1
    return order


class PipelineMaker:
    """Simulates `steps` steps of pp x dp ranks; times in ns, floats until they are written."""

    def __init__(self, pp: int, dp: int, microbatches: int, layers: int, slow_rank: int, seed: int) -> None:
        self.pp, self.dp, self.microbatches, self.layers, self.slow_rank = pp, dp, microbatches, layers, slow_rank
        self.rng = np.random.default_rng(seed)
        self.ranks = [RankRows(r) for r in range(pp * dp)]
        self.free = np.zeros(pp * dp)
        self.op_ids = defaultdict(int)
        self.sequence: dict[str, int] = defaultdict(int)
        self.hop = 120_000.0

    def rank_of(self, stage: int, replica: int) -> int:
        return stage * self.dp + replica

    def communicate(self, rank: int, lane: str, name: str, start: float, end: float, **facts: Any) -> None:
        self.op_ids[rank] += 1
        self.ranks[rank].add(
            lane, "comm", name, start, end, op_id=self.op_ids[rank], issue_ns=EPOCH + int(start), **facts
        )

    def message(self, phase: str, source: int, target: int, sent: float, posted: float) -> float:
        """One rendezvous message; returns when it has arrived."""
        done = max(sent, posted) + self.hop * self.rng.uniform(0.9, 1.1)
        group = f"pp.{phase}.{min(source, target)}-{max(source, target)}"
        seq = self.sequence[group]
        self.sequence[group] += 1
        facts = {"axis": "pp", "strategy": "pp", "bytes": 4_194_304, "group": group, "seq": seq, "phase": phase}
        self.communicate(source, f"pp.{phase}.send", "send", sent, done, collective="send", peer=target, **facts)
        self.communicate(
            target, f"pp.{phase}.receive", "receive", posted, done, collective="receive", peer=source, **facts
        )
        return done

    def compute(self, rank: int, phase: str, microbatch: int, start: float) -> float:
        """One microbatch of one phase, a row a layer; returns its end."""
        scale = {"forward": 1.0, "backward": 2.0}[phase] * (1.22 if rank == self.slow_rank else 1.0)
        stage = rank // self.dp
        order = range(self.layers) if phase == "forward" else reversed(range(self.layers))
        for layer in order:
            length = 1e6 / self.layers * scale * self.rng.normal(1, 0.03)
            self.ranks[rank].add(
                "compute",
                "compute",
                f"layer.{stage * self.layers + layer}",
                start,
                start + length,
                phase=phase,
                stage=stage,
                microbatch=microbatch,
                layer=stage * self.layers + layer,
            )
            start += length
        return start

    def replica(self, replica: int, gradients: dict[int, list[float]]) -> None:
        """One step of one pipeline up to its last backward; fills when each bucket of each rank is ready."""
        orders = [one_f_one_b(stage, self.pp, self.microbatches) for stage in range(self.pp)]
        at = [0] * self.pp
        done: dict[tuple[str, int, int], float] = {}
        while any(at[s] < len(orders[s]) for s in range(self.pp)):
            for stage in range(self.pp):
                while at[stage] < len(orders[stage]):
                    phase, batch = orders[stage][at[stage]]
                    before = stage - 1 if phase == "forward" else stage + 1
                    rank = self.rank_of(stage, replica)
                    if 0 <= before < self.pp:
                        sent = done.get((phase, before, batch))
                        if sent is None:
                            break
                        start = self.message(phase, self.rank_of(before, replica), rank, sent, self.free[rank])
                    else:
                        start = self.free[rank]
                    end = self.compute(rank, phase, batch, start)
                    if phase == "backward" and batch == self.microbatches - 1:
                        gradients[rank] = [start + (end - start) * share for share in (0.3, 0.55, 0.8, 1.0)]
                    self.free[rank] = end
                    done[phase, stage, batch] = end
                    at[stage] += 1

    def step(self, number: int) -> None:
        """Forward and backward of all replicas, bucketed all-reduce, clip, optimizer."""
        began = self.free.copy()
        gradients: dict[int, list[float]] = {}
        for replica in range(self.dp):
            self.replica(replica, gradients)
        for stage in range(self.pp):
            group = [self.rank_of(stage, replica) for replica in range(self.dp)]
            previous = dict.fromkeys(group, 0.0)
            for bucket in range(4 if self.dp > 1 else 0):
                start = {r: max(gradients[r][bucket], previous[r]) for r in group}
                end = max(start.values()) + 420_000 * self.rng.uniform(0.95, 1.05)
                seq = self.sequence[f"dp.{stage}"]
                self.sequence[f"dp.{stage}"] += 1
                for r in group:
                    self.communicate(
                        r,
                        "dp",
                        f"all_reduce bucket {bucket}",
                        start[r],
                        end,
                        axis="dp",
                        strategy="dp",
                        collective="all_reduce",
                        bytes=26_214_400,
                        group=f"dp.{stage}",
                        seq=seq,
                        in_elements=6_553_600,
                        out_elements=6_553_600,
                    )
                    previous[r] = end
            for r in group:
                self.free[r] = max(self.free[r], previous[r])
        self.clip_and_update()
        for r, rows in enumerate(self.ranks):
            rows.add("host", "host", f"ProfilerStep#{number}", began[r], self.free[r])
            rows.add("host", "host", "forward and backward", began[r] + 1000, self.free[r] - 900_000)
            rows.add("host", "host", "optimizer.step", self.free[r] - 800_000, self.free[r] - 1000)

    def clip_and_update(self) -> None:
        arrived = self.free.copy()
        end = float(arrived.max()) + 60_000
        seq = self.sequence["world"]
        self.sequence["world"] += 1
        for r, rows in enumerate(self.ranks):
            if len(self.ranks) > 1:
                self.communicate(
                    r,
                    "world",
                    "all_reduce gradient norm",
                    arrived[r],
                    end,
                    axis="world",
                    strategy="clip",
                    collective="all_reduce",
                    bytes=4,
                    group="world",
                    seq=seq,
                )
            length = 800_000 * self.rng.normal(1, 0.02)
            rows.add("compute", "compute", "optimizer", end, end + length, phase="optimizer", stage=r // self.dp)
            self.free[r] = end + length

    def meta(self, run_id: str, source: str) -> RunMeta:
        world = self.pp * self.dp
        pairs = {(min(a, b), max(a, b)) for a in range(world) for b in (a - self.dp, a + self.dp) if 0 <= b < world}
        groups = [GroupMeta(f"pp.{phase}.{a}-{b}", "pp", (a, b)) for a, b in pairs for phase in ("forward", "backward")]
        groups += [
            GroupMeta(f"dp.{s}", "dp", tuple(self.rank_of(s, d) for d in range(self.dp))) for s in range(self.pp)
        ]
        groups.append(GroupMeta("world", "world", tuple(range(world))))
        return RunMeta(
            run_id,
            run_id,
            source=source,
            complete=True,
            created="2025-01-01T00:00:00Z",
            world_size=world,
            hosts=("node0",) * world,
            mesh={"pp": self.pp, "dp": self.dp},
            coords=tuple({"pp": r // self.dp, "dp": r % self.dp} for r in range(world)),
            groups=tuple(groups),
            backend="gloo",
            device="cpu",
            parallel={"pp": self.pp, "dp": self.dp, "schedule": "1f1b", "microbatches": self.microbatches},
        )


def pipeline(
    pp: int = 4,
    dp: int = 2,
    microbatches: int = 8,
    steps: int = 6,
    layers: int = 6,
    slow_rank: int = 5,
    seed: int = 1,
    run_id: str = "pp4-dp2-1f1b",
) -> Run:
    """A 1F1B pipeline over `pp` stages and `dp` replicas with one slow rank (-1: none)."""
    maker = PipelineMaker(pp, dp, microbatches, layers, slow_rank, seed)
    for number in range(steps):
        maker.step(number)
    return Run.from_memory(maker.meta(run_id, "simulated"), {r.rank: r.data() for r in maker.ranks})


def empty(run_id: str) -> Run:
    """Two ranks that recorded nothing."""
    data = {rank: RankData(empty_columns(EVENT_COLUMNS)) for rank in (0, 1)}
    return Run.from_memory(RunMeta(run_id, run_id, complete=True, world_size=2), data)


HOSTILE_NAMES = (
    "<b>bold</b><img src=x onerror=\"document.title='owned'\">",
    'quote " and \' and </script><script>document.title="owned"</script>',
    "long " * 2000,
    "emoji 🚀 ünïcödé مرحبا",
    "{{7*7}} ${7*7} \u202eright to left",
)


def hostile(run_id: str = 'hostile<b>&"name') -> Run:
    """A small run whose every name is an attack or an accident."""
    run = pipeline(2, 1, 2, 2, 5, -1, run_id=run_id)
    data = {}
    for rank in run.ranks:
        one = run.rank(rank)
        strings = tuple(
            HOSTILE_NAMES[i % len(HOSTILE_NAMES)] if not s.startswith(("ProfilerStep", "pp.", "world")) else s
            for i, s in enumerate(one.strings)
        )
        data[rank] = RankData(one.events, strings, one.lanes)
    return Run.from_memory(run.meta, data)


def random_run(ranks: int, rows_per_lane: int, seed: int = 0, run_id: str = "random") -> Run:
    """`ranks` ranks of a compute and a dp lane with `rows_per_lane` rows each; matches nothing in particular."""
    rng = np.random.default_rng(seed)
    names = tuple([f"kernel_{i}" for i in range(40)] + [f"nccl_{i}" for i in range(8)] + ["dp"])
    lanes = (Lane(0, "compute", "compute", "", 7), Lane(1, "dp", "comm", "dp", 24))
    data = {}
    for rank in range(ranks):
        columns = []
        for lane in (0, 1):
            length = rng.lognormal(9, 0.8, rows_per_lane).astype(np.int64) + 200
            gap = rng.exponential(800, rows_per_lane).astype(np.int64)
            events = empty_columns(EVENT_COLUMNS, rows_per_lane)
            events["start_ns"] = EPOCH + np.cumsum(length + gap) - length
            events["dur_ns"] = length
            events["rank"][:] = rank
            events["lane"][:] = lane
            events["kind"][:] = code_of(KINDS, ("compute", "comm")[lane])
            events["phase"] = rng.integers(0, 6, rows_per_lane).astype(np.int8)
            events["name_id"] = rng.integers(*((0, 40) if lane == 0 else (40, 48)), rows_per_lane).astype(np.int32)
            events["flags"][:] = 0
            if lane:
                events["axis"][:] = code_of(AXES, "dp")
                events["collective"][:] = code_of(COLLECTIVES, "all_reduce")
                events["group_id"][:] = 48
                events["seq"] = np.arange(rows_per_lane)
                events["op_id"] = np.arange(rows_per_lane)
                events["bytes"][:] = 1_000_000
            columns.append(events)
        joined = {name: np.concatenate([c[name] for c in columns]) for name in EVENT_COLUMNS}
        data[rank] = RankData(joined, names, lanes)
    coords = tuple({"dp": r} for r in range(ranks))
    meta = RunMeta(run_id, run_id, "simulated", True, world_size=ranks, mesh={"dp": ranks}, coords=coords)
    return Run.from_memory(meta, data)
