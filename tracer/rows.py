"""From marks to rows: what a recorder notes in a step, and what a trace says about it.

A *mark* is a flat tuple `(time_ns, code, ...)` that the training thread appends to a list: the cheapest thing that Python
can do. A *row* is an interval of one lane of one rank. Rows are derived from marks after the step, by the thread that
writes them, so that a step pays for its marks only.

    mark                                    meaning (times of the recorder's own clock)
    (t, STEP, k, context)                   step k begins, a compute row opens
    (t, END)                                the step ends, whatever is open is closed
    (t, OPEN, context)                      the open wait or compute row ends, a compute row opens
    (t, CUT, context)                       the open compute row, if any, is cut: what follows belongs to `context`
    (t, PAUSE)                              whatever is open is closed
    (t, ISSUE, site, op_id, seq, context)   whatever is open is closed, a communication is handed to its stream
    (t, WAIT, op_id, context)               whatever is open is closed, a wait begins
    (t, COPY, name, bytes, context)         whatever is open is closed, a memory copy begins (until the next OPEN)
    (t, HOST_BEGIN, name), (t, HOST_END, context)   host work: no compute row under it
    (t, COUNTER, name, key, value)          a sample

Compute rows exist only inside a step; they never overlap each other or a wait, because one state says what is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from stepscope.tracer.schema import Operation

STEP, END, OPEN, CUT, PAUSE, ISSUE, WAIT, HOST_BEGIN, HOST_END, COUNTER, COPY = range(11)

Context = tuple[str, int, str, int, int, int]
"""Where work belongs: (block name, layer, phase, stage, chunk, microbatch); a missing integer is -1."""

NOWHERE: Context = ("step", -1, "other", -1, -1, -1)

Mark = tuple[Any, ...]
Times = dict[int, tuple[int, int]]
"""op_id -> (start, end) of the communications that have run, of the recorder's own clock."""


class CommSite(NamedTuple):
    """The static facts of one call site of a communication, built once; sizes as nccl-tests counts them (trace_format.md)."""

    collective: str  # schema.COLLECTIVES
    axis: str  # schema.AXES
    strategy: str  # schema.STRATEGIES
    group: str  # name of the process group, the same on all its ranks
    ranks: tuple[int, ...]  # global ranks, in group order
    stream: str  # "dp", "pp.forward.send", ...
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    bytes: int = -1
    peer: int = -1  # destination of a send or ring shift, source of a receive, root of a rooted collective
    peer_from: int = -1  # whom a ring shift receives from
    name: str = ""  # name of the rows; the collective's when empty

    @property
    def label(self) -> str:
        """What the row is called."""
        return self.name or self.collective


class ComputeRow(NamedTuple):
    """Work of the training thread, [start_ns, end_ns)."""

    context: Context
    start_ns: int
    end_ns: int
    costs: tuple[int, ...] = ()  # dry and simulated runs: the last six fields of schema.Operation


class CommRow(NamedTuple):
    """A communication; start and end are -1 until its stream has run it."""

    context: Context
    site: CommSite
    op_id: int
    seq: int
    issue_ns: int
    start_ns: int = -1
    end_ns: int = -1
    unfinished: bool = False  # the recording ended first: [issue, end of the recording)


class WaitRow(NamedTuple):
    """The training thread waits for communication `op_id`."""

    context: Context
    op_id: int
    label: str  # of the communication
    start_ns: int
    end_ns: int


class CopyRow(NamedTuple):
    """A memory copy between device and host, on the training thread."""

    context: Context
    name: str
    bytes: int
    start_ns: int
    end_ns: int


class HostRow(NamedTuple):
    """Work of the host that is no device work."""

    name: str
    start_ns: int
    end_ns: int


class CounterRow(NamedTuple):
    """A sample of series `key` of counter `name`."""

    name: str
    key: str
    time_ns: int
    value: int | float


class BeginRow(NamedTuple):
    """Step `step` has begun: written at once, so that a killed rank's file names the step in flight."""

    step: int
    time_ns: int


