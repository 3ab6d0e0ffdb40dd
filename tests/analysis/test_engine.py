"""One function over ranks: the same order, the same errors, on every engine."""

from __future__ import annotations

import pytest

from stepscope.analysis.engine import ENGINES, map_ranks
from stepscope.analysis.errors import StepscopeError


def square(rank: int) -> int:
    return rank * rank


def faulty(rank: int) -> int:
    if rank == 2:
        raise KeyError("no such thing")
    if rank == 5:
        raise StepscopeError("rank 5 says so itself")
    return rank


@pytest.mark.parametrize("engine", ENGINES)
def test_order_is_kept_and_completion_is_told(engine: str) -> None:
    told: list[tuple[int, int]] = []
    assert map_ranks(square, [3, 1, 2], engine, workers=2, done=lambda rank, value: told.append((rank, value))) == [
        9,
        1,
        4,
    ]
    assert sorted(told) == [(1, 1), (2, 4), (3, 9)]
    assert map_ranks(square, [], engine) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_names_its_rank(engine: str) -> None:
    with pytest.raises(RuntimeError, match="rank 2: KeyError"):
        map_ranks(faulty, [0, 1, 2], engine, workers=1)
    with pytest.raises(StepscopeError, match="rank 5 says so itself"):
        map_ranks(faulty, [4, 5], engine, workers=1)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="serial, processes"):
        map_ranks(square, [1], "magic")
