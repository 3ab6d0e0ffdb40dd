"""Blocks of scanned events put together: what later steps use, in as little memory as it takes.

Metadata and counters are taken out here; a column that no event of a block has takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stepscope.analysis.ingest.raw import (
    MISSING,
    NUMBERS,
    TEXTS,
    CounterSample,
    Raw,
    Repair,
    blank,
    both,
    exact_integer,
)
from stepscope.analysis.ingest.scanner.frame import Frame
from stepscope.analysis.ingest.text import CONTROL, ENCODING, ESCAPE, decode_text, tolerant_json

CHUNK_ROWS = 1 << 17
"""Rows that are handed on at once."""

_THREAD_NAME = ("name", "pid", "tid", "label")
"""The text columns of a metadata row that names a thread."""

_PH = TEXTS.index("ph")

Sink = Callable[[Raw], None]
"""Takes the next rows of a file; their codes count in a list of strings that only grows."""

_SAID = {
    CONTROL: ("control_character", both("string", "contain", "raw control characters: kept")),
    ESCAPE: ("unknown_escape", both("string", "contain", "an unknown escape: kept as a backslash")),
    ENCODING: ("bad_encoding", both("string", "contain", "bytes that are no character: shown as U+FFFD")),
}


Part = tuple[np.ndarray | None, np.ndarray]
"""A column of one block: all values, or (where they are few) the rows that have one and their values."""


class Gatherer:
    """Collects blocks and hands them on, some at a time; `finish` gives what is beside the rows."""

    def __init__(self, frame: Frame, sink: Sink) -> None:
        self._frame, self._sink = frame, sink
        self._blocks: list[tuple[int, dict[str, Part]]] = []
        self._rows = 0
        self._counters: list[tuple[int, int, bytes]] = []  # time, name, args
        self._letters: dict[int, str] = {}  # by code of `ph`
        self._threads: list[tuple[int, int, int, int]] = []  # name, pid, tid, args.name of metadata rows
        self._strings: list[str] = []
        self._odd: dict[int, str] = {}  # code -> what is odd about the string
        self._uses: dict[int, int] = {}  # code -> how many values are this odd string

    def add(self, rows: int, buffer: bytearray) -> None:
        """Take over the frame's first `rows` rows; `buffer` is the window that its spans point into."""
        letters = self._frame.texts[_PH, :rows]
        keep: np.ndarray | slice = slice(None)
        kept = rows
        codes = np.flatnonzero(np.bincount(letters + 1)) - 1
        beside = {self._letter(code): code for code in codes.tolist() if self._letter(code) in "MC"}
        if beside:
            if "C" in beside:
                self._take_counters(np.flatnonzero(letters == beside["C"]), buffer)
            if "M" in beside:
                named = np.flatnonzero(letters == beside["M"])
                columns = [self._frame.texts[TEXTS.index(name), named].tolist() for name in _THREAD_NAME]
                self._threads += zip(*columns, strict=True)
            keep = np.flatnonzero(~np.isin(letters, list(beside.values())))
            kept = len(keep)
        if kept:
            self._blocks.append((kept, self._block(rows, keep, kept)))
            self._rows += kept
            if self._rows >= CHUNK_ROWS:
                self._hand_on()

    def _block(self, rows: int, keep: np.ndarray | slice, kept: int) -> dict[str, Part]:
        """The columns that any row has a value in."""
        block: dict[str, Part] = {}
        used = self._frame.used.tolist()
        sources: tuple[tuple[tuple[str, ...], np.ndarray, int, list[int]], ...] = (
            (NUMBERS, self._frame.numbers, MISSING, used),
            (TEXTS, self._frame.texts, -1, used[len(NUMBERS) :]),
        )
        for names, source, missing, flags in sources:
            for name, values, any_has in zip(names, source, flags, strict=False):
                if not any_has:
                    continue
                chosen = values[:rows][keep]
                given = np.flatnonzero(chosen != missing)
                if 0 < len(given) < kept // 4:
                    block[name] = (given.astype(np.int32), chosen[given])
                elif len(given):
                    block[name] = (None, chosen.copy() if isinstance(keep, slice) else chosen)
        return block

    def finish(self, header: dict) -> Raw:
        """Hand on what is left; no rows, but everything that is beside them."""
        self._hand_on()
        texts = self._strings
        counters = [
            sample
            for time, name, args in self._counters
            for sample in _samples(time, texts[name] if name >= 0 else "", args)
        ]
        named = [[texts[code] if code >= 0 else "" for code in row] for row in self._threads]
        threads = {(pid, tid): label for name, pid, tid, label in named if name == "thread_name" and label}
        columns = {name: blank(name, 0) for name in (*NUMBERS, *TEXTS)}
        return Raw(columns, texts, header, counters, threads, self._odd_texts())

    def _hand_on(self) -> None:
        self._decode()
        if not self._rows:
            return
        columns = {name: self._joined(name) for name in (*NUMBERS, *TEXTS)}
        self._blocks, self._rows = [], 0
        if self._odd:
            for name in TEXTS:
                for code, times in zip(*np.unique(columns[name], return_counts=True), strict=True):
                    if int(code) in self._odd:
                        self._uses[int(code)] = self._uses.get(int(code), 0) + int(times)
        self._sink(Raw(columns, self._strings))

    def _decode(self) -> None:
        """The texts of strings that came since the last time, and what is odd about some of them."""
        frame, known = self._frame, len(self._strings)
        count = frame.text_count
        if count == known:
            return
        first = int(frame.offsets[known])
        arena = frame.arena[first : int(frame.offsets[count - 1] + frame.lengths[count - 1])].tobytes()
        places = zip(frame.offsets[known:count].tolist(), frame.lengths[known:count].tolist(), strict=True)
        for code, (at, length) in enumerate(places, known):
            text, what = decode_text(arena[at - first : at - first + length])
            self._strings.append(text)
            if what is not None:
                self._odd[code] = what

    def _letter(self, code: int) -> str:
        """The kind of event that a code of `ph` stands for."""
        if code not in self._letters:
            self._letters[code] = self._frame.text(code).decode("ascii", "replace") if code >= 0 else "?"
        return self._letters[code]

    def _joined(self, name: str) -> np.ndarray:
        """One column of all blocks, which give it up."""
        if not any(name in block for _, block in self._blocks):
            return blank(name, self._rows)
        parts = [(count, block.pop(name, (None, None))) for count, block in self._blocks]
        if all(where is None and values is not None for _, (where, values) in parts):
            return np.concatenate([values for _, (_, values) in parts if values is not None])
        missing = blank(name, 1)
        joined = np.full(self._rows, missing[0], missing.dtype)
        at = 0
        for count, (where, values) in parts:
            if where is not None:
                joined[at + where] = values
            elif values is not None:
                joined[at : at + count] = values
            at += count
        return joined

    def _take_counters(self, rows: np.ndarray, buffer: bytearray) -> None:
        times = self._frame.numbers[NUMBERS.index("ts")]
        names = self._frame.texts[TEXTS.index("name")]
        for row in rows.tolist():
            start, end = self._frame.spans[:, row].tolist()
            if start >= 0 and end > start and times[row] != MISSING:
                self._counters.append((int(times[row]), int(names[row]), bytes(buffer[start:end])))

    def _odd_texts(self) -> list[Repair]:
        """How many values are odd strings, by what is odd about them."""
        repairs = []
        for what, (code, texts) in _SAID.items():
            which = [one for one, is_odd in self._odd.items() if is_odd == what and self._uses.get(one)]
            if which:
                first = int(self._frame.firsts[which].min())
                repairs.append(Repair(code, texts, sum(self._uses[one] for one in which), first))
        return repairs


def _samples(time_ns: int, name: str, args: bytes) -> list[CounterSample]:
    """The series of one counter row; values that are no numbers are left out."""
    values = tolerant_json(args)
    pairs = ((key, _integer(value)) for key, value in values.items()) if isinstance(values, dict) else ()
    return [CounterSample(time_ns, name, key, value) for key, value in pairs if value != MISSING]


def _integer(value: object) -> int:
    if isinstance(value, str):
        return exact_integer(value)
    return exact_integer(str(value)) if isinstance(value, int) and not isinstance(value, bool) else MISSING
