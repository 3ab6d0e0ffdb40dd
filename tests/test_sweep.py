"""`stepscope sweep`: the file is checked before anything runs, a failing configuration is named and the others still run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.__main__ import status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.commands.sweep import Configuration, read

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "sweep.toml"


def written(folder: Path, text: str) -> Path:
    file = folder / "sweep.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_tables_become_the_words_of_stepscope_run(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[all]\nsteps = 3\ndevice = "cpu"\n[a]\n[b]\nsteps = 5\nbucket_mb = 0.5\noverlap = false\nsp = false\ntied = true\n',
    )
    assert read(file) == [
        Configuration("a", ("--steps=3", "--device=cpu")),
        Configuration("b", ("--steps=5", "--device=cpu", "--bucket-mb=0.5", "--no-overlap", "--tied")),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp = 2", "dp stands outside a table"),
        ("[all]\ndp = 2", "no configuration"),
        ("", "no configuration"),
        ("[a]\ndegree = 2", r"\[a\]: degree is no option of `stepscope run`"),
        ("[a]\nout = 'x'", r"\[a\]: out is set by the sweep itself"),
        ("[a]\noverlap = 1", "overlap must be true or false"),
        ("[a]\ndp = true", "dp must be a number or a text"),
        ("[a]\ndp = [1, 2]", "dp must be a number or a text"),
        ("['../a']\ndp = 1", "names a directory"),
        ("[a\n", "is no TOML file"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(StepscopeError, match=said):
        read(written(tmp_path, text))


def test_a_missing_file_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["sweep", str(tmp_path / "none.toml")]) == 1
    assert "none.toml: No such file" in capsys.readouterr().err


def test_the_example_is_understood() -> None:
    assert [one.name for one in read(EXAMPLE)] == ["one-rank", "dp2", "dp2-no-overlap"]


def test_a_sweep_trains_names_what_failed_and_compares_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = "[all]\nsteps = 2\nmicrobatches = 1\ndevice = 'cpu'\n"
    file = written(tmp_path, common + "[one]\n[broken]\npp = 7\n[two]\ndp = 2\n")
    found = tmp_path / "found.json"
    assert status_of(["sweep", str(file), "--out", str(tmp_path / "runs"), "--json", str(found)]) == 1
    captured = capsys.readouterr()
    assert "[2/3] broken: stepscope run" in captured.err and "broken failed: " in captured.err
    lines = captured.out.splitlines()
    heads = next(line for line in lines if "run" in line.split())
    assert "step," in captured.out and "tokens/s" in captured.out and heads
    assert [line.split()[:2] for line in lines if line.split()[:1] in (["A"], ["B"])] == [["A", "one"], ["B", "two"]]
    assert any(line.startswith("broken failed: ") and "(status" in line for line in lines)
    report = json.loads(found.read_text())
    assert [one["name"] for one in report["runs"]] == ["one", "two"]
    assert [one["run"]["world_size"] for one in report["runs"]] == [1, 2]
    assert [one["name"] for one in report["failed"]] == ["broken"]
    assert (tmp_path / "runs" / "two" / "run.json").exists()
