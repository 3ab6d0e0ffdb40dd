"""The public JSON: its schema, strictness, and that it says what the frames say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from pipeline_runs import PipelineRun, pipeline_run
from timelines import Timeline

from stepscope.analysis.ingest import open_run
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import analyze, dumps
from stepscope.analysis.report.written import plain

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "report.schema.json"
SCHEMA = json.loads(SCHEMA_FILE.read_text())
PAGE = SCHEMA_FILE.parent.parent / "json_format.md"


def checked(value: dict[str, Any]) -> dict[str, Any]:
    """The report after a trip through strict JSON text, valid by the schema."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    again = json.loads(dumps(value), parse_constant=refuse)
    jsonschema.validate(again, SCHEMA, cls=jsonschema.Draft202012Validator)
    return dict(again)


def test_a_pipeline_run() -> None:
    report = checked(analyze(pipeline_run(4, 8, 2, slow={1: 4})).to_json())
    assert report["health"] == {"status": "ok", "items": []}
    assert report["run"]["mesh"] == {"pp": 4, "dp": 2}
    assert len(report["ledger"]) == 8 * 3
    for row in (*report["ledger"], report["summary"]):
        assert sum(row[f"{term}_ns"] for term in TERMS) == row["step_ns"]
    assert report["summary"]["steps"] == 3
    assert report["summary"]["tokens_per_s"] is None
    assert report["pipeline"]["schedule"] == "1f1b"
    assert report["stragglers"][0]["rank"] == 1
    assert report["findings"]


def test_an_analysis_does_not_ask_where_a_run_came_from() -> None:
    """Measured, simulated, imported: the same rows give the same figures; only who may be believed about numbers differs."""
    found = []
    for source in ("measured", "simulated", "imported"):
        made = PipelineRun(2, 4, 2)
        made.line.source, made.line.hosts = source, ("one",) * 4
        for number in range(3):
            made.step(number, slow={1: 4})
        report = checked(analyze(made.run()).to_json())
        assert report["run"].pop("source") == source
        found.append(report)
    assert found[0] == found[1]
    for report in found:  # the messages of foreign writers are matched by their order, not by their numbers
        for row in (*report["matching"], *report["collectives"]):
            row.pop("match", None), row.pop("method", None)
    assert found[0] == found[2]
    assert found[0]["findings"] and found[0]["links"] and found[0]["stages"]


def test_a_collective_is_one_row_with_lists_by_rank() -> None:
    line = Timeline(world=4, mesh={"dp": 4})
    line.group("dp", "dp", 0, 1, 2, 3)
    line.step(0, 75)
    parts = {rank: (start, 75) for rank, start in enumerate((0, 60, 62, 64))}
    line.collective("dp", 3, parts, axis="dp", strategy="dp", bytes=64)
    (row,) = checked(analyze(line.run()).to_json())["collectives"]
    assert row == {
        "group": "dp",
        "axis": "dp",
        "strategy": "dp",
        "collective": "all_reduce",
        "seq": 3,
        "ranks": [0, 1, 2, 3],
        "bytes": 64,
        "arrival_ns": [0, 60, 62, 64],
        "end_ns": [75, 75, 75, 75],
        "wait_ns": [64, 4, 2, 0],
        "transfer_ns": [11, 11, 11, 11],
        "last_rank": 3,
        "match": "seq",
        "partial": False,
    }


def test_a_message_is_one_row_and_an_unmatched_part_says_so() -> None:
    line = Timeline(world=2, mesh={"pp": 2})
    line.group("pp", "pp", 0, 1)
    line.step(0, 100)
    line.message((85, 90), (10, 90), 0, 1, "pp")
    line.message((95, 97), None, 0, 1, "pp", seq=1)
    message, alone = checked(analyze(line.run()).to_json())["collectives"]
    assert (message["collective"], message["ranks"], message["last_rank"]) == ("send_receive", [0, 1], 0)
    assert [type(message[name]) for name in ("last_rank", "seq")] == [int, int]  # also where another one has none
    assert message["wait_ns"] == [0, 75]
    assert (alone["match"], alone["ranks"], alone["wait_ns"], alone["last_rank"]) == ("unmatched", [0], [None], None)


def test_nothing_at_all_is_null_and_not_zero() -> None:
    report = checked(analyze(Timeline(world=1).run()).to_json())
    assert report["ledger"] == report["findings"] == report["stragglers"] == []
    summary = report["summary"]
    counts = ("steps", "communications", "matched", "partial", "inferred", "unmatched")
    assert [summary.pop(name) for name in counts] == [0] * 6
    assert set(summary.values()) == {None}


def test_hostile_names_survive_as_text() -> None:
    name = '<b>"\ufffd\x00\n' + "x" * 10_000
    line = Timeline(world=2, mesh={"dp": 2})
    line.group(name, "dp", 0, 1)
    line.step(0, 100)
    line.collective(name, 0, {0: (0, 50), 1: (10, 50)}, axis="dp", name=name)
    report = checked(analyze(line.run()).to_json())
    assert report["collectives"][0]["group"] == name


def test_numbers_become_plain_and_undefined_becomes_null() -> None:
    value = {
        "a": np.int64(3),
        "b": np.float64("nan"),
        "c": (1, math.inf),
        "d": np.array([1.5]),
        "e": np.bool_(True),
        4: None,
    }
    assert plain(value) == {"a": 3, "b": None, "c": [1, None], "d": [1.5], "e": True, "4": None}
    with pytest.raises(ValueError, match="JSON"):
        dumps({"a": math.nan})


def test_the_page_names_every_field() -> None:
    text = PAGE.read_text()
    for section in (
        *("run", "ledger_row", "summary", "overlap_row", "collective", "pipeline", "straggler"),
        *("straggler_group", "finding"),
        *("fit", "outlier", "volume", "memory_state", "memory_peak", "expert_load", "expert_rank"),
        *("idle_row", "axis_ratio", "contended"),
    ):
        for name in SCHEMA["$defs"][section]["properties"]:
            assert f"`{name}`" in text or f'"{name}"' in text, f"{PAGE.name} does not explain {name}"


@pytest.mark.parametrize(
    ("trace", "ranks"),
    [("kineto-dlrm-8rank", 8), ("kineto-nccl-a100", 1), ("kineto-cpu-only", 1), ("kineto-mi300-resnet", 1)],
)
def test_real_traces_give_valid_reports(corpus: Path, trace: str, ranks: int) -> None:
    report = checked(analyze(open_run(corpus / trace)).to_json())
    assert len(report["run"]["ranks"]) == ranks
    assert report["ledger"]
    for row in report["ledger"]:
        assert sum(row[f"{term}_ns"] for term in TERMS) == row["step_ns"]


def test_the_last_comers_of_eight_real_ranks(corpus: Path) -> None:
    report = analyze(open_run(corpus / "kineto-dlrm-8rank"))
    assert {one.rank: one.last_arrivals for one in report.stragglers if one.last_arrivals} == {7: 5, 5: 2, 4: 1}
    assert report.stragglers[0].rank == 7
    assert all(finding.confidence != "high" for finding in report.findings)
