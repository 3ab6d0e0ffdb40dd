"""The uncompressed bytes of one trace file, block by block, whatever happened to the file.

A gzip file may consist of many members (our ranks write one a step) and may end in the middle of one: every byte that
can still be had is handed out, and `cut` says afterwards that the end was missing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

from stepscope.analysis.errors import StepscopeError

GZIP_MAGIC = b"\x1f\x8b"
READ_SIZE = 1 << 17
_DAMAGED: Any = isal_zlib.error  # the type of an exception, which its stubs do not say
_GZIP = 31  # window bits: gzip container

_watcher: ContextVar[Callable[[int], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(read_on: Callable[[int], None]) -> Iterator[None]:
    """Within this block, tell `read_on` how many bytes every file that is opened has just read (progress)."""
    token = _watcher.set(read_on)
    try:
        yield
    finally:
        _watcher.reset(token)


class ByteSource:
    """Reads one file, gzip or plain; use as a context manager.

    `cut` is a description when the compressed stream ended early or was damaged, else None; `spare` says that it only
    has bytes behind it that are none of it. `consumed` counts bytes read from the file itself (for progress), `produced`
    the uncompressed bytes handed out; `compressed`: is it gzip?
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file; StepscopeError when that is not possible."""
        self.path = str(path)
        try:
            self._file, self._filesystem = _open(self.path)
        except OSError as error:
            said = error.strerror or ("there is no such file" if isinstance(error, FileNotFoundError) else error)
            raise StepscopeError(f"cannot read {self.path}: {said}") from error
        self.cut: str | None = None
        self.spare = False
        self.consumed = 0
        self.produced = 0
        self._pending = b""  # uncompressed, not handed out yet
        self._told = _watcher.get()
        self._input = self._more()
        self.compressed = self._input[:2] == GZIP_MAGIC
        self._member: Any = isal_zlib.decompressobj(_GZIP) if self.compressed else None
        self._member_at = self._member_gave = 0  # where in the file it begins, bytes that came of it
        self._rescued: Iterator[bytes] | None = None  # what comes before damage

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as one block reaches; 0 only at the end of what can be read."""
        while not self._pending:
            block = self._next_block(len(buffer))
            if block is None:
                return 0
            self._pending = block
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        self.produced += size
        return size

    def read(self) -> bytes:
        """All the rest at once."""
        blocks = [self._pending]
        while (block := self._next_block(READ_SIZE)) is not None:
            blocks.append(block)
        self._pending = b""
        self.produced += sum(map(len, blocks))
        return b"".join(blocks)

    def _next_block(self, limit: int) -> bytes | None:
        if not self.compressed:
            block, self._input = self._input, b""
            return block or self._more() or None
        while self._rescued is None:
            if not self._input:
                self._input = self._more()
                if not self._input:
                    if not self._member.eof:
                        self.cut = "the compressed data end in the middle"
                    return None
            try:
                block = self._member.decompress(self._input, limit)
            except _DAMAGED as error:
                self.cut = f"the compressed data are damaged ({error})"
                self._rescued = self._before_damage()
                break
            self._input = self._member.unconsumed_tail
            self._member_gave += len(block)
            if self._member.eof:
                self._next_member()
            if block:
                return block
        return next(self._rescued, None)

    def _next_member(self) -> None:
        """Begin the member behind the one that has ended, if there is one; zero padding between them is legal."""
        rest = self._member.unused_data.lstrip(b"\0")
        while len(rest) < len(GZIP_MAGIC) and (more := self._more()):
            rest = (rest + more).lstrip(b"\0")
        if rest[:2] == GZIP_MAGIC:
            self._input, self._member = rest, isal_zlib.decompressobj(_GZIP)
            self._member_at, self._member_gave = self.consumed - len(rest), 0
        elif rest:
            self.spare = True
            self._rescued = iter(())

    def _before_damage(self) -> Iterator[bytes]:
        """What the damaged member still holds before the damage: isal gives nothing of a block that has some, zlib does."""
        self._go_back(self._member_at)
        member, gave = zlib.decompressobj(_GZIP), 0
        pieces: list[bytes] = []  # what comes before the rest of the file
        while data := pieces.pop() if pieces else self._file.read(READ_SIZE):
            while data and not member.eof:
                before = member.copy()
                try:
                    block, data = member.decompress(data, READ_SIZE), member.unconsumed_tail
                except zlib.error:
                    if len(data) == 1:
                        return
                    member, half = before, len(data) // 2  # the damage lies in one of the halves
                    pieces.append(data[half:])
                    data = data[:half]
                    continue
                gave += len(block)
                if gave > self._member_gave:
                    yield block[max(len(block) - gave + self._member_gave, 0) :]

    def _go_back(self, place: int) -> None:
        """Read on from this byte of the file."""
        try:
            self._file.seek(place)
        except (OSError, ValueError):  # a stream
            self._file.close()
            self._file, self._filesystem = _open(self.path)
            while place > 0 and (passed := self._file.read(min(place, READ_SIZE))):
                place -= len(passed)

    def _more(self) -> bytes:
        try:
            data = self._file.read(READ_SIZE)
        except Exception as error:  # every filesystem has exceptions of its own
            raise StepscopeError(f"cannot read {self.path}: {error or type(error).__name__}") from error
        self.consumed += len(data)
        if self._told is not None and data:
            self._told(len(data))
        return data


def _open(path: str) -> tuple[BinaryIO, Any]:
    """The file, and what must live as long as it is read: an archive's filesystem closes the archive when it goes."""
    if "://" not in path:
        return open(path, "rb"), None
    filesystem, inside = filesystem_of(path)
    # of a web server as a stream: not every one sends parts, and a file is read from its begin
    how = {"block_size": 0} if inside.startswith(("http://", "https://")) else {}
    try:
        return filesystem.open(inside, "rb", **how), filesystem
    except OSError:
        raise
    except Exception as error:  # every filesystem has exceptions of its own
        raise StepscopeError(f"cannot read {path}: {error or type(error).__name__}") from error


def filesystem_of(url: str) -> tuple[Any, str]:
    """The filesystem that a URL names, and the path in it. StepscopeError where that cannot be had."""
    import fsspec  # only for URLs: a heavy import, and an optional one

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StepscopeError(
            f"cannot open {url}: {error}; pip install 'stepscope[remote]' has what it needs"
        ) from error
    except Exception as error:  # every filesystem has exceptions of its own
        raise StepscopeError(f"cannot open {url}: {error}") from error
    return filesystem, path
