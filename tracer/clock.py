"""Clocks: the epoch anchor of this host, and the offset between hosts.

A recorder stamps with `time.perf_counter_ns`: monotonic, shared by all processes of one host, and cheap. The *anchor* is
what to add to get nanoseconds since the Unix epoch. Ranks of one host that share an anchor share a clock exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.tracer.schema import ClockMeta

ANCHOR_PAIRS = 200


class Clock(NamedTuple):
    """A monotonic clock and what to add to it to get nanoseconds since the epoch."""

    offset_ns: int
    now: Callable[[], int] = time.perf_counter_ns

    def epoch_ns(self) -> int:
        """Now, since the Unix epoch."""
        return self.now() + self.offset_ns


def anchor(pairs: int = ANCHOR_PAIRS) -> Clock:
    """The clock of this host: of `pairs` readings of the epoch between two of `perf_counter_ns`, the tightest counts.

    Its error is at most half the tightest bracket (some tens of nanoseconds). Measure it once a host and hand the
    result to all its ranks: a step of the system clock between two anchors would otherwise set them apart.
    """
    best_width, best_offset = None, 0
    for _ in range(pairs):
        before = time.perf_counter_ns()
        epoch = time.time_ns()
        after = time.perf_counter_ns()
        if best_width is None or after - before < best_width:
            best_width, best_offset = after - before, epoch - (before + after) // 2
    return Clock(best_offset)


# -- clocks of several hosts -------------------------------------------------------------------------------------------

ROUNDS = 200

Send = Callable[[int, int], None]
"""send(rank, value): one 64-bit integer to another rank."""
Receive = Callable[[int], int]
"""receive(rank): the integer that this rank sent."""


class OffsetSample(NamedTuple):
    """One measurement: at `time_ns` of this host's clock, rank 0's clock was `offset_ns` ahead, give or take `bound_ns`."""

    time_ns: int
    offset_ns: int
    bound_ns: int


def answer(peer: int, send: Send, receive: Receive, clock: Clock, rounds: int = ROUNDS) -> None:
    """The reference's side of `ask`: answer every ping with this clock's time."""
    for _ in range(rounds):
        receive(peer)
        send(peer, clock.epoch_ns())


def ask(reference: int, send: Send, receive: Receive, clock: Clock, rounds: int = ROUNDS) -> OffsetSample:
    """Offset of the reference's clock from `rounds` pings: the one with the shortest round trip counts.

    Its answer was stamped somewhere within that round trip: the middle errs by at most half of it (the bound).
    The shortest is far better than a median (Cristian 1989): queueing only ever adds time.
    """
    best: OffsetSample | None = None
    for _ in range(rounds):
        before = clock.epoch_ns()
        send(reference, before)
        theirs = receive(reference)
        after = clock.epoch_ns()
        bound = (after - before + 1) // 2
        if best is None or bound < best.bound_ns:
            middle = (before + after) // 2
            best = OffsetSample(middle, theirs - middle, bound)
    if best is None:
        raise ValueError("an offset needs at least one round")
    return best


def host_offsets(
    rank: int, hosts: Sequence[str], send: Send, receive: Receive, clock: Clock, rounds: int = ROUNDS
) -> dict[str, OffsetSample]:
    """Measure every other host against rank 0's (called by all ranks together); rank 0 gets the samples, others {}.

    `hosts[r]` is the host of rank r; its first rank speaks for it. On one host nothing is sent.
    """
    speakers = {host: hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]}
    samples: dict[str, OffsetSample] = {}
    for host, speaker in speakers.items():
        if rank == 0:
            answer(speaker, send, receive, clock, rounds)
            samples[host] = OffsetSample(*(receive(speaker) for _ in OffsetSample._fields))
        elif rank == speaker:
            for value in ask(0, send, receive, clock, rounds):
                send(0, value)
    return samples


def clock_of_ranks(hosts: Sequence[str], measured: Sequence[dict[str, OffsetSample]]) -> tuple[ClockMeta, ...]:
    """The `clock` of run.json from what rank 0 measured at the start, during and at the end of a run."""
    metas = {host: _clock_of([samples[host] for samples in measured if host in samples]) for host in set(hosts)}
    return tuple(metas[host] for host in hosts)


def _clock_of(samples: list[OffsetSample]) -> ClockMeta:
    """One offset for the whole run: the middle of the extremes, with a bound that covers every sample's own interval."""
    if not samples:
        return ClockMeta()
    low = min(sample.offset_ns - sample.bound_ns for sample in samples)
    high = max(sample.offset_ns + sample.bound_ns for sample in samples)
    first, last = samples[0], samples[-1]
    elapsed = last.time_ns - first.time_ns
    drift = (last.offset_ns - first.offset_ns) / elapsed * 1e6 if elapsed > 0 else 0.0
    return ClockMeta(offset_ns=(low + high) // 2, drift_ppm=drift, bound_ns=(high - low + 1) // 2)
