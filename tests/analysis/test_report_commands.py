"""`stepscope analyze` and `stepscope compare` from the outside: output, files and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_files import usual_steps, write_run

from stepscope.__main__ import status_of
from stepscope.tracer.schema import rank_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", count=4)


def test_analyze_prints_and_names_the_next_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["analyze", str(run)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("✓ health ok")
    assert "\x1b" not in captured.out
    assert f"stepscope compare {run} OTHER" in captured.err


def test_quiet_names_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([str(run), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out and not captured.err


def test_json_alone_on_standard_output(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["analyze", str(run), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["summary"]["steps"] == 4


def test_files_are_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    assert status_of(["analyze", str(run), "--html", str(page), "--json", str(data)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(data.read_text())["run"]["ranks"] == [0, 1]
    assert status_of(["analyze", str(run), "--html", str(tmp_path / "none" / "r.html")]) == 1
    assert "none/r.html: No such file" in capsys.readouterr().err


def test_a_damaged_run_is_analysed_and_ends_with_3(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = run / rank_file(1)
    damaged.write_bytes(damaged.read_bytes()[:-200])
    assert status_of(["analyze", str(run)]) == 3
    assert capsys.readouterr().out.startswith("! health")


def test_what_cannot_be_read_ends_with_1_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["analyze", str(tmp_path / "nothing")]) == 1
    captured = capsys.readouterr()
    assert "Error:" in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


def longer(run: Path, step_us: float) -> Path:
    """The same run with steps of another length."""
    from trace_files import header, members

    for rank in (0, 1):
        (run / rank_file(rank)).write_bytes(b"".join(members(header(rank), usual_steps(rank, 4, step_us))))
    return run


def test_compare_shows_and_judges(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = longer(write_run(tmp_path / "b"), 1100.0)
    a, b = str(run), str(other)
    assert status_of(["compare", a, b]) == 0
    assert "beyond" in capsys.readouterr().out
    assert status_of(["compare", a, b, "--fail-if-slower", "3%"]) == 4
    assert status_of(["compare", a, b, "--fail-if-slower", "0.5"]) == 0
    assert status_of(["compare", b, a, "--fail-if-slower", "3%"]) == 0
    assert status_of(["compare", a, a, "--fail-if-slower", "3%"]) == 0


def test_one_step_a_side_cannot_be_judged(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", count=1), write_run(tmp_path / "b", count=1)
    assert status_of(["compare", str(a), str(b), "--fail-if-slower", "3%"]) == 5


def test_compare_json_and_markdown(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["compare", str(run), str(run), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["health"]["status"] for one in found["runs"]] == ["ok", "ok"]
    assert found["comparisons"][0]["step"]["delta_ns"] == 0
    note = tmp_path / "note.md"
    assert status_of(["compare", str(run), str(run), "--markdown", str(note)]) == 0
    assert note.read_text().startswith("### stepscope compare")


def test_two_results_on_one_standard_output_are_wrong_usage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["analyze", str(run), "--json", "-", "--html", "-"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "--html -" in said.err
    assert status_of(["compare", str(run), str(run), "--json", "-", "--markdown", "-"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "--markdown -" in said.err


def test_the_page_alone_on_standard_output(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["analyze", str(run), "--html", "-"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!") and page.rstrip().endswith("</html>")


@pytest.mark.parametrize("words", [["compare"], ["compare", "a"], ["compare", "a", "b", "--fail-if-slower", "much"]])
def test_wrong_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == 2
