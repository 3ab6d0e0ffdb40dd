"""The `stepscope` command: one module a command, imported when that command is asked for.

`commands/NAME.py` holds the typer function `NAME` (`import_`, where Python keeps the word to itself); nothing else needs
registering. A command module imports only the standard library, typer, rich and its neighbours at the top
(tests/test_cli.py holds it to that): torch, pandas, pyarrow and dash come in inside the function, so that every `--help`
answers at once.
"""

from __future__ import annotations

import importlib
import keyword
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

import stepscope

COMMANDS = ("run", "schedule", "analyze", "compare", "sweep", "doctor", "import", "gather", "dashboard", "env")
"""In the order in which help lists them; one that this installation lacks is left out."""

DEFAULT_COMMAND = "analyze"
"""What `stepscope PATH` means."""

CONTEXT = {"help_option_names": ["--help", "-h"], "max_content_width": 100}


def markup_mode() -> Literal["markdown"] | None:
    """How help is drawn: boxes and colour on a terminal, plain where it is piped or NO_COLOR is set."""
    return None if os.environ.get("NO_COLOR") or not sys.stdout.isatty() else "markdown"


class WholeSentence(TyperCommand):
    """A command that the list of commands describes with the first paragraph of its help, wrapped and never cut."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first paragraph, on one line."""
        return " ".join((self.help or "").partition("\n\n")[0].split())


def as_command(name: str, function: Callable[..., object]) -> Any:
    """One typer function as the click command `name`."""
    single = typer.Typer(add_completion=False, rich_markup_mode=markup_mode(), context_settings=CONTEXT)
    single.command(name, cls=WholeSentence)(function)
    return typer.main.get_command(single)


def _in_python(name: str) -> str:
    """What the command's module and function are called."""
    return f"{name}_" if keyword.iskeyword(name) else name


def installed(name: str) -> bool:
    """Whether this installation has the command `name`."""
    return name in COMMANDS and find_spec(f"{__name__}.{_in_python(name)}") is not None


def load(name: str) -> Any:
    """The click command of `commands/NAME.py`."""
    module = importlib.import_module(f"{__name__}.{_in_python(name)}")
    return as_command(name, getattr(module, _in_python(name)))


class LazyGroup(TyperGroup):
    """Finds a command's module when it is asked for, so that none pays for the imports of another."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands of this installation, in the order of COMMANDS."""
        return [name for name in COMMANDS if installed(name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None for a name that is none."""
        return load(cmd_name) if installed(cmd_name) else None


def show_version(wanted: bool) -> None:
    """Print the version and end, where `--version` is given."""
    if wanted:
        print(f"stepscope {stepscope.__version__}")
        raise typer.Exit()


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Where did the time of a distributed training step go, who caused it, and what would fixing it give?

    Record a run with `stepscope run`, read it with `stepscope analyze RUN` (or just `stepscope RUN`), put two side by
    side with `stepscope compare A B`. Each command explains itself: `stepscope COMMAND --help`.

    Exit status: 0 done; 1 could not; 2 wrong usage; 3 done, but the health report touches figures (analyze,
    doctor, import); 130 interrupted. Set STEPSCOPE_DEBUG=1 to see the traceback behind an error, NO_COLOR=1 for plain output.
    """


def command_line() -> Any:
    """The whole command line as one click group."""
    app = typer.Typer(
        name="stepscope",
        cls=LazyGroup,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=markup_mode(),
        context_settings=CONTEXT,
    )
    app.callback()(root)
    return typer.main.get_command(app)


def looks_like_path(word: str) -> bool:
    """Whether a first argument that names no command is meant as a trace or a run directory."""
    return os.path.exists(word) or "/" in word or os.sep in word or word.endswith((".json", ".gz", ".sqlite"))


def with_default_command(arguments: list[str]) -> list[str]:
    """`stepscope PATH ...` is `stepscope analyze PATH ...`; a command's own name always wins over a file's."""
    if (
        arguments
        and not arguments[0].startswith("-")
        and arguments[0] not in COMMANDS
        and looks_like_path(arguments[0])
    ):
        return [DEFAULT_COMMAND, *arguments]
    return arguments
