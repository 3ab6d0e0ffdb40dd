"""One function over many ranks: in this process, in several, or on a Dask cluster.

This is the only place that knows how work is spread, so that another engine needs no change anywhere else. The function
and what it returns must be picklable for all but `serial`: pass paths and return summaries, never whole columns. It may
run twice for one rank (a worker that died, or seemed to): what it writes must be the same, and whole or absent.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.analysis.errors import StepscopeError

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.process import BaseProcess

Item = TypeVar("Item")
Result = TypeVar("Result")

ONE_BLAS_THREAD = "OPENBLAS_NUM_THREADS"
"""Set to 1, numpy loads without threads."""

ENGINES = ("serial", "processes")
DASK = "dask"
"""`dask@ADDRESS`: on the workers of the Dask scheduler at ADDRESS (`tcp://host:8786`)."""

CONNECT_S = 20
"""How long to look for a scheduler."""


def map_ranks(
    fn: Callable[[Item], Result],
    ranks: Iterable[Item],
    engine: str = "serial",
    workers: int | None = None,
    done: Callable[[Item, Result], None] | None = None,
) -> list[Result]:
    """`[fn(rank) for rank in ranks]`, in that order, on the chosen engine.

    `done(rank, result)` is called here as soon as a rank is finished (progress), in order of completion. The first
    error ends the whole: a StepscopeError passes through, any other becomes a RuntimeError that names its rank.
    `workers` defaults to the number of usable processors; a Dask cluster has those that it has.
    """
    items = list(ranks)
    if engine == "serial":
        results = []
        for item in items:
            try:
                results.append(fn(item))
            except StepscopeError:
                raise
            except Exception as error:
                raise _named(error, item) from error
            if done is not None:
                done(item, results[-1])
        return results
    if engine == "processes":
        return _in_processes(fn, items, workers or usable_processors(), done)
    name, _, address = engine.partition("@")
    if name == DASK and address:
        return _on_dask(fn, items, address, done)
    raise ValueError(f"unknown engine {engine!r}: choose one of {', '.join(ENGINES)}, or {DASK}@tcp://host:port")


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(
    fn: Callable[[Item], Result],
    items: list[Item],
    workers: int,
    done: Callable[[Item, Result], None] | None,
) -> list[Result]:
    import multiprocessing  # here: opening a store needs neither
    from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    # spawned, not forked: a fork would copy the locks of other threads (pyarrow, a dashboard) in whatever state they are
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, max(1, len(items))), mp_context=context, initializer=_begin_worker)
    futures: dict[Future[Result], Item] = {}
    try:
        with _interrupts_later(), _main_left_out(fn), _one_blas_thread():
            futures = {pool.submit(fn, item): item for item in items}
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, return_when=FIRST_EXCEPTION if done is None else "FIRST_COMPLETED")
            for future in finished:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise StepscopeError(
                        "a process that read traces was killed, for want of memory perhaps: try --engine serial"
                    ) from error
                if isinstance(error, StepscopeError):
                    raise error
                if error is not None:
                    raise _named(error, futures[future]) from error
                if done is not None:
                    done(futures[future], future.result())
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _main_left_out(fn: Callable[..., object]) -> Iterator[None]:
    """Processes that are started in this block do not run the user's script again, as spawned ones do: a script or a
    notebook that opens a large run would start it anew in every worker. Only where `fn` is no function of the script."""
    if getattr(fn, "__module__", "__main__") in ("__main__", "functools"):
        yield
        return
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Processes that are started in this block have no threads for linear algebra, which nothing here does: numpy's library
    starts one a core as soon as it is loaded, and lets them spin."""
    if ONE_BLAS_THREAD in os.environ:
        yield
        return
    os.environ[ONE_BLAS_THREAD] = "1"
    try:
        yield
    finally:
        del os.environ[ONE_BLAS_THREAD]


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C waits for the end of this block; processes that are started within it begin with Ctrl-C blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    """In a worker, once it has imported everything: end on Ctrl-C without a traceback; the command says what there is to say.

    And end with the process that started it, however that ended: nobody else would tell the worker that there is no more work.
    """
    from multiprocessing import parent_process
    from threading import Thread

    parent = parent_process()
    if parent is not None:
        Thread(target=_end_after, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _on_dask(
    fn: Callable[[Item], Result],
    items: list[Item],
    address: str,
    done: Callable[[Item, Result], None] | None,
) -> list[Result]:
    """One task an item on the cluster's workers, which must see the same files. Dask runs those of a dead worker again."""
    if not items:
        return []
    try:
        from distributed import Client, KilledWorker, as_completed
        from distributed.comm import CommClosedError
    except ImportError as error:
        raise StepscopeError("engine dask needs Dask: pip install 'stepscope[cluster]'") from error
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise StepscopeError(f"no Dask scheduler answers at {address}: {error}") from error
    futures: list[Any] = []
    try:
        futures = [client.submit(fn, item, pure=False) for item in items]
        place = {future.key: index for index, future in enumerate(futures)}
        results: dict[int, Result] = {}
        for future in as_completed(futures, loop=client.loop):
            index = place[future.key]
            failure = future.exception()
            if isinstance(failure, StepscopeError):
                raise failure
            if isinstance(failure, KilledWorker):
                raise StepscopeError(f"rank {items[index]}: every worker that read it died, for want of memory perhaps")
            if failure is not None:
                raise _named(failure, items[index]) from failure
            results[index] = future.result()
            if done is not None:
                done(items[index], results[index])
        return [results[index] for index in range(len(items))]
    except CommClosedError as error:
        raise StepscopeError(f"the Dask scheduler at {address} is gone: start the cluster again") from error
    finally:
        client.cancel(futures)
        client.close()


def _named(error: BaseException, item: object) -> RuntimeError:
    """The error to raise for one that happened in `item`."""
    return RuntimeError(f"rank {item}: {type(error).__name__}: {error}")