class StepRow(NamedTuple):
    """A whole step, or (`partial`) the part of it that ran before the recording was closed."""

    step: int
    start_ns: int
    end_ns: int
    partial: bool = False


Row = ComputeRow | CommRow | WaitRow | CopyRow | HostRow | CounterRow | BeginRow | StepRow

CHUNK_MARKS = 32
"""Marks derived at a time: a writing thread rests between chunks, so that it never holds the interpreter for long."""


class Deriver:
    """The state machine that reads marks in order and yields rows in program order, a step's own row last.

    It may be fed step after step. `times` is read and never kept: entries of the step before last are dropped.
    """

    def __init__(self, times: Times, offset_ns: int = 0, prune: bool = True) -> None:
        """`offset_ns` is added to every time (epoch minus recorder clock)."""
        self._times, self._offset, self._prune = times, offset_ns, prune
        self._rows: list[Row] = []
        self._compute: Context | None = None  # of the open compute row
        self._wait: tuple[int, Context] | None = None  # of the open wait row
        self._copy: tuple[str, int, Context] | None = None  # of the open copy row
        self._since = 0
        self._step: tuple[int, int] | None = None  # number and start of the open step
        self._hosts: list[tuple[str, int, bool]] = []  # name, start, whether compute was open
        self._labels: dict[int, str] = {}  # of this step's communications ...
        self._earlier: dict[int, str] = {}  # ... and of the step before

    def rows(self, marks: Iterable[Mark]) -> Iterator[Row]:
        """Every row that the marks complete."""
        for chunk in self.chunks(marks):
            yield from chunk

    def chunks(self, marks: Iterable[Mark]) -> Iterator[list[Row]]:
        """The same rows in short lists (see CHUNK_MARKS)."""
        for count, mark in enumerate(marks, 1):
            self._HANDLERS[mark[1]](self, mark)
            if count % CHUNK_MARKS == 0 and self._rows:
                yield self._take()
        if self._rows:
            yield self._take()
        self._forget()

    def finish(self, time: int) -> list[Row]:
        """Close what is open at `time`: the step in flight becomes partial."""
        self._end(time, partial=True)
        return self._take()

    def _take(self) -> list[Row]:
        rows, self._rows = self._rows, []
        return rows

    def _forget(self) -> None:
        """Drop what belongs to the step before last, so that a long run does not grow."""
        if self._prune:
            for op_id in self._earlier:
                self._times.pop(op_id, None)
        self._earlier, self._labels = self._labels, {}

    # -- what is open ----------------------------------------------------------------------------------------------

    def _close(self, time: int) -> None:
        start, end = self._since + self._offset, time + self._offset
        if self._compute is not None:
            self._rows.append(ComputeRow(self._compute, start, end))
        elif self._wait is not None:
            op_id, context = self._wait
            label = self._labels.get(op_id) or self._earlier.get(op_id, "")
            self._rows.append(WaitRow(context, op_id, label, start, end))
        elif self._copy is not None:
            name, size, context = self._copy
            self._rows.append(CopyRow(context, name, size, start, end))
        self._compute = self._wait = self._copy = None

    def _open(self, time: int, context: Context) -> None:
        if self._step is not None and not self._hosts:
            self._compute, self._since = context, time

    def _end(self, time: int, partial: bool) -> None:
        self._close(time)
        while self._hosts:
            name, start, _ = self._hosts.pop()
            self._rows.append(HostRow(name, start + self._offset, time + self._offset))
        if self._step is not None:
            number, start = self._step
            self._rows.append(StepRow(number, start + self._offset, time + self._offset, partial))
        self._step = None

    # -- one handler a mark ----------------------------------------------------------------------------------------

    def _on_step(self, mark: Mark) -> None:
        time, _, number, context = mark
        self._end(time, partial=False)
        self._step = (number, time)
        self._open(time, context)

    def _on_end(self, mark: Mark) -> None:
        self._end(mark[0], partial=False)

    def _on_open(self, mark: Mark) -> None:
        self._close(mark[0])
        self._open(mark[0], mark[2])

    def _on_cut(self, mark: Mark) -> None:
        if self._compute is not None:
            self._close(mark[0])
            self._open(mark[0], mark[2])

    def _on_pause(self, mark: Mark) -> None:
        self._close(mark[0])

    def _on_issue(self, mark: Mark) -> None:
        time, _, site, op_id, seq, context = mark
        self._close(time)
        self._labels[op_id] = site.label
        row = CommRow(context, site, op_id, seq, time + self._offset)
        self._rows.append(self.timed(row))

    def timed(self, row: CommRow) -> CommRow:
        """The row with its start and end, where its stream has run it by now."""
        times = self._times.get(row.op_id)
        if times is None:
            return row
        return row._replace(start_ns=times[0] + self._offset, end_ns=times[1] + self._offset)

    def _on_wait(self, mark: Mark) -> None:
        time, _, op_id, context = mark
        self._close(time)
        self._wait, self._since = (op_id, context), time

    def _on_copy(self, mark: Mark) -> None:
        time, _, name, size, context = mark
        self._close(time)
        self._copy, self._since = (name, size, context), time

    def _on_host_begin(self, mark: Mark) -> None:
        was_open = self._compute is not None
        self._close(mark[0])
        self._hosts.append((mark[2], mark[0], was_open))

    def _on_host_end(self, mark: Mark) -> None:
        if not self._hosts:  # its step has ended, and it with it
            return
        time, _, context = mark
        self._close(time)
        name, start, was_open = self._hosts.pop()
        self._rows.append(HostRow(name, start + self._offset, time + self._offset))
        if was_open:
            self._open(time, context)

    def _on_counter(self, mark: Mark) -> None:
        time, _, name, key, value = mark
        self._rows.append(CounterRow(name, key, time + self._offset, value))

    _HANDLERS: ClassVar[dict[int, Callable[[Deriver, Mark], None]]] = {
        STEP: _on_step,
        END: _on_end,
        OPEN: _on_open,
        CUT: _on_cut,
        PAUSE: _on_pause,
        ISSUE: _on_issue,
        WAIT: _on_wait,
        HOST_BEGIN: _on_host_begin,
        HOST_END: _on_host_end,
        COUNTER: _on_counter,
        COPY: _on_copy,
    }


