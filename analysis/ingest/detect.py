"""What kind of file is this? By content, never by name alone."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.formats import PARQUET_MAGIC, SQLITE_MAGIC, TABLE_COLUMNS, table_header
from stepscope.analysis.ingest.source import ByteSource

HEAD_BYTES = 8 << 20
"""How far into a file its list of events may begin: headers with many process groups are long."""

UNREAD = ""
"""In place of a format: nothing can be read of the file, so that it may be a trace as well."""

_FIRST_LOOK = 1 << 16
_EVENTS = re.compile(rb'"traceEvents"\s*:')
_DUMP = re.compile(rb'"\d+"\s*:\s*\{[^{}]*"fwd_start"\s*:')
_EVENT = re.compile(rb'"ph"\s*:\s*"')


def detect(path: str) -> tuple[str | None, str]:
    """(format, ""), or (None, why it is no trace), or (UNREAD, why nothing can be read of it)."""
    try:
        state = None if "://" in path else (os.stat(path).st_size, os.stat(path).st_mtime_ns)
    except OSError as error:
        return UNREAD, f"it cannot be read ({error.strerror})"
    return _detect(path, state)


@lru_cache(maxsize=4096)
def _detect(path: str, state: tuple[int, int] | None) -> tuple[str | None, str]:
    """As `detect`; `state` changes with the file."""
    try:
        with ByteSource(path) as source:
            head = _more(source, b"", _FIRST_LOOK)
            if not head:
                return UNREAD, source.cut or "it is empty"
            if head.startswith(SQLITE_MAGIC):
                return (None, "it is a compressed database: unpack it") if source.compressed else _of_database(path)
            if head.startswith(PARQUET_MAGIC):
                return _of_parquet(path)
            if head.startswith(b"PK\x03\x04"):
                return None, f"it is a zip archive: unpack it, or name what is in it (zip://**::{path})"
            first_line = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0]
            if first_line[:1] not in (b"{", b"[") and b"optype" in first_line:
                return _of_table(table_header(first_line)[0])
            return _of_json(source, head)
    except StepscopeError as error:
        return UNREAD, str(error)


def _of_database(path: str) -> tuple[str | None, str]:
    from stepscope.analysis.ingest import nsys  # brings in sqlite

    why = nsys.why_not(path) if "://" not in path else "an Nsight Systems export is read from a local copy"
    return (UNREAD if why.startswith(nsys.UNREADABLE) else None, why) if why else ("nsys", "")


def _of_parquet(path: str) -> tuple[str | None, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if "://" in path:
        return None, "copy the table here"
    try:
        return _of_table(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        return UNREAD, str(error)


def _of_table(columns: list[str]) -> tuple[str | None, str]:
    missing = [name for name in TABLE_COLUMNS if name not in columns]
    return (None, f"the table has no column {', '.join(missing)}") if missing else ("ndtimeline", "")


def _of_json(source: ByteSource, head: bytes) -> tuple[str | None, str]:
    if head.startswith(b"\x4e\x56\x54\x58") or b"nsys-rep" in head[:256]:
        return None, "it is an Nsight Systems report: export it with `nsys export --type sqlite`"
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
    if _DUMP.search(head[:_FIRST_LOOK]):
        return "pp-vis", ""
    if source.cut is not None or (len(head) < HEAD_BYTES and _ends_early(head.removeprefix(b"\xef\xbb\xbf"))):
        return UNREAD, "it ends before a list of trace events begins"
    return None, "it is JSON without a list of trace events"


def _ends_early(data: bytes) -> bool:
    """Is it JSON whose end is missing?"""
    text = data.decode("utf-8", "replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text) or error.msg.startswith("Unterminated")
    except RecursionError:
        return False
    return False


def _more(source: ByteSource, head: bytes, size: int) -> bytes:
    """`head` lengthened to `size` bytes, or to the end of the file."""
    buffer = bytearray(size)
    buffer[: len(head)] = head
    filled = len(head)
    with memoryview(buffer) as view:
        while filled < size and (got := source.readinto(view[filled:])):
            filled += got
    return bytes(buffer[:filled])
