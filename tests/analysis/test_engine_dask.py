"""Ranks on a Dask cluster: the same result as in this process, also when a worker dies in the middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_files import write_run

from stepscope.__main__ import status_of
from stepscope.analysis.engine import map_ranks
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import Progress, build, open_run
from stepscope.analysis.ledger.decompose import decompose

dask = pytest.importorskip("dask", reason="the extra `cluster` is not installed")
distributed = pytest.importorskip("distributed", reason="the extra `cluster` is not installed")

RANKS = tuple(range(64))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two workers of this machine, a process each, that are started anew when they die."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=0, host="127.0.0.1"
    ) as local:
        yield local


def square(rank: int) -> int:
    return rank * rank


def dies_once(place: str) -> int:
    """Kill the process that runs this, the first time."""
    mark = Path(place)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def dies_always(rank: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return rank


def refuses(rank: int) -> int:
    raise StepscopeError(f"rank {rank} says so itself")


def fails(rank: int) -> int:
    return 1 // rank


def test_order_errors_and_completion(cluster: Any) -> None:
    engine = f"dask@{cluster.scheduler_address}"
    told: list[tuple[int, int]] = []
    assert map_ranks(square, [3, 1, 2], engine, done=lambda rank, value: told.append((rank, value))) == [9, 1, 4]
    assert sorted(told) == [(1, 1), (2, 4), (3, 9)]
    assert map_ranks(square, [], engine) == []
    with pytest.raises(StepscopeError, match="rank 5 says so itself"):
        map_ranks(refuses, [5], engine)
    with pytest.raises(RuntimeError, match="rank 0: ZeroDivisionError"):
        map_ranks(fails, [1, 0], engine)


def test_a_task_whose_worker_died_runs_again(cluster: Any, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    assert map_ranks(dies_once, [str(mark)], f"dask@{cluster.scheduler_address}") == [7]
    assert mark.exists()


def test_a_task_that_kills_every_worker_is_told_in_words() -> None:
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1") as local,
        pytest.raises(StepscopeError, match="rank 4: every worker that read it died"),
    ):
        map_ranks(dies_always, [4], f"dask@{local.scheduler_address}")


def test_a_worker_killed_in_the_middle_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", RANKS, world_size=len(RANKS))
    serial = open_run(path, engine="serial")
    ledger = decompose(serial).ledger
    columns = {rank: dict(serial.columns(rank)) for rank in RANKS}
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        victims = sorted(client.run(os.getpid).values())[:1]

    def kill(state: Progress) -> None:
        if state.files_done >= 3 and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    run = open_run(path, kill, refresh=True, engine=f"dask@{cluster.scheduler_address}")
    assert victims == [], "the worker was killed"
    assert run.ranks == list(RANKS) and run.health.items == serial.health.items
    for rank in RANKS:
        for name, values in run.columns(rank).items():
            np.testing.assert_array_equal(values, columns[rank][name], err_msg=name)
    assert decompose(run).ledger.equals(ledger)
    [store] = path.glob(".stepscope*")
    assert sorted(file.name.split(".", 1)[1] for file in store.glob("rank_00003.*")) == [
        "counters.parquet",
        "events.parquet",
        "strings.parquet",
    ], "nothing half written is left"


def test_only_summaries_come_back(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", count=500)
    came: list[str] = []

    def spied(fn: Any, items: Any, engine: str, workers: Any, done: Any) -> list[Any]:
        results = map_ranks(fn, items, engine, workers, done)
        came.extend(json.dumps(one) for one in results)
        return results

    monkeypatch.setattr(build, "map_ranks", spied)
    run = open_run(path, engine=f"dask@{cluster.scheduler_address}")
    columns = sum(values.nbytes for values in run.columns(0).values())
    assert len(came) == 2 and max(map(len, came)) < 4000 < columns / 50


def test_the_command_takes_a_scheduler(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run"))
    words = ["doctor", run, "--engine", "dask", "--scheduler", cluster.scheduler_address]
    assert status_of(words) == 0
    assert capsys.readouterr().out.startswith("✓ health ok")
    assert status_of(words[:-2]) == 2
    assert "--scheduler" in capsys.readouterr().err
    assert status_of(["doctor", run, "--engine", "magic"]) == 2


def test_no_scheduler_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.analysis.engine.CONNECT_S", 1)
    with pytest.raises(StepscopeError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        map_ranks(square, [1], "dask@tcp://127.0.0.1:9")
