"""What is wrong with a file's rows: which are left out, cut or marked, each counted and said."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stepscope.analysis.ingest.raw import Raw
from stepscope.analysis.run import Columns

Note = Callable[..., None]
"""`note(code, text, touches=..., offset=...)` adds one health item."""

FARTHEST_NS = 1 << 61
"""Stamps and durations beyond are no times (and their sums would not fit)."""

LETTERS = "XiIRBE"
"""Kinds of events that have an extent: complete ones, instants, begins and ends."""

BEGIN = 4
"""Code of `B` among LETTERS; `E` follows."""


class Pairs:
    """Begin and end rows of a whole file: an end closes the last open begin of its thread."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []  # int64 [6, row]: chunk, row in it, time, pid, tid, is it a begin
        self._lengths: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # chunk -> rows of closed begins, their lengths
        self._all: dict[int, np.ndarray] = {}  # chunk -> all rows of pairs

    def add(self, number: int, chunk: Raw, letters: np.ndarray) -> None:
        """Those of one chunk; `letters` are its rows' codes in LETTERS."""
        rows = np.flatnonzero(letters >= BEGIN)
        columns = chunk.columns
        parts = (np.full(len(rows), number), rows, columns["ts"][rows], columns["pid"][rows], columns["tid"][rows])
        self._rows.append(np.stack([*(part.astype(np.int64) for part in parts), letters[rows] == BEGIN]))
        self._all[number] = rows

    def settle(self, note: Note) -> None:
        """Join them."""
        if not self._rows:
            return
        whole = np.concatenate(self._rows, axis=1)
        self._rows = []
        whole = whole[:, np.argsort(whole[2], kind="stable")]
        stacks: dict[tuple[int, int], list[int]] = {}
        begins, lengths, loose = [], [], 0
        times = whole[2].tolist()
        for index, (pid, tid, opens) in enumerate(whole[3:].T.tolist()):
            stack = stacks.setdefault((pid, tid), [])
            if opens:
                stack.append(index)
            elif stack:
                begins.append(stack.pop())
                lengths.append(times[index] - times[begins[-1]])
            else:
                loose += 1
        loose += sum(map(len, stacks.values()))
        if loose:
            note("loose_pairs", f"{loose} begin or end rows have no partner: left out", touches=("ledger",))
        closed, length = whole[:2, np.array(begins, np.int64)], np.array(lengths, np.int64)
        for number in self._all:
            here = closed[0] == number
            self._lengths[number] = (closed[1][here], length[here])

    def apply(self, number: int, columns: Columns) -> np.ndarray | None:
        """Give the begins of one chunk their lengths, in place; which rows to keep (None: all)."""
        if number not in self._all:
            return None
        rows, lengths = self._lengths[number]
        columns["dur"] = columns["dur"].copy()
        columns["dur"][rows] = np.where((lengths < 0) | (lengths > FARTHEST_NS), 0, lengths)
        kept = np.ones(len(columns["ts"]), bool)
        kept[self._all[number]] = False
        kept[rows] = True
        return kept


def report_cut(raw: Raw, own: bool, note: Note) -> None:
    """The health item of a file that ends too early."""
    which = "the last step is partial" if own else "it is in no time order, so all its steps are partial"
    note(
        "cut_file",
        f"the file ends early ({raw.cut}): every complete event before is kept, {which}",
        touches=("ledger", "summary"),
        offset=raw.cut_offset,
    )
