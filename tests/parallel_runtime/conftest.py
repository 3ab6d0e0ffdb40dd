"""Pools of rank processes for all checks that communicate: four, and eight for what needs three axes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks, started on first use."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def eight() -> Iterator[Pool]:
    """Eight ranks, started on first use."""
    ranks = Pool(8)
    yield ranks
    ranks.close()
