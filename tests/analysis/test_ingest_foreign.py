"""Traces of other programs, hand-made: what each odd thing becomes, and what is said of it."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from trace_files import row, step, write_run

from stepscope.__main__ import status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.run import Run
from stepscope.tracer.schema import FLAG_DEVICE_COPY, FLAG_GRAPH, FLAG_IMPOSSIBLE, FLAG_PARTIAL, KINDS


def write(path: Path, rows: list[dict], **header: Any) -> Path:
    path.write_text(json.dumps({**header, "traceEvents": rows}))
    return path


def events_of(run: Run, rank: int = 0) -> list[tuple[str, str, int, int]]:
    """(name, kind, start, duration) in ns, in the store's order."""
    events, strings = run.columns(rank), run.strings(rank)
    return [
        (strings[name], KINDS[kind], int(start), int(dur))
        for name, kind, start, dur in zip(*(events[c] for c in ("name_id", "kind", "start_ns", "dur_ns")), strict=True)
    ]


def codes(run: Run) -> list[str]:
    return [item.code for item in run.health.items]


def call(name: str, start: float, dur: float, correlation: int, tid: int = 1) -> dict:
    return row(name, start, dur, cat="cuda_runtime", tid=tid, pid=99, correlation=correlation)


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


# -- files -------------------------------------------------------------------------------------------------------------


def test_ranks_from_names_and_from_the_files_themselves(tmp_path: Path) -> None:
    for name, rank in (("a-rank-2.json", None), ("a-rank-10.json", None), ("a-rank-0.json", 0)):
        write(tmp_path / name, [row(name, 0, 1)], **({"distributedInfo": {"rank": rank}} if rank is not None else {}))
    run = open_run(tmp_path)
    assert run.ranks == [0, 2, 10]
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["a-rank-0.json", "a-rank-2.json", "a-rank-10.json"]
    assert codes(run) == ["rank_from_name", "missing_rank"]
    assert run.meta.world_size == 11 and run.health.items[1].text.startswith("8 of 11 ranks")


def test_ranks_from_coordinates(tmp_path: Path) -> None:
    for pp in range(2):
        for tp in range(2):
            write(tmp_path / f"17-TP-{tp}-DP-0-PP-{pp}-EP-0.trace.json", [row(f"pp{pp} tp{tp}", 0, 1)])
    run = open_run(str(tmp_path / "17-*.json"))
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["pp0 tp0", "pp0 tp1", "pp1 tp0", "pp1 tp1"]


