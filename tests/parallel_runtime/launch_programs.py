"""Programs that test_launch.py starts in a process of its own: `python launch_programs.py PROGRAM RANKS TIMEOUT_S [START]`.

Prints one JSON object: the results, or the failure's text. Rank processes print their process ids first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from stepscope.parallel_runtime.comm import PIPELINE_STREAMS
from stepscope.parallel_runtime.comm_gloo import GlooComm
from stepscope.parallel_runtime.failures import RankFailure
from stepscope.parallel_runtime.launch import World, launch
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.recorder import NullRecorder


def say(text: str) -> None:
    """One line in one write: lines of several processes never mix."""
    os.write(1, f"{text}\n".encode())


def _together(world: World) -> int:
    """All ranks meet once; so all have started. The sum of the ranks."""
    say(f"pid {os.getpid()}")
    total = torch.tensor([world.rank])
    dist.all_reduce(total)
    return int(total)


def works(world: World, prepared: str) -> list:
    total = _together(world)
    said = world.exchange("greeting", f"I am {world.rank}")
    return [world.rank, world.size, total, prepared, said]


def raises(world: World, prepared: str) -> None:
    _together(world)
    if world.rank == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.zeros(1))


def is_killed(world: World, prepared: str) -> None:
    _together(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def vanishes(world: World, prepared: str) -> None:
    _together(world)
    if world.rank == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def stays_away(world: World, prepared: str) -> None:
    """Rank 1 never joins the second all-reduce: the others run into the timeout."""
    comm = GlooComm(Mesh(dp=world.size), world.rank, NullRecorder(), ("dp",), timeout_s=1.0)
    comm.all_reduce(torch.zeros(1), "dp", strategy="dp").wait()
    if world.rank == 1:
        time.sleep(60)
    comm.all_reduce(torch.zeros(1), "dp", strategy="dp").wait()


def never_sends(world: World, prepared: str) -> None:
    comm = GlooComm(Mesh(pp=world.size), world.rank, NullRecorder(), PIPELINE_STREAMS, timeout_s=1.0)
    if world.rank == 0:
        time.sleep(60)
    comm.receive(torch.zeros(1), "pp", 0, strategy="pp", stream="pp.forward.receive").wait()


def sleeps(world: World, prepared: str) -> None:
    _together(world)
    say("ready")
    time.sleep(60)


def writes_down(world: World, prepared: str) -> None:
    """Rank 0 is ended because rank 1 failed, and still gets to its `finally`."""
    _together(world)
    if world.rank == 1:
        raise ValueError("the cause")
    try:
        time.sleep(60)
    finally:
        say("rank 0 wrote down what it had")


def main() -> None:
    program, ranks, timeout_s = globals()[sys.argv[1]], int(sys.argv[2]), float(sys.argv[3])
    start = sys.argv[4] if len(sys.argv) > 4 else None
    try:
        results = launch(program, lambda: "prepared once", world_size=ranks, timeout_s=timeout_s, start=start)
        outcome = {"results": results}
    except RankFailure as failure:
        outcome = {"failure": str(failure), "first": failure.first.rank}
    say(json.dumps(outcome))


if __name__ == "__main__":
    main()
