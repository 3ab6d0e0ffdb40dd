"""Memory that a read gives up is kept for its next chunk."""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's mallopt(3)
_LARGEST = 32 << 20
"""The largest block that glibc's allocator ever comes to keep by itself: it starts with 128 kB and follows what is freed."""


@cache
def keep_freed_blocks() -> None:
    """Let the allocator keep freed blocks from the start, as it would after a while: the columns of a chunk are some MB each,
    and taken from the system anew they are cleared page by page, a tenth of what reading ten million events costs.

    Once a process; where the allocator is another (macOS, musl) nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
