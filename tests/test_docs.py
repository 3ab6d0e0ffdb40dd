"""The pages stay true: what they name exists, what they tell to type is understood, and every page can be found."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.__main__ import status_of
from stepscope.commands import command_line, load, reference, with_default_command
from stepscope.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = {p.name for p in ROOT.iterdir() if p.is_dir() and (p.name == ".ci" or not p.name.startswith("."))} - {"runs"}
AT_THE_TOP = re.compile(r"(?:[\w-]+\.(?:md|toml|txt)|Makefile|LICENSE)")
COMMANDS = command_line().list_commands(None)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def outside_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def paths_in(text: str) -> Iterator[str]:
    """Everything between backticks that names a file or folder of this project."""
    for word in re.findall(r"`([^`\s]+)`", outside_fences(text)):
        path = word.split("::")[0].split("#")[0]
        is_path = "/" in path and path.split("/")[0] in FOLDERS
        if (is_path or AT_THE_TOP.fullmatch(path)) and not set(path) & set("<>{}$()="):
            yield path


def typed_in(text: str) -> Iterator[list[str]]:
    """Every command of a fenced block of shell, as words, continued lines joined; comments and `$ ` left out."""
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)  # NAME=value before the command
            if words:
                yield words


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_the_helpers_find_what_they_should() -> None:
    page = (
        "See `tracer/schema.py`, `README.md`, `run.json`, `tests/test_docs.py::test_x`, `runs/a`, `a/b`, `docs/<page>.md`\n"
        "```sh\n$ DEMO_SERVE=0 make demo  # comment\nstepscope run --dp 2 \\\n  --pp 2\n```\n```python\nmake it\n```\n"
    )
    assert list(paths_in(page)) == ["tracer/schema.py", "README.md", "tests/test_docs.py"]
    assert list(typed_in(page)) == [["make", "demo"], ["stepscope", "run", "--dp", "2", "--pp", "2"]]
    assert {"env", "demo", "test", "lint", "bench"} <= targets()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    gone = [
        path
        for path in paths_in(page.read_text(encoding="utf-8"))
        if not any(ROOT.glob(path.strip("/"))) and not (page.parent / path).exists()
    ]
    assert not gone


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", outside_fences(page.read_text(encoding="utf-8")))
    local = [link.split("#")[0] for link in links if "://" not in link and not link.startswith(("#", "mailto:"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        ahead += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert [name_of(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_tells_to_type_is_understood(page: Path) -> None:
    for words in typed_in(page.read_text(encoding="utf-8")):
        if words[0] == "make":
            named = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert set(named) <= targets(), " ".join(words)
        if words[0] != "stepscope":
            continue
        name, *arguments = with_default_command(words[1:]) or ["--help"]
        if name in ("--help", "--version"):
            continue
        assert name in COMMANDS, " ".join(words)
        known = {option for parameter in load(name).params for option in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.split("=")[0] for word in arguments if word.startswith("--")}
        assert options <= known | {"--help"}, " ".join(words)


def test_the_command_reference_is_what_the_commands_say() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert page == reference.rewritten(page), "run: python -m stepscope.commands.reference docs/cli.md"
    for name in COMMANDS:
        assert f"## stepscope {name}\n" in page


def test_every_exit_status_is_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert re.search(rf"^\| {code.value} \| ", page, flags=re.MULTILINE), code
    assert {"| 130 |", "| 141 |"} <= set(re.findall(r"^\| \d+ \|", page, flags=re.MULTILINE))


def test_the_report_in_the_readme_is_what_analyze_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = re.search(r"^```text\n(.*?)\n```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert shown is not None
    sample = shutil.copytree(
        ROOT / "sample_traces/dp2_pp2_1f1b", tmp_path / "dp2_pp2_1f1b", ignore=shutil.ignore_patterns(".stepscope")
    )
    assert status_of(["analyze", str(sample)]) == ExitCode.OK
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.startswith(shown[1]), "copy the head of `stepscope analyze sample_traces/dp2_pp2_1f1b -q` again"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a line"):
        reference.rewritten("# stepscope\n")
