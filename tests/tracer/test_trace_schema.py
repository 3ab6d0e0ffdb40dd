"""Every event that is written validates against the published schema, and the schema speaks the code's vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from trace_reading import EPOCH, HandClock, all_reduce_site, read_strict, small_meta

from stepscope.tracer.recorder import Recorder
from stepscope.tracer.rows import NOWHERE, ComputeRow
from stepscope.tracer.schema import AXES, COLLECTIVES, KINETO_COLLECTIVES, PHASES, STRATEGIES
from stepscope.tracer.writer import RankWriter, in_chunks

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "trace_event.schema.json").read_text())


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def test_every_event_of_every_kind_validates(tmp_path: Path, validator: Any) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    with Recorder(0, writer, HandClock(tick=1000).clock()) as recorder:
        recorder.begin_step(0)
        recorder.counter("parameter_bytes", 1)
        recorder.counter("tokens_per_expert", 2.5, key="layer.0 expert.1")
        recorder.place(phase="forward", stage=0, chunk=0, microbatch=0)
        with recorder.host('a "quoted" name'):
            pass
        with recorder.memcpy("Memcpy HtoD", 8):
            pass
        for collective in COLLECTIVES:
            recorder.block("layer.0", layer=0)
            op_id = recorder.issue(all_reduce_site(collective=collective, peer=1, peer_from=1), 0)
            recorder.resume()
            recorder.communicated(op_id, 1, 2)
            recorder.wait(op_id)
            recorder.resume()
        recorder.end_step()
        writer.submit(in_chunks([ComputeRow(NOWHERE, EPOCH, EPOCH + 1, (1, 2, 3, 4, 5, 6))]))
        recorder.begin_step(1)
        recorder.issue(all_reduce_site(), 1)
    events = read_strict(writer.path)["traceEvents"]
    kinds = set()
    for event in events:
        errors = [error.message for error in validator.iter_errors(event)]
        assert not errors, (event, errors)
        kinds |= {event["ph"] + event.get("cat", "")}
    assert kinds == {
        "M",
        "C",
        "iuser_annotation",
        "Xuser_annotation",
        "Xkernel",
        "Xgpu_memcpy",
        "Xwait",
        "scommunication",
        "tcommunication",
        "fcommunication",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"dur": -1},
        {"ts": "12"},
        {"name": 'q"uote'},
        {"name": "line\nbreak"},
        {"tid": 8},
        {"args": {"stream": 7, "phase": "sideways"}},
        {"args": {"phase": "forward"}},
        {"extra": 1},
    ],
)
def test_the_schema_refuses_what_is_wrong(validator: Any, change: dict[str, Any]) -> None:
    good = {"ph": "X", "cat": "kernel", "name": "a", "pid": 0, "tid": 7, "ts": 1.0, "dur": 1.0}
    good["args"] = {"stream": 7, "phase": "forward"}
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, **change})


def test_the_schema_speaks_the_codes_vocabularies(validator: Any) -> None:
    definitions = SCHEMA["$defs"]
    assert definitions["phase"]["enum"] == list(PHASES)
    assert definitions["strategy"]["enum"] == list(STRATEGIES)
    assert set(definitions["collective"]["enum"]) == set(KINETO_COLLECTIVES.values())
    axis = jsonschema.Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": "#/$defs/axis"}]})
    assert all(axis.is_valid(name) for name in AXES)
    assert not axis.is_valid("xp")


def test_the_examples_of_the_page_validate(validator: Any) -> None:
    page = (DOCS / "trace_format.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith('{"ph":')]
    assert len(lines) >= 8
    for line in lines:
        event = json.loads(line)
        assert not [error.message for error in validator.iter_errors(event)], line
