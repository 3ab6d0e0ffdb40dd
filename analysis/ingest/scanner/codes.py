"""What the compiled scanner and its caller agree on: status codes, the layout of its frame and counters, its limits.

Nothing here needs numba: a machine on which the scanner was compiled once never loads it again.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.raw import FIELDS, NUMBERS, TEXTS

# what `scan` returns
NEED_MORE, END_OF_LIST, OUTPUT_FULL, STRINGS_FULL, SYNTAX = range(5)

# what a repair is: repairs[kind] counts it, repairs[kind + REPAIRS] is the offset of the first, repairs[DIRTY] says "some"
QUOTE, VALUE, COMMA, LONG_TEXT, TOO_MANY_TEXTS, SWALLOWED, TOO_LARGE, REPAIRS = range(8)
DIRTY = 2 * REPAIRS
REPAIRS_SIZE = DIRTY + 1

# `state`: where the window is, how many rows are filled, how many of them are counters, and the scanner's own numbers
POSITION, FILLED, FINAL, ROWS, COUNTERS, TEXT_COUNT, ARENA_USED = range(7)
BASE, EVENT_START, STOPPED, CAPPED, NESTED, STATE_SIZE = range(7, 13)

# `frame`: addresses of the arrays that the compiled code works on, and their sizes
F_BYTES, F_NUMBERS, F_TEXTS, F_SPANS, F_USED, F_CAPACITY, F_SLOTS, F_TABLE, F_DATA = range(9)
F_HASHES, F_IDS, F_OFFSETS, F_LENGTHS, F_FIRSTS, F_ARENA, F_HASH_SIZE, F_TEXT_SIZE, F_ARENA_SIZE = range(9, 18)
F_STATE, F_REPAIRS, F_PENDING, FRAME_SIZE = range(18, 22)

MAX_TEXT = 1 << 16
"""Bytes of one string that are kept."""

OVERFLOW = 0
"""The string that stands for all that come when the table may not grow any more."""

PAD = 32
"""Readable bytes that must follow a window's and an arena's last: the scanner looks at so many at once."""

LETTERS = b"XBEiIRMC"
"""Kinds of events (`ph`) that get a row: those with an extent, metadata and counters. Flow events, a third of a typical trace,
say nothing that ids do not say and are dropped while scanning."""

COUNTER = ord("C")

TOP, ARGS = 0, 1
KEY_SLOTS = 256
"""Slots of each of the two key tables; a power of two."""

TIME, INTEGER, IDENTITY, TEXT = range(4)
KEY_AT, KEY_LENGTH, KEY_FORM, KEY_COLUMN, KEY_WIDTH = range(5)
"""A key's row in the table: offset and length of its bytes, its form, its column."""


def key_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys of `raw.FIELDS`: int32 [place * KEY_SLOTS + hash] -> key or -1, int64 [key * KEY_WIDTH + ...], their bytes."""
    columns = {name: index for names in (NUMBERS, TEXTS) for index, name in enumerate(names)}
    forms = {"time": TIME, "integer": INTEGER, "id": IDENTITY, "text": TEXT}
    slots = np.full(2 * KEY_SLOTS, -1, np.int32)
    table: list[int] = []
    arena = b""
    for field in FIELDS:
        for key in field.keys:
            data = key.encode()
            first = (TOP if field.top else ARGS) * KEY_SLOTS
            slot = key_hash(len(data), data[0], data[-1], data[len(data) // 2])
            while slots[first + slot] >= 0:
                slot = (slot + 1) % KEY_SLOTS
            slots[first + slot] = len(table) // KEY_WIDTH
            table += [len(arena), len(data), forms[field.form], columns[field.column]]
            arena += data
    return slots, np.array(table, np.int64), np.frombuffer(arena + bytes(PAD), np.uint8).copy()


def key_hash(length: int, first: int, last: int, middle: int) -> int:
    """Slot of a key. The compiled scanner computes the same."""
    return (length * 31 + first * 7 + last * 13 + middle * 3) % KEY_SLOTS
