"""Calls that launch device work, and the device rows of the same id: which were launched together, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.ingest.raw import Question, Raw, is_id
from stepscope.analysis.run import Columns
from stepscope.analysis.units import counted
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
            self._ids.append(np.unique(ids[is_id(ids)]))

    def ids(self) -> np.ndarray:
        """All of them, sorted."""
        return np.unique(np.concatenate(self._ids)) if self._ids else np.zeros(0, np.int64)


class LaunchCheck:
    """Device rows that start before the call that launched them, and kernel launches that nothing ran of.

    Of what is joined within a chunk only the ids are kept; the rest is held until the end, some bytes a row. Several rows, and
    several calls, may share an id: a row is early when it is before all calls of its id.
    """

    def __init__(self) -> None:
        self._launching = Question(lambda name: "launch" in name.lower(), False, bool)
        self._calls: list[np.ndarray] = []  # int64 [3, row]: id, start, does it launch a kernel
        self._device: list[np.ndarray] = []  # int64 [2, row]: id, start
        self._ran: list[np.ndarray] = []  # ids of joined calls
        self._early: list[np.ndarray] = []  # int64 [2, row]: id, start of device rows before one call of their id
        self._kernel_calls = 0

    def add(self, events: Columns, strings: list[str], device: np.ndarray) -> None:
        """The rows of one chunk; `device` marks those of the device."""
        known = events["launch_id"] != -1
        calls, rows = np.flatnonzero(known & (events["kind"] == _HOST)), np.flatnonzero(known & device)
        names = events["name_id"][calls]
        launching = self._launching(strings, names)
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
        early = calls[1][order[at[joined]]] > device[1][joined]
        if early.any():
            self._early.append(device[:, joined][:, early])
        ran = np.sort(device[0][joined])
        self._ran.append(ran.astype(np.int32) if len(ran) and ran[0] > -1 << 31 and ran[-1] < 1 << 31 else ran)
        return calls[:, ~np.isin(calls[0], ran)], device[:, ~joined]

    def report(self, note: Note, calls_again: Iterator[Columns]) -> None:
        """Say what does not fit. `calls_again`: launch_id and start_ns of all host rows, for when they are needed once more."""
        device = np.concatenate(self._device, axis=1) if self._device else np.zeros((2, 0), np.int64)
        self._device = []
        left: list[np.ndarray] = []
        while self._calls:
            calls, device = self._joined(self._calls.pop(0), device)
            left.append(calls[0][calls[2] != 0])
        lost = np.concatenate(left) if left else np.zeros(0, np.int64)
        if self._ran and (len(lost) or device.shape[1]):
            ran = np.concatenate(self._ran)
            lost = lost[~np.isin(lost, ran)]  # a second call of an id that ran is as little without a row
            self._early.append(
                device[:, np.isin(device[0], ran)]
            )  # perhaps: their call was in the chunk of another row
        lead = self._leads(calls_again)
        if len(lead):
            note(
                "earlier_than_launch",
                f"{counted(len(lead), 'device row starts', 'device rows start')} before the launching call (by up to "
                f"{int(lead.max())} ns): host and device clocks disagree",
                touches=("ledger",),
            )
        if len(lost):
            note("launch_without_kernel", f"{len(lost)} of {self._kernel_calls} kernel launches have no device row")

    def _leads(self, calls_again: Iterator[Columns]) -> np.ndarray:
        """By how much rows start before the first call of their id, of those that do."""
        ids, start = np.concatenate([np.zeros((2, 0), np.int64), *self._early], axis=1)
        if not len(ids):
            return ids
        known, place = np.unique(ids, return_inverse=True)
        first = np.full(len(known), np.iinfo(np.int64).max)
        for calls in calls_again:
            at = np.minimum(np.searchsorted(known, calls["launch_id"]), len(known) - 1)
            named = np.flatnonzero(known[at] == calls["launch_id"])
            np.minimum.at(first, at[named], calls["start_ns"][named])
        lead = first[place] - start
        return lead[lead > 0]
