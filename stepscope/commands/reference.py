"""The part of docs/cli.md that is made from the commands themselves, so that it cannot go stale.

`python -m stepscope.commands.reference docs/cli.md` rewrites what stands between the two marks in that file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stepscope.commands import command_line, load

BEGIN = "<!-- made by `python -m stepscope.commands.reference docs/cli.md` -->"
END = "<!-- end of what is made -->"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _row(parameter: Any, context: Any) -> str:
    """One line of a command's table: how it is written, and what its help says (with default and choices)."""
    names, described = parameter.get_help_record(context)
    return f"| `{_cell(names)}` | {_cell(described)} |"


def section(name: str) -> str:
    """The section of one command: its help text, then a table of its arguments and options."""
    command = load(name)
    context = command.make_context(name, [], resilient_parsing=True)
    context.info_name = f"stepscope {name}"
    usage = " ".join([context.info_name, *command.collect_usage_pieces(context)])
    lines = [f"## stepscope {name}", "", f"`{usage}`", "", *(command.help or "").strip().splitlines(), ""]
    rows = [_row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return "\n".join([*lines, "| | |", "|---|---|", *rows]) + "\n"


def reference() -> str:
    """All sections, in the order of `stepscope --help`."""
    return "\n".join(section(name) for name in command_line().list_commands(None))


def rewritten(page: str) -> str:
    """`page` with the part between the marks made anew; ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs a line {BEGIN!r} and after it a line {END!r}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
