"""Nsight Systems exports, tables of operations and pipeline dumps: the same columns as everything else."""

from __future__ import annotations

import json
import shutil
import sqlite3
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from plain_ledger import COMM, COMPUTE, HOST, MEMCPY, cover, length, whole_trace

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ingest.ndtimeline import exact_ns
from stepscope.analysis.report import analyze
from stepscope.analysis.run import Run
from stepscope.tracer.schema import AXES, COLLECTIVES, KINDS, PHASES


def codes(run: Run) -> list[str]:
    return [item.code for item in run.health.items]


def windows(run: Run, rank: int) -> dict[int, tuple[int, int]]:
    """Begin and end of every step annotation."""
    events, strings = run.columns(rank), run.strings(rank)
    return {
        int(strings[events["name_id"][row]].removeprefix("ProfilerStep#")): (
            int(events["start_ns"][row]),
            int(events["start_ns"][row] + events["dur_ns"][row]),
        )
        for row in np.flatnonzero(events["kind"] == HOST)
        if strings[events["name_id"][row]].startswith("ProfilerStep#")
    }


# -- Nsight Systems ----------------------------------------------------------------------------------------------------


def test_nsys_to_the_nanosecond(corpus: Path) -> None:
    run = open_run(corpus / "nsys-2gpu")
    oracle = json.loads((corpus / "nsys-2gpu" / "oracle.json").read_text())["gpus"]
    assert run.ranks == [0, 1] and "rank_from_device" in codes(run)
    for rank in run.ranks:
        events, expected = run.columns(rank), oracle[str(rank)]
        found = whole_trace(events)
        assert found["window"] == expected["T"] and found["compute"] == expected["compute"]
        assert found["comm"] == expected["comm_union"] and found["memcpy"] == expected["memcpy"]
        assert found["visible"] == expected["visible_comm"] + expected["wait"] and found["idle"] == expected["idle"]
        comm = np.flatnonzero(events["kind"] == COMM)
        begin = events["start_ns"][events["kind"] != HOST].min() - expected["window"][0]
        assert [int(start - begin) for start in events["start_ns"][comm]] == [op["a"] for op in expected["ops"]]
        names = [COLLECTIVES[code] for code in events["collective"][comm] if code >= 0]
        assert names == ["all_to_all"] * 32  # the call around the first began before the recording
        calls = set(events["launch_id"][(events["kind"] == HOST) & (events["launch_id"] >= 0)].tolist())
        device = events["launch_id"][(events["kind"] != HOST)]
        assert sum(launch in calls for launch in device.tolist()) > 0.99 * len(device)


def test_an_export_from_a_minimal_database(tmp_path: Path) -> None:
    """Two processes of one device each that use the same correlation ids: launches join by process and id."""
    file = tmp_path / "report.sqlite"
    process = {0: 10 << 24, 1: 11 << 24}
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        db.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "cudaLaunchKernel_v7000"), (3, "nccl:all_reduce")]
        )
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL"
            " (start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT, demangledName INT)"
        )
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT)"
        )
        for rank, pid in process.items():
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 7, 5, ?, 1)",
                (100 + rank, 200 + rank, rank, pid),
            )
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, 5, 2)", (50 + rank, 60, pid | 77))
    db.close()
    run = open_run(file)
    assert run.ranks == [0, 1]
    for rank in run.ranks:
        events, strings = run.columns(rank), run.strings(rank)
        rows = [
            (strings[n], KINDS[k], int(s))
            for n, k, s in zip(events["name_id"], events["kind"], events["start_ns"], strict=True)
        ]
        assert rows == [("gemm", "compute", 100 + rank), ("cudaLaunchKernel", "host", 50 + rank)]
        assert events["launch_id"].tolist() == [5, 5]
        assert [(lane.name, lane.role) for lane in run.lanes(rank)] == [("stream 7", "compute"), ("thread 77", "host")]


