"""One function over ranks: the same order, the same errors, on every engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trace_files import write_run

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


def dies(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_a_worker_that_is_killed_ends_the_read_in_words() -> None:
    with pytest.raises(StepscopeError, match=r"was killed.*try --engine serial"):
        map_ranks(dies, [0, 1, 2], "processes", workers=1)


def sleeps(place: str) -> int:
    Path(place).touch()
    time.sleep(60)
    return 0


INTERRUPTED = """
import sys
from test_engine import sleeps
from stepscope.analysis.engine import map_ranks
if __name__ == "__main__":
    map_ranks(sleeps, sys.argv[1:], "processes", workers=2)
"""


def started(directory: Path) -> subprocess.Popen[str]:
    """A command whose two workers are at work."""
    program = directory / "program.py"
    program.write_text(INTERRUPTED)
    marks = [directory / "a", directory / "b"]
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, str(program), *map(str, marks)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not all(mark.exists() for mark in marks):
        assert process.poll() is None
        time.sleep(0.05)
    return process


def test_ctrl_c_ends_the_workers_at_once_and_silently(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to all processes of the group."""
    process = started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert said.count("Traceback") == 1 and said.strip().endswith("KeyboardInterrupt")  # the command's own


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command_that_started_them(tmp_path: Path, how: signal.Signals) -> None:
    process = started(tmp_path)
    process.send_signal(how)
    process.communicate(timeout=30)  # until none of them holds its standard error
    assert process.returncode == -how


SCRIPT = """
import sys
print("once", file=sys.stderr)
import stepscope.analysis.ingest as ingest
run = ingest.open_run(sys.argv[1], engine="processes", workers=2)
print(run.ranks)
"""


def test_a_script_without_a_guard_is_not_run_again_in_the_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(write_run(tmp_path / "run"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[0, 1]\n" and done.stderr == "once\n"


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="serial, processes"):
        map_ranks(square, [1], "magic")
