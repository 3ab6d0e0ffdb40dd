"""The doors into the compiled code: functions of one pointer, to the frame that codes.py lays out."""

# mypy: disallow-untyped-defs=False
# (numba takes its types from the arguments)

from __future__ import annotations

import numba as nb
from numba import types

from stepscope.analysis.ingest.scanner import codes
from stepscope.analysis.ingest.scanner.codes import (
    BASE,
    FILLED,
    FINAL,
    NESTED,
    POSITION,
    ROWS,
    TEXT_COUNT,
)
from stepscope.analysis.ingest.scanner.events import scan, settle
from stepscope.analysis.ingest.scanner.interning import Strings, enter_all
from stepscope.analysis.ingest.scanner.lexer import end_of_value
from stepscope.analysis.ingest.scanner.options import OPTIONS, inlined
from stepscope.analysis.ingest.scanner.output import Keys, Output
from stepscope.analysis.ingest.scanner.words import pointer_to

FRAME = types.int64(types.CPointer(types.int64))
_bytes, _int32, _int64, _uint64 = (pointer_to(t) for t in (types.uint8, types.int32, types.int64, types.uint64))
_compiled = nb.njit(FRAME, **OPTIONS)


@inlined
def _strings(f):
    return Strings(
        _uint64(f[codes.F_HASHES]),
        _int32(f[codes.F_IDS]),
        _int64(f[codes.F_OFFSETS]),
        _int32(f[codes.F_LENGTHS]),
        _int64(f[codes.F_FIRSTS]),
        _bytes(f[codes.F_ARENA]),
        f[codes.F_HASH_SIZE],
        f[codes.F_TEXT_SIZE],
        f[codes.F_ARENA_SIZE],
    )


@_compiled
def scan_events(f):
    """events.scan on the window; returns its status, sets POSITION and ROWS."""
    state = _int64(f[codes.F_STATE])
    out = Output(
        _int64(f[codes.F_NUMBERS]),
        _int32(f[codes.F_TEXTS]),
        _int64(f[codes.F_SPANS]),
        _bytes(f[codes.F_USED]),
        f[codes.F_CAPACITY],
    )
    keys = Keys(_int32(f[codes.F_SLOTS]), _int64(f[codes.F_TABLE]), _bytes(f[codes.F_DATA]))
    b, repairs, pending = _bytes(f[codes.F_BYTES]), _int64(f[codes.F_REPAIRS]), _int64(f[codes.F_PENDING])
    final = state[FINAL] != 0
    status, position, rows = scan(
        b, state[POSITION], state[FILLED], final, out, keys, _strings(f), state, repairs, pending
    )
    state[POSITION] = position
    state[ROWS] = rows
    return status


@_compiled
def skip_value(f):
    """lexer.end_of_value at POSITION; what was repaired counts if the value ended."""
    state = _int64(f[codes.F_STATE])
    repairs, pending = _int64(f[codes.F_REPAIRS]), _int64(f[codes.F_PENDING])
    b, final, nested = _bytes(f[codes.F_BYTES]), state[FINAL] != 0, state[NESTED] != 0
    end = end_of_value(b, state[POSITION], state[FILLED], final, nested, pending, state[BASE])
    settle(repairs, pending, end >= 0)
    return end


@_compiled
def enter_strings(f):
    """interning.enter_all: all strings but the one of OVERFLOW into slots that are empty."""
    state = _int64(f[codes.F_STATE])
    enter_all(_strings(f), state[TEXT_COUNT], 1)
    return 0
