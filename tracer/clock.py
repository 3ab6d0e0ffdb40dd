"""Clocks: the epoch anchor of this host, and the offset between hosts.

A recorder stamps with `time.perf_counter_ns`: monotonic, shared by all processes of one host, and cheap. The *anchor* is
what to add to get nanoseconds since the Unix epoch. Ranks of one host that share an anchor share a clock exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

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