# -- rows and operations -----------------------------------------------------------------------------------------------


def wait_name(label: str) -> str:
    """What the wait for a communication is called."""
    return f"wait {label}" if label else "wait"


def operation_of(row: Row) -> Operation | None:
    """The row as the record that real, dry and simulated runs share; None for a step or a counter."""
    if isinstance(row, HostRow):
        return Operation("host", row.name, stream="host", start_ns=row.start_ns, end_ns=row.end_ns)
    if not isinstance(row, ComputeRow | CommRow | WaitRow | CopyRow):
        return None
    name, layer, phase, stage, chunk, microbatch = row.context
    where: dict[str, Any] = {"phase": phase, "stage": stage, "chunk": chunk, "microbatch": microbatch, "layer": layer}
    if isinstance(row, ComputeRow):
        costs: dict[str, Any] = dict(zip(Operation._fields[-6:], row.costs, strict=False))
        return Operation("compute", name, **where, start_ns=row.start_ns, end_ns=row.end_ns, **costs)
    if isinstance(row, WaitRow):
        return Operation(
            "wait", wait_name(row.label), **where, op_id=row.op_id, start_ns=row.start_ns, end_ns=row.end_ns
        )
    if isinstance(row, CopyRow):
        return Operation("memcpy", row.name, **where, bytes=row.bytes, start_ns=row.start_ns, end_ns=row.end_ns)
    facts = row.site._asdict()
    facts.pop("name")
    return Operation(
        "comm",
        row.site.label,
        **where,
        **facts,
        op_id=row.op_id,
        seq=row.seq,
        issue_ns=row.issue_ns,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
    )
