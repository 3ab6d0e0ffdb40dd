"""The first look at a file's rows, chunk by chunk while it is scanned: which are rows at all, what kind each is, and what must
be known of the whole file before any of its rows can be understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stepscope.analysis.ingest.damage import BEGIN, FARTHEST_NS, LETTERS, Note, Pairs
from stepscope.analysis.ingest.launches import GraphLaunches
from stepscope.analysis.ingest.raw import MISSING, Question, Raw, is_constant
from stepscope.analysis.ingest.rules import Rules
from stepscope.analysis.ingest.spool import Spool
from stepscope.analysis.ingest.steps_of_ours import OpenSteps
from stepscope.analysis.ingest.undescribed import Calls
from stepscope.analysis.run import Columns
from stepscope.analysis.units import counted
from stepscope.tracer.schema import KINDS

CATEGORIES = ("host", "kernel", "memcpy", "wait", "launch")
"""What `Rules.category` says of a row."""

LAUNCH = CATEGORIES.index("launch")
COMPUTE, COMM, WAIT, MEMCPY, HOST = (KINDS.index(kind) for kind in ("compute", "comm", "wait", "memcpy", "host"))
_KIND_OF = np.array(
    [{"kernel": COMPUTE, "memcpy": MEMCPY, "wait": WAIT}.get(category, HOST) for category in CATEGORIES], np.int8
)
_PEEKED = ("ts", "dur", "pid", "tid", "name", "correlation", "kind", "category")


class Survey:
    """Takes the chunks of one file into a spool; `rows` gives them back, complete, when the whole file is known."""

    def __init__(self, rules: Rules, ours: bool, spool: Spool) -> None:
        """`ours`: written by stepscope, whose rows are in step order and never implausible."""
        self._spool, self._ours = spool, ours
        self._extent = Question(lambda ph: LETTERS.find(ph) if len(ph) == 1 else -1, -1, np.int8)
        self._category = Question(lambda cat: CATEGORIES.index(rules.category(cat)), 0, np.int8)
        self._communicates = Question(rules.communication, False, bool)
        self._timeless = self._endless = self._negative = self._zero = 0
        self._stamped = False  # has any device row a stamp that is not 0?
        self.device_rows = 0
        self.pairs = Pairs()
        self.steps = OpenSteps() if ours else None
        self.calls = Calls(rules) if not ours else None
        self.graphs = GraphLaunches()

    def add(self, chunk: Raw) -> None:
        """The next rows of the file."""
        letters = self._extent(chunk.strings, chunk.columns["ph"])
        kept, pairs = self._with_extent(chunk, letters)
        chunk = chunk.take(kept)
        if not chunk.rows:
            return
        dur = chunk.columns["dur"]
        chunk.columns["dur"] = np.where((dur < 0) | (dur > FARTHEST_NS), 0, dur)
        number = len(self._spool)
        if pairs:
            self.pairs.add(number, chunk, letters[kept])
            chunk.columns["dur"][letters[kept] >= BEGIN] = 1  # any length but 0: it is known when its end is
        categories = self._category(chunk.strings, chunk.columns["cat"])
        kinds = self._kinds(chunk, categories)
        self.device_rows += int((kinds != HOST).sum())
        if self.steps is not None:
            self.steps.add(number, chunk)
        if self.calls is not None:
            self._count_zero(chunk, kinds)
            self.calls.add(chunk, kinds)
        self.graphs.add(chunk, categories == LAUNCH)
        columns = {name: values for name, values in chunk.columns.items() if name not in ("ph", "cat")}
        self._spool.append(columns | {"kind": kinds, "category": categories})

    def _with_extent(self, chunk: Raw, letters: np.ndarray) -> tuple[np.ndarray, bool]:
        """The rows that have an extent: complete ones, instants (length 0), begins and ends; are there any of the last two?

        Metadata, counters and flows are used elsewhere or say nothing that ids do not say.
        """
        ts, dur = chunk.columns["ts"], chunk.columns["dur"]
        timed = (ts != MISSING) & (np.abs(ts) < FARTHEST_NS)
        complete = letters == 0
        self._timeless += int((complete & ~timed).sum())
        whole = complete & timed
        endless = whole & ((dur == MISSING) | (dur > FARTHEST_NS))
        self._endless += int(endless.sum())
        self._negative += int((whole & (dur < 0) & ~endless).sum())
        return timed & (letters >= 0), bool((letters >= BEGIN).any())

    def _kinds(self, chunk: Raw, categories: np.ndarray) -> np.ndarray:
        """Kind of each row: category first, then communication metadata, then the kernel's name."""
        kinds = _KIND_OF[categories]
        kernels = np.flatnonzero(kinds == COMPUTE)
        communicates = chunk.columns["collective"][kernels] >= 0
        if not self._ours:
            communicates = communicates | self._communicates(chunk.strings, chunk.columns["name"][kernels])
        kinds[kernels[communicates]] = COMM
        return kinds

    def _count_zero(self, chunk: Raw, kinds: np.ndarray) -> None:
        device = kinds != HOST
        self._zero += int((device & _is_zero(chunk.columns)).sum())
        self._stamped = self._stamped or bool((device & (chunk.columns["ts"] > 0)).any())

    # -- when the whole file is known ------------------------------------------------------------------------------

    def report(self, note: Note) -> None:
        """Say what was left out or changed; after this, `rows` may be asked."""
        lost = self._timeless
        if lost:
            said = f"{counted(lost, 'row has', 'rows have')} no readable time stamp: left out"
            note("no_time", said, touches=("ledger",))
        for code, count, what in (
            ("no_duration", self._endless, "no readable duration"),
            ("negative_duration", self._negative, "a negative duration"),
        ):
            if count:
                said = f"{counted(count, 'row has', 'rows have')} {what}: kept with length 0"
                note(code, said, touches=("ledger",))
        self.pairs.settle(note)
        if self._zero and self._stamped:
            note("zero_rows", f"{self._zero} device rows have time 0 and length 0: left out")

    def peek(self, beside: Raw) -> Iterator[tuple[Raw, np.ndarray, np.ndarray]]:
        """Chunk by chunk: all rows, the kind of each, which of them launch device work. Begins have their lengths."""
        for number in range(len(self._spool)):
            columns = {name: self._spool.column(number, name) for name in _PEEKED}
            self.pairs.apply(number, columns)
            yield replace(beside, columns=columns), columns["kind"], columns["category"] == LAUNCH

    def rows(self, beside: Raw) -> Iterator[tuple[Raw, np.ndarray]]:
        """Chunk by chunk: the rows that count, and the kind of each. The spool gives them up."""
        for number in range(len(self._spool)):
            columns = self._spool.take(number)
            kept = self.pairs.apply(number, columns)
            if self._zero and self._stamped:
                zero = (columns["kind"] != HOST) & _is_zero(columns)
                kept = ~zero if kept is None else kept & ~zero
            if self.steps is not None:
                begins = self.steps.apply(number, columns)
                if begins is not None:
                    kept = ~begins if kept is None else kept & ~begins
            chunk = replace(beside, columns=columns)
            if kept is not None:
                chunk = chunk.take(kept)
            if chunk.rows:
                kinds = chunk.columns["kind"]
                yield chunk, (kinds.copy() if is_constant(kinds) else kinds)


def _is_zero(columns: Columns) -> np.ndarray:
    """Stamp 0 and length 0: among device rows that have a stamp, a profiler's empty record."""
    return (columns["ts"] == 0) & (columns["dur"] <= 0)
