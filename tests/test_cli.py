"""The command line: its exit codes, its help, its errors, and what it does not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import stepscope
from stepscope import commands
from stepscope.__main__ import BROKEN_PIPE, INTERRUPTED, status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.commands import as_command, command_line, env, looks_like_path, with_default_command
from stepscope.commands.console import console, say_next
from stepscope.exit_codes import ExitCode
from stepscope.tracer.schema import RunMeta

HEAVY = ("torch", "pandas", "pyarrow", "numpy", "dash", "plotly", "numba", "flask", "scipy")
THERE = command_line().list_commands(None)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Put a function in the place of the command `env`."""

    def put(function: Callable[..., object]) -> None:
        monkeypatch.setattr(commands, "load", lambda name: as_command(name, function))

    return put


# -- which command is meant --------------------------------------------------------------------------------------------


def test_the_commands_are_there() -> None:
    assert "env" in THERE
    assert set(THERE) <= set(commands.COMMANDS)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["runs/a"], ["analyze", "runs/a"]),
        (["runs/a", "--json", "-"], ["analyze", "runs/a", "--json", "-"]),
        (["trace.json.gz"], ["analyze", "trace.json.gz"]),
        (["analyze", "runs/a"], ["analyze", "runs/a"]),
        (["compare", "a", "b"], ["compare", "a", "b"]),
        (["nonsense"], ["nonsense"]),
        (["--version"], ["--version"]),
        ([], []),
    ],
)
def test_a_path_alone_is_analysed(given: list[str], meant: list[str]) -> None:
    assert with_default_command(given) == meant


def test_a_folder_in_sight_is_a_path_and_a_command_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baseline").mkdir()
    (tmp_path / "env").mkdir()
    assert looks_like_path("baseline")
    assert with_default_command(["baseline"]) == ["analyze", "baseline"]
    assert with_default_command(["env"]) == ["env"]


# -- help and version --------------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"stepscope {stepscope.__version__}\n"


def test_help_names_every_command_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    assert [word for word in listed if word in commands.COMMANDS] == THERE
    assert "..." not in text.partition("Commands:")[2], "a description is wrapped, never cut"


