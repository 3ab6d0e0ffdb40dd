"""`stepscope dashboard`: look at the runs under a directory in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepscope.commands.console import Quiet


def dashboard(
    root: Annotated[
        Path, typer.Argument(help="The directory that holds your runs (or one run directory).", show_default=True)
    ] = Path("runs"),
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port; without it the first free one from 8050 on.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    quiet: Quiet = False,
) -> None:
    """Look at runs in the browser: where each step's time goes, on which rank, and how two runs differ.

    Serves every run directory under ROOT at http://127.0.0.1:PORT/, on this machine alone; a run that is recorded
    meanwhile appears by itself. Nothing is fetched from the network. Ctrl+C ends it.

    Examples:

        stepscope dashboard runs

        stepscope dashboard runs/a --port 8080 --no-open
    """
    from stepscope.dashboard.server import serve

    serve(root, port, not no_open, lambda text: None if quiet else print(text, flush=True))
