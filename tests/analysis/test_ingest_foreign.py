"""Traces of other programs, hand-made: what each odd thing becomes, and what is said of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_files import call, codes, events_of, row, step, write

from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.tracer.schema import FLAG_DEVICE_COPY, FLAG_GRAPH, FLAG_IMPOSSIBLE, FLAG_PARTIAL, KINDS


def test_what_runs_on_a_device_and_what_does_not(tmp_path: Path) -> None:
    rows = [
        row("gemm", 0, 300),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", 300, 600, tid=20),
        row("cudaDeviceSynchronize", 300, 600, cat="cuda_sync", stream=7),
        row("nccl:all_reduce", 300, 600, cat="gpu_user_annotation", tid=20),
        row("launcher", 0, 50, cat="cpu_op", tid=1, pid=99, stream=7, kernel_backend="triton"),
        row("Memcpy DtoD (Device -> Device)", 900, 10, cat="gpu_memcpy", stream=7),
        row("Memset (Device)", 920, 10, cat="gpu_memset", stream=7),
        row("Memcpy HtoD", 940, 10, cat="Memcpy", stream=7),
        row("overhead", 0, 10, cat="overhead", tid=1, pid=99),
    ]
    run = open_run(write(tmp_path / "trace.json", rows))
    kinds = {name: kind for name, kind, _, _ in events_of(run)}
    assert kinds == {
        "gemm": "compute",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)": "comm",
        "cudaDeviceSynchronize": "host",
        "nccl:all_reduce": "host",
        "launcher": "host",
        "Memcpy DtoD (Device -> Device)": "memcpy",
        "Memset (Device)": "memcpy",
        "Memcpy HtoD": "memcpy",
        "overhead": "host",
    }
    assert [(lane.name, lane.role) for lane in run.lanes(0)] == [
        ("stream 7", "compute"),
        ("stream 20", "comm"),
        ("thread 7 annotations", "host"),
        ("thread 20 annotations", "host"),
        ("thread 1", "host"),
    ]
    flags = dict(zip((name for name, *_ in events_of(run)), run.columns(0, "flags")["flags"], strict=True))
    assert [name for name, flag in flags.items() if flag & FLAG_DEVICE_COPY] == ["Memcpy DtoD (Device -> Device)"]


def test_stamps_are_exact(tmp_path: Path) -> None:
    text = """{"traceEvents": [
        {"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":1712195495505582.988,"dur":0.001,"args":{"correlation":9007199254740993}},
        {"ph":"X","cat":"kernel","name":"b","pid":0,"tid":7,"ts":1712195495505590,"dur":1e3},
        {"ph":"X","cat":"kernel","name":"c","pid":0,"tid":7,"ts":"1712195495506590.1234","dur":68.0}]}"""
    (tmp_path / "t.json").write_text(text)
    run = open_run(tmp_path / "t.json")
    assert [(start, dur) for _, _, start, dur in events_of(run)] == [
        (1712195495505582988, 1),
        (1712195495505590000, 1_000_000),
        (1712195495506590123, 68_000),
    ]
    assert run.columns(0, "launch_id")["launch_id"].tolist() == [9007199254740993, -1, -1]


def test_relative_stamps_count_from_the_base(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "t.json", [row("a", 1.5, 2)], baseTimeNanoseconds=1_700_000_000_000_000_000))
    assert events_of(run) == [("a", "compute", 1_700_000_000_000_001_500, 2000)]


def test_a_kernel_with_time_0_is_left_out_and_counted(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "t.json", [row("a", 100, 10), row("empty", 0, 0), row("b", 120, 10)]))
    assert [name for name, *_ in events_of(run)] == ["a", "b"] and codes(run) == ["zero_rows"]


def test_real_overlap_on_one_lane_is_kept(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "t.json", [row("a", 0, 100), row("b", 95, 100)]))
    assert [(start, dur) for _, _, start, dur in events_of(run)] == [(0, 100_000), (95_000, 100_000)]
    assert codes(run) == []


def test_an_impossible_duration_is_cut_at_the_next_row(tmp_path: Path) -> None:
    rows = [row(f"k{i % 3}", 100 * i, 100) for i in range(9)]
    rows += [row("Memcpy HtoD", 900, 3_400_000, cat="gpu_memcpy", stream=7)]
    rows += [row(f"k{i % 3}", 1000 + 100 * i, 100) for i in range(10)]
    run = open_run(write(tmp_path / "t.json", rows))
    cut = [(name, start, dur) for name, kind, start, dur in events_of(run) if kind == "memcpy"]
    assert cut == [("Memcpy HtoD", 900_000, 100_000)]
    flags = run.columns(0, "flags")["flags"]
    assert (flags & FLAG_IMPOSSIBLE != 0).sum() == 1
    assert sum(dur for *_, dur in events_of(run)) == 2_000_000
    assert codes(run) == ["impossible_duration"] and run.health.status == "touched"


def test_a_long_row_that_nothing_contradicts_stays(tmp_path: Path) -> None:
    rows = [row("k", 100 * i, 100) for i in range(9)] + [row("k", 900, 50_000), row("tail", 950, 0)]
    run = open_run(write(tmp_path / "t.json", rows))
    assert max(dur for *_, dur in events_of(run)) == 50_000_000 and codes(run) == []


def test_begin_and_end_rows_are_joined(tmp_path: Path) -> None:
    def half(ph: str, name: str, ts: float, tid: int = 7) -> dict:
        return {"ph": ph, "cat": "kernel", "name": name, "pid": 0, "tid": tid, "ts": ts}

    rows = [half("B", "outer", 0), half("B", "inner", 10), half("B", "other", 5, tid=8), half("E", "", 20)]
    rows += [half("E", "", 40), half("E", "", 9, tid=8), half("E", "lonely", 50), half("B", "open", 60)]
    run = open_run(write(tmp_path / "t.json", rows))
    assert events_of(run) == [
        ("outer", "compute", 0, 40_000),
        ("inner", "compute", 10_000, 10_000),
        ("other", "compute", 5_000, 4_000),
    ]
    [item] = run.health.items
    assert item.code == "loose_pairs" and item.text.startswith("2 ")


def test_kernels_inherit_what_their_call_says(tmp_path: Path) -> None:
    said = {
        "Collective name": "_allgather_base",
        "In msg nelems": 8,
        "Out msg nelems": 64,
        "dtype": "BFloat16",
        "Process Group Name": "4",
        "Process Group Description": "mesh_tp",
        "Process Group Ranks": "[0, 1, 2, 3, 8]",
        "Seq": 12,
    }
    rows = [
        row("record_param_comms", 0, 5, cat="cpu_op", tid=1, pid=99, **{"External id": 5}, **said),
        row("ncclDevKernel_Generic", 50, 10, tid=20, **{"External id": 5}),
        row("ncclDevKernel_Generic", 70, 10, tid=20, **{"External id": 6}),
    ]
    run = open_run(write(tmp_path / "t.json", rows))
    events, strings = run.columns(0), run.strings(0)
    comm = np.flatnonzero(events["kind"] == KINDS.index("comm"))
    assert [strings[g] if g >= 0 else "" for g in events["group_id"][comm]] == ["4 [0-3,8]", ""]
    assert events["seq"][comm].tolist() == [12, -1] and events["bytes"][comm].tolist() == [128, -1]
    assert [(g.name, g.axis, g.ranks) for g in run.meta.groups] == [("4 [0-3,8]", "tp", (0, 1, 2, 3, 8))]


def test_the_annotation_around_a_launch_names_the_collective(tmp_path: Path) -> None:
    rows = [
        row("nccl:all_to_all", 0, 20, cat="user_annotation", tid=1, pid=99),
        call("cudaLaunchKernelExC", 5, 5, 77),
        call("cudaLaunchKernelExC", 30, 5, 78),
        call("cudaLaunchKernelExC", 6, 5, 79, tid=2),
        *[row("ncclDevKernel_SendRecv(int)", 50 + 20 * i, 10, tid=20, correlation=77 + i) for i in range(3)],
    ]
    run = open_run(write(tmp_path / "t.json", rows))
    comm = run.columns(0)["kind"] == KINDS.index("comm")
    assert run.columns(0)["collective"][comm].tolist() == [3, -1, -1]


def test_graph_launches_and_launch_doubts(tmp_path: Path) -> None:
    rows = [call("cudaGraphLaunch", 0, 5, 5), call("cudaLaunchKernel", 90, 5, 6), call("cudaLaunchKernel", 95, 5, 7)]
    rows += [row("k", 10 + 2 * i, 1, correlation=5) for i in range(10)] + [row("early", 80, 5, correlation=6)]
    run = open_run(write(tmp_path / "t.json", rows))
    events = run.columns(0)
    assert (events["flags"] & FLAG_GRAPH != 0).sum() == 10 and (events["launch_id"] == 5).sum() == 11
    said = {item.code: item.text for item in run.health.items}
    assert said["earlier_than_launch"].startswith("1 device row starts") and "10000 ns" in said["earlier_than_launch"]
    assert said["launch_without_kernel"].startswith("1 of 3")


def test_the_grid_of_a_launch_is_kept(tmp_path: Path) -> None:
    grids: list[Any] = [[512, 1, 1], "[512,1,1]", [4, 2], "512", None]
    rows = [row("gemm", 10 * i, 5, grid=grid) for i, grid in enumerate(grids)]
    run = open_run(write(tmp_path / "t.json", rows))
    found = [run.strings(0)[code] if code >= 0 else "" for code in run.columns(0)["grid_id"]]
    assert found == ["512x1x1", "512x1x1", "", "", ""]


def test_ids_of_all_64_bits_join_rows_to_their_calls(tmp_path: Path) -> None:
    ids = [2**64 - 17, 2**63, 2**63 - 1, 5]
    rows = [
        step(1, 0, 100),
        *[call("cudaLaunchKernel", 1 + i, 1, one) for i, one in enumerate(ids)],
        step(2, 100, 100),
        call("cudaLaunchKernel", 110, 1, 2**64 - 18),
        *[row(f"k{i}", 120 + 10 * i, 10, correlation=one) for i, one in enumerate(ids)],
        row("k4", 160, 10, correlation=2**64 - 18),
        row("none", 170, 10, correlation=2**64 - 1),
        row("too large", 180, 10, correlation=2**64),
    ]
    path = write(tmp_path / "t.json", rows)
    run = open_run(path)
    found = decompose(run)
    assert found.ledger["step_ns"].tolist() == [40_000, 10_000]  # k0 to k3 are of step 1, k4 alone of step 2
    said = {item.code: item for item in run.health.items}
    assert set(said) == {"too_large", "no_launch", "outside"}
    assert said["too_large"].text.startswith("1 number ") and said["too_large"].offset == path.read_text().index(
        f"{2**64}}}"
    )
    assert said["no_launch"].text.startswith("rank 0: 2 of 7 device rows")


def test_no_recognised_communication_is_said_with_the_longest_kernels(tmp_path: Path) -> None:
    rows = [row("secret_ring", 0, 500, tid=20), row("gemm", 0, 100)]
    world = {"rank": 1, "world_size": 2}
    run = open_run(write(tmp_path / "t.json", rows, distributedInfo=world))
    [item] = [item for item in run.health.items if item.code == "no_communication"]
    assert "secret_ring (500 us), gemm (100 us)" in item.text and "visible_comm_ns" in item.touches
    rules = tmp_path / "mine.toml"
    rules.write_text('[communication]\nnames = ["secret_ring"]\n')
    run = open_run(tmp_path / "t.json", rules=rules)
    assert "no_communication" not in codes(run)
    assert [kind for _, kind, _, _ in events_of(run, 1)] == ["compute", "comm"]


def test_a_top_level_list_and_strange_ids(tmp_path: Path) -> None:
    rows = [row("a", 0, 1, pid="Spans", tid=""), row("b", 5, 1, tid="stream 7"), 17, {"no": "ph"}]
    rows[1]["args"] = "not an object"
    (tmp_path / "t.json").write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    run = open_run(tmp_path / "t.json")
    assert [name for name, *_ in events_of(run)] == ["a", "b"] or [name for name, *_ in events_of(run)] == ["b", "a"]
    assert {(lane.pid, lane.tid) for lane in run.lanes(0)} == {("Spans", ""), ("0", "stream 7")}


def test_what_was_repaired_is_in_the_health_report(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [row("a", 0, 1), row("q#uote", 5, 1), row("b", 9, 1)]}).replace("#", '"')
    (tmp_path / "t.json").write_text(text)
    for _ in range(2):  # the second time from the store
        run = open_run(tmp_path / "t.json")
        assert [name for name, *_ in events_of(run)] == ["a", 'q"uote', "b"]
        [item] = run.health.items
        assert item.code == "raw_quote" and item.text.startswith("1 ") and item.file == "t.json"
        assert item.offset == text.index('q"uote') and run.health.status == "ok"


CONTROL_NAME = '{"ph": "X", "cat": "kernel", "name": "a\x01", "pid": 0, "tid": 7, "ts": 1, "dur": 1}'


@pytest.mark.parametrize(
    ("damaged", "one", "two"),
    [
        ('{"name": "q"uote", "ts": 1, "dur": 1}', "1 string contains a raw", "2 strings contain a raw"),
        ('{"name": "a", "ts": 1, "dur": NaN}', "1 value is no JSON", "2 values are no JSON"),
        (CONTROL_NAME, "1 string contains raw control", "2 strings contain raw control"),
        (',{"name": "a", "ts": 1, "dur": 1}', "1 comma is too many", "2 commas are too many"),
        ('{"ph": "X" [', "1 event makes no sense: left out", "2 events make no sense: left out"),
    ],
)
def test_a_repair_is_said_of_one_and_of_several(tmp_path: Path, damaged: str, one: str, two: str) -> None:
    whole = json.dumps(row("whole", 0, 1))
    for times, text in ((1, one), (2, two)):
        path = tmp_path / f"{times}.json"
        path.write_text('{"traceEvents": [' + ", ".join([whole, *[damaged, whole] * times]) + "]}")
        said = [item.text for item in open_run(path).health.items]
        assert any(line.startswith(text) for line in said), said


def test_a_foreign_file_that_was_cut_leaves_all_steps_partial(tmp_path: Path) -> None:
    rows = [step(1, 0, 10), step(2, 10, 10), row("a", 0, 1), row("b", 9, 1)]
    text = json.dumps({"traceEvents": rows})
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text[:-30].encode()))
    run = open_run(tmp_path / "t.json.gz")
    assert [name for name, *_ in events_of(run)] == ["a", "ProfilerStep#1", "ProfilerStep#2"]
    assert run.columns(0, "flags")["flags"].tolist() == [0, FLAG_PARTIAL, FLAG_PARTIAL]
    assert codes(run) == ["cut_file"] and run.health.status == "touched"


def message(kind: str, start: float, dur: float, seq: int, **more: Any) -> dict:
    """A point to point between ranks 0 and 1 as torch.profiler describes it."""
    said = {"Collective name": kind, "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    said |= {"Src Rank": 0, "Dst Rank": 1, "Seq": seq, "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8}
    return row("ncclDevKernel_SendRecv", start, dur, tid=20, **{**said, **more})


def test_numbers_of_messages_that_do_not_fit_leave_no_hole(tmp_path: Path) -> None:
    """Message 1 of the sender was over before that of the receiver began: undone, it must not upset message 5."""
    ends = {0: [message("send", 0, 10, 1), message("send", 200, 10, 5)]}
    ends[1] = [message("recv", 100, 10, 1), message("recv", 195, 15, 5)]
    for rank, rows in ends.items():
        rows = [*rows, row("gemm", 300, 5)]
        write(tmp_path / f"rank{rank}.json", rows, distributedInfo={"rank": rank, "world_size": 2})
    parts = decompose(open_run(tmp_path)).matches.parts
    pairs = parts.groupby("match_id")["arrival_ns"].apply(sorted).tolist()
    assert sorted(pairs) == [[0], [100_000], [195_000, 200_000]]
