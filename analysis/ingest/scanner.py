"""The byte scanner: trace events from JSON bytes straight into columns, compiled by numba.

No Python object is made for an event. What a strict JSON parser accepts is read exactly as that parser would; what it
refuses is read as far as it makes sense (`raw "quotes"` in names, `NaN`, nothing after a colon, missing or spare commas)
and counted with the place where it was first met. Strings are interned, numbers go from decimal text to int64 exactly.

All functions work on `b`, a window of the file's bytes of which the first `n` are valid; `final` says that nothing
follows. An index of -1 means: the window ends before this is decided. One file, because numba's cache does not notice a
change in another file that compiled code was called from.
"""

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102, SIM109, SIM110
# (numba takes its types from the arguments, and compiles plain comparisons and loops best)

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np

from stepscope.analysis.ingest.raw import FIELDS, MISSING, NUMBERS, TEXTS

# what `scan` returns
NEED_MORE, END_OF_LIST, OUTPUT_FULL, STRINGS_FULL, SYNTAX = range(5)

# what a repair is: repairs[kind] counts it, repairs[kind + REPAIRS] is the offset of the first, repairs[DIRTY] says "some"
QUOTE, VALUE, COMMA, LONG_TEXT, TOO_MANY_TEXTS, REPAIRS = range(6)
DIRTY = 2 * REPAIRS
REPAIRS_SIZE = DIRTY + 1

# `state`: the scanner's counters
TEXT_COUNT, ARENA_USED, BASE, EVENT_START, STOPPED, CAPPED, STATE_SIZE = range(7)

MAX_TEXT = 1 << 16
"""Bytes of one string that are kept."""

OVERFLOW = 0
"""The string that stands for all that come when the table may not grow any more."""

TOP, ARGS = 0, 1
_TABLE = 256  # slots of a key table; a power of two
_TIME, _INTEGER, _TEXT = range(3)
_MISSING = np.int64(MISSING)
_TENTH_MAX = np.int64(922337203685477580)  # the largest int64 is this and a 7
_THOUSANDTH_MAX = np.int64(9223372036854775)  # ... and this and 807

_QUOTE, _BACKSLASH, _COMMA, _COLON = 34, 92, 44, 58
_OPEN_BRACE, _CLOSE_BRACE, _OPEN_BRACKET, _CLOSE_BRACKET = 123, 125, 91, 93

# No reference counting (`_nrt`: nothing is allocated here, and the counters took half of the time), and small functions
# inlined: a call would pass seventy words for its arrays.
_options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
_compiled = nb.njit(**_options)
_inlined = nb.njit(forceinline=True, **_options)


class Keys(NamedTuple):
    """The keys that matter."""

    slots: np.ndarray  # [place, hash] -> key or -1
    table: np.ndarray  # [key] -> offset and length of its bytes, form, column
    data: np.ndarray  # their bytes


class Output(NamedTuple):
    """Where events go, a row each; blank rows hold MISSING and -1."""

    numbers: np.ndarray  # int64 [NUMBERS, row]
    texts: np.ndarray  # int32 [TEXTS, row]
    spans: np.ndarray  # int64 [2, row]: where the event's args begin and end in the window


class Strings(NamedTuple):
    """The string table: open addressing over an arena of bytes."""

    hashes: np.ndarray  # uint64 [slot], 0 is free
    ids: np.ndarray  # int32 [slot] -> code
    offsets: np.ndarray  # int64 [code] into the arena
    lengths: np.ndarray  # int32 [code]
    firsts: np.ndarray  # int64 [code] -> offset in the file where it was first met
    arena: np.ndarray  # uint8


