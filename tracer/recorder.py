"""The recorder: what a training program calls to say where it is.

Every call appends one mark (see rows.py); nothing is formatted, written or synchronised in a step. `end_step` hands the
step's marks to the writer's background thread. `NullRecorder` has the same surface and does nothing.

    recorder.begin_step(k)
    recorder.place(phase="forward", stage=0, chunk=0, microbatch=3)
    recorder.block("layer.0", layer=0)          # what follows on this thread belongs to layer.0
    op_id = recorder.issue(site, seq)           # cuts; the stream's thread later calls communicated(op_id, start, end)
    recorder.resume()                           # compute goes on
    recorder.wait(op_id)                        # cuts; blocked from here ...
    recorder.resume()                           # ... to here
    recorder.end_step()
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from stepscope.tracer.clock import Clock, anchor
from stepscope.tracer.device_times import DeviceClock
from stepscope.tracer.rows import (
    COPY,
    COUNTER,
    CUT,
    END,
    HOST_BEGIN,
    HOST_END,
    ISSUE,
    NOWHERE,
    OPEN,
    PAUSE,
    STEP,
    WAIT,
    BeginRow,
    CommRow,
    CommSite,
    Context,
    Deriver,
    Mark,
    Row,
    Times,
    operation_of,
)
from stepscope.tracer.schema import Operation

__all__ = ["CommSite", "NullRecorder", "Recorder", "RowSink"]


class RowSink(Protocol):
    """What a recorder writes to (writer.RankWriter)."""

    dropped: int

    def begin(self, row: BeginRow) -> None:
        """A step has begun."""

    def submit(self, chunks: Iterator[list[Row]], steps: int = 1) -> None:
        """Take the rows of one step, or (`steps` 0) of none; drained on the sink's own thread, in order of submission."""

    def close(self) -> None:
        """Write what was submitted and complete the file."""

    def cpu_ns(self) -> int:
        """CPU time that the sink's thread has used."""


