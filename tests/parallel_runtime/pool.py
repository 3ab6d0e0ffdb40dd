"""A persistent pool of rank processes: started once a test session, each check is a function sent to all of them.

Starting four ranks for each check would take seconds a piece. The workers are forked from a fresh server process in which
no test has run, so neither threads nor fake modes of the test process reach them. After any failure the pool is spent
(the other ranks may hang in a collective): it is killed, and the next check gets a new one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepscope.parallel_runtime.comm_gloo import GlooComm, GroupCache, make_process_groups
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.recorder import NullRecorder, Recorder

COMM_TIMEOUT_S = 60.0

GROUPS: GroupCache = {}
"""Process groups of this worker, kept over the checks: making one is collective and slow."""


def gloo(mesh: Mesh, rank: int, recorder: Recorder | NullRecorder, streams: Iterable[str]) -> GlooComm | None:
    """The door of this worker; None for a worker that the mesh does not need (it still takes part in making the groups)."""
    streams = tuple(streams)
    if rank >= mesh.world_size:
        make_process_groups(mesh, rank, streams, "gloo", COMM_TIMEOUT_S, GROUPS)
        return None
    return GlooComm(mesh, rank, recorder, streams, COMM_TIMEOUT_S, GROUPS)


def _serve(rank: int, world: int, port: int, pipe: Connection, stacks: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=COMM_TIMEOUT_S))
    with open(stacks, "w") as file:
        while (job := pipe.recv()) is not None:
            function, arguments, seconds = job
            faulthandler.dump_traceback_later(seconds, file=file)
            try:
                pipe.send((True, function(rank, *arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


class CheckFailed(AssertionError):
    """A rank raised; the text is its traceback."""


class CheckHung(AssertionError):
    """Some rank did not answer in time; the text shows where each stood."""


class Pool:
    """`run(function, *arguments)` calls `function(rank, *arguments)` on every rank and returns the results by rank."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory = tempfile.TemporaryDirectory()

    def _stacks(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank{rank}.txt"

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stepscope.parallel_runtime.comm_gloo"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self._store.port, theirs, str(self._stacks(rank))), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Run one check (a module-level function) on all ranks. Raises CheckFailed or CheckHung; the pool then restarts."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments, timeout * 0.8))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = "\n".join(f"rank {r}:\n{self._stacks(r).read_text()}" for r in waiting.values())
                self.kill()
                raise CheckHung(f"ranks {sorted(waiting.values())} did not answer within {timeout} s\n{stacks}")
            for pipe in ready:
                results[waiting[pipe]] = self._answer(waiting[pipe])
        return [results[rank] for rank in range(self.world)]

    def _answer(self, rank: int) -> Any:
        try:
            passed, value = self._pipes[rank].recv()
        except EOFError:
            passed, value = False, "ended without a word"
        if not passed:
            self.kill()
            raise CheckFailed(f"rank {rank}: {value}")
        return value

    def kill(self) -> None:
        """End all workers at once."""
        for process in self._processes:
            process.kill()
        self._forget()

    def close(self) -> None:
        """End all workers in peace."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._forget()
        self._directory.cleanup()

    def _forget(self) -> None:
        for process in self._processes:
            process.join(10)
        self._processes, self._pipes = [], []
