"""When work ran on a device whose queue the host fills ahead: events in place of the host's clock, read later.

The host runs ahead of a GPU, so the moment at which it reaches a cut says nothing about the moment at which the device does.
Each mark therefore carries an event of the compute stream; the writing thread reads its time once it has passed. The
training thread never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

POLL_S = 0.001
HURRY_S = 1.0
"""How long, when the recording ends, a device that may hang is waited for; afterwards the host's times stand."""


class Stamp(int):
    """`perf_counter_ns` at which the host asked; `event` passes when the device gets there."""

    event: Any


class DeviceClock:
    """Device events on the host's clock, counted from one event whose host time is known."""

    def __init__(self, cuda: Any, sleep: Callable[[float], None] = time.sleep) -> None:
        """`cuda` is torch.cuda, or what stands in for it."""
        self._cuda, self._sleep = cuda, sleep
        self._device = cuda.current_device()
        self._anchor: tuple[Any, int] | None = None  # replaced as a whole: two threads read it
        self._next: tuple[Any, int] | None = None  # taken, but its event may not have passed yet
        self._deadline: float | None = None
        self._last = 0

    def anchor(self) -> bool:
        """Take a new anchor, if the compute stream is idle at this moment: then an event runs when it is recorded.

        Within microseconds, that is: until then times are counted from the old one (from the first, the host waits).
        """
        if not self._cuda.current_stream().query():
            return False
        event = self._cuda.Event(enable_timing=True)
        before = time.perf_counter_ns()
        event.record()
        taken = event, (before + time.perf_counter_ns()) // 2
        if self._anchor is None:
            event.synchronize()
            self._anchor = taken
        else:
            self._next = taken
        return True

    def rebase(self, event: Any) -> None:
        """Count from a passed event instead.

        `elapsed_time` is a 32-bit float of milliseconds: 60 ns exact over a second, 8 us over two minutes.
        """
        at = self.ns(event)
        self._anchor, self._next = (event, at), None

    def ns(self, event: Any) -> int:
        """`perf_counter_ns` at which a passed event ran."""
        taken = self._next
        if taken is not None and taken[0].query():  # the time between two events can be asked once both have passed
            self._anchor, self._next = taken, None
        assert self._anchor is not None, "no anchor was taken"
        anchor, at = self._anchor
        return at + round(anchor.elapsed_time(event) * 1e6)

    # -- marks -----------------------------------------------------------------------------------------------------

    def stamp(self) -> Stamp:
        """The time of a mark: the host's now, and an event behind what the compute stream holds so far."""
        stamp = Stamp(time.perf_counter_ns())
        stamp.event = self._cuda.Event(enable_timing=True)
        stamp.event.record()
        return stamp

    def settle(self, marks: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The same marks at the times of the device, waiting for those that have not passed (on the writing thread)."""
        self._cuda.set_device(self._device)  # a thread's own; without it this one would open a context on GPU 0
        return [(self._settled(mark[0]), *mark[1:]) for mark in marks]

    def hurry(self) -> None:
        """The recording ends: wait for HURRY_S more at most, in all."""
        self._deadline = time.monotonic() + HURRY_S

    def _settled(self, moment: int) -> int:
        if not isinstance(moment, Stamp):
            return moment
        while not (passed := moment.event.query()):
            if self._deadline is not None and time.monotonic() > self._deadline:
                break
            self._sleep(POLL_S)
        # one stream runs in order: a new anchor that lies some microseconds off must not turn time back
        self._last = max(self._last, self.ns(moment.event) if passed else int(moment))
        return self._last
