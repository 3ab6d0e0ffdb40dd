"""A run of several hosts: two launchers with node ranks of their own on this one, each with its own directory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.__main__ import status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ingest.collect import collect
from stepscope.analysis.ledger.decompose import decompose
from stepscope.exit_codes import ExitCode
from stepscope.parallel_runtime.launch import ranks_here
from stepscope.parallel_runtime.recording import describe_here, parse_ranks, shorten
from stepscope.tracer.schema import RUN_FILE, RunMeta, rank_file
from stepscope.tracer.writer import write_meta

LIMIT_S = 180.0
STEPS = 3

LAUNCHER = """
import os, sys
import torch.distributed
from stepscope.__main__ import status_of
import stepscope.parallel_runtime.train

node, arguments = int(sys.argv[1]), sys.argv[2:]
ranks = []
for local in range(2):
    if not (process := os.fork()):
        place = {"RANK": 2 * node + local, "LOCAL_RANK": local, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in place.items()})
        os._exit(status_of(arguments))
    ranks.append(process)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks))
"""
"""What torchrun does on one node, with torch imported once for both ranks."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run directories of two nodes with two ranks each; ranks 0, 1 and 3 recorded."""
    root, port = tmp_path_factory.mktemp("nodes"), free_port()
    launchers = []
    for node in range(2):
        home = root / f"node{node}"
        home.mkdir()
        command = [sys.executable, "-c", LAUNCHER, str(node), "run"]
        command += f"--dp 2 --pp 2 --microbatches 2 --steps {STEPS} --layers 2 --hidden 32 --seq 16".split()
        command += ["--out", "runs/a", "--record-ranks", "0-1,3", "--device", "cpu", "-q"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        launchers.append(subprocess.Popen(command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for launcher in launchers:
            _, said = launcher.communicate(timeout=LIMIT_S)
            assert launcher.returncode == 0, said
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    return root / "node0/runs/a", root / "node1/runs/a"


def test_every_host_has_its_ranks_and_the_description_of_the_run(nodes: tuple[Path, Path]) -> None:
    assert [sorted(file.name for file in node.iterdir()) for node in nodes] == [
        [rank_file(0), rank_file(1), RUN_FILE],
        [rank_file(3), RUN_FILE],
    ]
    first, second = (RunMeta.from_json((node / RUN_FILE).read_text()) for node in nodes)
    assert first.run_id == second.run_id and first.complete and not second.complete
    assert first.recorder["ranks"] == [0, 1, 3] and first.recorder["level"] == "full"


def test_gathered_it_is_one_whole_run(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "whole"
    assert status_of(["gather", str(nodes[1]), str(nodes[0]), "--out", str(out)]) == ExitCode.OK
    assert "3 ranks of 4" in capsys.readouterr().out
    for rank, node in ((0, 0), (1, 0), (3, 1)):
        assert (out / rank_file(rank)).read_bytes() == (nodes[node] / rank_file(rank)).read_bytes()
    run = open_run(out)
    assert run.meta.complete and list(run.ranks) == [0, 1, 3]
    left_out = [item for item in run.health.items if item.code == "unrecorded_rank"]
    assert [item.rank for item in left_out] == [2] and "as was asked for" in left_out[0].text
    assert not {item.code for item in run.health.items} & {"missing_rank", "incomplete_run", "broken_rank"}
    ledger = decompose(run).ledger
    assert sorted(zip(ledger["rank"], ledger["step"], strict=True)) == [(r, s) for r in (0, 1, 3) for s in range(STEPS)]
    assert status_of(["gather", str(nodes[0]), "--out", str(out)]) == ExitCode.FAILED
    assert "never overwritten" in capsys.readouterr().err


def test_a_host_that_was_forgotten_is_noticed(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "half"
    assert status_of(["gather", str(nodes[0]), "--out", str(out)]) == ExitCode.TOUCHED
    assert "missing: rank 3" in capsys.readouterr().err
    assert {"missing_rank", "unrecorded_rank"} <= {item.code for item in open_run(out).health.items}


def test_what_does_not_belong_together_is_refused_before_anything_is_copied(
    nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(StepscopeError, match=r"has no run\.json"):
        collect([nodes[0], tmp_path])
    twice = shutil.copytree(nodes[0], tmp_path / "twice")
    with pytest.raises(StepscopeError, match="are both rank 0: leave one of them out"):
        collect([nodes[0], twice])
    meta = RunMeta.from_json((twice / RUN_FILE).read_text())
    write_meta(twice, replace(meta, run_id="another"))
    with pytest.raises(StepscopeError, match="are of different runs"):
        collect([nodes[0], twice])
    write_meta(twice, replace(meta, world_size=1))
    with pytest.raises(StepscopeError, match="is rank 1 of a run of 1 rank:"):
        collect([twice])


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_ranks_are_chosen_as_a_person_writes_them() -> None:
    assert parse_ranks("0-7,64", 65) == (*range(8), 64)
    assert parse_ranks(" 3, 1-2 ,2", 4) == (1, 2, 3)
    assert shorten((0, 1, 2, 5, 64, 65)) == "0-2,5,64-65"
    for text, message in (
        ("", "neither a rank nor a range"),
        ("0-", "neither a rank nor a range"),
        ("-1", "neither a rank nor a range"),
        ("3-1", "runs backwards: take 1-3"),
        ("0-4", "rank 4 is not among the 4 ranks: take 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_ranks(text, 4)


def test_a_directory_of_another_run_on_some_host_is_not_touched(tmp_path: Path) -> None:
    mine, other = RunMeta("a", "mine", world_size=2), RunMeta("b", "other", world_size=2)
    describe_here(tmp_path / "new", mine)
    describe_here(tmp_path / "new", replace(mine, complete=True))  # shared with rank 0: its word stands
    assert RunMeta.from_json((tmp_path / "new" / RUN_FILE).read_text()) == mine
    with pytest.raises(ValueError, match=r"holds another run \(mine\).*new on every host"):
        describe_here(tmp_path / "new", other)


def test_the_ranks_of_this_host_are_those_that_its_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_here(16) == 16
    for name, value in {"RANK": "8", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_here(16) == 8
