"""The launcher: how a failure of one rank ends all of them, and what is said about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepscope.parallel_runtime.comm import CommunicationError
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.failures import Failure, RankFailure
from stepscope.parallel_runtime.launch import World, threads_of, under_torchrun
from stepscope.tracer.recorder import CommSite

PROGRAMS = Path(__file__).with_name("launch_programs.py")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
LIMIT_S = 60  # a hang, not a slow machine


def start(program: str, ranks: int = 2, timeout_s: float = 30.0, method: str = "", **more: object) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(PROGRAMS), program, str(ranks), str(timeout_s), *([method] if method else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **more)  # type: ignore[call-overload]


def run(program: str, ranks: int = 2, timeout_s: float = 30.0, method: str = "") -> tuple[dict, list[int], str]:
    """(outcome, process ids of the ranks, all output)."""
    output, _ = start(program, ranks, timeout_s, method).communicate(timeout=LIMIT_S)
    lines = output.splitlines()
    return json.loads(lines[-1]), [int(line[4:]) for line in lines if line.startswith("pid ")], output


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(pids: list[int]) -> None:
    """All of them end within the five seconds that a run may take to end."""
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_alive(pid)] == []


@pytest.mark.parametrize("method", ["fork", "spawn"])  # CUDA needs spawn
def test_results_come_back_in_rank_order(method: str) -> None:
    outcome, pids, _ = run("works", ranks=3, method=method)
    said = ["I am 0", "I am 1", "I am 2"]
    assert outcome["results"] == [[rank, 3, 3, "prepared once", said] for rank in range(3)]
    assert_gone(pids)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raises", "rank 1 failed first: KeyError: 'the cause'"),
        ("is_killed", "rank 1 failed first: killed by SIGKILL"),
        ("vanishes", "rank 1 failed first: ended with exit status 7 without a word"),
    ],
)
def test_the_first_failure_is_named_and_all_ranks_end(program: str, message: str) -> None:
    outcome, pids, _ = run(program, ranks=3)
    assert outcome["first"] == 1
    assert outcome["failure"].startswith(message)
    assert outcome["failure"].endswith("all ranks have ended")
    assert len(pids) == 3
    assert_gone(pids)


def test_the_traceback_is_the_failing_rank_s() -> None:
    outcome, _, _ = run("raises")
    assert 'raise KeyError("the cause")' in outcome["failure"]
    assert "launch_programs.py" in outcome["failure"]


def test_a_collective_that_nobody_joins_is_named_with_who_stayed_away() -> None:
    outcome, _, _ = run("stays_away", ranks=3)
    first = outcome["failure"].splitlines()[0]
    assert first.startswith("all_reduce number 1 on mesh_dp_0 failed on rank ")
    assert "rank 1 never came to it" in first


def test_a_message_that_is_never_sent_is_named_with_its_sender() -> None:
    outcome, _, _ = run("never_sends")
    first = outcome["failure"].splitlines()[0]
    assert first.startswith("message number 0 on mesh_pp.forward_0, 0 to 1 failed on rank 1: rank 0 never came to it")


def test_an_ended_rank_still_writes_down_what_it_has() -> None:
    outcome, _, output = run("writes_down")
    assert outcome["first"] == 1
    assert "rank 0 wrote down what it had" in output


def read_until_ready(process: subprocess.Popen, ranks: int) -> list[int]:
    """Process ids of the ranks, once all are running."""
    assert process.stdout is not None
    pids, ready = [], 0
    while ready < ranks:
        line = process.stdout.readline()
        assert line, "the launcher ended early"
        ready += line.startswith("ready")
        if line.startswith("pid "):
            pids.append(int(line[4:]))
    return pids


def test_ctrl_c_ends_all_ranks() -> None:
    process = start("sleeps", start_new_session=True, stderr=subprocess.DEVNULL)
    pids = read_until_ready(process, 2)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole foreground group
    assert process.wait(LIMIT_S) != 0
    assert_gone(pids)


def test_ranks_end_with_a_launcher_that_was_killed() -> None:
    process = start("sleeps", ranks=3)
    pids = read_until_ready(process, 3)
    process.kill()
    process.wait(LIMIT_S)
    assert_gone(pids)


def test_under_torchrun_no_rank_is_launched() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(PROGRAMS),
        "works",
        "2",
        "30",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    # every rank is a whole program there, and prints its own result
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = ["I am 0", "I am 1"]
    assert sorted(o["results"] for o in outcomes) == [[[rank, 2, 1, "prepared once", said]] for rank in range(2)]


# -- which failure is the cause ----------------------------------------------------------------------------------------

SITE = CommSite("all_reduce", "dp", "dp", "mesh_dp_0", (0, 1, 2), "dp")


def lost(rank: int, seq: int = 4) -> Failure:
    return Failure.of(rank, CommunicationError(rank, SITE, seq, "Connection closed by peer"))


def test_an_echo_is_never_the_cause() -> None:
    echo, cause = lost(0), Failure.of(2, ValueError("boom"))
    failure = RankFailure([echo, cause])
    assert failure.first is cause
    assert "then rank 0: all_reduce number 4 on mesh_dp_0: Connection closed by peer" in str(failure)


def test_a_killed_rank_comes_before_what_its_death_made_others_raise() -> None:
    killed = Failure(1, 0, "killed by SIGKILL")
    assert RankFailure([Failure.of(0, RuntimeError("who knows")), killed, lost(2)]).first is killed


def test_only_ranks_that_came_to_the_same_operation_count_as_there() -> None:
    text = str(RankFailure([lost(0), lost(1, seq=3)]))
    assert "all_reduce number 4 on mesh_dp_0 failed on rank 0: rank 1, 2 never came to it" in text


def test_all_there_and_still_failed() -> None:
    text = str(RankFailure([lost(rank) for rank in range(3)]))
    assert text.startswith("all_reduce number 4 on mesh_dp_0 failed on rank 0: Connection closed by peer")


def test_both_ends_of_a_message_are_one_thing() -> None:
    send = SITE._replace(collective="send", group="mesh_pp.forward_0", ranks=(0, 1, 2), peer=1)
    receive = send._replace(collective="receive", peer=0)
    ends = [Failure.of(r, CommunicationError(r, site, 5, "timed out")) for r, site in ((0, send), (1, receive))]
    assert {end.name for end in ends} == {"message number 5 on mesh_pp.forward_0, 0 to 1"}
    assert {end.partners for end in ends} == {(0, 1)}


def test_threads_are_shared_among_the_ranks_of_a_host() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_of(1) == cores
    assert threads_of(10_000) == 1


def test_a_gpu_for_each_rank_or_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert Device.named("auto", ranks_here=2).kind == "cuda"
    assert Device.named("auto", ranks_here=3).kind == "cpu"
    assert Device.named("cuda", 1, ranks_here=2) == Device("cuda", 1)
    with pytest.raises(ValueError, match="4 ranks need a GPU each, but there are 2: take 2 ranks, or cpu"):
        Device.named("cuda", ranks_here=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="no CUDA device is available here"):
        Device.named("cuda")
    with pytest.raises(ValueError, match="device 'tpu' is unknown: take one of cpu, cuda, dry or auto"):
        Device.named("tpu")
    assert [Device.named(kind).backend for kind in ("cpu", "dry")] == ["gloo", "none"]


def test_ranks_meet_when_the_last_has_come() -> None:
    """Two come first and wait; nobody goes on before the third."""
    store, gone = dist.HashStore(), []
    worlds = [World(rank, 3, rank, Device.named("cpu"), store) for rank in range(3)]

    def come(world: World) -> None:
        world.meet("here")
        gone.append(world.rank)

    early = [threading.Thread(target=come, args=(world,)) for world in worlds[:2]]
    for thread in early:
        thread.start()
    while store.add("here", 0) < 2:
        pass
    assert not gone and not store.check(["here/all"])
    come(worlds[2])
    for thread in early:
        thread.join(30)
    assert sorted(gone) == [0, 1, 2]


def test_streams_have_queues_of_their_own_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads it when it starts: it is set before the first question to torch.cuda, and never against the user."""
    seen: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen.append(os.environ.get(QUEUES)) or 4)
    monkeypatch.setenv(QUEUES, "")  # so that what is set in its place does not outlive the test
    monkeypatch.delenv(QUEUES)
    assert Device.named("cuda", 1, 4).index == 1
    monkeypatch.setenv(QUEUES, "8")
    assert Device.named("auto").kind == "cuda"
    assert seen == ["32", "8"]


def test_torchrun_is_recognised_by_all_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert not under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert under_torchrun()