@pytest.mark.parametrize("number", ["1712195495505", "99999999999999999999"])
def test_a_number_that_no_rank_has_is_none(tmp_path: Path, number: str) -> None:
    """A worker's name may carry a date or a process id: the order of the names counts then."""
    for name in (f"worker-{number}", "worker-3"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": [row("gemm", 0, 1)]}))
    assert open_run(tmp_path).ranks == [0, 1]


def test_names_without_a_rank_count_in_natural_order(tmp_path: Path) -> None:
    for name in ("trace9.json", "trace10.json"):
        write(tmp_path / name, [row(name, 0, 1)])
    run = open_run(tmp_path)
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["trace9.json", "trace10.json"]


def test_the_users_map_gives_ranks(tmp_path: Path) -> None:
    for name in ("x.json", "y.json"):
        write(tmp_path / name, [row(name, 0, 1)])
    rules = tmp_path / "mine.toml"
    rules.write_text('[ranks]\n"x*" = 1\n"y*" = 0\n')
    run = open_run([tmp_path / "x.json", tmp_path / "y.json"], rules=rules)
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["y.json", "x.json"]


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        write(tmp_path / name, [row("a", 0, 1)], distributedInfo={"rank": 0, "world_size": 2})
    with pytest.raises(StepscopeError, match=r"one\.json and two\.json are both rank 0"):
        open_run(tmp_path)


def test_a_copy_that_does_not_say_its_rank_is_said(tmp_path: Path) -> None:
    for rank, length in ((0, 5), (1, 5), (2, 6)):
        write(tmp_path / f"rank{rank}.json", [row("a", 0, 5), row("b", 10, length)])
    (item,) = (item for item in open_run(tmp_path).health.items if item.touches)
    assert item.code == "same_file" and item.text.startswith("rank0.json and rank1.json are the same")


def test_two_files_of_one_rank_and_one_name_are_named_with_their_directories(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write(tmp_path / place / "t.json", [row(place, 0, 1)], distributedInfo={"rank": 0, "world_size": 2})
    with pytest.raises(StepscopeError, match=r"a/t\.json and \S*b/t\.json are both rank 0"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "places",
    [
        ["rank-10/t.json", "rank-2/t.json", "rank-0/t.json"],  # the rank in the directory
        ["node10/gpu0.json", "node2/gpu0.json", "node2/gpu1.json"],  # a rank within a node: counted on
        ["node1/TP-0.json", "node0/TP-1.json", "node0/TP-0.json"],
    ],
)
def test_files_of_one_name_are_told_apart_by_their_directories(tmp_path: Path, places: list[str]) -> None:
    for place in places:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write(tmp_path / place, [row(place, 0, 1)])
    run = open_run(tmp_path)
    found = [events_of(run, rank)[0][0] for rank in run.ranks]
    assert found == sorted(places, key=lambda place: [int(n) for n in re.findall(r"\d+", place)])
    assert run.ranks == ([0, 2, 10] if places[0].startswith("rank") else [0, 1, 2])


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["gpu8_rank0", "gpu8_rank10", "gpu8_rank2"], [0, 10, 2]),  # the machine has 8, the rank is another number
        (["rank-0", "worker1"], [0, 1]),
        (["other", "rank-3"], [0, 3]),
        (["b", "rank-0", "rank-1"], [2, 0, 1]),
        (["node0_rank0", "node0_rank1", "node1_rank0"], [0, 1, 2]),  # ranks of a node
        (["gpu8_a", "gpu8_b"], [0, 1]),
        (["x1²2", "x1²10", "x٣"], [0, 1, 2]),  # what is no digit, and digits of other scripts
    ],
)
def test_ranks_that_some_names_carry(tmp_path: Path, names: list[str], ranks: list[int]) -> None:
    for name in names:
        write(tmp_path / f"{name}.json", [row(name, 0, 1)])
    run = open_run(tmp_path)
    assert {events_of(run, rank)[0][0]: rank for rank in run.ranks} == dict(zip(names, ranks, strict=True))


@pytest.mark.parametrize("names", [["rank0_step10", "rank0_step20"], ["worker1.1695", "worker1.1694", "worker0.1694"]])
def test_two_files_that_are_one_rank_by_their_names(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write(tmp_path / f"{name}.json", [row(name, 0, 1)])
    with pytest.raises(StepscopeError, match=r"\.json and .*\.json are both rank \d: remove one .* \[ranks\] table"):
        open_run(tmp_path)
    (tmp_path / "mine.toml").write_text("[ranks]\n" + "".join(f'"{name}.json" = {i}\n' for i, name in enumerate(names)))
    assert open_run(tmp_path, rules=tmp_path / "mine.toml").ranks == list(range(len(names)))


def test_a_broken_file_leaves_the_others(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [row("a", 0, 1)])
    (tmp_path / "rank1.json.gz").write_bytes(gzip.compress(b'{"traceEvents": ['))
    run = open_run(tmp_path)
    assert run.ranks == [0] and run.health.status == "broken"
    assert [item.file for item in run.health.items if item.code == "broken_rank"] == ["rank1.json.gz"]


def test_a_broken_file_takes_nobodys_rank(tmp_path: Path) -> None:
    """Its place in the order of names is only a guess, which the file that says which rank it is proves wrong."""
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"traceEvents": ['))
    write(tmp_path / "b.json", [row("a", 0, 1)], distributedInfo={"rank": 0, "world_size": 2})
    run = open_run(tmp_path)
    assert run.ranks == [0] and {"broken_rank", "missing_rank"} <= set(codes(run))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rank1.json", b""),
        ("rank1.json.gz", gzip.compress(b"[")[:3]),
        ("rank1.json.gz", gzip.compress(b"")),
        ("rank1.json", b'{"schemaVersion": 1, "deviceProperties": [{"name": "A'),
        ("rank1.json", b'{"schemaVersion": 1, "distributedInfo": {"rank": 1}, '),
        ("one.parquet", b"PAR1 and nothing else"),
        ("one.sqlite", b"SQLite format 3\0 and nothing else"),
    ],
)
def test_what_nothing_can_be_read_of_may_be_a_rank(tmp_path: Path, name: str, data: bytes) -> None:
    """It is left out and touches the figures; an empty file that is not called as traces are is none."""
    write(tmp_path / "rank0.json", [row("a", 0, 1)])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "log.json").write_text('{"loss": 1}\n{"loss": 2}\n')
    (tmp_path / "data.json").write_text(json.dumps({"text": "a" * (9 << 20)}))
    (tmp_path / name).write_bytes(data)
    run = open_run(tmp_path)
    unread, ignored = (
        next(item for item in run.health.items if item.code == f"{code}_files") for code in ("unread", "ignored")
    )
    assert unread.text.startswith(f"1 file cannot be read and was left out: {name} (") and "ledger" in unread.touches
    assert ignored.text.startswith(
        "3 files are no traces and were ignored: _SUCCESS (it is empty); data.json, log.json ("
    )
    assert not ignored.touches
    assert status_of(["doctor", str(tmp_path), "--quiet"]) == 3


