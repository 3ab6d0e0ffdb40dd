"""One trace file, streamed through the byte scanner in bounded memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from stepscope.analysis.ingest.gather import Gatherer, Sink
from stepscope.analysis.ingest.raw import Raw, Repair, both
from stepscope.analysis.ingest.scanner import codes, machine
from stepscope.analysis.ingest.scanner.frame import Frame
from stepscope.analysis.ingest.source import ByteSource
from stepscope.analysis.ingest.text import tolerant_json

WINDOW = 8 << 20
"""Bytes of the file in memory at a time."""


FILL = 1 << 20
"""Bytes that are read at once: as many as the processor's cache holds, or again as many as an event has already taken."""

_EVENT_SHARE = 2
"""An event longer than the window divided by this is left out, counted: the window must hold it whole."""

BLOCK_ROWS = 1 << 14
"""Events scanned at a time."""

WASTE_LIMIT = 64 << 20
"""Bytes that may be scanned in vain (more in longer files) before damaged stretches are skipped whole: no file may take
longer than a few times its length."""

FIRST_TEXTS, FIRST_ARENA = 1 << 15, 4 << 20
MAX_TEXTS = 1 << 20
MAX_ARENA = 256 << 20
"""How many different strings, and how many bytes of them, are kept of one file."""

_NEXT_EVENT = re.compile(rb'\}\s*,?\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args|s|bp)"\s*:)|(?=\{\s*"ph"\s*:)')
_END_OF_LIST = re.compile(rb'\}\s*\](?=\s*,\s*"[^"]{1,100}"\s*:|\s*\}\s*\Z)')
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_LIST = "there is no list of trace events"
_NO_BRACKET = "the file ends before its closing bracket"

_SAID = {
    codes.QUOTE: ("raw_quote", both("string", "contain", "a raw quotation mark: kept as part of the text")),
    codes.VALUE: ("unreadable_value", both("value", "are", "no JSON (NaN, inf, nothing, ...): taken as missing")),
    codes.COMMA: ("spare_comma", both("comma", "are", "too many: ignored")),
    codes.LONG_TEXT: ("long_text", both("string", "are", f"longer than {codes.MAX_TEXT} bytes: cut")),
    codes.TOO_LARGE: ("too_large", both("number", "do", "not fit in 64 bits: taken as missing")),
    codes.SWALLOWED: ("swallowed_event", both("value", "hold", "what looks like events: kept as one value")),
    codes.TOO_MANY_TEXTS: ("too_many_texts", both("string", "were", "new when the table of names was full: lost")),
}


def read_chunks(source: ByteSource, sink: Sink, window: int = WINDOW) -> Raw:
    """Hand all events of one file to `sink`, some at a time; returns what is beside them, without a row.

    Damage is repaired as far as possible and listed in `repairs`. `window`: bytes of the file in memory at a time; events
    and header values longer than half of it are left out.
    """
    return _Reader(source, window, sink).read()


def read_trace(source: ByteSource, window: int = WINDOW) -> Raw:
    """All events of one file at once, as `read_chunks` reads them."""
    chunks: list[Raw] = []
    raw = read_chunks(source, chunks.append, window)
    if chunks:
        raw.columns = {name: np.concatenate([chunk.columns[name] for chunk in chunks]) for name in raw.columns}
    return raw


def prepare() -> None:
    """Load the compiled scanner, or compile it: ten seconds, once in an installation."""
    machine.entries()


class BytesInMemory:
    """A source that is no file."""

    cut: str | None = None
    spare = False

    def __init__(self, data: bytes) -> None:
        self._data = data

    def readinto(self, buffer: memoryview) -> int:
        """As ByteSource."""
        size = min(len(buffer), len(self._data))
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size


