"""What all tests share: where the real traces are. No other file names that place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

CORPUS = Path(os.environ.get("STEPSCOPE_CORPUS") or Path(__file__).resolve().parents[2] / "shared" / "traces")


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real traces; tests that need it are skipped, saying so, where it is absent."""
    if not CORPUS.is_dir():
        pytest.skip(f"real traces are not here: {CORPUS} (set STEPSCOPE_CORPUS to their folder)")
    return CORPUS


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stores of foreign traces go to a cache directory of this test, never to the user's."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


settings.register_profile("stepscope", deadline=None)  # a busy machine is slow, not wrong: no test asserts a time
settings.load_profile("stepscope")