def test_what_is_no_trace_is_refused_with_reasons(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(StepscopeError) as caught:
        open_run(tmp_path)
    said = str(caught.value)
    assert "LICENSE: it is neither JSON" in said and "config.json: it is JSON without" in said and "empty" in said
    with pytest.raises(StepscopeError, match="a pattern that fits some"):
        open_run(str(tmp_path / "*.absent"))


def test_files_below_a_directory_and_by_url(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "t" / "deep").mkdir(parents=True)
    write(tmp_path / "t" / "deep" / "rank3.json", [row("a", 0, 1)])
    assert open_run(tmp_path / "t").ranks == [3]
    assert open_run(f"file://{tmp_path}/t/deep").ranks == [3]
    assert open_run(f"file://{tmp_path}/t/deep/rank*.json").ranks == [3]
    assert not list((tmp_path / "t").rglob(".stepscope*"))  # a foreign folder is left as it is
    assert len(list((own_cache / "stepscope").iterdir())) == 3


def test_a_directory_of_runs_says_which_there_are(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / name)
    with pytest.raises(StepscopeError, match=r"is no run, it holds 2 runs \(a, b\): name one"):
        open_run(tmp_path)


def test_archives_and_filesystems_without_a_disk(tmp_path: Path) -> None:
    """`zip://` chains and any other filesystem of fsspec, with patterns, directories and names of files."""
    fsspec = pytest.importorskip("fsspec")
    texts = {f"t/rank{rank}.json": json.dumps({"traceEvents": [row(f"of {rank}", 0, 1)]}) for rank in (0, 1)}
    texts["t/LICENSE"] = "MIT"
    with zipfile.ZipFile(tmp_path / "traces.zip", "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
            with fsspec.open(f"memory://{name}", "w") as file:
                file.write(text)
    urls = [f"zip://{inside}::{tmp_path}/traces.zip" for inside in ("t/rank*.json", "t", "*", "**")]
    for url in (*urls, f"zip://t::file://{tmp_path}/traces.zip", "memory://t", "simplecache::memory://t"):
        run = open_run(url)
        assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1"], url
        ignored = [item.text for item in run.health.items if item.code == "ignored_files"]
        assert len(ignored) == (0 if "rank*" in url else 1) and all("LICENSE (" in text for text in ignored)
    assert open_run([f"zip://t/rank1.json::{tmp_path}/traces.zip"]).ranks == [1]
    with pytest.raises(StepscopeError, match=r"a zip archive: unpack it, or name what is in it \(zip://\*\*::"):
        open_run(tmp_path / "traces.zip")
    for wrong in ("zip://*::nothing.zip", f"zip://*::{tmp_path}/t.json", "nosuch://x"):
        (tmp_path / "t.json").write_text("{}")
        with pytest.raises(StepscopeError, match="cannot open"):
            open_run(wrong)


def test_what_has_changed_in_an_archive_or_in_memory_is_read_anew(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    for length in (1, 2):
        text = json.dumps({"traceEvents": [row("a", 0, length)]})
        with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
            archive.writestr("t.json", text)
        with fsspec.open("memory://changes/t.json", "w") as file:
            file.write(text)
        for url in (f"zip://t.json::{tmp_path}/t.zip", "memory://changes/t.json"):
            assert open_run(url).columns(0, "dur_ns")["dur_ns"].tolist() == [length * 1000], url


def test_traces_on_a_server(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", [row(f"of {rank}", 0, 1)])

    asked: list[str] = []

    class Quiet(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            """As ever, but remembered."""
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{server.server_port}"
        for url in (f"{there}/rank*.json", f"{there}/", [f"{there}/rank0.json", f"{there}/rank1.json"]):
            run = open_run(url)
            assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1"], url
        with pytest.raises(StepscopeError, match=r"cannot read http://.*/rank9.json: there is no such file"):
            open_run(f"{there}/rank9.json")
        # the server sends whole files only: a large one, and a damaged one, are read as they come, and not to list them
        rows = [row(f"kernel {i}", i, 1) for i in range(60_000)]
        data = json.dumps({"traceEvents": rows}).encode()
        (tmp_path / "large.json").write_bytes(data)
        (tmp_path / "damaged.json.gz").write_bytes(gzip.compress(data)[:-8] + b"12345678")
        assert len(data) > 5 << 20
        asked.clear()
        assert len(open_run(f"{there}/large.json").columns(0, "kind")["kind"]) == len(rows)
        assert asked == ["/large.json"] * 2  # a look at its begin, and the whole
        run = open_run(f"{there}/damaged.json.gz")
        assert len(run.columns(0, "kind")["kind"]) == len(rows)
        assert [item.code for item in run.health.items] == ["cut_file"]
        server.shutdown()


def test_a_server_that_stops_sending_leaves_the_rank_out(tmp_path: Path) -> None:
    class Breaking(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Less than it says."""
            self.send_response(200)
            self.send_header("Content-Length", "9000000")
            self.end_headers()
            self.wfile.write(json.dumps({"traceEvents": [row("a", 0, 1)] * 5000}).encode()[:-1000])

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StepscopeError, match=r"t.json cannot be read"):
            open_run(f"http://127.0.0.1:{server.server_port}/t.json")
        server.shutdown()


def test_a_library_that_a_url_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(
        StepscopeError, match=r"cannot open s3://b/t.json: Install s3fs to access S3; pip install .*remote"
    ):
        open_run("s3://b/t.json")


def test_what_a_run_of_several_files_is_called(tmp_path: Path) -> None:
    (tmp_path / "june").mkdir()
    files = [write(tmp_path / "june" / f"rank{rank}.json", [row("a", 0, 1)]) for rank in (0, 1)]
    assert open_run(files).meta.name == open_run(str(tmp_path / "june" / "rank*.json")).meta.name == "june"
    assert open_run(f"file://{tmp_path}/june/rank?.json").meta.name == "june"
    odd = write(tmp_path / "we ird%20[name]#1?.json", [row("a", 0, 1)])  # a file is a file, whatever it is called
    assert open_run(odd).meta.name == "we ird%20[name]#1?.json"
    assert open_run(tmp_path / "june").meta.name == "june" and open_run(files[1]).meta.name == "rank1.json"


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


def test_a_link_says_the_rank_of_what_it_leads_to(tmp_path: Path) -> None:
    """As where data are kept under the hashes of their contents. A file that is there by two names is read once."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "run").mkdir()
    for rank, blob in enumerate(("fe12", "0a34", "77bc")):
        write(tmp_path / "blobs" / blob, [row(f"of {rank}", 0, 1)])
        (tmp_path / "run" / f"rank{rank}.json").symlink_to(tmp_path / "blobs" / blob)
    (tmp_path / "run" / "latest.json").symlink_to("rank2.json")
    for paths in (tmp_path / "run", sorted((tmp_path / "run").glob("rank*")), str(tmp_path / "run" / "rank*")):
        run = open_run(paths)
        assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1", "of 2"]
    (tmp_path / "run" / "there").symlink_to(tmp_path / "blobs")
    assert open_run(tmp_path / "run" / "there" / ".." / "run" / "rank1.json").ranks == [
        1
    ]  # .. of what the link leads to
    write(tmp_path / "rank5.json", [row("of 5", 0, 1)], distributedInfo={"rank": 5, "world_size": 6})
    (tmp_path / "a.json").symlink_to("rank5.json")
    assert open_run([tmp_path / "a.json", tmp_path / "rank5.json"]).ranks == [5]


def test_links_in_a_circle_and_pipes_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(StepscopeError, match="cannot be read"):
        open_run(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path / "pip*"):
        with pytest.raises(StepscopeError, match="is a pipe or a device"):
            open_run(path)
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [row("gemm", 0, 1)]}))
    assert open_run(tmp_path).ranks == [0]


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    """Names are bytes: one that is no UTF-8 is a name as well, on a terminal that knows no letter but ASCII too."""
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.json"))
    write(file, [step(1, 0, 9), row("gemm \u2713", 0, 1)])
    for path in (file, tmp_path):
        words = [sys.executable, "-m", "stepscope", "doctor", str(path), "--quiet"]
        done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"") and b"health ok" in done.stdout
