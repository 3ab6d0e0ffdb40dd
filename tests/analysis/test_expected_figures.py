"""The figures that are published beside each real trace, folder by folder; times in us, as they stand there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_ledger import COMM, COMPUTE, HOST, whole_trace

from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.run import Run
from stepscope.tracer.schema import COLLECTIVES

US = 1000


def in_us(run: Run, rank: int = 0) -> dict[str, Any]:
    """The whole-trace figures of one rank in us, rounded; the overlap in per cent."""
    figures = whole_trace(run.columns(rank))
    overlap = figures.pop("overlap")
    return {name: round(ns / US) for name, ns in figures.items()} | {"overlap": overlap and round(100 * overlap, 2)}


def said(run: Run) -> dict[str, str]:
    return {item.code: item.text for item in run.health.items}


def test_kineto_dlrm_8rank(corpus: Path) -> None:
    run = open_run(corpus / "kineto-dlrm-8rank")
    found = decompose(run)
    parts = found.matches.parts
    assert parts.groupby("rank").size().tolist() == [8] * 8 and not parts["unmatched"].any()
    waits, transfers = (parts.groupby("rank")[name].sum() // US for name in ("wait_ns", "transfer_ns"))
    assert waits.tolist() == [5580, 11125, 3280, 9571, 6370, 6041, 3342, 1534]
    assert transfers.tolist() == [218, 211, 212, 203, 217, 210, 216, 212]
    exposed = (found.ledger["bubble_ns"] + found.ledger["imbalance_ns"]) // US
    assert exposed.tolist() == [5342, 10854, 3034, 9253, 6337, 6007, 3109, 1380]
    assert Counter(parts.drop_duplicates("match_id")["last_rank"].tolist()) == {7: 5, 5: 2, 4: 1}
    spread = parts.groupby("match_id")[["arrival_ns", "end_ns"]].agg(np.ptp) / US
    assert spread["end_ns"].between(1, 7).all() and spread["arrival_ns"].max() == pytest.approx(7600, abs=100)
    share = waits / (waits + transfers)
    assert round(100 * share.min()) == 88 and round(100 * share.max()) == 98


def test_kineto_nccl_a100(corpus: Path) -> None:
    run = open_run(corpus / "kineto-nccl-a100")
    expected = {"window": 660_551, "compute": 115_656, "comm": 46_876, "visible": 39_559, "idle": 503_051}
    assert in_us(run).items() >= (expected | {"overlap": 15.61}).items()
    events = run.columns(0)
    comm = events["kind"] == COMM
    names = Counter(COLLECTIVES[code] for code in events["collective"][comm].tolist())
    assert names == {"all_reduce": 15, "broadcast": 6} and np.isin(events["kind"], (COMPUTE, COMM)).sum() == 2700
    assert (events["group_id"][comm] >= 0).all() and (events["seq"][comm] >= 0).sum() + (
        events["bytes"][comm] > 0
    ).sum() > 0
    assert len(decompose(run).windows[0].steps) == 3 and run.meta.world_size == 2


def test_kineto_sampled_2of128(corpus: Path) -> None:
    run = open_run(corpus / "kineto-sampled-2of128")
    first = {"window": 1_222_847, "compute": 210_320, "comm": 396_199, "visible": 336_983, "idle": 675_191}
    second = {"window": 1_231_186, "compute": 271_973, "comm": 379_053, "visible": 303_523, "idle": 651_136}
    assert in_us(run, 0).items() >= (first | {"overlap": 14.95}).items()
    assert in_us(run, 1).items() >= (second | {"overlap": 19.93}).items()
    found = decompose(run)
    parts = found.matches.parts
    assert [len(windows.steps) for windows in found.windows.values()] == [2, 2]
    assert parts.groupby("rank")["unmatched"].agg(["size", "sum"]).to_numpy().tolist() == [[10, 5], [10, 5]]
    mine = found.steps["rank"] == 0
    assert found.steps[mine]["op_wait_ns"].sum() == 31_865 * US
    assert found.ledger[found.ledger["rank"] == 0]["imbalance_ns"].sum() == 9_882 * US, "what of it is exposed"


def test_kineto_v100_ns(corpus: Path) -> None:
    """Stamps since the epoch with nanoseconds: a reader that keeps them in float64 gets 468 173 and 7 567 us."""
    figures = whole_trace(open_run(corpus / "kineto-v100-ns").columns(0))
    assert figures["window"] == 480_029_179 and figures["compute"] == 468_153_602
    assert figures["memcpy"] == 4_300_839 and figures["idle"] == 7_574_738 and figures["comm"] == 0


def test_kineto_mi300_resnet(corpus: Path) -> None:
    run = open_run(corpus / "kineto-mi300-resnet")
    expected = {"window": 86_568, "compute": 25_739, "comm": 71_517, "visible": 55_625, "idle": 2_566, "overlap": 22.22}
    assert in_us(run).items() >= expected.items()
    found = decompose(run)
    events = run.columns(0)
    comm = np.flatnonzero(events["kind"] == COMM)
    assert len(comm) == 17 and (events["collective"][comm] >= 0).sum() == 12
    assert {run.strings(0)[code].partition("(")[0] for code in events["name_id"][comm]} == {"ncclDevKernel_Generic"}
    assert said(run)["no_launch"].startswith("rank 0: 968 of 3653 device rows")
    before = found.windows[0].start_ns[0] - events["start_ns"][comm][:5]
    assert (before > 0).all() and (events["collective"][comm][:5] < 0).all(), "the five without arguments come before"
    assert len(found.windows[0].steps) == 3 and run.meta.world_size == 8


def test_kineto_mi250(corpus: Path) -> None:
    run = open_run(corpus / "kineto-mi250")
    figures = whole_trace(run.columns(0))
    assert {name: round(figures[name] / US) for name in ("window", "idle", "comm")} == {
        "window": 8912,
        "idle": 8763,
        "comm": 0,
    }
    assert round(figures["compute"] / US, 1) == 110.9
    assert min(lane.stream for lane in run.lanes(0) if lane.role != "host") == 0


def test_kineto_triton(corpus: Path) -> None:
    assert whole_trace(open_run(corpus / "kineto-triton").columns(0))["compute"] == 1760


def test_kineto_cpu_only(corpus: Path) -> None:
    run = open_run(corpus / "kineto-cpu-only")
    found = decompose(run)
    assert run.ranks == [34] and run.meta.world_size == 300 and len(found.matches.parts) == 10
    assert all("host" in flags for flags in found.ledger["flags"]) and "host_ledger" in said(run)


def test_kineto_old_schema(corpus: Path) -> None:
    run = open_run(corpus / "kineto-old-schema")
    (windows,) = decompose(run).windows.values()
    events = run.columns(0)
    assert len(windows.steps) == 6 and (events["kind"] != HOST).sum() == 6 * 1516
    assert "no_launch" not in said(run), "all are joined by correlation"


def test_nsys_2gpu(corpus: Path) -> None:
    run = open_run(corpus / "nsys-2gpu")
    found = decompose(run)
    parts = found.matches.parts
    assert (
        parts.groupby("rank").size().tolist() == [33, 33]
        and not parts["unmatched"].any()
        and not parts["violation"].any()
    )
    pairs = parts.sort_values(["match_id", "rank"]).groupby("match_id")
    assert (pairs["rank"].apply(list) == pairs["rank"].apply(lambda _: [0, 1])).all()
    ends = pairs["end_ns"].apply(lambda two: two.iloc[1] - two.iloc[0]) / US
    assert (round(ends.min()), round(ends.max())) in ((-27, 9), (-9, 27))
    order = parts[parts["rank"] == 0].sort_values("arrival_ns")["match_id"].tolist()
    assert order == parts[parts["rank"] == 1].sort_values("arrival_ns")["match_id"].tolist(), "in order on both"
    waits = parts.groupby("rank")["wait_ns"].sum().tolist()
    assert sorted(waits) == [2_477_480, 10_898_336]
    assert set(parts["collective"]) <= {"all_to_all", ""} and found.ledger["bubble_ns"].sum() == 0, (
        "symmetric, no pipeline"
    )


def test_pp_vis_1f1b(corpus: Path) -> None:
    run = open_run(corpus / "pp-vis-1f1b")
    found = decompose(run)
    assert set(found.ledger["method"]) == {"inferred"}
    ledger = found.ledger.assign(lost=found.ledger["bubble_ns"] + found.ledger["idle_ns"])
    lost = ledger.groupby("step")[["lost", "step_ns"]].sum()
    share = (100 * lost["lost"] / lost["step_ns"]).round(1)
    first, odd = share.index[0], (16, 18)
    usual = share.drop([first, *odd])
    assert len(share) == 20 and usual.between(34, 35.5).all() and share[first] == pytest.approx(67, abs=0.5)
    assert share[list(odd)].tolist() == [38.2, 38.9]
    lengths = found.ledger.groupby("step")["step_ns"].first()
    assert lengths[first] / lengths.drop(first).median() == pytest.approx(2.3, abs=0.05)
    assert all(
        ("slow_first" in flags) == (step == first) for step, flags in zip(ledger["step"], ledger["flags"], strict=True)
    )
    late = (lengths.drop(first) - lengths.drop([first, *odd]).median()) / 1e6
    assert late[list(odd)].between(210, 255).all() and (late[[11, 15]] < 10).all(), "the longest is not always a cause"
    longest = {}
    for rank in run.ranks:
        events = run.columns(rank)
        rows = np.flatnonzero((events["kind"] == 0) & (events["dur_ns"] > 290_000_000))
        for start, dur in zip(events["start_ns"][rows], events["dur_ns"][rows], strict=True):
            step = int(np.searchsorted(found.windows[rank].start_ns, start, "right")) - 1
            if found.windows[rank].steps[step] != first:
                longest[found.windows[rank].steps[step]] = (rank, round(dur / 1e6))
    assert longest == {11: (0, 340), 15: (1, 301), 16: (2, 317), 18: (3, 342)}


def test_ndtimeline_st(corpus: Path) -> None:
    run = open_run(corpus / "ndtimeline-st")
    found = decompose(run)
    assert run.meta.mesh == {"pp": 4, "dp": 2} and len(found.windows[0].steps) == 32
    assert found.ledger.groupby("step")["step_ns"].first().mean() / 1e9 == pytest.approx(2.2144, abs=5e-5)
    published = json.loads((corpus / "ndtimeline-st" / "result-ST.json").read_text())
    assert published, "what the replay is held to"
