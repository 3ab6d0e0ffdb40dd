"""What in a foreign trace looks wrong, or may have been taken for the wrong thing: said, never changed."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import KINDS, Lane

_COMPUTE, _COMM = (KINDS.index(kind) for kind in ("compute", "comm"))
_SHOWN = 5


class Recognised:
    """Whether communication was recognised: the kernels that count as compute although they may be none."""

    def __init__(self, lanes: tuple[Lane, ...], strings: list[str], world: int | None) -> None:
        """`world`: how many ranks the header says there are."""
        self._strings, self._world = strings, world
        self._comm_lanes = {lane.index for lane in lanes if lane.role == "comm"}
        self._compute = np.zeros(len(strings) + 1)  # ns by name; the last is of rows without one
        self._on_comm = np.zeros(len(strings) + 1)
        self._on_comm_rows = 0
        self._computes = self._communicates = False

    def add(self, events: Columns) -> None:
        """The next rows in the store's order, all of one lane."""
        compute = np.flatnonzero(events["kind"] == _COMPUTE)
        self._communicates = self._communicates or bool((events["kind"] == _COMM).any())
        if not len(compute):
            return
        self._computes = True
        names = events["name_id"][compute]
        names = np.where(names < 0, len(self._strings), names)
        times = np.bincount(names, weights=events["dur_ns"][compute], minlength=len(self._compute))
        self._compute += times
        if int(events["lane"][0]) in self._comm_lanes:
            self._on_comm += times
            self._on_comm_rows += len(compute)

    def report(self, note: Note) -> None:
        """No communication although there are several ranks; compute kernels on a stream that otherwise communicates."""
        if self._world is not None and self._world > 1 and self._computes and not self._communicates:
            note(
                "no_communication",
                f"the trace is of one of {self._world} ranks, yet no communication was recognised; the longest kernels: "
                f"{self._longest(self._compute)}. If one of them communicates, name it in a rules file",
                touches=("visible_comm_ns", "overlap_efficiency", "collectives"),
            )
        if self._on_comm_rows:
            note(
                "unnamed_on_comm_stream",
                f"{self._on_comm_rows} kernels on communication streams fit no communication rule and count as "
                f"compute: {self._longest(self._on_comm)}",
            )

    def _longest(self, totals: np.ndarray) -> str:
        """Names by total time, the longest first."""
        spent = [
            (-totals[code], self._strings[code] if code < len(self._strings) else "?")
            for code in np.flatnonzero(totals)
        ]
        return ", ".join(f"{name[:60]} ({-time / 1000:.0f} us)" for time, name in sorted(spent)[:_SHOWN])
