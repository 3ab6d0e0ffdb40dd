"""What people trip over in trace files, from the file to the figure: one test a case, its answer worked out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_files import row, step

from stepscope.__main__ import status_of
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import Decomposition, decompose
from stepscope.analysis.ledger.steps import windows as windows_of_rank
from stepscope.analysis.report import analyze
from stepscope.analysis.run import Run
from stepscope.tracer.schema import KINDS

US = 1000


def traced(path: Path, rows: list[Any], **header: Any) -> Run:
    """A file of these rows, opened."""
    file = path / "trace.json"
    file.write_text(json.dumps({**header, "traceEvents": rows}))
    return open_run(file)


def terms(found: Decomposition, row_number: int = 0) -> dict[str, int]:
    """The terms of one row of the ledger that are not 0, in us."""
    names = ("compute", "visible_comm", "bubble", "imbalance", "memcpy", "idle", "hidden_comm", "unsplit")
    values = {name: int(found.ledger[f"{name}_ns"].iloc[row_number]) // US for name in names}
    return {name: value for name, value in values.items() if value}


def call(name: str, start: float, correlation: int, tid: int = 1) -> dict:
    return row(name, start, 2, cat="cuda_runtime", tid=tid, pid=99, correlation=correlation)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_synchronisation_is_no_work(tmp_path: Path) -> None:
    rows = [
        step(1, 0, 1000),
        row("gemm", 0, 300),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", 300, 600, tid=20),
    ]
    rows += [row("cudaDeviceSynchronize", 300, 600, cat="cuda_sync", stream=7)]
    found = decompose(traced(tmp_path, rows, distributedInfo={"rank": 0, "world_size": 2}))
    assert terms(found) == {"compute": 300, "visible_comm": 600, "idle": 100, "unsplit": 600}
    assert found.ledger["comm_overlap"].tolist() == [0.0]


def test_half_of_the_communication_is_hidden(tmp_path: Path) -> None:
    rows = [step(1, 0, 1000), row("gemm", 0, 400), row("gemm", 800, 200), row("ncclKernel_X", 300, 200, tid=20)]
    found = decompose(traced(tmp_path, rows, distributedInfo={"rank": 0, "world_size": 2}))
    assert terms(found) == {"compute": 600, "visible_comm": 100, "hidden_comm": 100, "idle": 300, "unsplit": 100}
    assert found.ledger["comm_overlap"].tolist() == [0.5]


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "void deep_ep::internode::dispatch<true, 8>(int4*, float*, int)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*, int)",
    ],
)
def test_one_communication_under_five_names(tmp_path: Path, name: str) -> None:
    rows = [step(1, 0, 1000), row("gemm", 0, 400), row(name, 300, 200, tid=20)]
    world = {"rank": 0, "world_size": 2}
    run = traced(tmp_path, rows, distributedInfo=world)
    assert terms(decompose(run))["visible_comm"] == 100
    assert "no_communication" not in {item.code for item in run.health.items}


def test_nothing_recognised_is_said_with_the_top_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [step(1, 0, 1000), row("gemm", 0, 400), row("ring_of_ours", 300, 200, tid=20)]
    traced(tmp_path, rows, distributedInfo={"rank": 0, "world_size": 2})
    assert status_of(["analyze", str(tmp_path / "trace.json")]) == 3
    assert "gemm (400 us), ring_of_ours (200 us)" in " ".join(capsys.readouterr().out.split())


def test_what_only_looks_like_device_work_or_communication(tmp_path: Path) -> None:
    rows = [step(1, 0, 100), row("triton_poi_fused_add_0", 10, 5), row("hip_softmax_kernel", 20, 5)]
    rows += [row("triton_poi_fused_add_0", 0, 90, cat="cpu_op", tid=1, pid=99, stream=7)]
    assert terms(decompose(traced(tmp_path, rows))) == {"compute": 10, "idle": 90}


def test_graphs_and_the_autograd_thread_belong_to_the_step_that_launched_them(tmp_path: Path) -> None:
    rows = [step(k, 100 * k, 100, pid=99) for k in (0, 1, 2)]
    rows += [call("cudaGraphLaunch", 50, 5), call("cudaLaunchKernel", 60, 6, tid=2), call("cudaLaunchKernel", 150, 7)]
    rows += [call("cudaLaunchKernel", 250, 8)]
    rows += [row(f"graph {i}", 110 + 10 * i, 10, correlation=5) for i in range(10)]  # 110-210, all of one launch
    rows += [
        row("backward", 210, 50, correlation=6),
        row("next", 300, 50, correlation=7),
        row("last", 400, 9, correlation=8),
    ]
    run = traced(tmp_path, rows)
    windows = windows_of_rank(run, 0)
    assert windows.steps == [0, 1, 2] and windows.launched.tolist() == [0] * 11 + [1, 2]
    assert [int(ns) // US for ns in windows.step_ns] == [190, 100, 9]
    found = decompose(run)
    assert terms(found, 0) == {"compute": 150, "idle": 40} and terms(found, 1) == {"compute": 50, "idle": 50}


def test_steps_without_device_data_are_in_no_average(tmp_path: Path) -> None:
    """Four steps of the CPU, kernels in the first two only: averages are over those."""
    rows = [step(k, 1000 * k, 1000, pid=99) for k in range(4)]
    for k in range(2):
        gemm = row("gemm", 1000 * k + 100, 900 + 100 * k, correlation=k + 1)
        rows += [call("cudaLaunchKernel", 1000 * k + 10, k + 1), gemm]
    run = traced(tmp_path, rows)
    report = analyze(run)
    assert any("device data in 2 of 4 steps" in item.text for item in run.health.items)
    assert [("empty" in flags) for flags in report.ledger["flags"]] == [False, False, True, True]
    assert report.means.values["step_ns"] == 1000 * US and report.means.values["compute_ns"] == 950 * US


@pytest.mark.parametrize(
    ("kernel", "runtime", "launch"),
    [
        ("kernel", "cuda_runtime", "cudaLaunchKernel"),
        ("kernel", "cuda_runtime", "hipLaunchKernel"),  # ROCm's categories are called so too
        ("Kernel", "Runtime", "cudaLaunchKernel"),  # before 2021
        ("mtia_ccp_events", "mtia_runtime", "launch"),
    ],
)
def test_device_work_of_every_maker_joins_its_launch(tmp_path: Path, kernel: str, runtime: str, launch: str) -> None:
    rows = [step(k, 100 * k, 100, pid=99) for k in (0, 1)]
    for k in (0, 1):
        rows.append(row(launch, 100 * k + 10, 2, cat=runtime, tid=1, pid=99, correlation=k + 1))
        rows.append(row("gemm", 100 * k + 50, 100, cat=kernel, stream=7, correlation=k + 1))
    found = decompose(traced(tmp_path, rows))
    assert (
        found.ledger["compute_ns"].tolist() == [100 * US, 100 * US]
        and found.ledger["step_ns"].tolist() == [100 * US] * 2
    )


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_kernel_at_time_0_changes_neither_step_nor_span(tmp_path: Path) -> None:
    rows = [row("a", 100, 10), row("b", 120, 10)]
    sound = decompose(traced(tmp_path, rows)).ledger
    found = decompose(traced(tmp_path, [*rows, row("empty", 0, 0)])).ledger
    assert found.equals(sound) and found["step_ns"].tolist() == [30 * US]


def test_overlap_on_one_lane_counts_once_where_it_is_busy(tmp_path: Path) -> None:
    found = decompose(traced(tmp_path, [row("a", 0, 100), row("b", 95, 100)]))
    assert terms(found) == {"compute": 195}


def test_an_impossible_duration_is_busy_up_to_the_next_row(tmp_path: Path) -> None:
    rows = [row(f"k{i % 3}", 100 * i, 100) for i in range(9)]
    rows += [row("Memcpy HtoD", 900, 3_400_000, cat="gpu_memcpy", stream=7)]
    rows += [row(f"k{i % 3}", 1000 + 100 * i, 100) for i in range(10)]
    run = traced(tmp_path, rows)
    assert terms(decompose(run)) == {"compute": 1900, "memcpy": 100}
    assert [item.code for item in run.health.items].count("impossible_duration") == 1


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_file_that_ends_early_is_told_before_any_figure(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [step(1, 0, 100), row("a", 0, 50), step(2, 100, 100), row("b", 100, 50), row("lost", 190, 5)]
    text = json.dumps({"traceEvents": rows})
    codes = []
    for cut in (len(text), len(text) - 60):
        data = text[:cut].encode()
        file = tmp_path / f"t{suffix}"
        file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        codes.append(status_of(["analyze", str(file)]))
        shown = capsys.readouterr().out
    assert codes == [0, 3]
    assert shown.startswith("! health") and "ends before its closing bracket" in " ".join(shown.split())
    run = open_run(tmp_path / f"t{suffix}")
    names = [run.strings(0)[code] for code in run.columns(0, "name_id")["name_id"]]
    assert sorted(names) == ["ProfilerStep#1", "ProfilerStep#2", "a", "b"]
    assert all("partial" in flags for flags in decompose(run).ledger["flags"])


@pytest.mark.parametrize("layout", [{"indent": None, "separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}, {}])
@pytest.mark.parametrize("first", [True, False])
def test_metadata_anywhere_in_any_layout(tmp_path: Path, layout: dict[str, Any], first: bool) -> None:
    head = {"distributedInfo": {"rank": 3, "world_size": 4, "backend": "nccl"}, "baseTimeNanoseconds": 10**18}
    events = {"traceEvents": [row("a", 5, 1)]}
    whole = head | events if first else events | head
    (tmp_path / "t.json").write_text(json.dumps(whole, **layout))
    run = open_run(tmp_path / "t.json")
    assert run.ranks == [3] and run.meta.world_size == 4 and run.meta.backend == "nccl"
    assert run.columns(3, "start_ns")["start_ns"].tolist() == [10**18 + 5 * US]


def test_odd_texts_and_values_keep_every_event_and_are_counted_with_their_place(tmp_path: Path) -> None:
    """All of the repairs in one file: nothing is lost, and each kind is one line of the report with its byte offset."""
    named = {
        "quote": 'q"uote',
        "control": "a\x01b\tc",
        "path": r"C:\Users\x",
        "byte": b"\xff".decode("latin-1"),
        "half": "\\ud800",
    }
    lines = [
        json.dumps(row("#", 10 * i, 5, correlation=2**60 + i)).replace("#", text)
        for i, text in enumerate(named.values())
    ]
    lines += [
        json.dumps(row("nan", 100, 5, occupancy="#")).replace('"#"', value)
        for value in ("NaN", "-nan", "inf", "N/A", "")
    ]
    data = ('{"traceEvents": [' + ", ".join(lines) + ",]}").encode("latin-1")
    (tmp_path / "t.json").write_bytes(data)
    run = open_run(tmp_path / "t.json")
    events, strings = run.columns(0), run.strings(0)
    assert (events["kind"] == KINDS.index("compute")).sum() == 10
    assert [strings[code] for code in events["name_id"]][:5] == [
        'q"uote',
        "a\x01b\tc",
        "C:\\Users\\x",
        "\ufffd",
        "\ufffd",
    ]
    assert events["launch_id"].tolist()[:5] == [2**60 + i for i in range(5)]
    said = {item.code: item for item in run.health.items}
    assert set(said) == {
        "raw_quote",
        "control_character",
        "unknown_escape",
        "bad_encoding",
        "unreadable_value",
        "spare_comma",
    }
    assert said["unreadable_value"].text.startswith("5 ") and said["bad_encoding"].text.startswith("2 ")
    assert said["unreadable_value"].offset == data.index(b"NaN") and said["raw_quote"].offset == data.index(b'q"uote')
    assert all(item.file == "t.json" and item.offset is not None and item.offset >= 0 for item in said.values())
    assert run.health.status == "ok", "what was kept whole touches no figure"


def test_raw_quotes_beside_escaped_ones(tmp_path: Path) -> None:
    written = {
        r'say \"hi", there and \\': 'say "hi", there and \\',
        r'say "hi\", there and \\': 'say "hi", there and \\',
    }
    written[r'q"uote\"}, z'] = 'q"uote"}, z'  # without the backslash it would end there
    for inside, meant in written.items():
        text = json.dumps({"traceEvents": [row("#", 0, 1), row("b", 5, 1)]}).replace("#", inside)
        (tmp_path / "t.json").write_text(text)
        run = open_run(tmp_path / "t.json")
        names = [run.strings(0)[code] for code in run.columns(0, "name_id")["name_id"]]
        assert names == [meant, "b"] and [item.code for item in run.health.items] == ["raw_quote"]


def test_a_long_text_is_never_cut_within_a_character(tmp_path: Path) -> None:
    for start in ("", "a", "ab", "abc"):
        text = json.dumps({"traceEvents": [row(start + "\U0001f600" * 20_000, 0, 1)]}, ensure_ascii=False)
        (tmp_path / "t.json").write_text(text, encoding="utf-8")
        run = open_run(tmp_path / "t.json")
        (name,) = (run.strings(0)[code] for code in run.columns(0, "name_id")["name_id"])
        assert name == start + "\U0001f600" * ((65536 - len(start)) // 4)
        assert [item.code for item in run.health.items] == ["long_text"]


def test_a_spare_comma_after_a_text(tmp_path: Path) -> None:
    """The last value of an event, and of its arguments, is a text: the comma behind it makes the text no longer."""
    text = json.dumps({"traceEvents": [row("a", 0, 1, dtype="Float"), row("b", 5, 1), row("c", 9, 1)]})
    text = text.replace('"Float"}}', '"Float",}}').replace(
        '{"stream": 7}}, {"ph"', '{"stream": 7}, "bp": "e",}, {"ph"', 1
    )
    assert text.count(",}") == 2
    (tmp_path / "t.json").write_text(text)
    run = open_run(tmp_path / "t.json")
    assert [run.strings(0)[code] for code in run.columns(0, "name_id")["name_id"]] == ["a", "b", "c"]
    assert {item.code: item.text.split()[0] for item in run.health.items} == {"spare_comma": "2"}


def test_a_list_with_strange_ids_has_no_rank_of_its_own(tmp_path: Path) -> None:
    rows = [row("a", 0, 1, pid="Spans", tid=""), row("b", 5, 1), row("c", 9, 1)]
    text = (
        json.dumps(rows)
        .replace('"dur": 1', '"dur": 7, "dur": 1', 1)
        .replace('"args": {"stream": 7}', '"args": "none"', 1)
    )
    (tmp_path / "t.json").write_bytes(b"\xef\xbb\xbf" + text[:-1].encode() + b",\n]")
    run = open_run(tmp_path / "t.json")
    assert run.meta.world_size == 1 and run.ranks == [0]
    assert np.sort(run.columns(0, "dur_ns")["dur_ns"]).tolist() == [1000] * 3
