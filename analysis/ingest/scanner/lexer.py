"""Where strings and values end, in JSON and in what programs write for it.

All functions work on `b`, a window of the file's bytes of which the first `n` are valid (and PAD more are readable);
`final` says that nothing follows. An index of -1 means: the window ends before this is decided.
"""

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM109
# (numba takes its types from the arguments, and compiles plain comparisons and loops best)

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.scanner.codes import DIRTY, QUOTE, REPAIRS, SWALLOWED, VALUE
from stepscope.analysis.ingest.scanner.decimals import is_blank
from stepscope.analysis.ingest.scanner.options import compiled, inlined
from stepscope.analysis.ingest.scanner.words import to_quote, to_structure

Q, BACKSLASH, COMMA_, COLON = 34, 92, 44, 58
OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET = 123, 125, 91, 93


@compiled
def count(repairs, kind, offset):
    """Count one repair."""
    if repairs[kind] == 0:
        repairs[kind + REPAIRS] = offset
    repairs[kind] += 1
    repairs[DIRTY] = 1


@inlined
def skip_blank(b, i, n):
    """Index of the next byte that is no white space."""
    while i < n and is_blank(b[i]):
        i += 1
    return i


@compiled
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
        return 1 if c == COMMA_ or c == CLOSE_BRACKET or c == CLOSE_BRACE or c == COLON else 0
    if c != COMMA_ and c != CLOSE_BRACE:
        return 0
    j = skip_blank(b, i + 1, n)
    if j >= n:
        return 1 if final else -1
    d = b[j]
    if c == COMMA_:
        return 1 if d == Q or d == CLOSE_BRACE else 0
    return 1 if d == COMMA_ or d == CLOSE_BRACE or d == CLOSE_BRACKET or d == OPEN_BRACE else 0


@inlined
def end_of_string(b, i, n, final, nested, repairs, base):
    """`i` just after an opening quote: index of the closing one, -1 when the window ends before.

    -2: after a raw quote comes what looks like the next event: the string has no end.
    """
    j = i
    while j < n:
        far = to_quote(b, j)
        j += far
        if far == 32:
            continue
        if j < n and b[j] == Q:
            if j + 2 < n and b[j + 1] == COMMA_ and (b[j + 2] == Q or (b[j + 2] == 32 and b[j + 3] == Q and j + 3 < n)):
                return j  # what nearly always follows
            if _closes(b, j + 1, n, final, nested) == 1:
                return j
            return _end_of_odd_string(b, i, j, n, final, nested, repairs, base)
        j += 2
    return -1


@compiled
def _end_of_odd_string(b, start, i, n, final, nested, repairs, base):
    """The same for a string that has a quote at `i` which does not seem to end it."""
    raw = 0
    while i < n:
        c = b[i]
        if c == Q:
            closed = _closes(b, i + 1, n, final, nested)
            if closed == 1:
                if raw > 0:
                    count(repairs, QUOTE, base + start)
                return i
            if closed < 0:
                return -1
            raw += 1
        elif c == BACKSLASH:
            i += 1
        elif raw > 0 and (c == CLOSE_BRACE or c == OPEN_BRACE):
            met = _event_follows(b, i, n)
            if met != 0:
                return -1 if met < 0 and not final else -2
        i += 1
    return -1


@compiled
def _event_follows(b, i, n):
    """Does another event seem to begin here, with `}, {"` or with `{"ph"`? 1 yes, 0 no, -1 undecided."""
    if b[i] == CLOSE_BRACE:
        i = skip_blank(b, i + 1, n)
        if i < n and b[i] != COMMA_:
            return 0
        i = skip_blank(b, i + 1, n)
        if i < n and b[i] != OPEN_BRACE:
            return 0
        i = skip_blank(b, i + 1, n)
        if i >= n:
            return -1
        return 1 if b[i] == Q else 0
    i = skip_blank(b, i + 1, n)
    if i + 3 >= n:
        return -1
    return 1 if b[i] == Q and b[i + 1] == 112 and b[i + 2] == 104 and b[i + 3] == Q else 0


