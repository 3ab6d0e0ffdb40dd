"""What kind of file is this? By content, never by name alone."""

from __future__ import annotations

import re
from functools import lru_cache

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.source import ByteSource

HEAD_BYTES = 8 << 20
"""How far into a file its list of events may begin: headers with many process groups are long."""

_FIRST_LOOK = 1 << 16
_EVENTS = re.compile(rb'"traceEvents"\s*:')
_EVENT = re.compile(rb'"ph"\s*:\s*"')


@lru_cache(maxsize=4096)
def detect(path: str) -> tuple[str | None, str]:
    """(format, "") or (None, why it is no trace)."""
    try:
        with ByteSource(path) as source:
            head = _more(source, b"", _FIRST_LOOK)
            if not head:
                return None, source.cut or "it is empty"
            return _of_json(source, head)
    except StepscopeError as error:
        return None, str(error)


def _of_json(source: ByteSource, head: bytes) -> tuple[str | None, str]:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] not in (b"{", b"["):
        return None, "it is neither JSON nor another known format"
    while True:
        if _EVENTS.search(head) or (text[:1] == b"[" and _EVENT.search(head)):
            return "kineto", ""
        if len(head) >= HEAD_BYTES:
            break
        longer = _more(source, head, min(HEAD_BYTES, 4 * len(head)))
        if len(longer) == len(head):
            break
        head = longer
    return None, "it is JSON without a list of trace events"


def _more(source: ByteSource, head: bytes, size: int) -> bytes:
    """`head` lengthened to `size` bytes, or to the end of the file."""
    buffer = bytearray(size)
    buffer[: len(head)] = head
    filled = len(head)
    with memoryview(buffer) as view:
        while filled < size and (got := source.readinto(view[filled:])):
            filled += got
    return bytes(buffer[:filled])
