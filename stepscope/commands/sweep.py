"""`stepscope sweep`: train several configurations one after another, and put them into one table."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomllib
import typer

from stepscope.analysis.errors import StepscopeError
from stepscope.commands.analyze import JsonFile, show, write_text
from stepscope.commands.console import Quiet, say_next
from stepscope.exit_codes import ExitCode

if TYPE_CHECKING:
    from stepscope.analysis.report import Report

COMMON = "all"
"""The table whose options every configuration has, unless it says otherwise."""

OURS = ("out", "quiet", "record", "help")
"""Options of `stepscope run` that the sweep sets itself."""

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Configuration:
    """One table of the file: its name and the words that `stepscope run` gets."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A configuration without a figure: what `stepscope run`, or reading what it recorded, said."""

    configuration: Configuration
    error: str


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="One table a configuration.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="Directory that gets one run a configuration; by default a new one in runs/."),
    ] = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Train several configurations one after another, and compare them in one table.

    Each table of the file is one configuration, named as the table; its keys are options of `stepscope run` without the
    dashes (`pp = 2`, `bucket-mb = 1.0`, `overlap = false`). The table [all] holds what all of them share. The file is
    checked before anything runs. A configuration that fails is named with its reason, and the others still run.

    Exit status: 0 all ran; 1 a configuration failed, or the file is wrong.

    Example: `stepscope sweep docs/sweep.toml --out runs/sweep`
    """
    from stepscope.parallel_runtime.naming import claim_below

    configurations = read(file)
    place = out if out is not None else claim_below(Path("runs"), f"sweep-{file.stem}")
    failures: list[Failure] = []
    reports: list[tuple[Configuration, Report]] = []
    for number, one in enumerate(configurations, 1):
        if not quiet:
            words = shlex.join(one.options)
            print(f"[{number}/{len(configurations)}] {one.name}: stepscope run {words}", file=sys.stderr, flush=True)
        result = train(one, place / one.name)
        if isinstance(result, Failure):
            failures.append(result)
            print(f"{one.name} failed: {result.error}", file=sys.stderr, flush=True)
        else:
            reports.append((one, result))
    if json_file is not None:
        write_text(json_file, as_json(reports, failures))
    if json_file != "-":
        print_table(reports, failures)
        if len(reports) > 1:
            paths = " ".join(shlex.quote(str(place / one.name)) for one, _ in reports)
            say_next(f"stepscope compare {paths}", quiet=quiet)
    return ExitCode.FAILED if failures else ExitCode.OK


# -- the file ----------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[Configuration]:
    """The configurations of a file, in its order; StepscopeError says which table and key is wrong."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StepscopeError(f"{file} is no TOML file: {error}") from error
    common = tables.pop(COMMON, {})
    for name, table in {COMMON: common, **tables}.items():
        if not isinstance(table, dict):
            raise StepscopeError(f"{file}: {name} stands outside a table: put it under [{COMMON}] or [NAME]")
    if not tables:
        raise StepscopeError(f"{file} has no configuration: write a table [NAME] with options of `stepscope run`")
    found = []
    for name, table in tables.items():
        if not SAFE_NAME.fullmatch(name):
            raise StepscopeError(
                f"{file}: [{name}] names a directory: use letters, digits, dots, dashes and underscores"
            )
        merged = {_key(key): value for key, value in common.items()} | {_key(k): v for k, v in table.items()}
        words = [word for key, value in merged.items() for word in option_words(key, value, f"{file}: [{name}]")]
        found.append(Configuration(name, tuple(words)))
    return found


def _key(key: str) -> str:
    """`bucket_mb` and `bucket-mb` are the same option."""
    return key.replace("_", "-")


def option_words(key: str, value: Any, where: str) -> list[str]:
    """The words of one option; StepscopeError for a name that `stepscope run` has not, or a value that is none."""
    on, off = _options()
    if key not in on or key in OURS:
        reason = "is set by the sweep itself" if key in OURS else "is no option of `stepscope run` (see its --help)"
        raise StepscopeError(f"{where}: {key} {reason}")
    if isinstance(value, bool) != on[key]:
        raise StepscopeError(f"{where}: {key} must be {'true or false' if on[key] else 'a number or a text'}")
    if isinstance(value, bool):
        return [f"--{key}"] if value else [f"--no-{key}"] if f"no-{key}" in off else []
    if not isinstance(value, int | float | str):
        raise StepscopeError(f"{where}: {key} must be a number or a text")
    return [f"--{key}={value}"]


def _options() -> tuple[dict[str, bool], set[str]]:
    """The long options of `stepscope run`, each with whether it is a switch, and the names that switch one off."""
    from stepscope.commands import load

    on: dict[str, bool] = {}
    off: set[str] = set()
    for parameter in load("run").params:
        switch = bool(getattr(parameter, "is_flag", False))
        on.update({word[2:]: switch for word in parameter.opts if word.startswith("--")})
        off.update(word[2:] for word in parameter.secondary_opts if word.startswith("--"))
    return on, off


# -- running and showing -----------------------------------------------------------------------------------------------


def train(one: Configuration, out: Path) -> Report | Failure:
    """Run one configuration in a process of its own and analyse what it recorded."""
    from stepscope.analysis.ingest import open_run
    from stepscope.analysis.report import analyze

    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "stepscope", "run", *one.options, "--quiet", "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or ["it said nothing"]
        return Failure(one, f"{said[0].removeprefix('Error: ')} (status {done.returncode})")
    try:
        report = analyze(open_run(out))
    except StepscopeError as error:
        return Failure(one, str(error))
    return report if report.means.values else Failure(one, "no whole step was recorded: ask for more steps")


def print_table(reports: list[tuple[Configuration, Report]], failures: list[Failure]) -> None:
    """The table of those that ran, then those that failed."""
    from rich.text import Text

    from stepscope.analysis.report.side_by_side import table
    from stepscope.analysis.report.terminal import clean

    if reports:
        drawn = table([report for _, report in reports], [one.name for one, _ in reports])
        show(lambda out: out.print(drawn))
    for failure in failures:
        line = Text(f"{failure.configuration.name} failed: {clean(failure.error)}")
        show(lambda out, line=line: out.print(line))  # type: ignore[misc]


def as_json(reports: list[tuple[Configuration, Report]], failures: list[Failure]) -> str:
    """The sweep as JSON (docs/json_format.md): each run's own run, health and summary; and what failed."""
    from stepscope.analysis.records import JSON_SCHEMA_VERSION
    from stepscope.analysis.report import dumps

    runs = []
    for one, report in reports:
        runs.append({"name": one.name, "options": list(one.options), **report.head()})
    failed = [
        {"name": one.configuration.name, "options": list(one.configuration.options), "error": one.error}
        for one in failures
    ]
    return dumps({"schema": JSON_SCHEMA_VERSION, "runs": runs, "failed": failed})
