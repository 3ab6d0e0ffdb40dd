"""Trace events from JSON bytes straight into columns.

No Python object is made for an event. What a strict JSON parser accepts is read exactly as that parser would; what it
refuses is read as far as it makes sense (`raw "quotes"` in names, `NaN`, nothing after a colon, missing or spare commas)
and counted with the place where it was first met. Strings are interned, numbers go from decimal text to int64 exactly.

All functions work on `b`, as in lexer.py. An index of -1 means: the window ends before this is decided.
"""

# mypy: disallow-untyped-defs=False
# (numba takes its types from the arguments, and compiles plain comparisons and loops best)

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.scanner.codes import (
    ARGS,
    BASE,
    COMMA,
    COUNTER,
    COUNTERS,
    DIRTY,
    END_OF_LIST,
    EVENT_START,
    KEY_FORM,
    KEY_WIDTH,
    NEED_MORE,
    OUTPUT_FULL,
    QUOTE,
    REPAIRS,
    ROWS,
    STOPPED,
    STRINGS_FULL,
    SYNTAX,
    TEXT,
    TIME,
    TOP,
)
from stepscope.analysis.ingest.scanner.decimals import is_blank, is_digit, plain_number
from stepscope.analysis.ingest.scanner.lexer import (
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COMMA_,
    OPEN_BRACE,
    Q,
    count,
    end_of_key,
    end_of_string,
    end_of_value,
    skip_blank,
)
from stepscope.analysis.ingest.scanner.options import compiled, inlined
from stepscope.analysis.ingest.scanner.output import (
    blank_row,
    clear_args,
    has,
    key_of,
    letter_of,
    put,
    put_number,
    put_text,
    store,
)


@compiled
def settle(repairs, pending, keep):
    """Add what was counted in one event to the total, or (an event that will be scanned again) forget it."""
    for kind in range(REPAIRS):
        if keep and pending[kind] > 0:
            if repairs[kind] == 0:
                repairs[kind + REPAIRS] = pending[kind + REPAIRS]
            repairs[kind] += pending[kind]
        pending[kind] = 0
    pending[DIRTY] = 0


@inlined
def _is_args(b, s, e):
    return e - s == 4 and b[s] == 97 and b[s + 1] == 114 and b[s + 2] == 103 and b[s + 3] == 115


