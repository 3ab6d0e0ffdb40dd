"""A pipeline schedule as a run directory: what `stepscope run` would record if every duration were what it is told to be.

The tables are played in virtual time (validator.play), step after step without a barrier, as the executor follows them;
the rows are those that the runtime writes: computations, messages on its streams, and the training thread's waits. One
step is played before the first that is recorded: the first step of a training starts with an empty pipeline, and no later
stage would have in it the bubble that it has in all others.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import stepscope
from stepscope.parallel_runtime.comm_streams import (
    group_metas,
    group_name,
    pipeline_stream,
    pipeline_streams,
    stream_of,
)
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import ITEM_BYTES
from stepscope.parallel_runtime.pp.schedules import (
    Action,
    Place,
    Table,
    destination_of,
    source_of,
    wraps_round,
)
from stepscope.parallel_runtime.pp.validator import SENDS_OUT, Played, Time, Timed, activation_peak, plan, play
from stepscope.tracer.rows import BeginRow, CommRow, CommSite, ComputeRow, Context, Row, StepRow, WaitRow
from stepscope.tracer.schema import ActionMeta, RunMeta
from stepscope.tracer.writer import BACKLOG_STEPS, RankWriter, in_chunks, write_meta

DTYPE = "float32"
"""Of the messages."""

MOST_STEPS = BACKLOG_STEPS
"""Steps that a rank's writer takes without dropping any, however slow the disk is."""


@dataclass(frozen=True)
class Pace:
    """How long things take, in one unit: `durations[stage][phase]` a computation (of one chunk), `transfer` a message, and
    `slow_link_time` more what the first stage of `slow_link` sends to the second."""

    durations: tuple[Mapping[str, Time], ...]
    transfer: Time = 0
    slow_link: tuple[int, ...] = ()
    slow_link_time: Time = 0

    @classmethod
    def of(
        cls,
        durations: Mapping[str, Time],
        stages: int,
        transfer: Time = 0,
        slow_stage: int | None = None,
        slow_factor: Time = 1,
        slow_link: tuple[int, ...] = (),
        slow_link_time: Time = 0,
    ) -> Pace:
        """Equal stages, of which `slow_stage` takes `slow_factor` times as long. ValueError where it is none, or the link."""
        for name, place in (("slow-stage", slow_stage), *(("slow-link", end) for end in slow_link)):
            if place is not None and not 0 <= place < stages:
                raise ValueError(f"{name} {place} is not among the {stages} stages: take 0 to {stages - 1}")
        if slow_factor <= 0 or slow_link_time < 0:
            raise ValueError(
                f"slow-factor {float(slow_factor):g}, slow-link-time {float(slow_link_time):g}: take a positive factor, and no time below 0"
            )
        slow = {phase: time * slow_factor for phase, time in durations.items()}
        each = tuple(slow if stage == slow_stage else dict(durations) for stage in range(stages))
        return cls(each, transfer, slow_link, slow_link_time)

    def whole(self, unit: Time) -> Pace:
        """The same in a unit of which one of these has `unit`, rounded to whole ones. ValueError where nothing is left."""

        def rounded(time: Time) -> int:
            found = round(time * unit)
            if time and found <= 0:
                raise ValueError(f"a time of {float(time * unit):g} ns cannot be recorded: take a longer unit")
            return found

        return Pace(
            tuple({phase: rounded(time) for phase, time in stage.items()} for stage in self.durations),
            rounded(self.transfer),
            self.slow_link,
            rounded(self.slow_link_time),
        )

    def duration_of(self, stage: int, action: Action) -> Time:
        """Time of a computation."""
        return self.durations[stage][action.phase]

    def transfer_of(self, source: int, target: int) -> Time:
        """Time of a message from one stage to another."""
        return self.transfer + (self.slow_link_time if (source, target) == self.slow_link else 0)


