"""A trace read with Python's own strict JSON parser: slow and simple; what the byte scanner is checked against."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from stepscope.analysis.ingest.raw import (
    FIELDS,
    MISSING,
    NUMBERS,
    TEXTS,
    Interner,
    Raw,
    exact_id,
    exact_integer,
    exact_ns,
)

KEPT = ("X", "B", "E", "i", "I", "R")


class Number(str):
    """A number with a fraction or an exponent, as the text it was written in."""


def read_strictly(data: bytes) -> Raw:
    """All events of valid JSON; ValueError for anything else."""
    whole = json.loads(data.decode("utf-8"), parse_float=Number, parse_constant=lambda word: None)  # NaN is no value
    events = whole if isinstance(whole, list) else whole["traceEvents"]
    strings = Interner()
    convert: dict[str, Callable[[Any], int]] = {
        "time": _number(exact_ns),
        "integer": _number(exact_integer),
        "id": _number(exact_id),
        "text": lambda value: strings.code(as_text(value)),
    }
    fields = {top: {key: field for field in FIELDS if field.top == top for key in field.keys} for top in (True, False)}
    rows = [event for event in events if isinstance(event, dict) and event.get("ph") in KEPT]
    arrays = {name: np.full(len(rows), MISSING, np.int64) for name in NUMBERS}
    arrays |= {name: np.full(len(rows), -1, np.int32) for name in TEXTS}
    for row, event in enumerate(rows):
        args = event.get("args")
        for top, place in ((True, event), (False, args if isinstance(args, dict) else {})):
            for key, value in place.items():
                # of two keys that mean the same column the later one counts, as of one key given twice
                field = fields[top].get(key)
                if field is not None:
                    missing = -1 if field.form == "text" else MISSING
                    arrays[field.column][row] = missing if value is None else convert[field.form](value)
    header = {} if isinstance(whole, list) else {key: value for key, value in whole.items() if key != "traceEvents"}
    threads = {
        (as_text(event.get("pid", "")), as_text(event.get("tid", ""))): as_text(event["args"]["name"])
        for event in events
        if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "thread_name"
        if isinstance(event.get("args"), dict) and as_text(event["args"].get("name"))
    }
    return Raw(arrays, strings.strings, header, thread_names=threads)


def as_text(value: Any) -> str:
    """A value where a text is expected: strings as they are, null as none, anything else as JSON writes it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(value)


def _number(exact: Callable[[str], int]) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, str):
            return exact(value)
        return exact(str(value)) if isinstance(value, int) and not isinstance(value, bool) else MISSING

    return convert


def texts(raw: Raw, column: str) -> list[str | None]:
    """A text column as text; lists and objects in one form."""
    known = np.array([*map(_one_form, raw.strings), None], dtype=object)
    found: list[str | None] = known[raw.columns[column]].tolist()
    return found


def _one_form(text: str) -> str:
    if text[:1] in ("[", "{"):
        try:
            return json.dumps(json.loads(text, strict=False, parse_float=str))
        except ValueError:
            return text
    return text


def assert_same(scanned: Raw, strict: Raw) -> None:
    """Every field of every event, and the header."""
    assert scanned.rows == strict.rows
    for name in NUMBERS:
        np.testing.assert_array_equal(scanned.columns[name], strict.columns[name], err_msg=name)
    for name in TEXTS:
        assert texts(scanned, name) == texts(strict, name), name
    assert scanned.header == strict.header
    named = [{thread: name for thread, name in one.thread_names.items() if name} for one in (scanned, strict)]
    assert named[0] == named[1], "thread names"
