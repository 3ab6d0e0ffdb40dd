"""A trace read with Python's own JSON parser: slow and simple; what the byte scanner is checked against.

Keeps every complete event of a file that was cut; other damage ends the reading there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from stepscope.analysis.ingest.raw import (
    FIELDS,
    MISSING,
    NUMBERS,
    TEXTS,
    CounterSample,
    Interner,
    Raw,
    exact_integer,
    exact_ns,
)
from stepscope.analysis.ingest.source import ByteSource

_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


class Number(str):
    """A number with a fraction or an exponent, as the text it was written in."""


def read_plain(source: ByteSource) -> Raw:
    """All events of one file."""
    data = source.read()
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    builder = _Builder()
    decoder = json.JSONDecoder(parse_float=Number, parse_constant=lambda name: None, strict=False)
    start = 0 if text.lstrip()[:1] == "[" else -1
    if start == 0:
        start = text.index("[") + 1
    elif found := _EVENTS.search(text):
        start = found.end()
    if start < 0:
        return builder.finish({}, "there is no list of trace events", 0)
    position, cut = start, source.cut
    while True:
        match = _BETWEEN.match(text, position)
        position = match.end() if match else position
        if text[position : position + 1] == "]":
            break
        try:
            event, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            cut = cut or "the file ends before its closing bracket"
            break
        if isinstance(event, dict):
            builder.add(event)
    header = {} if cut else _header(decoder, text[: start - 1] + "[" + text[position:])
    if cut:
        header = _header(decoder, text[: start - 1] + "[]}")
    return builder.finish(header, cut, len(text[:position].encode("utf-8")) if cut else -1)


def _header(decoder: json.JSONDecoder, text: str) -> dict[str, Any]:
    """What stands around the events; `text` is the file without them."""
    try:
        whole = decoder.decode(text)
    except json.JSONDecodeError:
        return {}
    return {key: value for key, value in whole.items() if key != "traceEvents"} if isinstance(whole, dict) else {}


class _Builder:
    """Collects events into columns."""

    def __init__(self) -> None:
        self._strings = Interner()
        self._columns: dict[str, list[int]] = {name: [] for name in (*NUMBERS, *TEXTS)}
        self._counters: list[CounterSample] = []
        convert: dict[str, Callable[[Any], int]] = {"time": _time, "integer": _integer, "text": self._text}
        self._fields = [(f.column, convert[f.form], f.keys, f.top, -1 if f.form == "text" else MISSING) for f in FIELDS]

    def add(self, event: dict[str, Any]) -> None:
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        for column, convert, keys, top, missing in self._fields:
            place = event if top else args
            value = next((place[key] for key in keys if key in place), None)
            self._columns[column].append(missing if value is None else convert(value))
        if event.get("ph") == "C":
            self._counters += counter_samples(_time(event.get("ts")), str(event.get("name", "")), args)

    def finish(self, header: dict[str, Any], cut: str | None, offset: int) -> Raw:
        columns = {name: np.array(self._columns[name], np.int64) for name in NUMBERS}
        columns |= {name: np.array(self._columns[name], np.int32) for name in TEXTS}
        return Raw(columns, self._strings.strings, header, self._counters, cut=cut, cut_offset=offset)

    def _text(self, value: Any) -> int:
        return self._strings.code(as_text(value))


def counter_samples(time_ns: int, name: str, args: dict[str, Any]) -> list[CounterSample]:
    """The series of one counter row; values that are no numbers are left out."""
    if time_ns == MISSING:
        return []
    pairs = ((key, _integer(value)) for key, value in args.items())
    return [CounterSample(time_ns, name, key, value) for key, value in pairs if value != MISSING]


def as_text(value: Any) -> str:
    """A value where a text is expected: strings as they are, anything else as JSON writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _time(value: Any) -> int:
    if isinstance(value, str):
        return exact_ns(value)
    return exact_ns(str(value)) if isinstance(value, int) and not isinstance(value, bool) else MISSING


def _integer(value: Any) -> int:
    if isinstance(value, str):
        return exact_integer(value)
    return exact_integer(str(value)) if isinstance(value, int) and not isinstance(value, bool) else MISSING
