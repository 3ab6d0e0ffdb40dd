"""A file understood in many small chunks, out of memory, is the file understood at once."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.ingest import gather, merge, open_run, reading, spool
from stepscope.analysis.ingest.impossible import _median_without
from stepscope.analysis.ingest.merge import Runs
from stepscope.analysis.ingest.spool import Spool
from stepscope.analysis.run import Run, sort_order
from stepscope.tracer.schema import EVENT_COLUMNS

SAMPLES = Path(__file__).parents[2] / "sample_traces"
_TEXTS = ("name_id", "group_id", "dtype_id", "grid_id")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a thousand rows, nearly all of them out of memory, merged two hundred rows at a time."""
    monkeypatch.setattr(gather, "CHUNK_ROWS", 1000)
    monkeypatch.setattr(reading, "BLOCK_ROWS", 400)
    monkeypatch.setattr(spool, "MEMORY_BYTES", 50_000)
    monkeypatch.setattr(merge, "BATCH_ROWS", 200)


def everything(run: Run) -> dict[str, Any]:
    """All that a run says, codes as the texts that they stand for."""
    ranks = {}
    for rank in run.ranks:
        data = run.rank(rank)
        texts = np.array([*data.strings, ""], dtype=object)
        events = {name: (texts[values] if name in _TEXTS else values).tolist() for name, values in data.events.items()}
        counters = {
            name: (texts[values] if name.endswith("_id") else values).tolist() for name, values in data.counters.items()
        }
        ranks[rank] = (events, counters, data.lanes)
    return {"ranks": ranks, "health": run.health.items, "meta": run.meta}


