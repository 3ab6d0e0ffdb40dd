"""Calls that launch device work, and the device rows of the same id: which were launched together, and what does not fit."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.ingest.raw import Question, Raw
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import KINDS

_HOST = KINDS.index("host")


class GraphLaunches:
    """The ids of calls that launch whole graphs: they are the device rows' own where several share one."""

    def __init__(self) -> None:
        self._is_graph = Question(lambda name: "GraphLaunch" in name, False, bool)
        self._ids: list[np.ndarray] = []

    def add(self, chunk: Raw, launches: np.ndarray) -> None:
        """Those among the rows of one chunk that `launches` marks."""
        rows = np.flatnonzero(launches)
        rows = rows[self._is_graph(chunk.strings, chunk.columns["name"][rows])]
        ids = chunk.columns["correlation"][rows]
        if len(ids):
            self._ids.append(np.unique(ids[ids > 0]))

    def ids(self) -> np.ndarray:
        """All of them, sorted."""
        return np.unique(np.concatenate(self._ids)) if self._ids else np.zeros(0, np.int64)


class LaunchCheck:
    """Device rows that start before the call that launched them, and kernel launches that nothing ran of.

    What is joined within a chunk is counted and forgotten; the rest is held until the end, a few bytes a row.
    """

    def __init__(self) -> None:
        self._launching = Question(lambda name: "launch" in name.lower(), False, bool)
        self._calls: list[np.ndarray] = []  # int64 [3, row]: id, start, does it launch a kernel
        self._device: list[np.ndarray] = []  # int64 [2, row]: id, start
        self._early = self._lead = self._kernel_calls = 0

    def add(self, events: Columns, strings: list[str], device: np.ndarray) -> None:
        """The rows of one chunk; `device` marks those of the device."""
        known = events["launch_id"] >= 0
        calls, rows = np.flatnonzero(known & (events["kind"] == _HOST)), np.flatnonzero(known & device)
        launching = self._launching(strings, events["name_id"][calls])
        self._kernel_calls += int(launching.sum())
        asked = np.stack([events["launch_id"][calls], events["start_ns"][calls], launching.astype(np.int64)])
        ran = np.stack([events["launch_id"][rows], events["start_ns"][rows]])
        asked, ran = self._joined(asked, ran)
        if asked.shape[1]:
            self._calls.append(asked)
        if ran.shape[1]:
            self._device.append(ran)

    def _joined(self, calls: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Count what belongs together; the rest."""
        if not calls.shape[1] or not device.shape[1]:
            return calls, device
        order = np.argsort(calls[0], kind="stable")
        ids = calls[0][order]
        at = np.minimum(np.searchsorted(ids, device[0]), len(ids) - 1)
        joined = ids[at] == device[0]
        lead = calls[1][order[at[joined]]] - device[1][joined]
        early = lead > 0
        if early.any():
            self._early += int(early.sum())
            self._lead = max(self._lead, int(lead.max()))
        used = np.zeros(len(ids), bool)
        first = at[joined]
        used[first] = True
        # a later call of the same id is as little without a row
        same = np.flatnonzero(ids[1:] == ids[:-1]) + 1
        for index in same.tolist():
            used[index] |= used[index - 1]
        left = np.ones(len(ids), bool)
        left[order[used]] = False
        return calls[:, left], device[:, ~joined]

    def report(self, note: Note) -> None:
        """Say what does not fit."""
        lost = 0
        device = np.concatenate(self._device, axis=1) if self._device else np.zeros((2, 0), np.int64)
        self._device = []
        while self._calls:
            calls, device = self._joined(self._calls.pop(0), device)
            lost += int(calls[2].sum())
        if self._early:
            note(
                "earlier_than_launch",
                f"{self._early} device rows start before the call that launched them (by up to {self._lead} ns): "
                "host and device clocks disagree",
                touches=("ledger",),
            )
        if lost:
            note("launch_without_kernel", f"{lost} of {self._kernel_calls} kernel launches have no device row")
