"""The compiled scanner as a file: kept whole, found again, never believed when it is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.analysis.ingest.scanner import machine


def test_what_is_kept_is_found_again_and_older_code_goes(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "scanner-0123.o"
    assert machine._kept(file) is None
    assert machine._keep(file, b"code") and machine._kept(file) == b"code"
    newer = file.with_name("scanner-4567.o")
    assert machine._keep(newer, b"more code")
    assert [entry.name for entry in file.parent.iterdir()] == [newer.name]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-3] + b"x" + data[-2:]]
)
def test_damaged_code_is_none(tmp_path: Path, damage: object) -> None:
    file = tmp_path / "scanner-0123.o"
    machine._keep(file, b"some machine code")
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    assert machine._kept(file) is None


def test_where_nothing_may_be_written_the_next_place_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no directory").write_text("")
    assert not machine._keep(tmp_path / "no directory" / "scanner-0123.o", b"code")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside, cache = machine._places()
    assert beside.name == "__pycache__" and cache == tmp_path / "stepscope"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "told"))
    assert machine._places() == [tmp_path / "told"]


@pytest.mark.parametrize("program", ["", "false", "no such program", "echo"])
def test_without_another_process_it_is_compiled_in_this_one(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program)
    assert machine._compiled_apart() is None


@pytest.mark.slow
def test_the_first_read_ever_compiles_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; from stepscope.analysis.ingest.scanner import machine; machine.entries();"
        "print([name for name in ('numba', 'scipy') if name in sys.modules])"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and not done.stderr
    [kept] = tmp_path.iterdir()
    assert kept.name.startswith("scanner-") and kept.suffix == ".o"


def test_once_compiled_it_is_loaded_without_numba() -> None:
    machine.entries()
    code = (
        "import sys\n"
        "from stepscope.analysis.ingest.reading import BytesInMemory, read_trace\n"
        'raw = read_trace(BytesInMemory(b\'[{"ph": "X", "ts": 1.25, "dur": 2}]\'))\n'
        "print(raw.columns['ts'].tolist(), [name for name in ('numba', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[1250] []\n"
