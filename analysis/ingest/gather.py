"""Blocks of scanned events put together: what later steps use, in as little memory as it takes.

Flow events (half of a typical trace) say nothing that ids do not say and are dropped here; a column that no event of a
block has takes no memory.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.raw import MISSING, NUMBERS, TEXTS, CounterSample, Raw, Repair, blank, exact_integer
from stepscope.analysis.ingest.scanner import Output, Strings
from stepscope.analysis.ingest.text import CONTROL, ENCODING, ESCAPE, decode_text, tolerant_json

KEPT = ("X", "B", "E", "i", "I", "R")
"""Kinds of events (`ph`) that become rows."""

_THREAD_NAME = ("name", "pid", "tid", "label")
"""The text columns of a metadata row that names a thread."""

_SAID = {
    CONTROL: ("control_character", "strings contain raw control characters: kept"),
    ESCAPE: ("unknown_escape", "strings contain an unknown escape: kept as a backslash"),
    ENCODING: ("bad_encoding", "strings contain bytes that are no character: shown as U+FFFD"),
}


Part = tuple[np.ndarray | None, np.ndarray]
"""A column of one block: all values, or (where they are few) the rows that have one and their values."""


class Gatherer:
    """Collects blocks; `finish` gives the whole."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, dict[str, Part]]] = []
        self._counters: list[tuple[int, int, bytes]] = []  # time, name, args
        self._kept: dict[int, bool] = {-1: False}  # by code of `ph`
        self._letters: dict[str, int] = {"C": -2, "M": -2}  # codes of those that are used otherwise
        self._threads: list[tuple[int, int, int, int]] = []  # name, pid, tid, args.name of metadata rows

    def add(self, output: Output, rows: int, buffer: bytearray, strings: Strings, known: int) -> None:
        """Take over the first `rows` of `output`; `buffer` is the window that its spans point into."""
        letters = output.texts[TEXTS.index("ph"), :rows]
        codes = np.unique(letters)
        for code in codes.tolist():
            if code not in self._kept:
                letter = _bytes_of(strings, code).decode("ascii", "replace")
                self._kept[code] = letter in KEPT
                if letter in self._letters:
                    self._letters[letter] = code
        if (codes == self._letters["C"]).any():
            self._take_counters(output, np.flatnonzero(letters == self._letters["C"]), buffer)
        if (codes == self._letters["M"]).any():
            rows_of_names = np.flatnonzero(letters == self._letters["M"])
            columns = [output.texts[TEXTS.index(name), rows_of_names].tolist() for name in _THREAD_NAME]
            self._threads += zip(*columns, strict=True)
        keep = np.flatnonzero(np.isin(letters, [code for code in codes.tolist() if self._kept[code]]))
        if not len(keep):
            return
        block: dict[str, Part] = {}
        for names, source, missing in ((NUMBERS, output.numbers, MISSING), (TEXTS, output.texts, -1)):
            some = source[:, :rows].max(axis=1) > missing  # missing is the least value: most columns end here
            for name, values, any_has in zip(names, source, some.tolist(), strict=True):
                if not any_has:
                    continue
                chosen = values[keep]
                given = np.flatnonzero(chosen != missing)
                if 0 < len(given) < len(keep) // 4:
                    block[name] = (given.astype(np.int32), chosen[given])
                elif len(given):
                    block[name] = (None, chosen)
        self._blocks.append((len(keep), block))

    def finish(self, strings: Strings, known: int, header: dict) -> Raw:
        """Everything, with its strings decoded."""
        columns = {name: self._joined(name) for name in (*NUMBERS, *TEXTS)}
        self._blocks = []
        texts, odd = _decoded(strings, known)
        counters = [
            sample
            for time, name, args in self._counters
            for sample in _samples(time, texts[name] if name >= 0 else "", args)
        ]
        named = [[texts[code] if code >= 0 else "" for code in row] for row in self._threads]
        threads = {(pid, tid): label for name, pid, tid, label in named if name == "thread_name"}
        raw = Raw(columns, texts, header, counters, threads)
        raw.repairs = _odd_texts(raw, odd, strings)
        return raw

    def _joined(self, name: str) -> np.ndarray:
        """One column of all blocks, which give it up."""
        rows = sum(count for count, _ in self._blocks)
        if not any(name in block for _, block in self._blocks):
            return blank(name, rows)
        parts = [(count, block.pop(name, (None, None))) for count, block in self._blocks]
        if all(where is None and values is not None for _, (where, values) in parts):
            return np.concatenate([values for _, (_, values) in parts if values is not None])
        missing = blank(name, 1)
        joined = np.full(rows, missing[0], missing.dtype)
        at = 0
        for count, (where, values) in parts:
            if where is not None:
                joined[at + where] = values
            elif values is not None:
                joined[at : at + count] = values
            at += count
        return joined

    def _take_counters(self, output: Output, rows: np.ndarray, buffer: bytearray) -> None:
        times = output.numbers[NUMBERS.index("ts")]
        names = output.texts[TEXTS.index("name")]
        for row in rows.tolist():
            start, end = output.spans[:, row].tolist()
            if start >= 0 and end > start and times[row] != MISSING:
                self._counters.append((int(times[row]), int(names[row]), bytes(buffer[start:end])))


def _samples(time_ns: int, name: str, args: bytes) -> list[CounterSample]:
    """The series of one counter row; values that are no numbers are left out."""
    values = tolerant_json(args)
    pairs = ((key, _integer(value)) for key, value in values.items()) if isinstance(values, dict) else ()
    return [CounterSample(time_ns, name, key, value) for key, value in pairs if value != MISSING]


def _integer(value: object) -> int:
    if isinstance(value, str):
        return exact_integer(value)
    return exact_integer(str(value)) if isinstance(value, int) and not isinstance(value, bool) else MISSING


def _bytes_of(strings: Strings, code: int) -> bytes:
    at = int(strings.offsets[code])
    return bytes(strings.arena[at : at + int(strings.lengths[code])])


def _decoded(strings: Strings, known: int) -> tuple[list[str], dict[int, str]]:
    """All texts, and what is odd about some of them."""
    arena = strings.arena[
        : int(strings.offsets[:known].max() + strings.lengths[:known].max()) if known else 0
    ].tobytes()
    texts, odd = [], {}
    for code, (at, length) in enumerate(
        zip(strings.offsets[:known].tolist(), strings.lengths[:known].tolist(), strict=True)
    ):
        text, what = decode_text(arena[at : at + length])
        texts.append(text)
        if what is not None:
            odd[code] = what
    return texts, odd


def _odd_texts(raw: Raw, odd: dict[int, str], strings: Strings) -> list[Repair]:
    """How many values are odd strings, by what is odd about them."""
    if not odd:
        return []
    uses = np.zeros(len(raw.strings), np.int64)
    for name in TEXTS:
        codes = raw.columns[name]
        uses += np.bincount(codes[codes >= 0], minlength=len(uses))
    repairs = []
    for what, (code, text) in _SAID.items():
        which = [one for one, is_odd in odd.items() if is_odd == what and uses[one]]
        if which:
            repairs.append(Repair(code, text, int(uses[which].sum()), int(strings.firsts[which].min())))
    return repairs
