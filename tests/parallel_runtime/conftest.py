"""Pools of rank processes for all checks that communicate: four, and eight for what needs three axes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pool import Pool

# Threads of small tensors wait for each other in busy loops: on full cores that is twenty times the CPU time.
torch.set_num_threads(1)


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