@inlined
def _scan_event(b, i, n, final, out, row, keys, strings, state, repairs):
    """One event from just after its opening brace; (status, position after it), status -1 when it is complete."""
    base = state[BASE]
    place = TOP
    last_key, last_start, last_end = np.int64(-1), -1, -1  # the string value before, should it turn out to be longer
    comma = False
    while True:
        i = skip_blank(b, i, n)
        if i >= n:
            return NEED_MORE, i
        c = b[i]
        if c == COMMA_:
            if comma:
                count(repairs, COMMA, base + i)
            comma = True
            i += 1
            continue
        if c == CLOSE_BRACE:
            if comma:
                count(repairs, COMMA, base + i)
            i += 1
            if place == TOP:
                return -1, i
            out.spans[out.capacity + row] = i
            place, comma, last_start = TOP, False, -1
            continue
        key_end, after = (-2, 0)
        if c == Q:
            key_end, after = end_of_key(b, i, n)
        if key_end == -1:
            return NEED_MORE, i
        if key_end == -2:
            # no key: then the string value before has not ended where it seemed to
            if last_start < 0:
                return SYNTAX, i
            last_end = end_of_value_after(b, last_end + 1, n, final, repairs, base)
            if last_end < 0:
                return (NEED_MORE if last_end == -1 else SYNTAX), i
            count(repairs, QUOTE, base + last_start)
            if last_key >= 0 and not store(
                b, last_start, last_end, True, last_key, out, row, keys, strings, state, repairs
            ):
                return STRINGS_FULL, i
            i, comma = last_end + 1, False
            continue
        key_start, comma = i + 1, False
        i = skip_blank(b, after, n)
        if i >= n:
            return NEED_MORE, i
        key = np.int64(-1)
        if place == ARGS:
            key = key_of(b, key_start, key_end, ARGS, keys)
        elif _is_args(b, key_start, key_end):
            if out.spans[row] >= 0:
                clear_args(out, row, keys)
                out.spans[row] = -1
            if b[i] == OPEN_BRACE:
                out.spans[row] = i
                place, last_start = ARGS, -1
                i += 1
                continue
        else:
            key = key_of(b, key_start, key_end, TOP, keys)
            if key >= 0 and repairs[QUOTE] > 0 and has(out, row, keys, key):
                return SYNTAX, i  # a string without end has run into the next event
        start = i
        form = keys.table[key * KEY_WIDTH + KEY_FORM] if key >= 0 else TEXT
        if is_digit(b[start]):
            value, i = plain_number(b, start, n, form == TIME)
            if i >= 0:
                last_key, last_start = key, -1
                if key >= 0:
                    if form != TEXT:
                        put(value, key, out, row, keys)
                    elif not put_text(b, start, i, True, key, out, row, keys, strings, state, repairs):
                        return STRINGS_FULL, i
                continue
            i = start
        if b[start] == Q:
            i = end_of_string(b, start + 1, n, final, False, repairs, base)
            if i >= 0:
                last_key, last_start, last_end = key, start + 1, i
                if key >= 0:
                    if form != TEXT:
                        put_number(b, start + 1, i, form, key, out, row, keys, state, repairs)
                    elif not put_text(b, start + 1, i, True, key, out, row, keys, strings, state, repairs):
                        return STRINGS_FULL, i
                i += 1
                continue
        else:
            i = end_of_value(b, i, n, final, False, repairs, base)
        if i < 0:
            return (NEED_MORE if i == -1 else SYNTAX), start
        last_key, last_start = key, -1
        if key >= 0 and not store(b, start, i, False, key, out, row, keys, strings, state, repairs):
            return STRINGS_FULL, i


@compiled
def end_of_value_after(b, i, n, final, repairs, base):
    """The next quote that may end a string which has not ended before `i`."""
    return end_of_string(b, i, n, final, False, repairs, base)


@compiled
def scan(b, pos, n, final, out, keys, strings, state, repairs, pending):
    """Events from `pos` on into the rows of `out` from state[ROWS] on, which must be blank; those of counters are counted.

    `pending`: a second array like `repairs`. Returns (status, position, rows): NEED_MORE and the start of the unfinished
    event; END_OF_LIST and the position after the bracket; OUTPUT_FULL or STRINGS_FULL (make room, call again); SYNTAX and the
    start of an event that makes no sense.
    """
    row = state[ROWS]
    while row < out.capacity:
        i = pos
        commas = 0
        while i < n and (is_blank(b[i]) or b[i] == COMMA_):
            commas += b[i] == COMMA_
            i += 1
        if i >= n:
            return NEED_MORE, pos, row
        state[EVENT_START] = i
        last = b[i] == CLOSE_BRACKET
        if commas > (0 if last else 1):
            count(pending, COMMA, state[BASE] + i)
        if last:
            settle(repairs, pending, True)
            return END_OF_LIST, i + 1, row
        if b[i] == OPEN_BRACE:
            status, i = _scan_event(b, i + 1, n, final, out, row, keys, strings, state, pending)
        else:  # an item that is no event
            i = end_of_value(b, i, n, final, True, pending, state[BASE])
            status = NEED_MORE if i == -1 else (SYNTAX if i < 0 or i == state[EVENT_START] else OUTPUT_FULL)
        if status >= 0 and status != OUTPUT_FULL:
            settle(repairs, pending, False)
            state[STOPPED] = n if status == NEED_MORE else max(i, state[EVENT_START])
            if b[state[EVENT_START]] == OPEN_BRACE:
                blank_row(out, row)
            return status, (state[EVENT_START] if status == SYNTAX else pos), row
        if pending[DIRTY] > 0:
            settle(repairs, pending, True)
        pos = i
        if status == -1:
            letter = letter_of(out, row, strings)
            state[COUNTERS] += letter == COUNTER
            if letter == 0:
                blank_row(out, row)
            else:
                row += 1
    return OUTPUT_FULL, pos, row
