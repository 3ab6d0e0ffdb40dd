"""What a trace file says, column by column, before anybody decides what it means.

A reader (the byte scanner, or a plain JSON parser) fills one array a field; `normalize` turns them into the column store.
Times are integer nanoseconds read from the decimal text, strings are codes into one table, missing is MISSING or -1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from stepscope.analysis.units import counted

MISSING = np.iinfo(np.int64).min
INT64_MAX = np.iinfo(np.int64).max


class Field(NamedTuple):
    """One field of an event: our column, how it is read, and the keys that carry it (in `args` unless `top`)."""

    column: str
    form: str  # time (us in the file, ns here) | integer | id (see exact_id) | text
    keys: tuple[str, ...]
    top: bool = False


FIELDS = (
    Field("ts", "time", ("ts",), top=True),
    Field("dur", "time", ("dur",), top=True),
    Field("stream", "integer", ("stream",)),
    Field("correlation", "id", ("correlation",)),
    Field("external_id", "id", ("External id", "external id")),
    Field("in_elements", "integer", ("In msg nelems",)),
    Field("out_elements", "integer", ("Out msg nelems",)),
    Field("seq", "integer", ("Seq",)),
    Field("source_rank", "integer", ("Src Rank",)),
    Field("destination_rank", "integer", ("Dst Rank",)),
    Field("root_rank", "integer", ("Root Rank",)),
    Field("bytes", "integer", ("bytes",)),
    Field("issue_ns", "integer", ("issue_ns",)),
    Field("op_id", "integer", ("op_id",)),
    Field("waits_for", "integer", ("waits_for",)),
    Field("stage", "integer", ("stage",)),
    Field("chunk", "integer", ("chunk",)),
    Field("microbatch", "integer", ("microbatch",)),
    Field("layer", "integer", ("layer",)),
    Field("step", "integer", ("step",)),  # our rows: which step begins here
    Field("partial", "integer", ("partial",)),  # a step that the recording ended in
    Field("unfinished", "integer", ("unfinished",)),  # a communication that the recording ended in
    Field("ph", "text", ("ph",), top=True),
    Field("cat", "text", ("cat",), top=True),
    Field("name", "text", ("name",), top=True),
    Field("pid", "text", ("pid",), top=True),
    Field("tid", "text", ("tid",), top=True),
    Field("collective", "text", ("Collective name",)),
    Field("dtype", "text", ("dtype",)),
    Field("group_name", "text", ("Process Group Name", "Process Group ID")),
    Field("group_description", "text", ("Process Group Description",)),
    Field("group_ranks", "text", ("Process Group Ranks",)),
    Field("grid", "text", ("grid",)),
    Field("phase", "text", ("phase",)),
    Field("axis", "text", ("axis",)),
    Field("strategy", "text", ("strategy",)),
    Field("label", "text", ("name",)),  # args.name of a metadata row
)
NUMBERS = tuple(f.column for f in FIELDS if f.form != "text")
TEXTS = tuple(f.column for f in FIELDS if f.form == "text")
TIMES = tuple(f.column for f in FIELDS if f.form == "time")


class CounterSample(NamedTuple):
    """One value of one series of a counter row (`ph: C`)."""

    time_ns: int  # as in the file: relative to the header's base
    name: str
    key: str
    value: int


_OF_ONE = {"are": "is", "were": "was", "do": "does"}
"""Of a verb whose form for one is not the other with an s."""


def both(noun: str, verb: str, rest: str) -> tuple[str, str]:
    """What to say of one and of several: `string contains ...`, `strings contain ...`."""
    return f"{noun} {_OF_ONE.get(verb, verb + 's')} {rest}", f"{noun}s {verb} {rest}"


class Repair(NamedTuple):
    """Something in a file that is not as it should be: what, how often, and where first (uncompressed byte offset)."""

    code: str
    texts: tuple[str, str]  # of one, of several: what stands behind the number
    times: int
    offset: int

    @property
    def said(self) -> str:
        """`1 string contains ...`, `2 strings contain ...`."""
        return counted(self.times, *self.texts)


@dataclass
class Raw:
    """All events of one file, in file order, and everything beside them (`header`)."""

    columns: dict[str, np.ndarray]  # NUMBERS int64 (MISSING), TEXTS int32 (-1)
    strings: list[str]
    header: dict[str, Any] = field(default_factory=dict)
    counters: list[CounterSample] = field(default_factory=list)
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)  # (pid, tid) -> what the file calls it
    repairs: list[Repair] = field(default_factory=list)
    cut: str | None = None  # why the end is missing
    cut_offset: int = -1

    @property
    def rows(self) -> int:
        """Number of events."""
        return len(self.columns["ts"])

    def take(self, rows: np.ndarray) -> Raw:
        """The same file with only these rows (mask or indices)."""
        if rows.dtype == bool and rows.all():
            return self
        count = int(rows.sum()) if rows.dtype == bool else len(rows)
        columns = {
            name: np.broadcast_to(values[:1], count) if is_constant(values) else values[rows]
            for name, values in self.columns.items()
        }
        return replace(self, columns=columns)


class Question:
    """A question about texts, asked once of each distinct one, over however many chunks of a file's rows."""

    def __init__(self, question: Callable[[str], Any], missing: Any, dtype: Any) -> None:
        """`missing`: the answer where there is no text."""
        self._question, self._missing, self._dtype = question, missing, dtype
        self._table = np.full(1, missing, dtype)  # [code]; the last entry is that of -1
        self._known = np.ones(1, bool)

    def __call__(self, strings: list[str], codes: np.ndarray) -> np.ndarray:
        """The answer for every code of a text in `strings`, a list that only grows."""
        if not len(codes) or is_constant(codes):
            value = self._missing if not len(codes) or codes[0] < 0 else self._of(strings, codes[:1])[0]
            return np.broadcast_to(np.array([value], self._dtype), len(codes))
        return self._of(strings, codes)

    def _of(self, strings: list[str], codes: np.ndarray) -> np.ndarray:
        if len(self._table) <= len(strings):
            size = 2 * len(strings) + 1
            table, known = np.full(size, self._missing, self._dtype), np.zeros(size, bool)
            table[: len(self._table) - 1], known[: len(self._known) - 1] = self._table[:-1], self._known[:-1]
            known[-1] = True
            self._table, self._known = table, known
        used = np.zeros(len(self._table), bool)
        used[codes] = True
        for code in np.flatnonzero(used & ~self._known).tolist():
            self._table[code] = self._question(strings[code])
            self._known[code] = True
        return self._table[codes]