@compiled
def end_of_value(b, i, n, final, nested, repairs, base):
    """`i` at the first byte of a value: index after it, -1 when the window ends before, -2 when it has no end.

    An empty value ends at `i`.
    """
    c = b[i]
    if c == Q:
        j = end_of_string(b, i + 1, n, final, nested, repairs, base)
        return j if j < 0 else j + 1
    if c == OPEN_BRACE or c == OPEN_BRACKET:
        return _end_of_nested(b, i, n, final, repairs, base)
    start = i
    while i < n:
        c = b[i]
        if c > COMMA_ and c != CLOSE_BRACE and c != CLOSE_BRACKET:
            i += 1
            continue
        if c == COMMA_ or c == CLOSE_BRACE or c == CLOSE_BRACKET or c == Q:
            while i > start and is_blank(b[i - 1]):
                i -= 1
            if not is_plain(b, start, i):
                count(repairs, VALUE, base + start)
            return i
        i += 1
    return -1


@compiled
def _end_of_nested(b, i, n, final, repairs, base):
    """The end of a list or an object. One that seems to hold an event, and is no JSON, may have no end of its own: counted."""
    depth = 0
    start = i
    swallowed = False
    while i < n:
        far = to_structure(b, i)
        i += far
        if far == 32:
            continue
        if i >= n:
            return -1
        c = b[i]
        if c == Q:
            i = end_of_string(b, i + 1, n, final, True, repairs, base)
            if i < 0:
                return i
        elif c == OPEN_BRACE or c == OPEN_BRACKET:
            depth += 1
            swallowed = swallowed or (depth > 1 and c == OPEN_BRACE and _event_follows(b, i, n) == 1)
        else:
            depth -= 1
            if depth == 0:
                if swallowed and not _is_well_formed(b, start, i + 1):
                    count(repairs, SWALLOWED, base + start)
                return i + 1
        i += 1
    return -1


@compiled
def _is_well_formed(b, i, e):
    """Are commas, colons and brackets of the list or object b[i:e] where JSON wants them? (Up to 63 levels; else no.)"""
    kinds = np.uint64(0)  # of the open brackets, a bit each: 1 for a brace
    depth = 0
    done = False  # a value has ended: a comma, a colon or a closing bracket must follow
    first = True  # just opened: it may close at once
    while i < e:
        c = b[i]
        if c == COMMA_ or c == COLON:
            if not done:
                return False
            done, first = False, False
        elif c == CLOSE_BRACE or c == CLOSE_BRACKET:
            if depth == 0 or not (done or first) or (kinds & np.uint64(1)) != (c == CLOSE_BRACE):
                return False
            kinds >>= np.uint64(1)
            depth -= 1
            done, first = True, False
        elif not is_blank(c):
            if done or depth > 63:
                return False
            if c == OPEN_BRACE or c == OPEN_BRACKET:
                kinds = (kinds << np.uint64(1)) | np.uint64(c == OPEN_BRACE)
                depth += 1
                first = True
            else:
                i = _end_of_scalar(b, i, e) - 1
                done, first = True, False
        i += 1
    return depth == 0


@compiled
def _end_of_scalar(b, i, e):
    """Index after a string or a bare word."""
    if b[i] == Q:
        i += 1
        while i < e and b[i] != Q:
            i += 2 if b[i] == BACKSLASH else 1
        return i + 1
    while (
        i < e
        and not is_blank(b[i])
        and b[i] != COMMA_
        and b[i] != COLON
        and b[i] != CLOSE_BRACE
        and b[i] != CLOSE_BRACKET
    ):
        i += 1
    return i


@compiled
def is_plain(b, s, e):
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


@compiled
def is_kept(b, s, e):
    """A value without quotes that a text column keeps: lists, objects, numbers, true and false, but not null or NaN."""
    if e <= s:
        return False
    c = b[s]
    return c == OPEN_BRACKET or c == OPEN_BRACE or (c != 110 and is_plain(b, s, e))


@inlined
def end_of_key(b, i, n):
    """`i` at an opening quote: index of the closing quote of a key, the position after its colon.

    (-1, 0): the window ends before; (-2, 0): no key.
    """
    j = i + 1
    while j < n:
        far = to_quote(b, j)
        j += far
        if far == 32:
            continue
        if j >= n or b[j] == Q:
            break
        j += 2
    if j >= n:
        return -1, 0
    k = j + 1
    if k < n and b[k] == COLON:
        return j, k + 1
    k = skip_blank(b, k, n)
    if k >= n:
        return -1, 0
    return (j, k + 1) if b[k] == COLON else (-2, 0)
