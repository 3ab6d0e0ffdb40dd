"""Communication kernels of older traces that say nothing about themselves: what the host's rows say of them.

The description is that of the `record_param_comms` row with the same external id; the collective alone that of the
annotation (`nccl:all_to_all`) around the call that launched the kernel, on its thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stepscope.analysis.ingest.raw import MISSING, Question, Raw, is_constant, is_id
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import COLLECTIVES, KINDS, code_of

_COMM, _HOST = (KINDS.index(kind) for kind in ("comm", "host"))
_NEVER_SEND_RECEIVE = tuple(code_of(COLLECTIVES, word) for word in ("all_reduce", "reduce", "broadcast", "barrier"))
"""Collectives that NCCL never runs as its SendRecv kernel: an annotation that says so is about another kernel."""

_DESCRIPTION = (
    *("in_elements", "out_elements", "seq", "source_rank", "destination_rank", "root_rank"),
    *("collective", "dtype", "group_name", "group_description", "group_ranks"),
)
"""What a kernel inherits from the call that launched it."""


class Calls:
    """What a whole file's host rows say about communication."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._is_wait = Question(lambda text: text == "wait", False, bool)
        self._marks = Question(lambda name: name.startswith(("nccl:", "rccl:")), False, bool)
        self._described: list[Columns] = []
        self._bare: list[np.ndarray] = []  # correlations of kernels that say nothing of themselves
        self._annotations: list[np.ndarray] = []  # int64 [5, row]: pid, tid, start, end, name
        self._launches: list[np.ndarray] = []  # int64 [4, row]: correlation, pid, tid, start
        self._around: tuple[np.ndarray, np.ndarray] | None = None  # correlations, codes of the annotations' names
        self._external: np.ndarray | None = None
        self._table: Columns = {}

    def add(self, chunk: Raw, kinds: np.ndarray) -> None:
        """The rows of one chunk, on the first look."""
        columns = chunk.columns
        described = columns["collective"] >= 0
        if not is_constant(columns["external_id"]):
            calls = np.flatnonzero((kinds == _HOST) & described & (columns["external_id"] != MISSING))
            calls = calls[~self._is_wait(chunk.strings, columns["collective"][calls])]
            if len(calls):
                self._described.append({name: columns[name][calls] for name in (*_DESCRIPTION, "external_id")})
        bare = columns["correlation"][(kinds == _COMM) & ~described]
        if len(bare):
            self._bare.append(bare[is_id(bare)])

    def settle(self) -> None:
        """The whole file was seen."""
        if self._described:
            names = (*_DESCRIPTION, "external_id")
            table = {name: np.concatenate([part[name] for part in self._described]) for name in names}
            order = np.argsort(table["external_id"], kind="stable")
            self._table = {name: values[order] for name, values in table.items()}
            self._external = self._table.pop("external_id")
        self._described = []

    @property
    def bare(self) -> bool:
        """Are there kernels that only an annotation could tell about?"""
        return bool(self._bare)

    def look_around(self, chunks: Iterable[tuple[Raw, np.ndarray, np.ndarray]]) -> None:
        """The annotations around the calls that launched the bare kernels; `chunks`: rows, kinds, which of them launch."""
        wanted = np.unique(np.concatenate(self._bare))
        for chunk, kinds, launches in chunks:
            columns = chunk.columns
            ids = columns["correlation"]
            rows = np.flatnonzero(launches & is_id(ids))
            rows = rows[np.isin(ids[rows], wanted)]
            parts = (ids[rows], columns["pid"][rows], columns["tid"][rows], columns["ts"][rows])
            self._launches.append(np.stack([part.astype(np.int64) for part in parts]))
            rows = np.flatnonzero((kinds == _HOST) & (columns["dur"] > 0))
            rows = rows[self._marks(chunk.strings, columns["name"][rows])]
            start, end = columns["ts"][rows], columns["ts"][rows] + columns["dur"][rows]
            marks = (columns["pid"][rows], columns["tid"][rows], start, end, columns["name"][rows])
            self._annotations.append(np.stack([mark.astype(np.int64) for mark in marks]))
        self._around = _around(np.concatenate(self._launches, axis=1), np.concatenate(self._annotations, axis=1))
        self._launches, self._annotations = [], []

    def inherit(self, columns: Columns, kinds: np.ndarray) -> None:
        """Copy descriptions onto the kernels of one chunk that have none, in `columns` (arrays are replaced)."""
        if self._external is None:
            return
        external = columns["external_id"]
        bare = np.flatnonzero((kinds == _COMM) & (columns["collective"] < 0) & (external != MISSING))
        if not len(bare):
            return
        found = np.minimum(np.searchsorted(self._external, external[bare]), len(self._external) - 1)
        same = self._external[found] == external[bare]
        for name in _DESCRIPTION:
            values = self._table[name][found[same]]
            if not is_constant(columns[name]) or (values != columns[name][0]).any():
                columns[name] = columns[name].copy()
                columns[name][bare[same]] = values

    def collectives(self, strings: list[str], events: Columns, names: np.ndarray) -> None:
        """Fill `collective` of the kernels of one chunk that still have none; `names`: codes of the rows' names."""
        if self._around is None or not len(self._around[0]):
            return
        bare = np.flatnonzero((events["kind"] == _COMM) & (events["collective"] < 0) & (events["launch_id"] != -1))
        ids, annotations = self._around
        at = np.minimum(np.searchsorted(ids, events["launch_id"][bare]), len(ids) - 1)
        for row, place in zip(bare.tolist(), at.tolist(), strict=True):
            if ids[place] != events["launch_id"][row]:
                continue
            code = self._rules.collective(strings[annotations[place]])
            if code not in _NEVER_SEND_RECEIVE or "SendRecv" not in strings[names[row]]:
                events["collective"][row] = code


def _around(launches: np.ndarray, annotations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Correlations of launches within an annotation, sorted, and the code of the innermost one's name."""
    ids, names = [], []
    order = np.argsort(launches[0], kind="stable")
    first = np.ones(len(order), bool)
    first[1:] = launches[0][order][1:] != launches[0][order][:-1]
    for index in order[first].tolist():
        correlation, pid, tid, start = launches[:, index].tolist()
        around = np.flatnonzero(
            (annotations[0] == pid) & (annotations[1] == tid) & (annotations[2] <= start) & (start < annotations[3])
        )
        if len(around):
            ids.append(correlation)
            names.append(int(annotations[4][around[int(np.argmax(annotations[2][around]))]]))
    return np.array(ids, np.int64), np.array(names, np.int64)
