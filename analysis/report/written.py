"""Tables of the public JSON: as objects for programs, and as text for files, written column by column.

Both say the same; text is made without an object a row, several times faster.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Lists:
    """A column of lists of integers: all their values one after the other, and where each list begins (none is empty)."""

    values: np.ndarray
    first: np.ndarray
    missing: bool = False  # -1 stands for a number that is not there

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, order: np.ndarray) -> Lists:
        """The lists in another order."""
        count = self.counts[order]
        before = np.cumsum(count) - count
        at = np.arange(int(count.sum())) + np.repeat(self.first[order] - before, count)
        return Lists(self.values[at], before, self.missing)

    @property
    def counts(self) -> np.ndarray:
        """Length of each list."""
        return np.diff(np.append(self.first, len(self.values)))

    def objects(self) -> list[list[int | None]]:
        """As plain lists."""
        values: list[int | None] = self.values.tolist()
        if self.missing and (self.values < 0).any():
            values = [None if value is not None and value < 0 else value for value in values]
        return [values[low:high] for low, high in pairwise([*self.first.tolist(), len(values)])]

    def texts(self) -> list[str]:
        """As JSON; lists of one length together, which are rows of one array."""
        if self.missing and (self.values < 0).any():
            return [_encoded(one) for one in self.objects()]
        found, counts = np.empty(len(self), object), self.counts
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            places = self.first[rows]
            text = "[" + ", ".join(["%s"] * count) + "]"
            columns = (self.values[places + at].tolist() for at in range(count))
            found[rows] = [text % one for one in zip(*columns, strict=True)]
        return found.tolist()


@dataclass(frozen=True)
class Numbers:
    """A column of integers of which none is negative; -1 stands for one that is not there."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, order: np.ndarray) -> Numbers:
        """The numbers in another order."""
        return Numbers(self.values[order])

    def objects(self) -> list[int | None]:
        """As plain integers and None."""
        return [value if value >= 0 else None for value in self.values.tolist()]

    def texts(self) -> list[str]:
        """As JSON."""
        found = list(map(str, self.values.tolist()))
        for place in np.flatnonzero(self.values < 0).tolist():
            found[place] = "null"
        return found


Column = pd.Series | np.ndarray | pd.api.extensions.ExtensionArray | Lists | Numbers


@dataclass(frozen=True)
class Table:
    """Rows as objects with exactly `names`, whose values are in `columns` (a frame, or columns by name)."""

    columns: pd.DataFrame | Mapping[str, Column]
    names: Sequence[str]

    def records(self) -> list[dict[str, Any]]:
        """Strict JSON values, an object a row."""
        values = [_values(self.columns[name]) for name in self.names]
        return [dict(zip(self.names, row, strict=True)) for row in zip(*values, strict=True)]

    def rows(self) -> list[str]:
        """The text of each object."""
        row = "{" + ", ".join(_encoded(name).replace("%", "%%") + ": %s" for name in self.names) + "}"
        return [row % one for one in zip(*(_texts(self.columns[name]) for name in self.names), strict=True)]


# -- values ------------------------------------------------------------------------------------------------------------

PLAIN = frozenset((str, int, bool, type(None)))


def plain(value: Any) -> Any:
    """`value` as strict JSON values: numpy and tuples unwrapped, tables as objects, NaN and infinities null."""
    if isinstance(value, Table):
        return value.records()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is pd.NA:
        return None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _values(column: Column) -> list[Any]:
    """One column as strict JSON values."""
    if isinstance(column, (Lists, Numbers)):
        return column.objects()
    values: list[Any] = column.tolist()
    kind = getattr(column.dtype, "kind", "O")
    if kind in "iub":
        return [None if value is pd.NA else value for value in values]
    if kind == "f":
        return [value if math.isfinite(value) else None for value in values]
    return [value if type(value) in PLAIN or _plain_list(value) else plain(value) for value in values]


def _plain_list(value: Any) -> bool:
    """A list that JSON takes as it is: most are."""
    return type(value) is list and PLAIN.issuperset(map(type, value))


# -- text --------------------------------------------------------------------------------------------------------------


def dumps(value: Mapping[str, Any]) -> str:
    """Strict JSON text, one row of a table a line; refuses NaN.

    Lone surrogates (broken names) are escaped, so that it is valid UTF-8.
    """
    return "{\n" + ",\n".join(f" {_encoded(key)}: {_lines(item)}" for key, item in value.items()) + "\n}\n"


def _encoded(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _lines(value: Any) -> str:
    """A table a row a line, an object of tables a table a line, anything else on one line."""
    rows = _rows(value)
    if rows:
        return "[\n  " + ",\n  ".join(rows) + "\n ]"
    if isinstance(value, dict) and value and any(isinstance(item, (list, Table)) for item in value.values()):
        return "{\n  " + ",\n  ".join(f"{_encoded(key)}: {_line(item)}" for key, item in value.items()) + "\n }"
    return _line(value)


def _line(value: Any) -> str:
    return "[" + ", ".join(value.rows()) + "]" if isinstance(value, Table) else _encoded(value)


def _rows(value: Any) -> list[str]:
    """Texts of the rows of a table or list, none of anything else."""
    if isinstance(value, Table):
        return value.rows()
    return list(map(_encoded, value)) if isinstance(value, list) else []


def _texts(column: Column) -> Iterable[str]:
    """One column as JSON, value by value."""
    if isinstance(column, (Lists, Numbers)):
        return column.texts()
    kind = getattr(column.dtype, "kind", "O")
    what = {"i": "integer", "u": "integer", "b": "boolean"}.get(kind) or pd.api.types.infer_dtype(column, skipna=False)
    if isinstance(column, pd.Series) and column.hasnans:
        what = "mixed"
    if what == "integer":
        return map(str, column.tolist())
    if what == "boolean":
        return ["true" if value else "false" for value in column.tolist()]
    if kind == "f":
        return [repr(value) if math.isfinite(value) else "null" for value in column.tolist()]
    if what == "string":  # few words come again and again
        code, words = pd.factorize(column)  # type: ignore[arg-type]
        return np.array([_encoded(str(word)) for word in words], object)[code].tolist()  # type: ignore[no-any-return]
    known: dict[Any, str] = {}
    return [_text(value, known) for value in column.tolist()]


def _text(value: Any, known: dict[Any, str]) -> str:
    """One value of a column of anything; `known`: texts of words, and of tuples of words, seen so far."""
    kind = type(value)
    if kind is str or (kind is tuple and all(type(one) is str for one in value)):
        text = known.get(value)
        if text is None:
            text = known[value] = _encoded(plain(value))
        return text
    return _encoded(plain(value))