@pytest.mark.parametrize("name", THERE)
def test_help_of_a_command_is_worth_reading(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([name, "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert f"Usage: stepscope {name}" in text
    assert f"stepscope {name} " in text.partition("Options:")[0].partition("\n")[2], "an example belongs into the text"
    assert "--quiet" in text
    assert "\x1b" not in text
    for parameter in commands.load(name).params:
        assert parameter.param_type_name == "argument" or parameter.help, f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("arguments", [[], *[[name] for name in THERE]], ids=["root", *THERE])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import json, sys; from stepscope.__main__ import status_of\n"
        f"status = status_of({[*arguments, '--help']!r})\n"
        f"print(json.dumps([status, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)\n"
    )
    done = run_python(code)
    assert json.loads(done.stderr.splitlines()[-1]) == [0, []]


def test_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["nonsense"]) == ExitCode.USAGE
    assert "No such command 'nonsense'" in capsys.readouterr().err
    assert status_of(["env", "--nonsense"]) == ExitCode.USAGE
    assert status_of([]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "--nonsense" in captured.err
    assert "Usage: stepscope" in captured.out + captured.err


@pytest.mark.parametrize(
    "wrong",
    [("--pp", "0"), ("--chunks", "0"), ("--schedule", "foo"), ("--forward", "nan"), ("--weight", "9")],
    ids=" ".join,
)
def test_a_schedule_that_cannot_be_is_wrong_usage(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["schedule", *wrong]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert wrong[1] in said.err


# -- errors ------------------------------------------------------------------------------------------------------------


def raiser(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        """Raise."""
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (StepscopeError("runs/a has no rank file"), ExitCode.FAILED, "Error: runs/a has no rank file\n"),
        (FileNotFoundError(2, "No such file", "runs/a"), ExitCode.FAILED, "Error: runs/a: No such file\n"),
        (OSError("disk gone"), ExitCode.FAILED, "Error: disk gone\n"),
        (typer.BadParameter("P must divide"), ExitCode.USAGE, "P must divide"),
        (KeyboardInterrupt(), INTERRUPTED, "Interrupted.\n"),
        (typer.Exit(3), ExitCode.TOUCHED, ""),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), ExitCode.FAILED, "pip install"),
        (ZeroDivisionError("by zero"), ExitCode.FAILED, "stepscope itself failed: ZeroDivisionError: by zero"),
    ],
)
def test_an_error_becomes_words_and_a_status(
    error: BaseException,
    status: int,
    words: str,
    fake: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake(raiser(error))
    assert status_of(["env"]) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_value_error_of_ours_speaks_about_the_input(
    fake: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        """Read a file that is none of ours."""
        RunMeta.from_json("{}")

    fake(command)
    assert status_of(["env"]) == ExitCode.FAILED
    assert capsys.readouterr().err == "Error: run.json has no run_id or name: it was not written by stepscope\n"


def test_a_value_error_of_a_library_is_a_bug_and_no_user_error(
    fake: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        """Fail inside the standard library."""
        json.loads("{")

    fake(command)
    assert status_of(["env"]) == ExitCode.FAILED
    assert "stepscope itself failed: JSONDecodeError" in capsys.readouterr().err


def test_the_traceback_is_there_for_who_asks(
    fake: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_DEBUG", "1")
    fake(raiser(StepscopeError("broken")))
    assert status_of(["env"]) == ExitCode.FAILED
    assert "Traceback" in capsys.readouterr().err


def test_a_command_may_return_its_status(fake: Callable[..., None]) -> None:
    def command() -> int:
        """Answer."""
        return ExitCode.TOUCHED

    fake(command)
    assert status_of(["env"]) == ExitCode.TOUCHED


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys; from stepscope import commands; from stepscope.__main__ import status_of\n"
        "def env():\n"
        "    'Print much.'\n"
        "    for _ in range(100_000): print('x' * 100)\n"
        "commands.load = lambda name: commands.as_command(name, env)\n"
        "sys.exit(status_of(['env']))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == b"x" * 100 + b"\n"
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == BROKEN_PIPE
    child.stderr.close()


def test_control_c_is_no_traceback() -> None:
    code = (
        "import sys, time; from stepscope import commands; from stepscope.__main__ import status_of\n"
        "def env():\n"
        "    'Wait.'\n"
        "    print('waiting', flush=True)\n"
        "    for _ in range(600): time.sleep(0.1)\n"  # one long sleep misses a signal that comes just before it
        "commands.load = lambda name: commands.as_command(name, env)\n"
        "sys.exit(status_of(['env']))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == INTERRUPTED
    assert errors == "Interrupted.\n"


# -- printing ----------------------------------------------------------------------------------------------------------


def test_piped_output_is_plain_and_wide(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console().print("[bold red]" + "word " * 25)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_no_color_wins_over_a_terminal() -> None:
    code = (
        "import sys; sys.stdout.isatty = lambda: True\n"
        "from stepscope.commands import markup_mode\nfrom stepscope.commands.console import console\n"
        "console().print('[bold red]word')\nprint(markup_mode())\n"
    )
    assert run_python(code, NO_COLOR="1", TERM="xterm").stdout == "word\nNone\n"
    assert "\x1b[1;31mword" in run_python(code, NO_COLOR="", TERM="xterm").stdout


def test_the_next_step_is_named_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    say_next("stepscope nonsense a", "stepscope analyze a", "stepscope env")
    say_next("stepscope env", quiet=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Next: stepscope analyze a\n  or: stepscope env\n"


# -- env ---------------------------------------------------------------------------------------------------------------


def test_env_prints_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["env"]) == ExitCode.OK
    captured = capsys.readouterr()
    assert sys.version.split()[0] in captured.out
    assert "gloo yes" in captured.out
    assert captured.err.startswith("Next: stepscope run")


def test_env_json_stands_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert status_of(["env", "--json", "-"]) == ExitCode.OK
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert found["schema"] == 1
    assert found["stepscope"]["version"] == stepscope.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert found["packages"]["torch"]
    assert status_of(["env", "--json", str(tmp_path / "env.json")]) == ExitCode.OK
    assert json.loads((tmp_path / "env.json").read_text())["packages"] == found["packages"]


def test_env_says_what_is_missing_and_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = env.version_of
    monkeypatch.setattr(env, "version_of", lambda package: None if package == "torch" else real(package))
    monkeypatch.setattr(env.shutil, "which", lambda name: None)
    assert status_of(["env"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "Missing: torch (run: train and record): pip install -e '.[runtime]'" in text
    assert "Missing: chromium (developing: browser tests): apt-get install chromium" in text
    assert "Nothing is missing" not in text
