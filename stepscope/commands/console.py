"""What every command prints with: one console, one way to name the next step, one `--quiet`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.commands import installed

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 140
"""Columns where nobody's terminal says otherwise: a table in a file or in CI's log is not squeezed into 80."""

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but the result and errors: no progress, no next step.")
]
"""The `--quiet` of every command."""


def console(stderr: bool = False) -> Console:
    """A rich console that is plain (no colour, no bold, no motion) where its stream is piped or NO_COLOR is set."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    plain = False if os.environ.get("NO_COLOR") else None  # NO_COLOR alone would leave rich its bold and dim
    return Console(stderr=stderr, width=width, force_terminal=plain, highlight=False)


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Values that a configuration refuses are wrong usage of the command, like those that typer refuses: status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def say_next(*commands: str, quiet: bool = False) -> None:
    """Name the commands that a person would type next, those that this installation has.

    On standard error, so that output stays what was asked for.
    """
    if quiet:
        return
    there = [command for command in commands if installed(command.split()[1])]
    for number, command in enumerate(there):
        print(f"{'Next:' if number == 0 else '  or:'} {command}", file=sys.stderr)