def make_keys() -> Keys:
    """The keys of `raw.FIELDS`."""
    columns = {name: index for names in (NUMBERS, TEXTS) for index, name in enumerate(names)}
    forms = {"time": _TIME, "integer": _INTEGER, "text": _TEXT}
    slots = np.full((2, _TABLE), -1, np.int32)
    table: list[tuple[int, int, int, int]] = []
    arena = b""
    for field in FIELDS:
        for key in field.keys:
            data = key.encode()
            place = TOP if field.top else ARGS
            slot = _slot_of(data)
            while slots[place, slot] >= 0:
                slot = (slot + 1) % _TABLE
            slots[place, slot] = len(table)
            table.append((len(arena), len(data), forms[field.form], columns[field.column]))
            arena += data
    return Keys(slots, np.array(table, np.int64), np.frombuffer(arena, np.uint8).copy())


def _slot_of(key: bytes) -> int:
    return (len(key) * 31 + key[0] * 7 + key[-1] * 13 + key[len(key) // 2] * 3) % _TABLE


@_inlined
def _blank(c):
    return c == 32 or c == 10 or c == 13 or c == 9


@_inlined
def skip_blank(b, i, n):
    """Index of the next byte that is no white space."""
    while i < n and _blank(b[i]):
        i += 1
    return i


@_inlined
def _closes(b, i, n, final, nested):
    """Does the quote before `i` end a string value? By what follows it: 1 yes, 0 no (a raw quote), -1 undecided.

    In valid JSON the answer is always yes. In an event, a comma must be followed by the next key, a brace by what may
    follow an object; `nested` strings (in lists and inner objects, keys and values) are followed by any of `:,]}`.
    """
    i = skip_blank(b, i, n)
    if i >= n:
        return 1 if final else -1
    c = b[i]
    if nested:
        return 1 if c == _COMMA or c == _CLOSE_BRACKET or c == _CLOSE_BRACE or c == _COLON else 0
    if c != _COMMA and c != _CLOSE_BRACE:
        return 0
    j = skip_blank(b, i + 1, n)
    if j >= n:
        return 1 if final else -1
    d = b[j]
    if c == _COMMA:
        return 1 if d == _QUOTE or d == _CLOSE_BRACE else 0
    return 1 if d == _COMMA or d == _CLOSE_BRACE or d == _CLOSE_BRACKET or d == _OPEN_BRACE else 0


@_compiled
def end_of_string(b, i, n, final, nested, repairs, base):
    """`i` just after an opening quote: index of the closing one, -1 when the window ends before.

    -2: after a raw quote comes what looks like the next event: the string has no end.
    """
    raw = 0
    start = i
    while i < n:
        c = b[i]
        if c == _QUOTE:
            closed = _closes(b, i + 1, n, final, nested)
            if closed == 1:
                if raw > 0:
                    count(repairs, QUOTE, base + start)
                return i
            if closed < 0:
                return -1
            raw += 1
        elif c == _BACKSLASH:
            i += 1
        elif raw > 0 and (c == _CLOSE_BRACE or c == _OPEN_BRACE):
            met = _event_follows(b, i, n)
            if met != 0:
                return -1 if met < 0 and not final else -2
        i += 1
    return -1


@_compiled
def _event_follows(b, i, n):
    """Does another event seem to begin here, with `}, {"` or with `{"ph"`? 1 yes, 0 no, -1 undecided."""
    if b[i] == _CLOSE_BRACE:
        i = skip_blank(b, i + 1, n)
        if i < n and b[i] != _COMMA:
            return 0
        i = skip_blank(b, i + 1, n)
        if i < n and b[i] != _OPEN_BRACE:
            return 0
        i = skip_blank(b, i + 1, n)
        if i >= n:
            return -1
        return 1 if b[i] == _QUOTE else 0
    i = skip_blank(b, i + 1, n)
    if i + 3 >= n:
        return -1
    return 1 if b[i] == _QUOTE and b[i + 1] == 112 and b[i + 2] == 104 and b[i + 3] == _QUOTE else 0


@_compiled
def count(repairs, kind, offset):
    """Count one repair."""
    if repairs[kind] == 0:
        repairs[kind + REPAIRS] = offset
    repairs[kind] += 1
    repairs[DIRTY] = 1


@_compiled
def end_of_value(b, i, n, final, nested, repairs, base):
    """`i` at the first byte of a value: index after it, -1 when the window ends before, -2 when it has no end.

    An empty value ends at `i`.
    """
    c = b[i]
    if c == _QUOTE:
        j = end_of_string(b, i + 1, n, final, nested, repairs, base)
        return j if j < 0 else j + 1
    if c == _OPEN_BRACE or c == _OPEN_BRACKET:
        depth = 0
        while i < n:
            c = b[i]
            if c == _QUOTE:
                i = end_of_string(b, i + 1, n, final, True, repairs, base)
                if i < 0:
                    return i
            elif c == _OPEN_BRACE or c == _OPEN_BRACKET:
                depth += 1
            elif c == _CLOSE_BRACE or c == _CLOSE_BRACKET:
                depth -= 1
                if depth == 0:
                    return i + 1
            i += 1
        return -1
    start = i
    while i < n:
        c = b[i]
        if c > _COMMA and c != _CLOSE_BRACE and c != _CLOSE_BRACKET:
            i += 1
            continue
        if c == _COMMA or c == _CLOSE_BRACE or c == _CLOSE_BRACKET or c == _QUOTE:
            while i > start and _blank(b[i - 1]):
                i -= 1
            if not _is_plain(b, start, i):
                count(repairs, VALUE, base + start)
            return i
        i += 1
    return -1


@_compiled
def _is_plain(b, s, e):
    """Is the bare word a number, true, false or null (by its first two letters)?"""
    if e <= s:
        return False
    c = b[s]
    if c == 45 and e > s + 1:
        c = b[s + 1]
    if 48 <= c <= 57:
        return True
    if e - s == 4:
        return (b[s] == 110 and b[s + 1] == 117) or (b[s] == 116 and b[s + 1] == 114)
    return e - s == 5 and b[s] == 102 and b[s + 1] == 97


@_inlined
def number(b, s, e, thousand):
    """Decimal text -> int64, exactly; `thousand` times it for times (us -> ns). Digits below 1 are dropped.

    MISSING for what is no number or too large. Up to 18 digits before an exponent are exact.
    """
    while s < e and _blank(b[s]):
        s += 1
    while e > s and _blank(b[e - 1]):
        e -= 1
    negative = s < e and b[s] == 45
    i = s + 1 if negative else s
    first = i
    whole = np.int64(0)
    dropped = 0  # digits before the point that did not fit
    while i < e and 48 <= b[i] <= 57:
        digit = np.int64(b[i] - 48)
        if whole > _TENTH_MAX or (whole == _TENTH_MAX and digit > 7):
            dropped += 1
        else:
            whole = whole * 10 + digit
        i += 1
    if i == first:
        return _MISSING
    fraction_start = i
    if i < e and b[i] == 46:
        i += 1
        fraction_start = i
        while i < e and 48 <= b[i] <= 57:
            i += 1
    if i < e:
        return _with_exponent(b, i, e, whole, fraction_start, i, negative, thousand, dropped)
    if dropped > 0:
        return _MISSING
    if thousand:
        below = np.int64(0)
        scale = np.int64(100)
        for j in range(fraction_start, min(i, fraction_start + 3)):
            below += scale * np.int64(b[j] - 48)
            scale //= 10
        if whole > _THOUSANDTH_MAX or (whole == _THOUSANDTH_MAX and below > 807):
            return _MISSING
        whole = whole * 1000 + below
    return -whole if negative else whole


@_compiled
def _with_exponent(b, i, e, mantissa, fraction_start, fraction_end, negative, thousand, dropped):
    """The rest of a number that has an exponent, `i` at its `e`; MISSING for anything else there."""
    if b[i] != 101 and b[i] != 69:
        return _MISSING
    i += 1
    down = False
    if i < e and (b[i] == 43 or b[i] == 45):
        down = b[i] == 45
        i += 1
    if i >= e:
        return _MISSING
    exponent = 0
    while i < e and 48 <= b[i] <= 57:
        if exponent < 100000:
            exponent = exponent * 10 + (b[i] - 48)
        i += 1
    if i < e:
        return _MISSING
    shift = (-exponent if down else exponent) + (3 if thousand else 0) + dropped
    for j in range(fraction_start, fraction_end):
        if mantissa < np.int64(100000000000000000):
            mantissa = mantissa * 10 + np.int64(b[j] - 48)
            shift -= 1
    while shift > 0 and mantissa != 0:
        if mantissa > _TENTH_MAX:
            return _MISSING
        mantissa *= 10
        shift -= 1
    while shift < 0 and mantissa != 0:
        mantissa //= 10
        shift += 1
    return -mantissa if negative else mantissa


# -- strings -----------------------------------------------------------------------------------------------------------


@_inlined
def _hash(b, s, e):
    """64 bits of b[s:e], eight bytes at a time; never 0."""
    h = np.uint64(0xCBF29CE484222325)
    i = s
    while i + 8 <= e:
        w = np.uint64(0)
        for j in range(8):
            w |= np.uint64(b[i + j]) << np.uint64(8 * j)
        h = (h ^ w) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(29)
        i += 8
    while i < e:
        h = (h ^ np.uint64(b[i])) * np.uint64(0x100000001B3)
        i += 1
    h ^= h >> np.uint64(32)
    return h | np.uint64(1)


@_inlined
def intern(b, s, e, strings, state, repairs):
    """Code of the string b[s:e]: the one it has, or a new one; -2 when the table is full and may grow."""
    if e - s > MAX_TEXT:
        count(repairs, LONG_TEXT, state[BASE] + s)
        e = s + MAX_TEXT
        while e > s and (b[e] & 0xC0) == 0x80:  # never within a character
            e -= 1
    h = _hash(b, s, e)
    slots = strings.hashes.shape[0]
    slot = np.int64(h >> np.uint64(1)) & (slots - 1)
    length = e - s
    while strings.hashes[slot] != 0:
        code = strings.ids[slot]
        if strings.hashes[slot] == h and strings.lengths[code] == length:
            if _same(b, s, strings.arena, strings.offsets[code], length):
                return np.int64(code)
        slot = (slot + 1) & (slots - 1)
    code = state[TEXT_COUNT]
    used = state[ARENA_USED]
    if code >= strings.offsets.shape[0] or used + length > strings.arena.shape[0] or 2 * code >= slots:
        if state[CAPPED] == 0:
            return np.int64(-2)
        count(repairs, TOO_MANY_TEXTS, state[BASE] + s)
        return np.int64(OVERFLOW)
    strings.hashes[slot] = h
    strings.ids[slot] = code
    strings.offsets[code] = used
    strings.lengths[code] = length
    strings.firsts[code] = state[BASE] + s
    for k in range(length):
        strings.arena[used + k] = b[s + k]
    state[ARENA_USED] = used + length
    state[TEXT_COUNT] = code + 1
    return np.int64(code)


@_compiled
def rehash(old, new):
    """Enter the strings of a table into a larger one; codes stay."""
    slots = new.hashes.shape[0]
    for k in range(old.hashes.shape[0]):
        h = old.hashes[k]
        if h != 0:
            slot = np.int64(h >> np.uint64(1)) & (slots - 1)
            while new.hashes[slot] != 0:
                slot = (slot + 1) & (slots - 1)
            new.hashes[slot] = h
            new.ids[slot] = old.ids[k]


@_inlined
def _same(b, s, other, at, length):
    for k in range(length):
        if other[at + k] != b[s + k]:
            return False
    return True


@_inlined
def _key(b, s, e, place, keys):
    """Number of the key b[s:e] in `place`, -1 when nobody asks for it."""
    length = e - s
    if length <= 0:
        return np.int64(-1)
    h = np.int64(length) * 31 + np.int64(b[s]) * 7 + np.int64(b[e - 1]) * 13 + np.int64(b[s + length // 2]) * 3
    slot = h & (_TABLE - 1)
    while keys.slots[place, slot] >= 0:
        key = np.int64(keys.slots[place, slot])
        if keys.table[key, 1] == length and _same(b, s, keys.data, keys.table[key, 0], length):
            return key
        slot = (slot + 1) & (_TABLE - 1)
    return np.int64(-1)


# -- events ------------------------------------------------------------------------------------------------------------


@_compiled
def _clear_args(out, row, keys):
    """Forget what an earlier `args` of the same event said: the last one counts, as of every key given twice."""
    for slot in range(keys.slots.shape[1]):
        key = keys.slots[ARGS, slot]
        if key >= 0:
            if keys.table[key, 2] == _TEXT:
                out.texts[keys.table[key, 3], row] = -1
            else:
                out.numbers[keys.table[key, 3], row] = _MISSING


@_compiled
def _blank_row(out, row):
    """Make an output row empty again, after an event that could not be finished."""
    for column in range(out.numbers.shape[0]):
        out.numbers[column, row] = _MISSING
    for column in range(out.texts.shape[0]):
        out.texts[column, row] = -1
    out.spans[0, row] = -1
    out.spans[1, row] = -1


@_compiled
def settle(repairs, pending, keep):
    """Add what was counted in one event to the total, or (an event that will be scanned again) forget it."""
    for kind in range(REPAIRS):
        if keep and pending[kind] > 0:
            if repairs[kind] == 0:
                repairs[kind + REPAIRS] = pending[kind + REPAIRS]
            repairs[kind] += pending[kind]
        pending[kind] = 0
    pending[DIRTY] = 0


@_inlined
def _end_of_key(b, i, n):
    """`i` at an opening quote: index of the closing quote of a key, the position after its colon.

    (-1, 0): the window ends before; (-2, 0): no key.
    """
    j = i + 1
    while j < n and b[j] != _QUOTE:
        j += 2 if b[j] == _BACKSLASH else 1
    if j >= n:
        return -1, 0
    k = skip_blank(b, j + 1, n)
    if k >= n:
        return -1, 0
    return (j, k + 1) if b[k] == _COLON else (-2, 0)


@_inlined
def _store(b, s, e, text, key, out, row, keys, strings, state, repairs):
    """Put the value b[s:e] (without its quotes if `text`) into the column of `key`; False when the string table is full."""
    form, column = keys.table[key, 2], keys.table[key, 3]
    if form != _TEXT:
        out.numbers[column, row] = number(b, s, e, form == _TIME)
        return True
    code = np.int64(-1)
    if text or _is_kept(b, s, e):
        code = intern(b, s, e, strings, state, repairs)
    if code == -2:
        return False
    out.texts[column, row] = code
    return True


@_inlined
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
        if c == _COMMA:
            if comma:
                count(repairs, COMMA, base + i)
            comma = True
            i += 1
            continue
        if c == _CLOSE_BRACE:
            if comma:
                count(repairs, COMMA, base + i)
            i += 1
            if place == TOP:
                return -1, i
            out.spans[1, row] = i
            place, comma, last_start = TOP, False, -1
            continue
        key_end, after = (-2, 0)
        if c == _QUOTE:
            key_end, after = _end_of_key(b, i, n)
        if key_end == -1:
            return NEED_MORE, i
        if key_end == -2:
            # no key: then the string value before has not ended where it seemed to
            if last_start < 0:
                return SYNTAX, i
            last_end = end_of_string(b, last_end + 1, n, final, False, repairs, base)
            if last_end < 0:
                return (NEED_MORE if last_end == -1 else SYNTAX), i
            count(repairs, QUOTE, base + last_start)
            if last_key >= 0 and not _store(
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
            key = _key(b, key_start, key_end, ARGS, keys)
        elif _is_args(b, key_start, key_end):
            if out.spans[0, row] >= 0:
                _clear_args(out, row, keys)
                out.spans[0, row] = -1
            if b[i] == _OPEN_BRACE:
                out.spans[0, row] = i
                place, last_start = ARGS, -1
                i += 1
                continue
        else:
            key = _key(b, key_start, key_end, TOP, keys)
            if key >= 0 and repairs[QUOTE] > 0 and _has(out, row, keys, key):
                return SYNTAX, i  # a string without end has run into the next event
        start = i
        i = end_of_value(b, i, n, final, False, repairs, base)
        if i < 0:
            return (NEED_MORE if i == -1 else SYNTAX), start
        text = 1 if b[start] == _QUOTE else 0
        last_key, last_start, last_end = key, (start + 1 if text else -1), i - 1
        if key >= 0 and not _store(b, start + text, i - text, text == 1, key, out, row, keys, strings, state, repairs):
            return STRINGS_FULL, i


@_compiled
def _has(out, row, keys, key):
    """Has the event a value for this key already?"""
    column = keys.table[key, 3]
    if keys.table[key, 2] == _TEXT:
        return out.texts[column, row] != -1
    return out.numbers[column, row] != _MISSING


@_compiled
def _is_args(b, s, e):
    return e - s == 4 and b[s] == 97 and b[s + 1] == 114 and b[s + 2] == 103 and b[s + 3] == 115


@_compiled
def scan(b, pos, n, final, out, keys, strings, state, repairs, pending):
    """Events from `pos` on into the rows of `out`, which must be blank. `pending`: a second array like `repairs`.

    Returns (status, position, rows): NEED_MORE and the start of the unfinished event; END_OF_LIST and the position after
    the bracket; OUTPUT_FULL or STRINGS_FULL (make room, call again); SYNTAX and the start of an event that makes no sense.
    """
    row = 0
    while row < out.numbers.shape[1]:
        i = pos
        commas = 0
        while i < n and (_blank(b[i]) or b[i] == _COMMA):
            commas += b[i] == _COMMA
            i += 1
        if i >= n:
            return NEED_MORE, pos, row
        state[EVENT_START] = i
        last = b[i] == _CLOSE_BRACKET
        if commas > (0 if last else 1):
            count(pending, COMMA, state[BASE] + i)
        if last:
            settle(repairs, pending, True)
            return END_OF_LIST, i + 1, row
        if b[i] == _OPEN_BRACE:
            status, i = _scan_event(b, i + 1, n, final, out, row, keys, strings, state, pending)
        else:  # an item that is no event
            i = end_of_value(b, i, n, final, True, pending, state[BASE])
            status = NEED_MORE if i == -1 else (SYNTAX if i < 0 or i == state[EVENT_START] else OUTPUT_FULL)
        if status >= 0 and status != OUTPUT_FULL:
            settle(repairs, pending, False)
            state[STOPPED] = n if status == NEED_MORE else max(i, state[EVENT_START])
            if b[state[EVENT_START]] == _OPEN_BRACE:
                _blank_row(out, row)
            return status, (state[EVENT_START] if status == SYNTAX else pos), row
        if pending[DIRTY] > 0:
            settle(repairs, pending, True)
        pos = i
        row += status == -1
    return OUTPUT_FULL, pos, row


@_compiled
def _is_kept(b, s, e):
    """A value without quotes that a text column keeps: lists, objects, numbers, true and false, but not null or NaN."""
    if e <= s:
        return False
    c = b[s]
    return c == _OPEN_BRACKET or c == _OPEN_BRACE or (c != 110 and _is_plain(b, s, e))
