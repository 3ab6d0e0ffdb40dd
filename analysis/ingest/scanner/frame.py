"""The arrays that the compiled scanner works on, and the frame of their addresses."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.raw import MISSING, NUMBERS, TEXTS
from stepscope.analysis.ingest.scanner import codes

_OVERFLOW_TEXT = b"(one of too many names)"


class Frame:
    """Output rows, string table, counters. `address` is what the compiled functions take.

    `numbers` [NUMBERS, row], `texts` [TEXTS, row] and `spans` [2, row] hold MISSING and -1 where nothing was said; `used` says
    which of the columns any row has a value in.
    """

    def __init__(self, window: bytearray, rows: int, texts: int, arena: int) -> None:
        self._frame = np.zeros(codes.FRAME_SIZE, np.int64)
        self.address = self._frame.ctypes.data
        self.state = np.zeros(codes.STATE_SIZE, np.int64)
        self.repairs = np.zeros(codes.REPAIRS_SIZE, np.int64)
        self._pending = np.zeros(codes.REPAIRS_SIZE, np.int64)
        self.numbers = np.full((len(NUMBERS), rows), MISSING, np.int64)
        self.texts = np.full((len(TEXTS), rows), -1, np.int32)
        self.spans = np.full((2, rows), -1, np.int64)
        self.used = np.zeros(len(NUMBERS) + len(TEXTS), np.uint8)
        self._keys = codes.key_tables()
        self._window = np.frombuffer(window, np.uint8)
        arrays: tuple[tuple[int, np.ndarray], ...] = (
            (codes.F_BYTES, self._window),
            (codes.F_NUMBERS, self.numbers),
            (codes.F_TEXTS, self.texts),
            (codes.F_SPANS, self.spans),
            (codes.F_USED, self.used),
            *zip((codes.F_SLOTS, codes.F_TABLE, codes.F_DATA), self._keys, strict=True),
            (codes.F_STATE, self.state),
            (codes.F_REPAIRS, self.repairs),
            (codes.F_PENDING, self._pending),
        )
        for place, array in arrays:
            self._frame[place] = array.ctypes.data
        self._frame[codes.F_CAPACITY] = rows
        self._make_strings(texts, arena)
        self._enter_overflow()

    def clear(self, rows: int) -> None:
        """Make the first `rows` output rows blank again."""
        for column in np.flatnonzero(self.used[: len(NUMBERS)]).tolist():
            self.numbers[column, :rows] = MISSING
        for column in np.flatnonzero(self.used[len(NUMBERS) :]).tolist():
            self.texts[column, :rows] = -1
        self.spans[:, :rows] = -1
        self.used[:] = 0

    # -- the string table ------------------------------------------------------------------------------------------

    @property
    def text_count(self) -> int:
        """How many strings there are."""
        return int(self.state[codes.TEXT_COUNT])

    def text(self, code: int) -> bytes:
        """The bytes of one string."""
        at = int(self.offsets[code])
        return self.arena[at : at + int(self.lengths[code])].tobytes()

    def texts_full(self, most: int, most_bytes: int) -> bool:
        """Has the table its greatest size?"""
        return len(self.offsets) >= most or len(self.arena) - codes.PAD >= most_bytes

    def grow_strings(self) -> None:
        """Twice the room, with the same strings under the same codes; their slots are still to be filled."""
        count, used = self.text_count, int(self.state[codes.ARENA_USED])
        old = (self.offsets, self.lengths, self.firsts, self.arena)
        self._make_strings(2 * len(self.offsets), 2 * (len(self.arena) - codes.PAD))
        for new, before in ((self.offsets, old[0]), (self.lengths, old[1]), (self.firsts, old[2])):
            new[:count] = before[:count]
        self.arena[:used] = old[3][:used]

    def _make_strings(self, texts: int, arena: int) -> None:
        self._hashes = np.zeros(4 * texts, np.uint64)
        self._ids = np.zeros(4 * texts, np.int32)
        self.offsets = np.zeros(texts, np.int64)
        self.lengths = np.zeros(texts, np.int32)
        self.firsts = np.zeros(texts, np.int64)  # where in the file each was met first
        self.arena = np.zeros(arena + codes.PAD, np.uint8)
        for place, array in (
            (codes.F_HASHES, self._hashes),
            (codes.F_IDS, self._ids),
            (codes.F_OFFSETS, self.offsets),
            (codes.F_LENGTHS, self.lengths),
            (codes.F_FIRSTS, self.firsts),
            (codes.F_ARENA, self.arena),
        ):
            self._frame[place] = array.ctypes.data
        self._frame[codes.F_HASH_SIZE] = 4 * texts
        self._frame[codes.F_TEXT_SIZE] = texts
        self._frame[codes.F_ARENA_SIZE] = arena

    def _enter_overflow(self) -> None:
        """The string OVERFLOW, which no text of a file is looked up as."""
        size = len(_OVERFLOW_TEXT)
        self.arena[:size] = np.frombuffer(_OVERFLOW_TEXT, np.uint8)
        self.lengths[codes.OVERFLOW] = size
        self.state[codes.TEXT_COUNT], self.state[codes.ARENA_USED] = codes.OVERFLOW + 1, size
