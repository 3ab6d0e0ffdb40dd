"""Real Kineto traces: the columns hold what independent ledgers of the same files were computed from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_ledger import COMM, COMPUTE, HOST, MEMCPY, whole_trace

from stepscope.analysis.ingest import open_run
from stepscope.analysis.run import Run
from stepscope.tracer.schema import COLLECTIVES

WITH_ORACLE = (
    "kineto-dlrm-8rank",
    "kineto-mi250",
    "kineto-mi300-resnet",
    "kineto-nccl-a100",
    "kineto-sampled-2of128",
    "kineto-triton",
    "kineto-v100-ns",
)


def opened(corpus: Path, folder: str) -> tuple[Run, dict[str, Any]]:
    file = corpus / folder / "oracle.json"
    return open_run(corpus / folder), json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("folder", WITH_ORACLE)
def test_whole_trace_to_the_nanosecond(corpus: Path, folder: str) -> None:
    run, oracle = opened(corpus, folder)
    assert len(run.ranks) == len(oracle["ranks"])
    for rank, expected in zip(run.ranks, oracle["ranks"], strict=True):
        assert whole_trace(run.columns(rank)) == expected["whole_trace"], expected["file"]
        run.release(rank)


@pytest.mark.parametrize("folder", [name for name in WITH_ORACLE if "sampled" not in name])
def test_rows_join_their_launches(corpus: Path, folder: str) -> None:
    """Rows launched within [ProfilerStep#k, ProfilerStep#k+1), by kind, and the stamps are absolute."""
    run, oracle = opened(corpus, folder)
    for rank, expected in zip(run.ranks, oracle["ranks"], strict=True):
        events, strings = run.columns(rank), run.strings(rank)
        steps = {
            strings[events["name_id"][row]].removeprefix("ProfilerStep#"): int(events["start_ns"][row])
            for row in np.flatnonzero(events["kind"] == HOST)
            if strings[events["name_id"][row]].startswith("ProfilerStep#")
        }
        edges = [*sorted(steps.values()), np.iinfo(np.int64).max]
        calls = np.flatnonzero((events["kind"] == HOST) & (events["launch_id"] >= 0))
        called = dict(zip(events["launch_id"][calls].tolist(), events["start_ns"][calls].tolist(), strict=True))
        device = np.flatnonzero(events["kind"] != HOST)
        launched = np.array([called.get(launch, -1) for launch in events["launch_id"][device].tolist()])
        for step, ledger in expected["steps"].items():
            begin = steps[step]
            end = edges[edges.index(begin) + 1]
            kinds = events["kind"][device[(launched >= begin) & (launched < end)]]
            counts = {"compute": COMPUTE, "comm": COMM, "mem": MEMCPY}
            assert {name: int((kinds == kind).sum()) for name, kind in counts.items()} == ledger["counts"], step


def test_communication_arguments_on_kernels(corpus: Path) -> None:
    run = open_run(corpus / "kineto-nccl-a100")
    events, strings = run.columns(0), run.strings(0)
    comm = np.flatnonzero(events["kind"] == COMM)
    names = [COLLECTIVES[code] for code in events["collective"][comm]]
    assert (names.count("all_reduce"), names.count("broadcast")) == (15, 6)
    assert {strings[code] for code in events["group_id"][comm]} == {"0 [0-1]"}
    assert [(group.name, group.axis, group.ranks) for group in run.meta.groups] == [("0 [0-1]", "world", (0, 1))]
    of_size = (events["in_elements"][comm] == 6637568) & (events["bytes"][comm] == 4 * 6637568)
    assert of_size.sum() >= 3
    assert run.meta.world_size == 2 and run.meta.source == "imported"
    assert [item.code for item in run.health.items if item.code == "missing_rank"]


def test_names_of_old_kernels_give_their_collective(corpus: Path) -> None:
    run = open_run(corpus / "kineto-dlrm-8rank")
    assert run.ranks == list(range(8)) and run.meta.world_size == 8
    for rank in run.ranks:
        events = run.columns(rank)
        comm = np.flatnonzero(events["kind"] == COMM)
        names = [COLLECTIVES[code] for code in events["collective"][comm]]
        assert (names.count("all_to_all"), names.count("all_reduce")) == (5, 3)
        assert [lane.stream for lane in run.lanes(rank) if lane.role == "comm"] == [84]


def test_a_cpu_trace_has_a_host_ledger(corpus: Path) -> None:
    run = open_run(corpus / "kineto-cpu-only")
    assert run.ranks == [34]
    events = run.columns(34)
    comm = np.flatnonzero(events["kind"] == COMM)
    assert len(comm) == 10 and {COLLECTIVES[code] for code in events["collective"][comm]} == {"all_reduce"}
    assert {lane.role for lane in run.lanes(34)} == {"host"} and (events["group_id"][comm] == -1).all()
    assert "host_ledger" in [item.code for item in run.health.items]


def test_the_old_schema(corpus: Path) -> None:
    run = open_run(corpus / "kineto-old-schema")
    events, strings = run.columns(0), run.strings(0)
    steps = [
        strings[code] for code in events["name_id"][events["kind"] == HOST] if strings[code].startswith("ProfilerStep")
    ]
    assert len(steps) == 6
    assert [(lane.name, lane.stream) for lane in run.lanes(0) if lane.role != "host"] == [("stream 7", 7)]
    calls = set(events["launch_id"][(events["kind"] == HOST) & (events["launch_id"] >= 0)].tolist())
    device = events["launch_id"][events["kind"] != HOST]
    assert len(device) == 6 * 1516 and all(launch in calls for launch in device.tolist())


def test_what_is_no_trace_is_ignored_and_listed(corpus: Path) -> None:
    run = open_run(corpus / "kineto-mi250")
    [item] = [item for item in run.health.items if item.code == "ignored_files"]
    assert "LICENSE" in item.text and "oracle.json" in item.text and not item.touches
