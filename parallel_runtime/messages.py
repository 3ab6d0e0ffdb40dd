"""One communication as a prediction names it: what each strategy's `traffic.py` counts."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Message(NamedTuple):
    """One kind of operation of a strategy; `bytes` is the message size of the trace format."""

    strategy: str
    collective: str
    phase: str
    bytes: int


def sent(collective: str, size: int, ranks: int) -> Fraction:
    """Bytes that each rank sends for one operation with a message of `size` bytes, by a ring or pairwise (nccl-tests)."""
    if collective == "all_reduce":
        return Fraction(2 * (ranks - 1) * size, ranks)
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return Fraction((ranks - 1) * size, ranks)
    if collective in ("send", "ring_shift"):
        return Fraction(size)
    if collective == "receive":
        return Fraction(0)
    raise ValueError(f"no rule for what {collective} sends: it depends on the root, take one of the others")
