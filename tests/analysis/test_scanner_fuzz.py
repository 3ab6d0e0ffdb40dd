"""Real traces, damaged: a few hundred cases each time, minutes of them in `make bench` (see fuzz_scanner.py)."""

from __future__ import annotations

from pathlib import Path

import fuzz_scanner
import pytest


def traces(corpus: Path) -> list[Path]:
    return sorted(corpus.glob("kineto*/*.json.gz"))


def test_a_few_hundred_damaged_stretches(corpus: Path) -> None:
    small = [path for path in traces(corpus) if path.stat().st_size < 100_000]
    assert len(small) >= 3
    wrong = {seed: fuzz_scanner.one(small, seed)[1] for seed in range(500)}
    assert {seed: what for seed, what in wrong.items() if what} == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minutes_of_damaged_stretches(corpus: Path) -> None:
    counts, failures = fuzz_scanner.run(traces(corpus), seconds=120)
    assert failures == {} and sum(counts.values()) > 5000
