"""One pool of four rank processes for all checks that communicate."""

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
