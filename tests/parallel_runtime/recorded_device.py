"""A device that does what a recorded one did: torch.cuda as the CUDA door uses it, with work that begins and ends when it did.

Streams run in order; an event passes when its stream gets there: when all work before it has ended, and not before the host
recorded it; a stream that waits for an event goes no further before. The work itself has its recorded times, and the device
checks that these keep to the order that the program asked for: real hardware kept to the order of the program that ran then.

The time between two events is a float32 of milliseconds with steps of half a microsecond, as `cudaEventElapsedTime` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).with_name("recorded")
RESOLUTION_NS = 500

COMPUTE_STREAM = 7


class Work(NamedTuple):
    """A piece of device work; `host`: when it was launched."""

    host: int
    stream: int
    start: int
    end: int
    what: str  # kernel, copy, or collective:bytes

    @property
    def collective(self) -> str:
        """`broadcast`, `allreduce`, or nothing."""
        return self.what.partition(":")[0] if ":" in self.what else ""

    @property
    def bytes(self) -> int:
        """Message size of a collective."""
        return int(self.what.partition(":")[2])


class Wait(NamedTuple):
    """A stream was told to wait."""

    host: int


def recorded(name: str) -> list[Work | Wait]:
    """What the host did in the recorded step, in order."""
    rows: list[Work | Wait] = []
    for line in (FOLDER / name).read_text().splitlines()[1:]:
        host, *times, what = line.split(",")
        rows.append(Wait(int(host)) if what == "wait" else Work(int(host), *map(int, times), what))
    return rows


def recorded_ranks(name: str) -> dict[int, list[Work]]:
    """The collectives of every rank of a recorded job, on one clock."""
    ranks: dict[int, list[Work]] = {}
    for line in (FOLDER / name).read_text().splitlines()[1:]:
        rank, host, *times, what = line.split(",")
        ranks.setdefault(int(rank), []).append(Work(int(host), *map(int, times), what))
    return ranks


class OutOfOrder(AssertionError):
    """The recorded device began a piece of work before what the program told it to wait for."""


class Stream:
    """Runs in order; `reached`: when it gets to what comes next."""

    def __init__(self, device: Device) -> None:
        self.device, self.reached = device, 0
        self.work: list[Work] = []

    def run(self, work: Work) -> None:
        """The next piece of work."""
        if work.start < self.reached:
            raise OutOfOrder(f"{work} began {self.reached - work.start} ns too early")
        self.work.append(work)
        self.reached = work.end

    def wait_event(self, event: Event) -> None:
        assert event.at is not None
        self.reached = max(self.reached, event.at)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def query(self) -> bool:
        return self.reached <= self.device.host


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current_stream()
        self.device.host += self.device.call_ns
        self.at = stream.reached = max(stream.reached, self.device.host)

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self.device.host

    def synchronize(self) -> None:
        assert self.at is not None
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, later: Event) -> float:
        assert self.at is not None and later.at is not None and self.query() and later.query(), "both must have passed"
        steps = round((later.at - self.at) / RESOLUTION_NS)
        return float(np.float32(steps * RESOLUTION_NS / 1e6))


class Device:
    """`host`: the host's clock. A call that records an event takes `call_ns` of it."""

    def __init__(self, call_ns: int = 0) -> None:
        self.host, self.call_ns = 0, call_ns
        self.streams: list[Stream] = []
        self.compute = self.current = Stream(self)
        self.naps = 0

    # -- torch.cuda ------------------------------------------------------------------------------------------------------

    def Stream(self, priority: int) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self) -> None:
        self.host = max([self.host, self.compute.reached, *(stream.reached for stream in self.streams)])

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        assert index == 0

    # -- the module `time`, as device_times uses it ------------------------------------------------------------------------

    def perf_counter_ns(self) -> int:
        return self.host

    def sleep(self, seconds: float) -> None:
        self.naps += 1
        self.host += round(seconds * 1e9)

    def monotonic(self) -> float:
        return self.host / 1e9
