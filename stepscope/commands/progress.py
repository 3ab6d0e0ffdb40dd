"""How far a first read is, on a terminal: ranks, bytes and how long it will still take.

On standard error, and only where that is a terminal: a pipe, a log or `--quiet` sees nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepscope.commands.console import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from stepscope.analysis.ingest import Progress, ProgressCall

STAGES = {
    "preparing": "loading the scanner (the first time ever it is compiled: about 10 s)",
    "reading": "reading traces",
}


@contextmanager
def reading(quiet: bool) -> Iterator[ProgressCall | None]:
    """What to give to `open_run` as `progress` within this block; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with shown_on(console(stderr=True)) as call:
        yield call


@contextmanager
def shown_on(out: Console) -> Iterator[ProgressCall]:
    """A progress call that draws a bar on `out`, from its first call to the end of this block, and leaves nothing."""
    bar: Bar | None = None

    def call(state: Progress) -> None:
        nonlocal bar
        if bar is None:  # a store that is up to date is opened without a word
            bar = _bar(out)
            bar.add_task(STAGES[state.stage], total=state.bytes or None, count="")
            bar.start()
        count = f"{state.files_done} of {state.files} {state.unit}"
        bar.update(
            bar.tasks[0].id,
            description=STAGES[state.stage],
            total=state.bytes or None,
            completed=state.bytes_done,
            count=count,
        )

    try:
        yield call
    finally:
        if bar is not None:
            bar.stop()


def _bar(out: Console) -> Bar:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}", markup=False),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        refresh_per_second=4,
    )
