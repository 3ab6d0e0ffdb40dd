"""The row that an event is written to: which key it has a column for, what goes there, and how it becomes blank again."""

# mypy: disallow-untyped-defs=False
# (numba takes its types from the arguments, and compiles plain comparisons and loops best)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stepscope.analysis.ingest.raw import MISSING, NUMBERS, TEXTS
from stepscope.analysis.ingest.scanner.codes import (
    ARGS,
    BASE,
    IDENTITY,
    KEY_AT,
    KEY_COLUMN,
    KEY_FORM,
    KEY_LENGTH,
    KEY_SLOTS,
    KEY_WIDTH,
    LETTERS,
    TEXT,
    TIME,
    TOO_LARGE,
)
from stepscope.analysis.ingest.scanner.decimals import identity, is_decimal, number
from stepscope.analysis.ingest.scanner.interning import intern, same
from stepscope.analysis.ingest.scanner.lexer import count, is_kept
from stepscope.analysis.ingest.scanner.options import compiled, inlined

_MISSING = np.int64(MISSING)
_NUMBERS, _TEXTS = len(NUMBERS), len(TEXTS)
_PH = TEXTS.index("ph")
_LETTERS = tuple(LETTERS)


class Output(NamedTuple):
    """Where events go, a row each, column after column of `capacity` rows; blank rows hold MISSING and -1."""

    numbers: Any  # int64 [NUMBERS, row]
    texts: Any  # int32 [TEXTS, row]
    spans: Any  # int64 [2, row]: where the event's args begin and end in the window
    used: Any  # uint8 [NUMBERS and TEXTS]: has any row a value here?
    capacity: Any


class Keys(NamedTuple):
    """The keys that matter (codes.key_tables)."""

    slots: Any
    table: Any
    data: Any


@inlined
def key_of(b, s, e, place, keys):
    """Number of the key b[s:e] in `place`, -1 when nobody asks for it."""
    length = e - s
    if length <= 0:
        return np.int64(-1)
    h = np.int64(length) * 31 + np.int64(b[s]) * 7 + np.int64(b[e - 1]) * 13 + np.int64(b[s + length // 2]) * 3
    slot = h & (KEY_SLOTS - 1)
    while True:
        key = np.int64(keys.slots[place * KEY_SLOTS + slot])
        if key < 0:
            return key
        at = key * KEY_WIDTH
        if keys.table[at + KEY_LENGTH] == length and same(b, s, keys.data, keys.table[at + KEY_AT], length):
            return key
        slot = (slot + 1) & (KEY_SLOTS - 1)


@compiled
def clear_args(out, row, keys):
    """Forget what an earlier `args` of the same event said: the last one counts, as of every key given twice."""
    for slot in range(KEY_SLOTS):
        key = np.int64(keys.slots[ARGS * KEY_SLOTS + slot])
        if key >= 0:
            column = keys.table[key * KEY_WIDTH + KEY_COLUMN]
            if keys.table[key * KEY_WIDTH + KEY_FORM] == TEXT:
                out.texts[column * out.capacity + row] = -1
            else:
                out.numbers[column * out.capacity + row] = _MISSING


@compiled
def blank_row(out, row):
    """Make an output row empty again, after an event that is not kept or could not be finished."""
    for column in range(_NUMBERS):
        out.numbers[column * out.capacity + row] = _MISSING
    for column in range(_TEXTS):
        out.texts[column * out.capacity + row] = -1
    out.spans[row] = -1
    out.spans[out.capacity + row] = -1


@inlined
def put(value, key, out, row, keys):
    column = keys.table[key * KEY_WIDTH + KEY_COLUMN]
    out.numbers[column * out.capacity + row] = value
    out.used[column] = 1


@compiled
def put_number(b, s, e, form, key, out, row, keys, state, repairs):
    """Put the number b[s:e] into a column of numbers; one that does not fit is counted (times are where they are used)."""
    value = identity(b, s, e) if form == IDENTITY else number(b, s, e, form == TIME)
    if value == _MISSING and form != TIME and is_decimal(b, s, e):
        count(repairs, TOO_LARGE, state[BASE] + s)
    put(value, key, out, row, keys)


@inlined
def put_text(b, s, e, text, key, out, row, keys, strings, state, repairs):
    """Intern b[s:e] for a text column; False when the string table is full."""
    column = keys.table[key * KEY_WIDTH + KEY_COLUMN]
    code = np.int64(-1)
    if text or is_kept(b, s, e):
        code = intern(b, s, e, strings, state, repairs)
    if code == -2:
        return False
    out.texts[column * out.capacity + row] = code
    out.used[_NUMBERS + column] = 1
    return True


@compiled
def store(b, s, e, text, key, out, row, keys, strings, state, repairs):
    """Put the value b[s:e] (without its quotes if `text`) into the column of `key`; False when the string table is full."""
    form = keys.table[key * KEY_WIDTH + KEY_FORM]
    if form != TEXT:
        put_number(b, s, e, form, key, out, row, keys, state, repairs)
        return True
    return put_text(b, s, e, text, key, out, row, keys, strings, state, repairs)


@compiled
def has(out, row, keys, key):
    """Has the event a value for this key already?"""
    at = keys.table[key * KEY_WIDTH + KEY_COLUMN] * out.capacity + row
    if keys.table[key * KEY_WIDTH + KEY_FORM] == TEXT:
        return out.texts[at] != -1
    return out.numbers[at] != _MISSING


@inlined
def letter_of(out, row, strings):
    """The kind of the finished event (its `ph`), 0 for one that nobody asks for."""
    code = np.int64(out.texts[_PH * out.capacity + row])
    if code < 0 or strings.lengths[code] != 1:
        return np.uint8(0)
    letter = strings.arena[strings.offsets[code]]
    for kept in _LETTERS:
        if letter == kept:
            return letter
    return np.uint8(0)