@dataclass(frozen=True)
class SimulatedRun:
    """`steps` steps of a schedule at a `pace` of whole ns, with messages of `message_bytes`. ValueError for what cannot be."""

    schedule: str
    microbatches: int
    chunks: int
    steps: int
    pace: Pace
    message_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"{self.steps} steps, and each is as long as the one before: take 1 to {MOST_STEPS}")
        item = ITEM_BYTES[DTYPE]
        if self.message_bytes < item or self.message_bytes % item:
            raise ValueError(
                f"a message of {self.message_bytes} bytes holds no {DTYPE} numbers: take a multiple of {item}"
            )

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.pace.durations)

    @property
    def mesh(self) -> Mesh:
        """One rank a stage."""
        return Mesh(pp=self.stages)

    def rows(self) -> Iterator[list[list[Row]]]:
        """Stage after stage, `[step]`: the rows of one rank's step, in the order in which a rank file has them."""
        tables = plan(self.schedule, self.stages, self.microbatches, self.chunks)
        played = play(
            [_repeated(table, self.steps + 1, self.microbatches) for table in tables],
            self.pace.duration_of,
            self.pace.transfer_of,
            self.chunks,
        )
        for stage, one in enumerate(played):
            yield list(_StageRows(self, tables, stage, one).steps())

    def meta(self, name: str) -> RunMeta:
        """run.json: what the runtime would say of this layout, without a model."""
        mesh = self.mesh
        coordinates = tuple(mesh.coordinates(rank) for rank in range(mesh.world_size))
        tables = plan(self.schedule, self.stages, self.microbatches, self.chunks)
        pace = self.pace
        train: dict[str, Any] = {
            "microbatches": self.microbatches,
            "steps": self.steps,
            "durations_ns": [dict(stage) for stage in pace.durations],
            "transfer_ns": pace.transfer,
            "message_bytes": self.message_bytes,
        }
        if pace.slow_link:
            train |= {"slow_link": list(pace.slow_link), "slow_link_ns": pace.slow_link_time}
        return RunMeta(
            run_id=uuid.uuid4().hex,
            name=name,
            source="simulated",
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            hosts=("virtual",) * mesh.world_size,
            world_size=mesh.world_size,
            mesh=mesh.sizes(),
            coords=coordinates,
            groups=group_metas(mesh, pipeline_streams(self.chunks)),
            device="virtual",
            parallel={**mesh.sizes(), "schedule": self.schedule, "chunks": self.chunks},
            train=train,
            pipeline_table=tuple(
                tuple(ActionMeta(a.phase, a.chunk, a.microbatch) for a in table if a.kind == "compute")
                for table in tables
            ),
            recorder={"level": "full", "dropped": 0},
            versions={"stepscope": stepscope.__version__, "python": sys.version.split()[0]},
        )

    def write(self, directory: Path) -> None:
        """The run directory: `directory` exists and is empty. OSError where the disk does not take all of it."""
        meta = self.meta(directory.name)
        write_meta(directory, meta)
        for rank, steps in enumerate(self.rows()):
            writer = RankWriter(directory, rank, meta, base_ns=0)
            for rows in steps:
                writer.submit(in_chunks(rows))
            writer.close()
            if writer.dropped:
                raise OSError(f"{writer.path}: {writer.dropped} of {self.steps} steps could not be written")
        write_meta(directory, replace(meta, complete=True))


def _repeated(table: Table, steps: int, microbatches: int) -> Table:
    """The table of so many steps, in each of which the thread waits for its sends; microbatches are numbered throughout."""
    return tuple(
        action
        for step in range(steps)
        for action in (*(_in_step(action, step, microbatches) for action in table), SENDS_OUT)
    )


def _in_step(action: Action, step: int, microbatches: int) -> Action:
    return action._replace(microbatch=action.microbatch + step * microbatches)


