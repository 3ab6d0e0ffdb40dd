"""Which positions of a sequence each rank of cp holds, and which blocks of attention that leaves: pure arithmetic.

A layout cuts the sequence into equal pieces and deals them out; for n = 4 ranks

    contiguous   rank 0: 0     rank 1: 1     rank 2: 2     rank 3: 3
    zigzag       rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4

A query sees the keys up to its own position. So rank 0 of a contiguous layout has 1 block to compute where the last one
has n; under zigzag every rank has the same (the idea is of Brandon et al. 2023, this way to deal of Megatron and Llama 3).

Positions of a rank always ascend, so that a rank's own block is causal by local index. For any other pair of ranks what
the queries of one see of the keys of the other is one rectangle without a mask, or nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.parallel_runtime.config import CP_LAYOUTS as PIECES


class Block(NamedTuple):
    """Queries [0] to [1] of this rank see keys [0] to [1] of another (or of this one, then causally)."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


def pieces_of(layout: str, ranks: int, rank: int) -> tuple[int, ...]:
    """Numbers of the pieces that `rank` holds, ascending."""
    return (rank,) if PIECES[layout] == 1 else (rank, 2 * ranks - 1 - rank)


def positions_of(layout: str, ranks: int, rank: int, length: int) -> list[int]:
    """Positions of a sequence of `length` that `rank` holds, ascending; the number of pieces must divide `length`."""
    piece, rest = divmod(length, PIECES[layout] * ranks)
    assert rest == 0, f"{length} positions do not divide into {PIECES[layout]} pieces for each of {ranks} ranks"
    return [first * piece + place for first in pieces_of(layout, ranks, rank) for place in range(piece)]


def block_of(layout: str, ranks: int, here: int, source: int, length: int) -> Block | None:
    """What the queries of rank `here` see of the keys of rank `source`, each holding `length` positions; None: nothing."""
    if here == source:
        return Block((0, length), (0, length), True)
    mine, theirs = pieces_of(layout, ranks, here), pieces_of(layout, ranks, source)
    seen = [(i, j) for i, query in enumerate(mine) for j, key in enumerate(theirs) if key < query]
    if not seen:
        return None
    (first, last), (lowest, highest) = ((min(places), max(places) + 1) for places in zip(*seen, strict=True))
    assert len(seen) == (last - first) * (highest - lowest), "what is seen is one rectangle"
    piece = length // PIECES[layout]
    return Block((first * piece, last * piece), (lowest * piece, highest * piece), False)


def scores_of(layout: str, ranks: int, rank: int, length: int) -> int:
    """Pairs of a query and a key it sees that `rank` computes, of a sequence of `length`: its share of the work."""
    local, total = length // ranks, 0
    for source in range(ranks):
        block = block_of(layout, ranks, rank, source, local)
        if block is not None:
            queries, keys = (end - start for start, end in block[:2])
            total += queries * (queries + 1) // 2 if block.causal else queries * keys
    return total
