"""Entry point of the `stepscope` command: the only place where an exception becomes a message and an exit status."""

from __future__ import annotations

import io
import os
import sys
import traceback

import typer

from stepscope.analysis.engine import ONE_BLAS_THREAD
from stepscope.analysis.errors import StepscopeError
from stepscope.commands import command_line, with_default_command
from stepscope.exit_codes import ExitCode

INTERRUPTED = 130
"""128 + SIGINT: Ctrl-C."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: who read our output has closed it (`stepscope analyze RUN | head`)."""


def _raised_by_us(error: BaseException) -> bool:
    """Whether `error` was raised in a module of ours: then it speaks about the input, otherwise it is a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).split(".")[0] == "stepscope"


def _explain(error: Exception) -> str:
    """The words for a person: what went wrong, or that it is our fault."""
    if isinstance(error, StepscopeError) or (isinstance(error, ValueError) and _raised_by_us(error)):
        return f"Error: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"Error: {error.filename}: {error.strerror or error}"
    if isinstance(error, OSError):
        return f"Error: {error}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "torch":
        return "Error: this needs torch: pip install -e '.[runtime]' (`stepscope env` says what else is missing)"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"Error: stepscope itself failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})\n"
        "This is a bug. STEPSCOPE_DEBUG=1 shows the traceback to report."
    )


def _quiet_pipe() -> None:
    """Point standard output nowhere, so that flushing it at exit does not complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    command = command_line()
    with command.make_context("stepscope", with_default_command(arguments)) as context:
        result = command.invoke(context)
    sys.stdout.flush()
    return int(result) if isinstance(result, int) else int(ExitCode.OK)


def status_of(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors are printed to standard error, without a traceback."""
    try:
        return _run(arguments)
    except typer.Exit as ending:
        sys.stdout.flush()
        return ending.exit_code
    except typer.TyperException as error:  # wrong usage: prints usage, what is wrong and where help is
        show = getattr(error, "show", None)
        if show is None:
            print(f"Error: {error}", file=sys.stderr)
        else:
            show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _quiet_pipe()
        return BROKEN_PIPE
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            traceback.print_exc()
        print(_explain(error), file=sys.stderr)
        return int(ExitCode.FAILED)


def main() -> None:
    """The console script."""
    if sys.argv[1:2] not in (["run"], ["sweep"]):  # those train, and the processes that they start inherit it
        os.environ.setdefault(ONE_BLAS_THREAD, "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows another
            stream.reconfigure(errors="replace")
    sys.exit(status_of(sys.argv[1:]))


if __name__ == "__main__":
    main()
