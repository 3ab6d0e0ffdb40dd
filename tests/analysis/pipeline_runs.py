"""Exact pipeline runs in virtual time: every duration is whole, communication is free, so every answer is known.

Stages of equal forwards and backwards in the schedule's order, dp replicas that reduce at the end of the step, an
optimizer after that; one rank may compute longer in its first forward or start late.
"""

from __future__ import annotations

from timelines import Timeline

from stepscope.analysis.run import Run
from stepscope.tracer.schema import STEP_ANNOTATION, ActionMeta

MS = 10**6


def order_of(schedule: str, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """(phase, microbatch) in the order in which a stage runs them."""
    forwards = [("forward", m) for m in range(microbatches)]
    backwards = [("backward", m) for m in range(microbatches)]
    if schedule == "gpipe":
        return forwards + backwards
    if schedule == "naive":
        return [slot for pair in zip(forwards, backwards, strict=True) for slot in pair]
    warm = min(stages - 1 - stage, microbatches)
    steady = [slot for pair in zip(forwards[warm:], backwards, strict=False) for slot in pair]
    return forwards[:warm] + steady + backwards[microbatches - warm :]


class PipelineRun:
    """Builds one run, step by step; times in `unit` ns."""

    def __init__(self, stages: int, microbatches: int, dp: int = 1, schedule: str = "1f1b", unit: int = MS) -> None:
        self.stages, self.microbatches, self.dp, self.schedule, self.unit = stages, microbatches, dp, schedule, unit
        self.line = Timeline(world=stages * dp, mesh={"pp": stages, "dp": dp}, origin=10**18)
        for replica in range(dp):
            for stage in range(stages - 1):
                self.line.group(f"pp{stage}.{replica}", "pp", self.rank(stage, replica), self.rank(stage + 1, replica))
        for stage in range(stages):
            self.line.group(f"dp{stage}", "dp", *(self.rank(stage, replica) for replica in range(dp)))
        self.clock = dict.fromkeys(range(stages * dp), 0)
        self.operations = 0

    def rank(self, stage: int, replica: int) -> int:
        """Global rank: pp outermost, as in the mesh."""
        return stage * self.dp + replica

    def step(
        self,
        number: int,
        slow: dict[int, int] | None = None,
        late: dict[int, int] | None = None,
        forward: int = 1,
        backward: int = 2,
    ) -> None:
        """One step. `slow`: rank -> units more in its first forward; `late`: rank -> units of idle before its first work."""
        starts = dict(self.clock)
        for rank, units in (late or {}).items():
            self.clock[rank] += units
        for replica in range(self.dp):
            self._pipeline(number, replica, slow or {}, {"forward": forward, "backward": backward})
        for stage in range(self.stages):
            self._reduce(number, stage)
        for rank, start in starts.items():
            self.line.row(
                rank, "host", start * self.unit, self.clock[rank] * self.unit, name=f"{STEP_ANNOTATION}{number}"
            )

    def _pipeline(self, number: int, replica: int, slow: dict[int, int], durations: dict[str, int]) -> None:
        orders = {s: order_of(self.schedule, s, self.stages, self.microbatches) for s in range(self.stages)}
        done: dict[tuple[str, int, int], int] = {}
        position = dict.fromkeys(orders, 0)
        while any(position[s] < len(orders[s]) for s in orders):
            for stage, order in orders.items():
                while position[stage] < len(order):
                    phase, microbatch = order[position[stage]]
                    source = stage - 1 if phase == "forward" else stage + 1
                    received = 0 <= source < self.stages
                    if received and (phase, microbatch, source) not in done:
                        break
                    rank = self.rank(stage, replica)
                    ready = self.clock[rank]
                    if received:
                        ready = max(ready, done[phase, microbatch, source])
                        self._message(
                            number, phase, microbatch, (source, stage), replica, done[phase, microbatch, source]
                        )
                    length = durations[phase] + (slow.get(rank, 0) if (phase, microbatch) == ("forward", 0) else 0)
                    place = {
                        "phase": phase,
                        "stage": stage,
                        "chunk": 0,
                        "microbatch": microbatch,
                        "name": f"block {stage}",
                    }
                    self.line.compute(rank, ready * self.unit, (ready + length) * self.unit, **place)
                    self.clock[rank] = done[phase, microbatch, stage] = ready + length
                    position[stage] += 1

    def _message(
        self, number: int, phase: str, microbatch: int, ends: tuple[int, int], replica: int, sent: int
    ) -> None:
        """A receive from when the stage is free until the sender's work is done: all of it is waiting."""
        source, stage = ends
        receiver = self.rank(stage, replica)
        if sent > self.clock[receiver]:
            at = (self.clock[receiver] * self.unit, sent * self.unit)
            self.operations += 1
            self.line.message(
                (sent * self.unit, sent * self.unit),
                at,
                self.rank(source, replica),
                receiver,
                f"pp{min(ends)}.{replica}",
                seq=number * self.microbatches + microbatch,
                op_id=self.operations,
                stream=f"pp.{phase}",
                bytes=4096,
            )

    def _reduce(self, number: int, stage: int) -> None:
        ranks = [self.rank(stage, replica) for replica in range(self.dp)]
        last = max(self.clock[rank] for rank in ranks)
        if self.dp > 1:
            parts = {rank: (self.clock[rank] * self.unit, (last + 1) * self.unit) for rank in ranks}
            self.line.collective(f"dp{stage}", number, parts, stream="dp", axis="dp", strategy="dp", bytes=1 << 20)
            last += 1
        for rank in ranks:
            self.line.compute(
                rank, last * self.unit, (last + 1) * self.unit, phase="optimizer", stage=stage, name="adamw"
            )
            self.clock[rank] = last + 1

    def table(self) -> tuple[tuple[ActionMeta, ...], ...]:
        """The planned table of every rank, as run.json holds it."""
        orders = [
            order_of(self.schedule, s, self.stages, self.microbatches)
            for s in range(self.stages)
            for _ in range(self.dp)
        ]
        return tuple(tuple(ActionMeta(phase, 0, microbatch) for phase, microbatch in order) for order in orders)

    def run(self) -> Run:
        """The run so far."""
        return self.line.run()


def pipeline_run(
    stages: int,
    microbatches: int,
    dp: int = 1,
    steps: int = 3,
    schedule: str = "1f1b",
    slow: dict[int, int] | None = None,
    late: dict[int, int] | None = None,
) -> Run:
    """Equal steps; see PipelineRun."""
    made = PipelineRun(stages, microbatches, dp, schedule)
    for number in range(steps):
        made.step(number, slow, late)
    return made.run()