def test_databases_that_are_no_exports(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE t (x INTEGER)")
    db.close()
    with pytest.raises(StepscopeError, match="something else than Nsight"):
        open_run(tmp_path / "other.sqlite")
    (tmp_path / "broken.sqlite").write_bytes(b"SQLite format 3\0" + bytes(200))
    with pytest.raises(StepscopeError, match="no readable SQLite"):
        open_run(tmp_path / "broken.sqlite")


# -- tables of operations ----------------------------------------------------------------------------------------------


def test_ndtimeline_of_a_real_job(corpus: Path) -> None:
    run = open_run(corpus / "ndtimeline-st")
    table = pd.read_parquet(corpus / "ndtimeline-st" / "trace-ST.parquet")
    assert run.ranks == list(range(8)) and run.meta.mesh == {"pp": 4, "dp": 2}
    assert run.meta.coords[5] == {"pp": 2, "dp": 1} and run.health.status == "ok"
    steps = windows(run, 0)
    assert len(steps) == 32 and all(windows(run, rank) == steps for rank in run.ranks)
    assert np.mean([end - begin for begin, end in steps.values()]) == pytest.approx(2.2144477888941765e9, abs=1)
    edges = sorted(steps.values())
    assert all(end == begin for (_, end), (begin, _) in pairwise(edges))
    for rank in run.ranks:
        own = table[table["rank"] == rank]
        events, strings = run.columns(rank), run.strings(rank)
        operations = ~np.char.startswith(np.array(strings)[events["name_id"]], "ProfilerStep#")
        assert operations.sum() == len(own)
        assert sorted(events["dur_ns"][operations].tolist()) == pytest.approx(
            sorted((own["duration"].astype(float) * 1e9).tolist()), abs=1
        )
        compute = events["kind"] == COMPUTE
        assert compute.sum() == own["optype"].isin(["forward-compute", "backward-compute", "optimizer"]).sum()
        assert set(events["stage"][compute].tolist()) == {rank // 2}
    assert [len(table) for table in run.meta.pipeline_table] == [8] * 8
    assert [action.phase for action in run.meta.pipeline_table[7]] == ["forward", "backward"] * 4


def test_sends_and_receives_of_a_real_job_pair_by_group_and_number(corpus: Path) -> None:
    run = open_run(corpus / "ndtimeline-st")
    ends: dict[tuple, dict[str, tuple[int, int]]] = {}
    for rank in run.ranks:
        events, strings = run.columns(rank), run.strings(rank)
        for row in np.flatnonzero(events["kind"] == COMM):
            word = COLLECTIVES[events["collective"][row]]
            if word in ("send", "receive"):
                pair = (rank, int(events["peer"][row]))
                key = (
                    strings[events["group_id"][row]],
                    pair if word == "send" else pair[::-1],
                    int(events["seq"][row]),
                )
                ends.setdefault(key, {})[word] = (rank, int(events["start_ns"][row] + events["dur_ns"][row]))
    assert len(ends) == 32 * 4 * 6 * 2 and all(set(pair) == {"send", "receive"} for pair in ends.values())
    gaps = [abs(pair["send"][1] - pair["receive"][1]) for pair in ends.values()]
    assert np.median(gaps) < 1_000_000


def test_a_table_of_other_operations(tmp_path: Path) -> None:
    """Two stages, one replica, csv, without ranks: stage 1 receives at 2-5 what stage 0 sends at 3-4."""
    rows = [
        (0, 0, 7, "forward-compute", 1.0, 2.0, 0),
        (0, 0, 7, "forward-send", 3.0, 1.0, -1),
        (0, 1, 7, "forward-recv", 2.0, 3.0, -1),
        (0, 1, 7, "forward-compute", 5.0, 0.5, 0),
        (0, 1, 7, "strange-thing", 6.0, 0.25, -1),
        (0, 1, 8, "forward-compute", 0.5, 0.125, 0),
        (0, 1, 8, "forward-compute", None, 0.125, 0),
    ]
    columns = ["dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "ops.csv", index=False)
    run = open_run(tmp_path / "ops.csv")
    assert run.ranks == [0, 1] and set(codes(run)) == {"unknown_operation", "no_time"}
    second = 1_000_000_000
    assert windows(run, 1) == {7: (0, int(5.25 * second)), 8: (int(5.25 * second), int(5.375 * second))}
    assert windows(run, 0) == {7: (0, int(5.25 * second))}
    events, strings = run.columns(1), run.strings(1)
    row = int(np.flatnonzero(events["kind"] == COMM)[0])
    assert COLLECTIVES[events["collective"][row]] == "receive" and AXES[events["axis"][row]] == "pp"
    assert (int(events["peer"][row]), int(events["seq"][row]), strings[events["group_id"][row]]) == (
        0,
        0,
        "pp dp0 forward",
    )
    assert (int(events["start_ns"][row]), int(events["dur_ns"][row])) == (second, 3 * second)
    assert KINDS[events["kind"][[strings[n] for n in events["name_id"]].index("strange-thing")]] == "host"


COLUMNS = ["dp_rank", "stage", "step", "optype", "start_ts", "duration"]


def test_a_part_of_a_table_that_is_a_copy_counts_once(tmp_path: Path) -> None:
    first = [(0, 0, 1, "forward-compute", 0.0, 1.0), (0, 0, 1, "gc", 1.0, 0.0), (0, 0, 1, "gc", 1.0, 0.0)]
    second = [(0, 1, 1, "forward-compute", 1.0, 1.0)]
    for name, rows in (("a", first), ("b", second), ("copy of a", first)):
        pd.DataFrame(rows, columns=COLUMNS).to_parquet(tmp_path / f"{name}.parquet")
    run = open_run(tmp_path)
    [item] = [item for item in run.health.items if item.code == "repeated_rows"]
    assert item.text.startswith("3 rows stand in several of the files")
    assert [len(run.columns(rank)["start_ns"]) for rank in run.ranks] == [4, 2], "with a step's annotation each"


def test_a_table_with_odd_values_keeps_the_other_rows(tmp_path: Path) -> None:
    good = (0, 0, 1, "forward-compute", 0.5, 1.0)
    odd = [
        (0, 0, 1, "forward-compute", "inf", 1.0), (0, 0, 1, "forward-compute", 0.5, "soon"), (0, -1, 1, "gc", 0.5, 1.0),
        (0, 99_999, 1, "gc", 0.5, 1.0), ("x", 0, 1, "gc", 0.5, 1.0), (0, 0, None, "gc", 0.5, 1.0), (0, 0, 1, None, 0.5, 1.0),
        (0, 0, 1, "gc", 1e300, 1.0),
    ]  # fmt: skip
    rows = [(*row, rank) for row, rank in zip([good, *odd], [None, *range(8)], strict=True)]
    pd.DataFrame(rows, columns=[*COLUMNS, "rank"]).to_csv(tmp_path / "ops.csv", index=False)
    run = open_run(tmp_path / "ops.csv")
    assert run.ranks == [0] and codes(run) == ["no_time"] and run.health.items[0].text.startswith("8 rows of the table")
    assert windows(run, 0) == {1: (0, 1_000_000_000)}
    pd.DataFrame(odd, columns=COLUMNS).to_csv(tmp_path / "ops.csv", index=False)
    with pytest.raises(StepscopeError, match="no row has a place and a time"):
        open_run(tmp_path / "ops.csv")


def test_optional_numbers_of_a_table_that_cannot_be_are_not_said(tmp_path: Path) -> None:
    rows = [(0, 0, 1, "forward-compute", 0.5 + i, 1.0, odd, odd) for i, odd in enumerate((3, 1e30, -7, 40_000, "x"))]
    pd.DataFrame(rows, columns=[*COLUMNS, "mb_id", "mc"]).to_csv(tmp_path / "ops.csv", index=False)
    found = open_run(tmp_path / "ops.csv").columns(0, "microbatch", "chunk", "phase")
    assert found["microbatch"][found["phase"] >= 0].tolist() == [3, -1, -1, 40_000, -1]
    assert found["chunk"][found["phase"] >= 0].tolist() == [3, -1, -1, -1, -1]


def test_a_negative_duration_of_a_table_is_said(tmp_path: Path) -> None:
    rows = [(0, 0, 1, "forward-compute", 0.5, 1.0), (0, 0, 1, "backward-compute", 2.0, -1.0)]
    pd.DataFrame(rows, columns=COLUMNS).to_csv(tmp_path / "ops.csv", index=False)
    run = open_run(tmp_path / "ops.csv")
    assert codes(run) == ["negative_duration"] and run.health.items[0].text.startswith("1 row of the table has")
    assert (run.columns(0, "dur_ns")["dur_ns"] >= 0).all()


def test_seconds_become_the_nearest_nanosecond() -> None:
    assert exact_ns(1.5) == 1_500_000_000 and exact_ns(np.float32(0.1)) == 100_000_001


# -- pipeline dumps ----------------------------------------------------------------------------------------------------


def test_pp_vis_of_a_real_job(corpus: Path) -> None:
    run = open_run(corpus / "pp-vis-1f1b")
    oracle = json.loads((corpus / "pp-vis-1f1b" / "oracle.json").read_text())["iterations"]
    assert run.ranks == list(range(8)) and run.meta.mesh == {"pp": 8}
    for rank in run.ranks:
        events, steps = run.columns(rank), windows(run, rank)
        assert {step: end - begin for step, (begin, end) in steps.items()} == {
            int(k): one["T"] for k, one in oracle.items()
        }
        for step, (begin, end) in steps.items():
            inside = (events["start_ns"] >= begin) & (events["start_ns"] < end)
            chosen = {name: values[inside] for name, values in events.items()}
            assert length(cover(chosen, COMPUTE)) == oracle[str(step)]["ranks"][rank]["compute"]
        assert not np.isin(events["kind"], (COMM, MEMCPY)).any() and set(
            events["stage"][events["kind"] == COMPUTE]
        ) == {rank}
        forward = (events["phase"] == PHASES.index("forward")) & (events["kind"] == COMPUTE)
        assert events["microbatch"][forward].tolist() == list(range(16)) * 20
    assert [action.phase for action in run.meta.pipeline_table[7]][:4] == ["forward", "backward"] * 2


def test_a_stage_of_a_dump_that_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    for rank in range(3):
        shutil.copy(corpus / "pp-vis-1f1b" / f"pp_rank_{rank}.json", tmp_path)
    content = json.loads((tmp_path / "pp_rank_1.json").read_text())
    content["3"]["fwd_end"].pop()
    (tmp_path / "pp_rank_1.json").write_text(json.dumps(content))
    run = open_run(tmp_path)
    assert run.ranks == [0, 2] and "broken_rank" in codes(run)
    [item] = [item for item in run.health.items if item.code == "broken_rank"]
    assert "iteration 3 has 16 starts and 15 ends" in item.text and item.file == "pp_rank_1.json"
    # each is the stage that it was, not one of as many as could be read
    assert [set(run.columns(rank, "stage")["stage"].tolist()) - {-1} for rank in run.ranks] == [{0}, {2}]
    assert analyze(run).pipeline.stages == 3


@pytest.mark.parametrize(
    "config", ['{"pp_size": "two", "vp_size": null}', '{"pp_size": 0, "vp_size": -1}', "[]", "{", '{"pp_size": true}']
)
def test_odd_configurations_and_values_of_dumps(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    one = {"fwd_start": [0.0, 4], "fwd_end": [1.0, 5], "bwd_start": [2], "bwd_end": [3]}
    for rank, odd in enumerate(("0.0", "Infinity", "NaN", '"x"', "null", "[]")):
        (tmp_path / f"pp_rank_{rank}.json").write_text(json.dumps({"1": one}).replace("[0.0", f"[{odd}", 1))
    run = open_run(tmp_path)
    assert run.ranks == [0] and codes(run).count("broken_rank") == 5
    assert windows(run, 0) == {1: (0, 5_000_000)}


def test_operations_of_a_dump_that_end_before_they_start_are_said(tmp_path: Path) -> None:
    one = {"fwd_start": [0.0, 4], "fwd_end": [1.0, 3.5], "bwd_start": [6], "bwd_end": [5]}
    straight = {"fwd_start": [0.0, 4], "fwd_end": [1.0, 5], "bwd_start": [6], "bwd_end": [6]}
    for rank, iteration in enumerate((one, straight)):
        (tmp_path / f"pp_rank_{rank}.json").write_text(json.dumps({"1": iteration}))
    run = open_run(tmp_path)
    (item,) = [item for item in run.health.items if item.code == "negative_duration"]
    assert item.text == (
        "2 operations end before they start (first: forward 1 of iteration 1, 4 to 3.5 ms): kept with length 0"
    )
    assert item.rank == 0 and item.file == "pp_rank_0.json" and item.touches == ("ledger",)
    assert run.columns(0, "dur_ns")["dur_ns"].tolist().count(0) == 2


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    one = {"fwd_start": [0.0], "fwd_end": [1.0], "bwd_start": [2], "bwd_end": [3]}
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "pp_rank_0.json").write_text(json.dumps({"1": one}))
    with pytest.raises(StepscopeError, match=r"a/pp_rank_0\.json and \S*b/pp_rank_0\.json are both rank 0"):
        open_run(tmp_path)


def test_files_of_several_formats_are_not_mixed(corpus: Path) -> None:
    with pytest.raises(StepscopeError, match="several formats"):
        open_run([corpus / "kineto-mi250", corpus / "pp-vis-1f1b"])
