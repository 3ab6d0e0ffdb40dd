"""Comparisons as people and programs get them: one table of all runs, per token, the JSON's schema, a closed pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console
from test_compare import plain_run
from trace_files import write_run

from stepscope.__main__ import BROKEN_PIPE, status_of
from stepscope.analysis.compare import Comparison, compare, compare_reports
from stepscope.analysis.report import analyze, dumps
from stepscope.analysis.report.differences import markdown, print_comparison
from stepscope.analysis.report.side_by_side import heads_and_rows, letters

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"
COMPARE = json.loads((SCHEMAS / "compare.schema.json").read_text())
REPORT = json.loads((SCHEMAS / "report.schema.json").read_text())


def three() -> Comparison:
    """Steps of 1000, 1500 and 800 ns (a tenth of each idle) with 100, 200 and an unknown number of tokens."""
    sides = []
    for length, batch in ((1000, 10), (1500, 20), (800, None)):
        run = plain_run([length] * 3)
        if batch:
            run.meta.model["seq"], run.meta.train["global_batch"] = 10, batch
        sides.append(analyze(run))
    return compare_reports(sides)


def test_all_runs_stand_in_one_table() -> None:
    heads, rows = heads_and_rows(three().reports, ["base", "large", "small"])
    assert heads[1:3] == ["run", "step, µs"]
    assert heads[-3:] == ["tokens/s", "ns a token", "vs A"]
    # 1000 ns for 100 tokens: 10 ns a token, 100 M tokens a second; the third run does not say its tokens
    assert [row[0] for row in rows] == ["A", "B", "C"]
    assert [row[1] for row in rows] == ["base", "large", "small"]
    assert [row[2] for row in rows] == ["1.000", "1.500", "0.800"]
    assert [row[3] for row in rows] == ["0.900", "1.350", "0.720"]
    assert [row[-3] for row in rows] == ["100 M", "133.3 M", "–"]
    assert [row[-2] for row in rows] == ["10", "8", "–"]
    assert [row[-1] for row in rows] == ["–", "+50 %", "−20 %"]


def test_terminal_and_markdown_show_the_table_and_the_time_per_token() -> None:
    console = Console(width=140, record=True, file=None, quiet=False)
    with console.capture() as captured:
        print_comparison(three(), console)
    text = captured.get()
    assert text.index("All runs, mean step") < text.index("A → B, per step") < text.index("A → B, per token")
    assert "A → C, per step" in text and "A → C, per token" not in text
    note = markdown(three())
    assert "| A | hand-made | 1.000 |" in note
    assert "| per token, in ns | A | B |" in note and "A | C |" in note
    for table in note.split("\n\n"):
        bars = {line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(bars) <= 1, table  # every row of a table has as many cells as its head


def test_letters_go_on_after_z() -> None:
    assert letters(28)[25:] == ["Z", "AA", "AB"]


@pytest.mark.parametrize("comparison", [three(), compare([plain_run([100]), plain_run([120])])])
def test_the_json_follows_its_schema(comparison: Comparison) -> None:
    found = json.loads(dumps(comparison.to_json()))
    jsonschema.validate(found, COMPARE, cls=jsonschema.Draft202012Validator)
    for run in found["runs"]:
        for part in ("run", "health", "summary"):
            jsonschema.validate(run[part], {**REPORT, "$ref": f"#/$defs/{part}"} | no_root())
    broken = json.loads(dumps(comparison.to_json()))
    broken["comparisons"][0]["terms"][0]["name"] = "communication"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, COMPARE, cls=jsonschema.Draft202012Validator)


def no_root() -> dict[str, object]:
    """Keywords that let a schema's definitions be used without what its root demands."""
    return {"required": [], "properties": {}, "additionalProperties": True}


def test_the_schema_s_fields_are_explained() -> None:
    page = (SCHEMAS.parent / "json_format.md").read_text()
    for section in ("comparison", "step", "delta"):
        for name in COMPARE["$defs"][section]["properties"]:
            assert f"`{name}`" in page or f'"{name}"' in page, name


def test_compare_takes_three_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name, count=3)) for name in "abc"]
    assert status_of(["compare", *paths, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, COMPARE, cls=jsonschema.Draft202012Validator)
    assert (len(found["runs"]), len(found["comparisons"])) == (3, 2)


@pytest.mark.parametrize("more", [[], ["--json", "-"]])
def test_a_reader_that_closes_the_pipe_ends_it_quietly(tmp_path: Path, more: list[str]) -> None:
    path = str(write_run(tmp_path / "a", count=3))
    command = [sys.executable, "-m", "stepscope", "compare", path, path, "--quiet", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == BROKEN_PIPE
    assert errors == b""
