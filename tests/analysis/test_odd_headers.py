"""Headers, groups and steps whose numbers cannot be: taken as not said, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_files import write_run

import stepscope
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.report import analyze
from stepscope.tracer.schema import MAX_RANKS, RUN_FILE, RunMeta

STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 5, "tid": 1, "ts": 0, "dur": 1000}
GEMM = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 400, "args": {"stream": 7}}


def write(path: Path, rows: list[dict[str, Any]], **header: Any) -> Path:
    path.write_text(json.dumps({**header, "traceEvents": rows}))
    return path


@pytest.mark.parametrize(
    "info",
    [
        {"rank": -5},
        {"rank": MAX_RANKS},
        {"rank": 10**12},
        {"rank": True},
        {"rank": "3"},
        {"world_size": 10**9},
        {"world_size": -2},
    ],
)
def test_a_rank_or_world_that_cannot_be(tmp_path: Path, info: dict[str, Any]) -> None:
    run = open_run(write(tmp_path / "trace.json", [STEP, GEMM], distributedInfo=info))
    assert run.ranks == [0] and run.meta.world_size == 1
    (item,) = [item for item in run.health.items if item.code == "odd_header"]
    (key,) = info
    assert f"{key} {info[key]}" in item.text
    assert analyze(run).ledger["compute_ns"].tolist() == [400_000]


@pytest.mark.parametrize("base", [10**30, -(10**30), 2**63 - 1, "nonsense", [1]])
def test_a_base_time_that_cannot_be(tmp_path: Path, base: Any) -> None:
    run = open_run(write(tmp_path / "trace.json", [STEP, GEMM], baseTimeNanoseconds=base))
    assert run.columns(0, "start_ns")["start_ns"].tolist() == [0, 0]
    assert "odd_header" in {item.code for item in run.health.items}


@pytest.mark.parametrize("header", [{}, {"baseTimeNanoseconds": 0, "distributedInfo": {"rank": 0, "world_size": 1}}])
def test_ordinary_headers_are_not_odd(tmp_path: Path, header: dict[str, Any]) -> None:
    run = open_run(write(tmp_path / "trace.json", [STEP, GEMM], **header))
    assert "odd_header" not in {item.code for item in run.health.items}


@pytest.mark.parametrize("ranks", ["[" * 50_000, "[99999999999999999999, 0]", "[true, 1]", "[-1, 0]"])
def test_ranks_of_a_group_that_cannot_be(tmp_path: Path, ranks: str) -> None:
    said = {"stream": 20, "Collective name": "allreduce", "Process Group Name": "1", "Process Group Ranks": ranks}
    reduce = {**GEMM, "name": "ncclDevKernel_AllReduce_Sum_f32", "tid": 20, "ts": 500, "args": said}
    run = open_run(write(tmp_path / "trace.json", [STEP, GEMM, reduce]))
    assert [group.ranks for group in run.meta.groups] == [()]
    assert analyze(run).ledger["visible_comm_ns"].tolist() == [400_000]


@pytest.mark.parametrize("digits", ["9" * 19, "1" + "0" * 30, "9" * 5000])
def test_a_step_number_beyond_64_bits_is_no_step(tmp_path: Path, digits: str) -> None:
    odd = {**STEP, "name": f"ProfilerStep#{digits}", "ts": 2000}
    report = analyze(open_run(write(tmp_path / "trace.json", [STEP, odd, GEMM])))
    assert report.ledger["compute_ns"].tolist() == [400_000]


def test_a_step_in_which_nothing_takes_time(tmp_path: Path) -> None:
    report = analyze(open_run(write(tmp_path / "trace.json", [{**STEP, "dur": 1}, {**GEMM, "dur": 0}])))
    assert report.ledger["idle_ns"].tolist() == [1000] and report.class_means.empty


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world_size", -4),
        ("world_size", "x"),
        ("world_size", 10**9),
        ("world_size", True),
        ("mesh", [1, 2]),
        ("mesh", {"pp": 0}),
        ("mesh", {"pp": "2"}),
        ("recorder", None),
        ("device", 5),
    ],
)
def test_a_run_json_with_a_field_that_cannot_be(tmp_path: Path, field: str, value: Any) -> None:
    written = json.loads(RunMeta("id", "run", world_size=1).to_json())
    assert RunMeta.from_json(json.dumps(written)).world_size == 1
    (tmp_path / RUN_FILE).write_text(json.dumps({**written, field: value}))
    write(tmp_path / "rank_00000.trace.json", [STEP, GEMM])
    run = open_run(tmp_path)
    assert run.meta.world_size == 1 and run.ranks == [0]
    (item,) = [item for item in run.health.items if item.code == "no_run_json"]
    assert field in item.text


def odd(run: Any) -> dict[str, Any]:
    return {item.code: item for item in run.health.items}


def test_a_mesh_that_is_not_the_world(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", mesh={"pp": 2, "dp": 2, "ep": 2}))
    item = odd(run)["odd_mesh"]
    assert "the mesh (pp 2 x dp 2) has 4 ranks, the run 2" in item.text and item.file == RUN_FILE
    assert {"pipeline", "volumes", "memory"} <= set(item.touches) and run.health.status == "touched"
    assert odd(open_run(write_run(tmp_path / "right", mesh={"dp": 2, "ep": 2}))) == {}  # ep is among the ranks of dp


def test_a_run_json_that_tells_another_world_than_the_files(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", ranks=(0, 1, 2))  # their headers say 2
    written = json.loads((path / RUN_FILE).read_text())
    (path / RUN_FILE).write_text(json.dumps({**written, "world_size": 3, "mesh": {"dp": 3}}))
    item = odd(open_run(path))["odd_world"]
    assert "(2 in rank_00000.trace.json.gz, rank_00001.trace.json.gz, rank_00002.trace.json.gz) than 3" in item.text
    assert {"imbalance_ns", "unsplit_ns", "stragglers"} <= set(item.touches)


def test_two_files_that_tell_different_worlds(tmp_path: Path) -> None:
    for rank, world in enumerate((2, 4)):
        write(tmp_path / f"rank{rank}.json", [STEP, GEMM], distributedInfo={"rank": rank, "world_size": world})
    run = open_run(tmp_path)
    item = odd(run)["odd_world"]
    assert "different world sizes (2 in rank0.json, 4 in rank1.json): 4 is taken" in item.text
    assert run.meta.world_size == 4


def test_files_that_tell_one_world_or_none_are_not_odd(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [STEP, GEMM], distributedInfo={"rank": 0, "world_size": 2})
    write(tmp_path / "rank1.json", [STEP, GEMM], distributedInfo={"rank": 1})
    assert not {"odd_world", "odd_mesh"} & set(odd(open_run(tmp_path)))


NO_PATHS: list[Any] = [None, 5, 2.5, True, b"run", [None], ["run", 3], "", [""], object()]


@pytest.mark.parametrize("value", NO_PATHS, ids=repr)
def test_what_is_no_path_is_said(value: Any) -> None:
    with pytest.raises(StepscopeError, match="is no path: give a run directory or traces"):
        stepscope.open(value)


def test_any_path_like_opens(tmp_path: Path) -> None:
    class Named:
        def __fspath__(self) -> str:
            return str(path)

    path = write_run(tmp_path / "run")
    for one in (path, str(path), [path], (str(path),), Named()):
        assert stepscope.open(one).run.ranks == [0, 1]


@pytest.mark.parametrize("host", ["one", ""])
def test_relative_stamps_beside_absolute_ones(tmp_path: Path, host: str) -> None:
    """Three ranks reduce at 0, 20 and 40 us until 100; the first one's clock begins with its file, 54 years behind.

    On hosts that nobody names its clock is estimated; on one host, where clocks are the same, health says they disagree.
    """
    for rank in range(3):
        said = {
            "stream": 20,
            "Collective name": "allreduce",
            "Process Group Name": "1",
            "Process Group Ranks": "[0, 1, 2]",
        }
        name = {**GEMM, "name": "ncclDevKernel_AllReduce_Sum_f32", "tid": 20}
        rows = [
            {**name, "ts": 1000 * k + 20 * rank, "dur": 100 - 20 * rank, "args": {**said, "Seq": k}} for k in range(3)
        ]
        base = {"baseTimeNanoseconds": 1_700_000_000_000_000_000} if rank else {}
        info = {"distributedInfo": {"rank": rank, "world_size": 3}, "host_name": host}
        write(tmp_path / f"rank{rank}.json", [{**STEP, "dur": 3000}, *rows], **info, **base)
    report = analyze(open_run(tmp_path))
    codes = {item.code for item in report.health.items}
    assert ("clock_violation" if host else "clock_estimated") in codes
    if not host:
        assert report.ledger["imbalance_ns"].tolist() == [120_000, 60_000, 0]
