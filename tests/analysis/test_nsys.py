"""Nsight Systems exports of every shape: steps from NVTX, several at once, old and new schemas, tables that are not there."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nsys_exports import NEW, OLD, SESSION_NS, Export

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ingest.nvtx_steps import Range, steps_of
from stepscope.analysis.ingest.rules import load_rules
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.run import Run
from stepscope.tracer.schema import FLAG_PARTIAL, KINDS


def steps(run: Run, rank: int = 0) -> dict[int, tuple[int, int]]:
    """Number -> begin and end of every step annotation, ns since the session began."""
    events, strings = run.columns(rank), run.strings(rank)
    base = SESSION_NS if int(events["start_ns"].min()) >= SESSION_NS else 0
    found = {}
    for name, start, dur in zip(events["name_id"], events["start_ns"], events["dur_ns"], strict=True):
        if strings[name].startswith("ProfilerStep#"):
            found[int(strings[name].partition("#")[2])] = (int(start) - base, int(start + dur) - base)
    return found


def said(run: Run) -> dict[str, str]:
    return {item.code: item.text for item in run.health.items}


def kernels(run: Run, rank: int) -> list[tuple[str, int, int]]:
    """(name, start, duration) of the compute and communication rows."""
    events, strings = run.columns(rank), run.strings(rank)
    device = np.isin(events["kind"], (KINDS.index("compute"), KINDS.index("comm")))
    rows = (events[name][device].tolist() for name in ("name_id", "start_ns", "dur_ns"))
    return [(strings[name], start, dur) for name, start, dur in zip(*rows, strict=True)]


def trained(path: Path, schema: dict[str, str] = NEW, **place: Any) -> Export:
    """Three steps of the worked example: calls at 0-1000, kernels 50-400, 400-700, 700-1000."""
    export = Export(path, schema)
    for number, (begin, end, start, stop) in enumerate(
        [(0, 100, 50, 400), (100, 200, 400, 700), (200, 1000, 700, 1000)], start=5
    ):
        export.range(f"step {number}", begin, end, **place)
        export.call(begin + 1, begin + 3, number, **place)
        export.kernel("gemm<float>", start, stop, number, **place)
    return export


def test_the_grid_of_a_launch_is_kept(tmp_path: Path) -> None:
    export = Export(tmp_path / "report.sqlite", NEW)
    export.kernel("gemm<float>", 0, 10, grid=(512, 2, 1))
    export.kernel("gemm<float>", 20, 30)
    run = open_run(export.write())
    assert [run.strings(0)[code] if code >= 0 else "" for code in run.columns(0)["grid_id"]] == ["512x2x1", ""]


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [NEW, OLD], ids=["new", "old"])
def test_ranges_called_step_are_the_steps(tmp_path: Path, schema: dict[str, str]) -> None:
    run = open_run(trained(tmp_path / "report.sqlite", schema).write())
    assert steps(run) == {5: (0, 100), 6: (100, 200), 7: (200, 1000)}
    ledger = decompose(run).ledger
    assert ledger["step"].tolist() == [5, 6, 7] and ledger["step_ns"].tolist() == [350, 300, 300]
    assert ledger["compute_ns"].tolist() == [350, 300, 300]
    assert said(run)["steps_from_ranges"] == "the steps are the NVTX ranges called 'step <n>'"
    strings = run.strings(0)
    assert {"step 5", "step 6", "step 7"} <= set(strings), "their own names stay"


@pytest.mark.parametrize(
    "names",
    [
        ["ProfilerStep#3", "ProfilerStep#4"],
        ["iter_0003", "iter_0004"],
        ["Iteration: 3", "Iteration: 4"],
        ["step::3", "step::4"],
        ["train_step=3", "train_step=4"],
        ["iteration3", "iteration4"],
        ["Train Step [3]", "Train Step [4]"],
    ],
)
def test_numbers_in_every_manner_of_writing(tmp_path: Path, names: list[str]) -> None:
    export = Export(tmp_path / "r.sqlite").kernel("gemm", 5, 9).range("forward 1", 0, 5).range("layer_12", 0, 3)
    for index, name in enumerate(names):
        export.range(name, 10 * index, 10 * index + 10)
    run = open_run(export.write())
    assert steps(run) == {3: (0, 10), 4: (10, 20)}
    assert ("steps_from_ranges" in said(run)) == (not names[0].startswith("ProfilerStep"))


def test_names_without_a_number_are_counted_and_the_outer_one_counts(tmp_path: Path) -> None:
    export = Export(tmp_path / "r.sqlite").kernel("gemm", 5, 9).range("train_step", 0, 10).range("train_step", 10, 25)
    export.range("train_step", 12, 20)  # within the second
    export.range("step", 2, 4).range("optimizer step", 4, 6)  # one is shorter, the other is something else
    assert steps(open_run(export.write())) == {0: (0, 10), 1: (10, 25)}


def test_marks_begin_steps_and_registered_names_count(tmp_path: Path) -> None:
    export = Export(tmp_path / "r.sqlite").kernel("gemm", 5, 38)
    for number, start in ((1, 0), (2, 10), (3, 30)):
        export.range(f"iteration {number}", start, None, kind=34, registered=True)
    run = open_run(export.write())
    assert steps(run) == {1: (0, 10), 2: (10, 30), 3: (30, 38)}
    assert decompose(run).ledger["flags"].tolist()[-1] == ("partial",), "nobody knows whether the last one ended"


@pytest.mark.parametrize("schema", [NEW, OLD], ids=["new", "old"])
def test_a_step_that_the_recording_ended_in_is_partial(tmp_path: Path, schema: dict[str, str]) -> None:
    export = trained(tmp_path / "r.sqlite", schema).range("step 8", 1000, None).call(1001, 1002, 8)
    run = open_run(export.kernel("gemm<float>", 1100, 1300, 8).write())
    assert steps(run)[8] == (1000, 1300)
    events, strings = run.columns(0), run.strings(0)
    flagged = events["name_id"][events["flags"] & FLAG_PARTIAL != 0]
    assert [strings[code] for code in flagged] == ["ProfilerStep#8"]
    assert ["partial" in flags for flags in decompose(run).ledger["flags"]] == [False, False, False, True]


def test_a_loop_in_a_loop_is_counted_and_a_users_words_count(tmp_path: Path) -> None:
    rules = load_rules()
    twice = [Range(f"step {i % 2}", 1, 10 * i, 10 * i + 10) for i in range(4)]
    assert [step.number for step in steps_of(twice, rules, 40).steps] == [0, 1, 2, 3]
    late = [Range("step 1", 1, 0, 12), Range("step 2", 1, 10, 20)]
    assert [(step.start, step.end) for step in steps_of(late, rules, 20).steps] == [(0, 10), (10, 20)]
    others = [Range("zug 7", 1, 0, 10), Range("zug 8", 1, 10, 20)]
    assert steps_of(others, rules, 20).steps == ()
    (tmp_path / "mine.toml").write_text('[steps]\nnames = ["Zug"]\n')
    mine = load_rules(str(tmp_path / "mine.toml"))
    assert [step.number for step in steps_of(others, mine, 20).steps] == [7, 8]
    assert mine.step("step 3") == ("step", 3), "the built-in words stay"


# -- several at once ---------------------------------------------------------------------------------------------------


def test_one_export_a_node_counts_on(tmp_path: Path) -> None:
    for node in (10, 2):
        export = Export(tmp_path / f"node{node}.sqlite").session(host=f"host{node}", start_ns=SESSION_NS + node)
        for device in range(2):
            export.kernel(f"node {node} device {device}", 5, 9, device=device, pid=100 + device)
        export.write()
    run = open_run(tmp_path)
    assert [kernels(run, rank)[0][:2] for rank in run.ranks] == [
        ("node 2 device 0", SESSION_NS + 2 + 5),
        ("node 2 device 1", SESSION_NS + 2 + 5),
        ("node 10 device 0", SESSION_NS + 10 + 5),
        ("node 10 device 1", SESSION_NS + 10 + 5),
    ]
    assert run.meta.hosts == ("host2", "host2", "host10", "host10") and run.meta.world_size == 4
    assert "rank 3: device 1 of process 101, 1 kernel" in said(run)["rank_from_device"]


def test_one_export_a_rank_is_ranked_by_name_else_by_environment(tmp_path: Path) -> None:
    for folder, name in (("named", "rank{}.sqlite"), ("told", "job-{}.sqlite")):
        (tmp_path / folder).mkdir()
        for rank in (3, 1, 0, 2):
            label = rank if folder == "named" else 9 - rank
            export = Export(tmp_path / folder / name.format(label)).session(start_ns=SESSION_NS + rank, RANK=rank)
            export.kernel(f"of {rank}", 5, 9, pid=50 + rank).write()
        run = open_run(tmp_path / folder)
        assert [kernels(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1", "of 2", "of 3"], folder


def test_a_lone_rank_that_communicates_says_how_many_there_are_or_that_nobody_knows(tmp_path: Path) -> None:
    for name, told in (("told", {"WORLD_SIZE": 8, "RANK": 3}), ("untold", {})):
        export = Export(tmp_path / f"{name}.sqlite").session(**told).kernel("gemm", 0, 5)
        run = open_run(export.kernel("ncclDevKernel_AllReduce_Sum", 5, 9, stream=20).write())
        codes = {item.code for item in run.health.items}
        assert run.health.status == "touched"
        if told:
            assert run.ranks == [3] and run.meta.world_size == 8 and "missing_rank" in codes
        else:
            assert run.ranks == [0] and "unknown_world" in codes
    Export(tmp_path / "alone.sqlite").kernel("gemm", 0, 5).write()
    assert open_run(tmp_path / "alone.sqlite").health.status == "ok"


def test_the_users_map_comes_first(tmp_path: Path) -> None:
    for index, name in enumerate(("a.sqlite", "b.sqlite")):
        export = Export(tmp_path / name).session(start_ns=SESSION_NS + index, RANK=index)
        export.kernel(name, 5, 9).kernel(name, 5, 9, device=1).write()
    rules = tmp_path / "mine.toml"
    rules.write_text('[ranks]\n"a*" = 2\n"b*" = 0\n')
    run = open_run([tmp_path / "a.sqlite", tmp_path / "b.sqlite"], rules=rules)
    assert [kernels(run, rank)[0][0] for rank in run.ranks] == ["b.sqlite", "b.sqlite", "a.sqlite", "a.sqlite"]


def test_the_same_recording_twice_is_refused(tmp_path: Path) -> None:
    for name in ("one.sqlite", "copy.sqlite"):
        Export(tmp_path / name).session().kernel("gemm", 5, 9).write()
    with pytest.raises(StepscopeError, match=r"copy\.sqlite and .*one\.sqlite are of the same recording"):
        open_run(tmp_path)
    run = open_run([tmp_path / "one.sqlite", tmp_path / "one.sqlite"])  # the same file twice is one file
    assert run.ranks == [0]


def test_devices_of_one_process_share_its_steps_and_calls(tmp_path: Path) -> None:
    export = Export(tmp_path / "r.sqlite").range("step 1", 0, 50)
    for device in range(2):
        export.call(1 + device, 3 + device, device + 1).kernel(f"d{device}", 10, 20, device + 1, device=device)
    run = open_run(export.write())
    for rank in (0, 1):
        assert steps(run, rank) == {1: (0, 50)} and [name for name, *_ in kernels(run, rank)] == [f"d{rank}"]
    assert decompose(run).ledger["compute_ns"].tolist() == [10, 10]


# -- what is not there -------------------------------------------------------------------------------------------------


def test_a_graph_recorded_as_a_whole_is_device_work_and_said(tmp_path: Path) -> None:
    export = Export(tmp_path / "r.sqlite")
    where = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": 10 << 24, "correlationId": 4}
    export.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=10, end=90, graphId=109, graphExecId=1, **where)
    export.call(1, 3, 4, name="cudaGraphLaunch_v10000")
    run = open_run(export.write())
    assert kernels(run, 0) == [("CUDA graph 109", 10, 80)] and run.health.status == "touched"
    assert said(run)["whole_graphs"].startswith("1 launch of a CUDA graph is recorded as one row each")


def test_missing_tables_and_columns_are_said_and_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "lean.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute("INSERT INTO StringIds VALUES (1, 'gemm')")
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, shortName INT)"
        )
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 30, 0, 7, 1), (40, 50, 0, 7, 99)")
    run = open_run(path)
    assert kernels(run, 0) == [("gemm", 10, 20), ("?", 40, 10)] and run.meta.world_size == 1
    texts = [item.text for item in run.health.items if item.code == "missing_table"]
    assert len(texts) == 2 and any("NVTX ranges" in text for text in texts)
    assert decompose(run).ledger["step"].tolist() == ["all"]


def test_exports_without_kernels_are_no_traces(tmp_path: Path) -> None:
    Export(tmp_path / "cpu.sqlite").range("step 1", 0, 5).write()
    with pytest.raises(StepscopeError, match=r"without GPU kernels .*--trace=cuda"):
        open_run(tmp_path)
    with closing(sqlite3.connect(tmp_path / "cpu.sqlite")) as database, database:
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({NEW['CUPTI_ACTIVITY_KIND_KERNEL']})")
    with pytest.raises(StepscopeError, match="no device ran a kernel"):
        open_run(tmp_path)


def test_a_damaged_export_leaves_the_others(tmp_path: Path) -> None:
    for node in (0, 1):
        export = Export(tmp_path / f"node{node}.sqlite").session(start_ns=SESSION_NS + node)
        for i in range(2000):
            export.kernel(f"kernel {i}", 10 * i, 10 * i + 5, pid=50 + node)
        export.write()
    whole = (tmp_path / "node0.sqlite").read_bytes()
    (tmp_path / "node0.sqlite").write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))
    run = open_run(tmp_path)
    assert run.health.status == "broken" and len(run.ranks) == 1
    assert [item.file for item in run.health.items if item.code == "broken_rank"] == ["node0.sqlite"]
    (tmp_path / "node1.sqlite").unlink()
    with pytest.raises(StepscopeError, match="SQLite says"):
        open_run(tmp_path)


@pytest.mark.parametrize("column", ["start", "deviceId", "globalPid", "correlationId"])
@pytest.mark.parametrize("value", ["abc", "", b"\xff"])
def test_an_export_with_a_value_that_is_none_leaves_the_others(tmp_path: Path, column: str, value: Any) -> None:
    """SQLite keeps any value in any column."""
    for node in (0, 1):
        export = Export(tmp_path / f"node{node}.sqlite").session(start_ns=SESSION_NS + node)
        export.kernel("gemm", 10, 15, pid=50 + node).kernel("gemm", 20, 25, pid=50 + node).write()
    with closing(sqlite3.connect(tmp_path / "node0.sqlite")) as database, database:
        database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = ? WHERE start = 20", (value,))
    run = open_run(tmp_path)
    broken = [item.file for item in run.health.items if item.code in ("broken_rank", "unread_files")]
    assert len(broken) == 1 and len(run.ranks) == 1


def test_odd_names_of_files_and_texts(tmp_path: Path) -> None:
    path = Export(tmp_path / "50% of #1?.sqlite").kernel("gemm", 5, 9)
    run = open_run(path.write())
    assert run.ranks == [0]
    with closing(sqlite3.connect(tmp_path / "50% of #1?.sqlite")) as database, database:
        database.execute("UPDATE StringIds SET value = CAST(X'67ff' AS TEXT)")
    assert kernels(open_run(tmp_path), 0) == [("g\ufffd", 5, 4)]


def test_copies_and_memsets(tmp_path: Path) -> None:
    export = Export(tmp_path / "r.sqlite").kernel("gemm", 5, 9)
    where = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": 10 << 24, "correlationId": None}
    for kind in (1, 8, 10, 99):
        export.row("CUPTI_ACTIVITY_KIND_MEMCPY", start=10 * kind, end=10 * kind + 5, bytes=64, copyKind=kind, **where)
    export.row("CUPTI_ACTIVITY_KIND_MEMSET", start=2000, end=2001, bytes=8, value=0, **where)
    run = open_run(export.write())
    events, strings = run.columns(0), run.strings(0)
    rows = events["kind"] == KINDS.index("memcpy")
    assert [strings[code] for code in events["name_id"][rows]] == [
        "Memcpy HtoD", "Memcpy DtoD", "Memcpy PtoP", "Memcpy other", "Memset",
    ]  # fmt: skip
    assert events["bytes"][rows].tolist() == [64, 64, 64, 64, 8]