class Recorder:
    """Records one rank. All methods but `communicated` belong to the thread that trains (or to autograd's for it)."""

    level = "full"

    def __init__(
        self, rank: int, writer: RowSink | None = None, clock: Clock | None = None, keep_last: bool = True
    ) -> None:
        """`writer` None keeps the last step in memory only; `clock` is measured when none is given."""
        self.rank = rank
        self.clock = clock if clock is not None else anchor()
        self._writer = writer
        self._keep_last = keep_last
        self._now: Callable[[], int] = self.clock.now
        self._device: DeviceClock | None = None
        self._marks: list[Mark] = []
        self._mark = self._marks.append
        self._times: Times = {}
        self._place = NOWHERE[2:]
        self._context: Context = NOWHERE
        self._op_id = 0
        self._step: int | None = None
        self._begun = (0, 0)  # index of the open step's first mark; last op_id before it
        self._kept: tuple[int | None, list[Mark]] = (None, [])
        self._deriver = Deriver(self._times, self.clock.offset_ns)
        self._pending: list[CommRow] = []
        self._totals = {"steps": 0, "marks": 0, "step_ns": 0}
        self._closed = False

    def follow(self, device: DeviceClock) -> None:
        """From now on marks are of this device's compute stream; their times are read once the device has got there."""
        self._device = device
        self._now = device.stamp

    def _settled(self, marks: list[Mark]) -> list[Mark]:
        return marks if self._device is None else self._device.settle(marks)

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Step `step` begins here, in an open compute row; a step that is still open ends here."""
        if self._step is not None:
            self.end_step()
        self._step = step
        self._begun = (len(self._marks), self._op_id)
        self._place, self._context = NOWHERE[2:], NOWHERE
        now = self._now()
        if self._writer is not None:
            self._writer.begin(BeginRow(step, now + self.clock.offset_ns))
        self._mark((now, STEP, step, NOWHERE))

    def end_step(self) -> None:
        """The step ends here; its marks go to the writer's thread. Nothing happens when no step is open."""
        if self._step is None:
            return
        self._mark((self._now(), END))
        marks, begun = self._marks, self._begun
        self._marks = []
        self._mark = self._marks.append
        self._totals["steps"] += 1
        self._totals["marks"] += len(marks)
        self._totals["step_ns"] += marks[-1][0] - marks[begun[0]][0]
        if self._keep_last:
            self._kept = (self._step, marks[begun[0] :])
        self._step = None
        if self._writer is not None:
            self._writer.submit(self._file_rows(marks))
        else:  # nobody reads earlier steps: forget their times
            for op_id in [number for number in self._times if number <= begun[1]]:
                del self._times[op_id]

    def _file_rows(self, marks: list[Mark]) -> Iterator[list[Row]]:
        """One step's rows for the file: communications appear once they have run (on the writer's thread)."""
        earlier, self._pending = self._pending, []
        ready = self._ready([self._deriver.timed(row) for row in earlier])
        if ready:
            yield ready
        for chunk in self._deriver.chunks(self._settled(marks)):
            yield self._ready(chunk)

    def _ready(self, rows: list[Any]) -> list[Row]:
        self._pending.extend(row for row in rows if isinstance(row, CommRow) and row.start_ns < 0)
        return [row for row in rows if not isinstance(row, CommRow) or row.start_ns >= 0]

    # -- where the training thread is ------------------------------------------------------------------------------

    def place(
        self,
        phase: str | None = None,
        stage: int | None = None,
        chunk: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        """What follows belongs here; None leaves a part as it is. A change cuts, and forgets the block."""
        was = self._place
        place = (
            was[0] if phase is None else phase,
            was[1] if stage is None else stage,
            was[2] if chunk is None else chunk,
            was[3] if microbatch is None else microbatch,
        )
        if place != was:
            self._place = place
            self._context = context = (place[0], -1, *place)
            self._mark((self._now(), CUT, context))

    def block(self, name: str, phase: str | None = None, layer: int = -1) -> None:
        """A block mark: what follows on this thread is work of block `name` (cuts always)."""
        if phase is not None:
            self._place = (phase, *self._place[1:])
        self._context = context = (name, layer, *self._place)
        self._mark((self._now(), CUT, context))

    def pause(self) -> None:
        """Close the open row without opening another: host work that follows lies outside any row until `resume`."""
        self._mark((self._now(), PAUSE))

    def resume(self) -> None:
        """A compute row opens anew: after an issue has returned, after a wait, after `pause`."""
        self._mark((self._now(), OPEN, self._context))

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Host work under its own name; no compute row under it. It ends with its step at the latest."""
        self._mark((self._now(), HOST_BEGIN, name))
        try:
            yield
        finally:
            self._mark((self._now(), HOST_END, self._context))

    @contextmanager
    def memcpy(self, name: str, size: int) -> Iterator[None]:
        """A memory copy of `size` bytes on this thread (no compute row under it), such as `Memcpy DtoH`."""
        self._mark((self._now(), COPY, name, size, self._context))
        try:
            yield
        finally:
            self.resume()

    # -- communication ---------------------------------------------------------------------------------------------

    def issue(self, site: CommSite, seq: int) -> int:
        """A communication is about to be handed to its stream (cuts); returns its op_id, unique in the rank."""
        self._op_id = op_id = self._op_id + 1
        self._mark((self._now(), ISSUE, site, op_id, seq, self._context))
        return op_id

    def wait(self, op_id: int) -> None:
        """The training thread now needs the result of `op_id` (cuts); `resume` ends the wait."""
        self._mark((self._now(), WAIT, op_id, self._context))

    def communicated(self, op_id: int, start_ns: int, end_ns: int) -> None:
        """Called by the stream's thread: when the communication ran, as `perf_counter_ns` (the recorder's clock)."""
        self._times[op_id] = (start_ns, end_ns)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def counter(self, name: str, value: int | float, key: str = "") -> None:
        """A sample of counter `name` (schema.COUNTERS), series `key`."""
        self._mark((self.clock.now(), COUNTER, name, key, value))

    def operations(self, step: int | None = None) -> list[Operation]:
        """The rows of the last step that ended (before any: of what was recorded so far), in program order.

        ValueError for a step that is no longer kept.
        """
        number, marks = self._kept
        if number is None:
            marks = self._marks
        if step is not None and step != number:
            raise ValueError(f"step {step} is not kept: only the last step that ended is ({number})")
        rows = Deriver(self._times, self.clock.offset_ns, prune=False).rows(self._settled(marks))
        return [operation for row in rows if (operation := operation_of(row)) is not None]

    def summary(self) -> dict[str, Any]:
        """This rank's part of run.json's `recorder`; best asked for after `close`.

        `marks_share` = marks x measured cost of a mark / step time: what the training thread pays for certain.
        `writer_share` = CPU time of the writing thread / step time: a share of it is hidden behind waits and kernels.
        `overhead` is their sum, an upper bound; all None before a step has ended. `dropped` counts steps not written.
        """
        totals, mark_ns = self._totals, cost_of_a_mark()
        writer_ns = self._writer.cpu_ns() if self._writer is not None else 0
        marks_share = writer_share = overhead = None
        if totals["step_ns"]:
            marks_share = totals["marks"] * mark_ns / totals["step_ns"]
            writer_share = writer_ns / totals["step_ns"]
            overhead = marks_share + writer_share
        return {
            "level": self.level,
            "overhead": overhead,
            "dropped": self._writer.dropped if self._writer is not None else 0,
            "marks_share": marks_share,
            "writer_share": writer_share,
            "mark_ns": mark_ns,
            "marks_per_step": totals["marks"] / totals["steps"] if totals["steps"] else None,
        }

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the recording (safe to call twice): a step in flight is written as partial, the file completed."""
        if self._closed:
            return
        self._closed = True
        if self._device is not None:
            self._device.hurry()
        if self._writer is not None:
            self._writer.submit(self._last_rows(self._marks, self._now()), steps=int(self._step is not None))
            self._writer.close()

    def _last_rows(self, marks: list[Mark], now: int) -> Iterator[list[Row]]:
        yield from self._file_rows(marks)
        now = self._settled([(now,)])[0][0]
        end = now + self.clock.offset_ns
        yield [
            row._replace(start_ns=row.issue_ns, end_ns=max(end, row.issue_ns), unfinished=True) for row in self._pending
        ]
        yield self._deriver.finish(now)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class NullRecorder:
    """A recorder that records nothing; `issue` still numbers the communications."""

    level = "off"

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._op_id = 0
        self._host = nullcontext()

    def follow(self, device: DeviceClock) -> None:
        """Nothing."""

    def begin_step(self, step: int) -> None:
        """Nothing."""

    def end_step(self) -> None:
        """Nothing."""

    def place(
        self,
        phase: str | None = None,
        stage: int | None = None,
        chunk: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        """Nothing."""

    def block(self, name: str, phase: str | None = None, layer: int = -1) -> None:
        """Nothing."""

    def pause(self) -> None:
        """Nothing."""

    def resume(self) -> None:
        """Nothing."""

    def host(self, name: str) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return self._host

    def memcpy(self, name: str, size: int) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return self._host

    def issue(self, site: CommSite, seq: int) -> int:
        """The running number of the communication."""
        self._op_id += 1
        return self._op_id

    def wait(self, op_id: int) -> None:
        """Nothing."""

    def communicated(self, op_id: int, start_ns: int, end_ns: int) -> None:
        """Nothing."""

    def counter(self, name: str, value: int | float, key: str = "") -> None:
        """Nothing."""

    def operations(self, step: int | None = None) -> list[Operation]:
        """Nothing was recorded."""
        return []

    def summary(self) -> dict[str, Any]:
        """The `recorder` object of run.json."""
        return {"level": self.level, "overhead": 0.0, "dropped": 0}

    def close(self) -> None:
        """Nothing."""

    def __enter__(self) -> NullRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def cost_of_a_mark(samples: int = 100) -> float:
    """Nanoseconds that one mark costs here and now: the median over four calls that a step makes, with cold caches."""
    recorder = Recorder(0, clock=Clock(0))
    recorder.begin_step(0)
    work, costs = bytearray(1 << 20), []
    for number in range(samples):
        bytes(work)  # what a step does between marks: it throws the recorder out of the fast caches
        start = time.perf_counter_ns()
        recorder.block("calibration", layer=0)
        recorder.wait(0)
        recorder.resume()
        recorder.place(microbatch=number)
        costs.append((time.perf_counter_ns() - start) / 4)
    return statistics.median(costs)