def blank(column: str, rows: int) -> np.ndarray:
    """A column that no event has: one missing value, shown `rows` times, read only."""
    missing = np.array([-1], np.int32) if column in TEXTS else np.array([MISSING], np.int64)
    return np.broadcast_to(missing, rows)


def is_constant(values: np.ndarray) -> bool:
    """Is this one value that is shown many times (np.broadcast_to)?"""
    return len(values) > 1 and values.strides == (0,)


def own(columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A column as an array that may be changed in place, also where it was one value shown often."""
    if not columns[name].flags.writeable:
        columns[name] = columns[name].copy()
    return columns[name]


class Interner:
    """Strings to codes, in order of appearance."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.strings: list[str] = []
        self._codes: dict[str, int] = {}
        for text in strings:
            self.code(text)

    def code(self, text: str) -> int:
        """The code of `text`, a new one when it has none."""
        found = self._codes.get(text)
        if found is None:
            found = self._codes[text] = len(self.strings)
            self.strings.append(text)
        return found


_DECIMAL = re.compile(r"[ \t\r\n]*(-?)(\d+)(?:\.(\d*))?(?:[eE]([+-]?\d+))?[ \t\r\n]*\Z", re.ASCII)


def exact_ns(text: str) -> int:
    """Microseconds as decimal text -> ns, exactly; digits below the nanosecond are dropped. MISSING for no number.

    >>> exact_ns("1712195495505582.988"), exact_ns("0.1"), exact_ns("1.5e3"), exact_ns("NaN") == MISSING
    (1712195495505582988, 100, 1500000, True)
    """
    return _scaled(text, 3)


def exact_integer(text: str) -> int:
    """Decimal text -> int (a fraction is dropped), MISSING for no number or one beyond 64 bits."""
    return _scaled(text, 0)


def exact_id(text: str) -> int:
    """An id, which is only ever compared: as `exact_integer`; from 2 ** 63 on what it exceeds 2 ** 64 - 1 by, a negative
    number. So all of 64 bits are told apart, but for the last two, with which writers say "none": they become 0 and -1.

    >>> exact_id("17"), exact_id("9223372036854775808"), exact_id("18446744073709551615"), exact_id("18446744073709551616")
    (17, -9223372036854775807, 0, -9223372036854775808)
    """
    value = int(text) if re.fullmatch(r"[ \t\r\n]*\d{19,20}[ \t\r\n]*", text, re.ASCII) else 0
    return value - (1 << 64) + 1 if 1 << 63 <= value < 1 << 64 else exact_integer(text)


def is_id(ids: np.ndarray) -> np.ndarray:
    """Which entries of a column of ids name something."""
    named: np.ndarray = (ids != MISSING) & (ids != 0) & (ids != -1)
    return named


def _scaled(text: str, decimals: int) -> int:
    """The number times 10 ** decimals, its further digits dropped."""
    found = _DECIMAL.match(text)
    if not found:
        return MISSING
    sign, whole, fraction, exponent = found.groups()
    power = int((exponent or "").lstrip("+-0")[:8] or "0")  # what is longer is as large, or as small, as it gets
    power = -power if (exponent or "").startswith("-") else power
    digits, shift = whole + (fraction or ""), decimals - len(fraction or "") + power
    if shift > 60 and int(digits):
        return MISSING
    value = int(digits) * 10 ** max(min(shift, 60), 0) // 10 ** min(max(-shift, 0), len(digits) + 1)
    return _bounded(-value if sign else value)


def _bounded(value: int) -> int:
    return value if -INT64_MAX <= value <= INT64_MAX else MISSING