class _Reader:
    """The window on the file, and everything that the scanner needs."""

    def __init__(self, source: ByteSource | BytesInMemory, window: int, sink: Sink) -> None:
        self._source = source
        self._window = window
        self._code = machine.entries()
        self._buffer = bytearray(window + codes.PAD)
        self._frame = Frame(self._buffer, BLOCK_ROWS, FIRST_TEXTS, FIRST_ARENA)
        self._state = self._frame.state
        self._filled = 0
        self._position = 0
        self._base = 0  # offset in the file of the window's first byte
        self._final = False
        self._header: dict[str, Any] = {}
        self._lost: list[Repair] = []
        self._wasted = 0  # bytes scanned in events that came to nothing
        self._gatherer = Gatherer(self._frame, sink)

    def read(self) -> Raw:
        cut = (self._read_lists() or None) if self._find_list() else _NO_LIST
        offset = self._base + self._position
        if self._source.spare:
            said = "stretch of bytes follows the compressed data and is none: ignored"
            self._lost.append(Repair("spare_bytes", (said, said), 1, offset))
        if self._source.cut is not None:
            cut = self._source.cut
        raw = self._gatherer.finish(self._header)
        raw.cut, raw.cut_offset = cut, offset if cut else -1
        raw.repairs = self._all_repairs() + raw.repairs
        return raw

    # -- the window ------------------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Drop what is done, read on. False when nothing more came: the file has ended (`final`), or the window is full."""
        if self._position:
            rest = self._filled - self._position
            self._buffer[:rest] = self._buffer[self._position : self._filled]
            self._base += self._position
            self._filled, self._position = rest, 0
        before = self._filled
        goal = min(self._window, max(2 * before, before + FILL))
        with memoryview(self._buffer) as view:
            while self._filled < goal:
                got = self._source.readinto(view[self._filled : goal])
                if not got:
                    self._final = True
                    break
                self._filled += got
        return self._filled > before

    # -- around the list of events ---------------------------------------------------------------------------------

    def _find_list(self) -> bool:
        """Up to the first event: a list at the top, or `traceEvents` in an object; what comes before is the header."""
        self._fill()
        if self._buffer[:3] == b"\xef\xbb\xbf":
            self._position = 3
        self._skip_blank()
        first = self._buffer[self._position : self._position + 1]
        if first == b"[":
            self._position += 1
            return True
        if first == b"{":
            self._position += 1
            if self._read_pairs():
                return True
        # not even the header is JSON: look for the list by its name
        found = _LIST.search(self._buffer, 0, self._filled)
        if found:
            self._position = found.end()
        return found is not None

    def _read_pairs(self) -> bool:
        """Keys and values of the outermost object into the header, up to and into the list of events (True)."""
        while True:
            self._skip_blank(b",")
            if self._ensure(1) and self._buffer[self._position] != ord('"'):
                return False
            key = self._read_value()
            self._skip_blank(b":")
            if key is None or not self._ensure(1):
                return False
            name = key.strip(b'"').decode("utf-8", "replace")
            if name == "traceEvents" and self._buffer[self._position] == ord("["):
                self._position += 1
                return True
            value = self._read_value()
            if value is None:
                return False
            self._header[name] = tolerant_json(value)

    def _read_value(self) -> bytes | None:
        """The bytes of one value, None when it does not end within the window."""
        while True:
            end = -1
            if self._position < self._filled:
                self._tell_window()
                end = self._code.skip_value(self._frame.address)
            if end >= 0:
                value = bytes(self._buffer[self._position : end])
                self._position = end
                return value or None
            if self._final or end == -2:
                return None
            if self._filled - self._position > self._window // _EVENT_SHARE or not self._fill():
                return None

    def _tell_window(self) -> None:
        """Where the window is, for the compiled code; values of the header are read as nested ones."""
        self._state[codes.POSITION], self._state[codes.FILLED] = self._position, self._filled
        self._state[codes.FINAL], self._state[codes.BASE] = self._final, self._base
        self._state[codes.NESTED] = True

    def _skip_blank(self, more: bytes = b"") -> None:
        while self._ensure(1) and self._buffer[self._position] in b" \t\r\n" + more:
            self._position += 1

    def _ensure(self, size: int) -> bool:
        """Are `size` bytes there to look at?"""
        if self._position + size > self._filled and not self._final:
            self._fill()
        return self._position + size <= self._filled

    # -- the list of events ----------------------------------------------------------------------------------------

    def _read_lists(self) -> str:
        """The list of events, what comes behind it, and events behind that; why it ended early, else empty."""
        while True:
            cut = self._scan_list()
            if cut:
                return cut
            offset = self._base + self._position
            if self._read_pairs():
                self._lost.append(
                    Repair(
                        "second_list",
                        ("further list of events: read as well", "further lists of events: read as well"),
                        1,
                        offset,
                    )
                )
            elif self._find_event():
                self._lost.append(
                    Repair("spare_bracket", both("bracket", "do", "not end the list of events: ignored"), 1, offset)
                )
            else:
                return ""

    def _find_event(self) -> bool:
        """Go on to what looks like the next event; False when the rest of the file holds none."""
        while True:
            event = _NEXT_EVENT.search(self._buffer, self._position, self._filled)
            if event:
                self._position = event.end()
                return True
            if self._final:
                return False
            self._position = max(self._position, self._filled - self._window // 4)
            self._fill()

    def _scan_list(self) -> str:
        """All events up to the closing bracket; why it ended where there is none, else empty."""
        while True:
            self._tell_window()
            status = self._code.scan_events(self._frame.address)
            self._position = int(self._state[codes.POSITION])
            # what counters say stands in the window, which is about to move on: all other rows can wait until there are many
            if status == codes.OUTPUT_FULL or self._state[codes.COUNTERS]:
                self._hand_on()
            if status == codes.END_OF_LIST or (status != codes.OUTPUT_FULL and not self._go_on(status)):
                self._hand_on()
                return "" if status == codes.END_OF_LIST else _NO_BRACKET

    def _hand_on(self) -> None:
        """The rows that were scanned so far to the gatherer."""
        rows = int(self._state[codes.ROWS])
        if rows:
            self._gatherer.add(rows, self._buffer)
            self._frame.clear(rows)
        self._state[codes.ROWS] = self._state[codes.COUNTERS] = 0

    def _go_on(self, status: int) -> bool:
        """Whether there is more to scan, after the scanner stopped for want of room, of bytes or of sense."""
        if status == codes.STRINGS_FULL:
            self._grow_strings()
            return True
        if status == codes.SYNTAX:
            return self._resume("lost_event", both("event", "make", "no sense: left out"))
        longest = self._window // _EVENT_SHARE
        if self._filled - self._position > longest:
            return self._resume("long_event", both("event", "are", f"longer than {longest} bytes: left out"))
        if not self._final:
            self._fill()
            return True
        return self._damaged_rest() and self._resume("lost_event", both("event", "make", "no sense: left out"))

    def _damaged_rest(self) -> bool:
        """The rest of the file is no whole event: is something wrong in it (other events follow), or is its end missing?"""
        start = self._buffer.find(b"{", self._position, self._filled)
        return start >= 0 and _NEXT_EVENT.search(self._buffer, start + 1, self._filled) is not None

    def _resume(self, code: str, texts: tuple[str, str]) -> bool:
        """Leave out the event at the position; go on at what looks like the next one, or like the end of the list.

        The end is only believed where the file ends too: within an event, a list of objects ends like the list of events.
        """
        self._lost.append(Repair(code, texts, 1, self._base + self._position))
        stopped = int(self._state[codes.STOPPED])
        self._wasted += stopped - self._position
        self._position = max(self._buffer.find(b"{", self._position, self._filled), self._position) + 1
        if self._wasted > WASTE_LIMIT + self._base:
            self._position = max(self._position, stopped)
        if self._find_event():
            return True
        end = _END_OF_LIST.search(self._buffer, self._position, self._filled)
        if end:
            self._position = end.end() - 1
        return end is not None

    def _grow_strings(self) -> None:
        """Twice the room for strings, up to the cap; then all that are new share one."""
        if self._frame.texts_full(MAX_TEXTS, MAX_ARENA):
            self._state[codes.CAPPED] = 1
            return
        self._frame.grow_strings()
        self._code.enter_strings(self._frame.address)

    def _all_repairs(self) -> list[Repair]:
        repairs = []
        for kind, (code, texts) in _SAID.items():
            times = int(self._frame.repairs[kind])
            first = int(self._frame.repairs[kind + codes.REPAIRS])
            if times:
                repairs.append(Repair(code, texts, times, first))
        for code in ("lost_event", "long_event", "spare_bracket", "second_list", "spare_bytes"):
            lost = [repair for repair in self._lost if repair.code == code]
            if lost:
                repairs.append(lost[0]._replace(times=len(lost)))
        return repairs