def damaged(source: Path) -> dict[str, bytes]:
    """A real trace cut short, with noise in it, and with begins and ends, odd lengths and stamps in no order at all."""
    data = gzip.decompress(source.read_bytes())
    dice = random.Random(17)
    noisy = bytearray(data)
    for _ in range(300):
        noisy[dice.randrange(len(noisy))] = dice.choice(b'"{}[],:\\x9')
    trace = json.loads(data)
    rows: list[dict[str, Any]] = []
    for row in trace["traceEvents"]:
        die = dice.random()
        if row.get("ph") == "X" and die < 0.2:
            end = float(row["ts"]) + float(row.pop("dur"))
            rows += [{**row, "ph": "B"}, {"ph": "E", "pid": row["pid"], "tid": row["tid"], "ts": end}]
        elif row.get("cat") == "kernel" and die > 0.98:
            rows.append({**row, "dur": 5e6} if die > 0.99 else {**row, "ts": 0, "dur": 0})
        else:
            rows.append(row)
    dice.shuffle(rows)
    rows.append({"ph": "E", "pid": rows[0]["pid"], "tid": "nothing to end", "ts": rows[0]["ts"]})
    shuffled = json.dumps({**trace, "traceEvents": rows}).encode()
    return {"cut": data[: len(data) * 2 // 3], "noise": bytes(noisy), "shuffled": shuffled}


def test_real_and_damaged_traces(corpus: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = corpus / "kineto-nccl-a100" / "nccl_data.json.gz"
    paths = [source, corpus / "kineto-old-schema", corpus / "kineto-mi300-resnet", corpus / "kineto-cpu-only"]
    for name, data in damaged(source).items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_bytes(data)
    at_once = [everything(open_run(path, refresh=True, engine="serial")) for path in paths]
    request.getfixturevalue("small_chunks")
    for path, expected in zip(paths, at_once, strict=True):
        found = everything(open_run(path, refresh=True, engine="serial"))
        assert found["health"] == expected["health"] and found["meta"] == expected["meta"], path
        for rank, parts in expected["ranks"].items():
            assert found["ranks"][rank] == parts, (path, rank)
    codes = {item.code for expected in at_once for item in expected["health"]}
    assert {"cut_file", "impossible_duration", "zero_rows", "loose_pairs"} <= codes


def test_our_own_files_also_where_they_end_early(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sample = SAMPLES / "dp2_pp2_1f1b"
    whole, cut = (gzip.decompress((sample / f"rank_0000{rank}.trace.json.gz").read_bytes()) for rank in (0, 1))
    run = tmp_path / "run"
    run.mkdir()
    (run / "rank_00000.trace.json").write_bytes(whole)
    (run / "rank_00001.trace.json").write_bytes(cut[: len(cut) * 3 // 5])
    expected = everything(open_run(run))
    request.getfixturevalue("small_chunks")
    assert everything(open_run(run, refresh=True)) == expected
    assert "cut_file" in {item.code for item in expected["health"]}


def test_launches_and_their_rows_in_chunks_far_apart(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def row(cat: str, name: str, ts: int, correlation: int) -> dict[str, Any]:
        tid = 7 if cat == "kernel" else 1
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 0,
            "tid": tid,
            "ts": ts,
            "dur": 1,
            "args": {"correlation": correlation},
        }

    filler = [row("cpu_op", "op", 10 * i, 0) for i in range(3000)]
    rows = [row("cuda_runtime", "cudaGraphLaunch", 50, 1), row("kernel", "a", 60, 1), *filler]
    rows += [row("kernel", "b", 40, 1)]  # of the same graph, before its call
    rows += [row("cuda_runtime", "cudaLaunchKernel", 70, 2), row("kernel", "c", 80, 2), *filler]
    rows += [row("cuda_driver", "cuLaunchKernel", 71, 2), row("cuda_runtime", "cudaLaunchKernel", 90, 3)]  # 3 never ran
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(rows))
    at_once = everything(open_run(path))
    assert [item.code for item in at_once["health"]] == ["earlier_than_launch", "launch_without_kernel"]
    assert (
        at_once["health"][0].text.startswith("1 device row starts before")
        and "by up to 10000 ns" in at_once["health"][0].text
    )
    assert at_once["health"][1].text.startswith("1 of 4 kernel launches")
    request.getfixturevalue("small_chunks")
    assert everything(open_run(path, refresh=True)) == at_once


# -- parts -------------------------------------------------------------------------------------------------------------

CHUNKS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=40),
    min_size=1,
    max_size=6,
)


ROW = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("XXXXBE"),
        "name": st.sampled_from(["gemm", "ncclDevKernel_AllReduce(x)", "nccl:all_reduce", "ProfilerStep#1", "a", "b"]),
        "cat": st.sampled_from(["kernel", "kernel", "cuda_runtime", "user_annotation"]),
        "pid": st.sampled_from([0, 1, "", None]),
        "tid": st.sampled_from([7, 8]),
        "ts": st.sampled_from([0, 10, 20, 30]),
        "dur": st.sampled_from([0, 1, 5, 10, 5000]),
        "args": st.fixed_dictionaries(
            {},
            optional={
                "Collective name": st.sampled_from(["allreduce", "allgather"]),
                "Process Group Name": st.sampled_from(["1", "2"]),
                "Process Group Description": st.sampled_from(["mesh_tp", "mesh_dp", ""]),
                "Process Group Ranks": st.sampled_from(["[0, 1]", "[0, 2]", ""]),
                "axis": st.sampled_from(["tp", "dp"]),
                "correlation": st.integers(1, 4),
                "External id": st.integers(1, 2),
            },
        ),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, min_size=2, max_size=25), st.booleans(), st.integers(1, 6), st.integers(1, 4))
def test_ties_and_contradictions_do_not_depend_on_where_chunks_end(
    rows: list[dict[str, Any]], cut: bool, chunk: int, batch: int
) -> None:
    text = json.dumps({"traceEvents": rows})
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", directory)
        path = Path(directory) / "trace.json"
        path.write_text(text[:-2] if cut else text)
        at_once = everything(open_run(path, engine="serial"))
        patch.setattr(gather, "CHUNK_ROWS", chunk)
        patch.setattr(reading, "BLOCK_ROWS", 1)
        patch.setattr(merge, "BATCH_ROWS", batch)
        assert everything(open_run(path, refresh=True, engine="serial")) == at_once


@settings(max_examples=200, deadline=None)
@given(CHUNKS, st.integers(1, 8), st.sampled_from([0, 1 << 20]))
def test_merged_runs_are_in_the_order_of_a_sort(
    chunks: list[list[tuple[int, int, int]]], batch: int, memory: int
) -> None:
    whole = np.array([row for chunk in chunks for row in chunk], np.int64)
    ids = np.arange(len(whole))
    with Spool(memory=memory) as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "BATCH_ROWS", batch)
        runs = Runs(kept)
        at = 0
        for chunk in chunks:
            events = {name: np.zeros(len(chunk), dtype) for name, dtype in EVENT_COLUMNS.items()}
            rows = np.array(chunk, np.int64)
            events |= {"lane": rows[:, 0], "start_ns": rows[:, 1], "dur_ns": rows[:, 2]}
            events["issue_ns"] = ids[at : at + len(chunk)]
            at += len(chunk)
            runs.append(events)
        parts = list(runs.merged([0, 1, 2]))
    found = {
        name: np.concatenate([part[name] for part in parts]) for name in ("lane", "start_ns", "dur_ns", "issue_ns")
    }
    order = sort_order({"lane": whole[:, 0], "start_ns": whole[:, 1], "dur_ns": whole[:, 2]})
    assert found["issue_ns"].tolist() == ids[order].tolist()
    assert found["lane"].tolist() == whole[order, 0].tolist()
    ends = whole[:, 1] + whole[:, 2]
    assert (runs.first_ns, runs.last_ns, runs.rows) == (whole[:, 1].min(), ends.max(), len(whole))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others(values: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    others = values[:at] + values[at + 1 :]
    assert _median_without(np.sort(np.array(values)), values[at]) == float(np.median(others))


def test_a_spool_gives_back_what_it_took(tmp_path: Path) -> None:
    with Spool(tmp_path, memory=1000) as kept:
        chunks = [
            {"a": np.arange(n, dtype=np.int64), "b": np.arange(n, dtype=np.int8), "c": np.broadcast_to(np.int32(7), n)}
            for n in (10, 200, 0, 3000, 1)
        ]
        for chunk in chunks:
            kept.append(chunk)
        kept.put(0, "a", np.arange(10)[::-1])
        assert kept.column(0, "a").tolist() == list(range(9, -1, -1))
        assert kept.column(3, "a", 2990, 5000).tolist() == list(range(2990, 3000))
        for number, chunk in enumerate(chunks[1:], 1):
            assert kept.names(number) == ["a", "b", "c"]
            for name, values in kept.take(number).items():
                assert values.dtype == chunk[name].dtype and values.tolist() == chunk[name].tolist()
        assert list(tmp_path.iterdir()) == []  # the file has no name