class _StageRows:
    """The rows of one stage: its table walked once more, now that all times are known (executor.py: who waits for what)."""

    def __init__(self, run: SimulatedRun, tables: Sequence[Table], stage: int, played: Played) -> None:
        self._run, self._stage, self._table = run, stage, tables[stage]
        self._most_sent = activation_peak(tables[(stage - 1) % run.stages])
        self._times: dict[Action, Timed] = {one.action: one for one in (*played.computing, *played.messages)}
        self._op_ids: dict[Action, int] = {}
        self._numbers: Counter[tuple[str, int, int]] = Counter()

    def steps(self) -> Iterator[list[Row]]:
        """The rows of every step but the first played one."""
        now = max(int(one.end) for action, one in self._times.items() if action.microbatch < self._run.microbatches)
        for step in range(1, self._run.steps + 1):
            rows = list(self._rows(step, now))
            now = rows[-1].end_ns  # type: ignore[union-attr]  # the step's own row
            yield rows

    def _rows(self, step: int, begun: int) -> Iterator[Row]:
        yield BeginRow(step - 1, begun)
        now, sent_forward, sent_backward = begun, dict[tuple[int, int], Action](), deque[Action]()
        for planned in self._table:
            action, context = _in_step(planned, step, self._run.microbatches), self._context(planned)
            key = (planned.chunk, planned.microbatch)
            waits: list[Action] = []
            if action.kind == "compute":
                receive = action._replace(kind="receive")
                waits += [receive] if receive in self._times else []
                if action.phase == "backward" and key in sent_forward:
                    waits.append(sent_forward.pop(key))
            else:
                yield self._message(action, context, now)
                if action.kind == "send" and action.phase == "forward":
                    sent_forward[key] = action
                elif action.kind == "send":
                    sent_backward.append(action)
                    if len(sent_backward) > self._most_sent:
                        waits.append(sent_backward.popleft())
            for awaited in waits:
                yield (wait := self._wait(awaited, context, now))
                now = wait.end_ns
            if action.kind == "compute":
                _, start, end = self._times[action]
                assert start == now, f"stage {self._stage}: {action} starts at {start}, its thread is free at {now}"
                yield ComputeRow(context, now, now := int(end))
        nowhere: Context = ("other", -1, "other", self._stage, -1, -1)
        for awaited in (*sent_forward.values(), *sent_backward):
            yield (wait := self._wait(awaited, nowhere, now))
            now = wait.end_ns
        yield StepRow(step - 1, begun, now)

    def _context(self, action: Action) -> Context:
        return (action.phase, -1, action.phase, self._stage, action.chunk, action.microbatch)

    def _wait(self, message: Action, context: Context, now: int) -> WaitRow:
        return WaitRow(context, self._op_ids[message], message.kind, now, max(now, int(self._times[message].end)))

    def _message(self, action: Action, context: Context, now: int) -> CommRow:
        """A message as its stream runs it; numbered like comm.Comm does, per group, source and destination."""
        site = self._site(action)
        ends = (self._stage, site.peer) if action.kind == "send" else (site.peer, self._stage)
        key = (site.group, *ends)
        number = self._numbers[key]
        self._numbers[key] += 1
        op_id = self._op_ids[action] = len(self._op_ids) + 1
        _, start, end = self._times[action]
        return CommRow(context, site, op_id, number, now, int(start), int(end))

    def _site(self, action: Action) -> CommSite:
        run, here = self._run, Place(self._stage, action.chunk)
        other = (destination_of if action.kind == "send" else source_of)(action.phase, here, run.stages, run.chunks)
        assert other is not None, f"{action} has no other end"
        stream = pipeline_stream(action.phase, action.kind, wraps_round(action, self._stage, run.stages, run.chunks))
        elements = run.message_bytes // ITEM_BYTES[DTYPE]
        return CommSite(
            collective=action.kind,
            axis="pp",
            strategy="pp",
            group=group_name(stream_of(stream).channel, 0),
            ranks=tuple(range(run.stages)),
            stream=stream,
            dtype=DTYPE,
            in_elements=elements,
            out_elements=elements,
            bytes=run.message_bytes,
            peer=other.stage,
            name=action.kind,
        )
