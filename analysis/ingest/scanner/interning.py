"""The string table: open addressing over an arena of bytes; a string is a code from its first appearance on."""

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102
# (numba takes its types from the arguments, and compiles plain comparisons and loops best)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stepscope.analysis.ingest.scanner.codes import (
    ARENA_USED,
    BASE,
    CAPPED,
    LONG_TEXT,
    MAX_TEXT,
    OVERFLOW,
    TEXT_COUNT,
    TOO_MANY_TEXTS,
)
from stepscope.analysis.ingest.scanner.lexer import count
from stepscope.analysis.ingest.scanner.options import compiled, inlined
from stepscope.analysis.ingest.scanner.words import load_word


class Strings(NamedTuple):
    """Pointers into the table, and its sizes."""

    hashes: Any  # uint64 [slot], 0 is free
    ids: Any  # int32 [slot] -> code
    offsets: Any  # int64 [code] into the arena
    lengths: Any  # int32 [code]
    firsts: Any  # int64 [code] -> offset in the file where it was first met
    arena: Any  # uint8
    slots: Any
    capacity: Any
    arena_size: Any


@inlined
def _low_bytes(word, length):
    """The first `length` (1 to 7) of eight bytes."""
    return word & ((np.uint64(1) << np.uint64(8 * length)) - np.uint64(1))


@inlined
def _mixed(h, word):
    h = (h ^ word) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(29))


@inlined
def _hash(b, s, e):
    """64 bits of b[s:e], eight bytes at a time; never 0."""
    h = np.uint64(0xCBF29CE484222325) + np.uint64(e - s)
    i = s
    while i + 8 <= e:
        h = _mixed(h, load_word(b, i))
        i += 8
    if i < e:
        h = _mixed(h, _low_bytes(load_word(b, i), e - i))
    h ^= h >> np.uint64(32)
    return h | np.uint64(1)


@inlined
def same(b, s, other, at, length):
    """Are these `length` bytes the same in both?"""
    k = 0
    while k + 8 <= length:
        if load_word(b, s + k) != load_word(other, at + k):
            return False
        k += 8
    if k == length:
        return True
    return _low_bytes(load_word(b, s + k) ^ load_word(other, at + k), length - k) == 0


@compiled
def intern(b, s, e, strings, state, repairs):
    """Code of the string b[s:e]: the one it has, or a new one; -2 when the table is full and may grow."""
    if e - s > MAX_TEXT:
        count(repairs, LONG_TEXT, state[BASE] + s)
        e = s + MAX_TEXT
        while e > s and (b[e] & 0xC0) == 0x80:  # never within a character
            e -= 1
    h = _hash(b, s, e)
    slot = np.int64(h >> np.uint64(1)) & (strings.slots - 1)
    length = e - s
    while strings.hashes[slot] != 0:
        code = np.int64(strings.ids[slot])
        if strings.hashes[slot] == h and strings.lengths[code] == length:
            if same(b, s, strings.arena, strings.offsets[code], length):
                return code
        slot = (slot + 1) & (strings.slots - 1)
    return _entered(b, s, length, h, slot, strings, state, repairs)


@compiled
def _entered(b, s, length, h, slot, strings, state, repairs):
    """A new string, into a free slot."""
    code = state[TEXT_COUNT]
    used = state[ARENA_USED]
    if code >= strings.capacity or used + length > strings.arena_size or 2 * code >= strings.slots:
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
    return code


@compiled
def enter_all(strings, count_, first):
    """Enter the strings from `first` on, which the table holds already, into its (empty) slots."""
    for code in range(first, count_):
        at = strings.offsets[code]
        h = _hash(strings.arena, at, at + strings.lengths[code])
        slot = np.int64(h >> np.uint64(1)) & (strings.slots - 1)
        while strings.hashes[slot] != 0:
            slot = (slot + 1) & (strings.slots - 1)
        strings.hashes[slot] = h
        strings.ids[slot] = code
