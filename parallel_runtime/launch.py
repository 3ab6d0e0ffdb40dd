"""Start the ranks, watch them, end them all when one fails, and name the failure that came first.

On one host `launch` is the launcher: it hosts the store on a port that the system picks, so that no two runs can meet, and
forks the ranks after torch is imported (CPU: eight ranks in a second) or spawns them (CUDA does not survive a fork). Under
torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it only joins.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.failures import Failure, RankFailure

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = ("lo", "lo0")

GRACE_S = (0.0, 0.3, 1.0)
"""How long the launcher waits for a worse word after a failure of cause 0, 1, 2: what a rank raises, and above all a
communication that fails, is often the echo of another rank's end."""
TERMINATE_S = 2.0
"""After SIGTERM a rank has this long to write down its complete steps; then it is killed."""

REAP_S = 1.0
"""A process whose pipe has closed ends within this time."""


@dataclass(frozen=True)
class World:
    """What one rank knows of the others before it communicates: its place, and a store for a few words at start and end."""

    rank: int
    size: int
    local_rank: int
    device: Device
    store: dist.Store

    def exchange(self, key: str, text: str) -> list[str]:
        """Every rank's text, in rank order; returns when all have spoken. `key` must be new."""
        self.store.set(f"{key}/{self.rank}", text)
        return [self.store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    def meet(self, key: str) -> None:
        """Return when all ranks have come here; `key` must be new. One counter, so that thousands may."""
        if self.store.add(key, 1) == self.size:
            self.store.set(f"{key}/all", "")
        self.store.wait([f"{key}/all"])

    def messages(self) -> tuple[Callable[[int, int], None], Callable[[int], int]]:
        """send(rank, integer) and receive(rank), to compare clocks of hosts. All ranks call it together."""
        group = None if self.device.backend == "gloo" else dist.new_group(backend="gloo")

        def send(rank: int, value: int) -> None:
            dist.send(torch.tensor([value]), rank, group)

        def receive(rank: int) -> int:
            value = torch.zeros(1, dtype=torch.int64)
            dist.recv(value, rank, group)
            return int(value)

        return send, receive


Program = Callable[..., Any]
"""`program(world, prepared, *arguments)`: the whole life of one rank."""


def under_torchrun() -> bool:
    """Whether another launcher has already started this process as one rank."""
    return all(name in os.environ for name in TORCHRUN)


def ranks_here(world_size: int) -> int:
    """Ranks of this host: all, unless another launcher says how many of them it started here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if under_torchrun() else world_size


def launch(
    program: Program,
    prepare: Callable[[], str],
    arguments: tuple[Any, ...] = (),
    *,
    world_size: int,
    device: str = "cpu",
    timeout_s: float = 300.0,
    start: str | None = None,
) -> list[Any]:
    """Run `program(world, prepared, *arguments)` on every rank; results in rank order (under torchrun: this rank's only).

    `prepare` runs once for the whole run, before any rank starts its program, and every rank gets its text. `start` is
    multiprocessing's start method, by default the quickest that is safe for the device.
    Raises RankFailure when a rank fails, within 5 s of it; ValueError when torchrun started another number of ranks.
    """
    if under_torchrun():
        return [_joined(program, prepare, arguments, world_size, device, timeout_s)]
    Device.named(device, ranks_here=world_size)  # refuse a missing device before anything starts
    start = start or ("fork" if device == "cpu" and sys.platform == "linux" else "spawn")
    return _Launcher(program, (prepare(), *arguments), world_size, device, timeout_s, start).run()


# -- one rank ----------------------------------------------------------------------------------------------------------


def threads_of(ranks_here: int) -> int:
    """Compute threads of each of `ranks_here` ranks that share this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_here)


def _start(world: World, ranks_here: int, timeout_s: float) -> None:
    """Make the default process group of this rank's backend."""
    torch.set_num_threads(threads_of(ranks_here) if world.device.kind == "cpu" else 1)
    if world.device.kind == "cuda":
        torch.cuda.set_device(world.device.index)
    if ranks_here == world.size and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = {name for _, name in socket.if_nameindex()}
        local = next((name for name in LOOPBACK if name in names), None)
        if local:  # one host: a host name that does not resolve must not matter
            os.environ["GLOO_SOCKET_IFNAME"] = local
    dist.init_process_group(
        world.device.backend,
        store=dist.PrefixStore("process_group", world.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )


def _joined(
    program: Program,
    prepare: Callable[[], str],
    arguments: tuple[Any, ...],
    world_size: int,
    device: str,
    timeout_s: float,
) -> Any:
    """Run as one rank that somebody else started."""
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise ValueError(f"{started} ranks were started, but the layout has {world_size}: start {world_size}")
    store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    world = World(rank, started, local_rank, Device.named(device, local_rank, ranks_here), store)
    _start(world, ranks_here, timeout_s)
    if rank == 0:
        store.set("prepared", prepare())
    try:
        return program(world, store.get("prepared").decode(), *arguments)
    finally:
        dist.destroy_process_group()


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)  # lets `finally` write down what is complete


def _end_with_launcher() -> None:
    """A rank must not outlive its launcher, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def _rank_main(
    rank: int,
    world_size: int,
    device: str,
    timeout_s: float,
    pipe: Connection,
    program: Program,
    arguments: tuple[Any, ...],
) -> None:
    """A rank process of our launcher: reports its result, or its failure, through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends us
    signal.signal(signal.SIGTERM, _terminated)
    _end_with_launcher()
    try:
        port = pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
        world = World(rank, world_size, rank, Device.named(device, rank), store)
        _start(world, world_size, timeout_s)
        result = program(world, *arguments)
        dist.destroy_process_group()
    except Exception as error:
        sys.stdout.flush()
        pipe.send(Failure.of(rank, error))
        sys.exit(1)
    pipe.send((result,))


# -- the launcher ------------------------------------------------------------------------------------------------------


class _Launcher:
    """The ranks of one run on this host."""

    def __init__(
        self,
        program: Program,
        arguments: tuple[Any, ...],
        world_size: int,
        device: str,
        timeout_s: float,
        start: str,
    ) -> None:
        context: Any = multiprocessing.get_context(start)
        self.timeout_s = timeout_s
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, device, timeout_s, theirs, program, arguments),
                name=f"rank {rank}",
                daemon=True,
            )
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self) -> list[Any]:
        """Start, watch, end. The store's threads start after the ranks: nothing is forked with a thread running."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for process in self.processes:
                process.start()
            store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
            )
            for pipe in self.pipes:
                pipe.send(store.port)
            self._watch()
        finally:
            self._end()
        if self.failures:
            raise RankFailure(list(self.failures.values()))
        return [self.results[rank] for rank in range(len(self.processes))]

    def _watch(self) -> None:
        """Until all ranks are done, or one has failed and the others had the time to say whether it was only an echo."""
        while self._running():
            deadlines = [failure.at_ns / 1e9 + GRACE_S[failure.cause] for failure in self.failures.values()]
            left = min(deadlines) - time.monotonic() if deadlines else None
            if left is not None and left <= 0.0:
                return
            self._listen(left)

    def _running(self) -> list[int]:
        return [r for r in range(len(self.processes)) if r not in self.results and r not in self.failures]

    def _listen(self, seconds: float | None) -> None:
        """Take in what the ranks say, or that they are gone, for at most this long."""
        running = self._running()
        ready = set(
            wait([*(self.pipes[r] for r in running), *(self.processes[r].sentinel for r in running)], timeout=seconds)
        )
        for rank in running:
            if self.pipes[rank] in ready or self.processes[rank].sentinel in ready:
                self._hear(rank)

    def _hear(self, rank: int) -> None:
        """A rank's last word; one that ended without a word was killed or vanished."""
        try:
            word = self.pipes[rank].recv() if self.pipes[rank].poll(0) else None
        except (EOFError, ConnectionError):
            word = None
        if isinstance(word, Failure):
            self.failures[rank] = word
        elif word is not None:
            (self.results[rank],) = word
        else:
            self.processes[rank].join(REAP_S)
            self.failures[rank] = Failure(rank, 0, _ending(self.processes[rank].exitcode))

    def _end(self) -> None:
        """End every rank that still runs: politely, then by force."""
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            if process.exitcode is None and self._is_unfinished(process):
                process.terminate()
        limit = time.monotonic() + TERMINATE_S
        for process in started:
            process.join(max(0.0, limit - time.monotonic()))
        for process in started:
            if process.exitcode is None:
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _is_unfinished(self, process: Any) -> bool:
        return self.processes.index(process) not in self.results


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code} without a word"
