"""Decimal text to int64, exactly."""

# mypy: disallow-untyped-defs=False
# (numba takes its types from the arguments, and compiles plain comparisons and loops best)

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.raw import MISSING
from stepscope.analysis.ingest.scanner.options import compiled, inlined

_MISSING = np.int64(MISSING)
_TENTH_MAX = np.int64(922337203685477580)  # the largest int64 is this and a 7
_TENTH_OF_ALL = np.uint64(1844674407370955161)  # the largest uint64 is this and a 5
_HALF_OF_ALL = np.uint64(1 << 63)
_THOUSANDTH_MAX = np.int64(9223372036854775)  # ... and this and 807


@inlined
def is_blank(c):
    """Is the byte one of JSON's white space?"""
    return c == 32 or c == 10 or c == 13 or c == 9


@inlined
def is_digit(c):
    """Is the byte a decimal digit or a minus?"""
    return c == 45 or (48 <= c <= 57)


@compiled
def is_decimal(b, s, e):
    """Is it written as a number is: digits first, and nothing that no number has?"""
    if s >= e or not is_digit(b[s]):
        return False
    for i in range(s, e):  # noqa: SIM110
        if not (is_digit(b[i]) or b[i] == 43 or b[i] == 46 or b[i] == 69 or b[i] == 101):
            return False
    return True


@compiled
def number(b, s, e, thousand):
    """Decimal text -> int64, exactly; `thousand` times it for times (us -> ns). Digits below 1 are dropped.

    MISSING for what is no number or too large. Up to 18 digits before an exponent are exact.
    """
    while s < e and is_blank(b[s]):
        s += 1
    while e > s and is_blank(b[e - 1]):
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


@compiled
def identity(b, s, e):
    """As `number`, but of ids (raw.exact_id): from 2 ** 63 on what they exceed 2 ** 64 - 1 by."""
    first, end = s, e
    while s < e and is_blank(b[s]):
        s += 1
    while e > s and is_blank(b[e - 1]):
        e -= 1
    if e - s < 19 or e - s > 20:
        return number(b, first, end, False)
    whole = np.uint64(0)
    for i in range(s, e):
        digit = b[i] - 48
        if digit < 0 or digit > 9:
            return number(b, first, end, False)
        if whole > _TENTH_OF_ALL or (whole == _TENTH_OF_ALL and digit > 5):
            return _MISSING
        whole = whole * np.uint64(10) + np.uint64(digit)
    if whole < _HALF_OF_ALL:
        return np.int64(whole)
    return np.int64(whole + np.uint64(1))


@compiled
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


@inlined
def plain_number(b, i, n, thousand):
    """The usual number: at most 18 digits, a point and more digits perhaps, then a comma, a brace, or blank space and one.

    `i` at its first byte. (value, index after it); the index is -1 for anything else, which `number` then looks at.
    """
    negative = b[i] == 45
    if negative:
        i += 1
    first = i
    whole = np.int64(0)
    while i < n:
        digit = np.int64(b[i]) - 48
        if digit < 0 or digit > 9:
            break
        whole = whole * 10 + digit
        i += 1
    if i == first or i - first > 18 or (thousand and whole >= _THOUSANDTH_MAX):
        return whole, -1
    if i < n and b[i] == 46:
        i += 1
        point = i
        below = np.int64(0)
        while i < n:
            digit = np.int64(b[i]) - 48
            if digit < 0 or digit > 9:
                break
            if i - point < 3:
                below = below * 10 + digit
            i += 1
        if thousand:
            digits = i - point
            if digits == 0:
                return whole, -1
            if digits == 1:
                below *= 100
            elif digits == 2:
                below *= 10
            whole = whole * 1000 + below
    elif thousand:
        whole *= 1000
    end = i
    while i < n and is_blank(b[i]):
        i += 1
    if i >= n or (b[i] != 44 and b[i] != 125):
        return whole, -1
    return (-whole if negative else whole), end
