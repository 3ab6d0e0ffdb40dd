"""Real traces: ledgers equal, to the nanosecond, those that were computed independently beside them."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from timelines import Timeline

from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import Decomposition, decompose

TERM_OF = {
    "T": "step_ns",
    "compute": "compute_ns",
    "visible_comm": "visible_comm_ns",
    "bubble": "bubble_ns",
    "imbalance": "imbalance_ns",
    "memcpy": "memcpy_ns",
    "idle": "idle_ns",
    "hidden_comm": "hidden_comm_ns",
    "hidden_wait": "hidden_wait_ns",
}


def read(corpus: Path, folder: str) -> tuple[Decomposition, list[dict[str, Any]]]:
    oracle = json.loads((corpus / folder / "oracle.json").read_text())["ranks"]
    return decompose(open_run(corpus / folder)), oracle


def assert_terms(row: Any, expected: dict[str, Any]) -> None:
    got = {name: int(row[column]) for name, column in TERM_OF.items() if name in expected}
    assert got == {name: expected[name] for name in got}


@pytest.mark.parametrize(
    "folder",
    [
        "kineto-dlrm-8rank",
        "kineto-mi250",
        "kineto-mi300-resnet",
        "kineto-nccl-a100",
        "kineto-triton",
        "kineto-v100-ns",
    ],
)
def test_every_step_of_every_rank(corpus: Path, folder: str) -> None:
    found, oracle = read(corpus, folder)
    rows = found.ledger.set_index(["rank", "step"])
    windows = found.steps.set_index(["rank", "step"])
    ranks = sorted(found.windows)
    seen = 0
    for rank, of_rank in zip(ranks, oracle, strict=True):
        for step, figures in of_rank["steps"].items():
            figures = figures.get("window_rows", figures)
            row = rows.loc[(rank, int(step))]
            assert_terms(row, figures)
            for name in ("overlap_efficiency", "comm_overlap"):
                if figures[name] is None:
                    assert pd.isna(row[name])
                else:
                    assert row[name] == pytest.approx(figures[name], abs=1e-12)
            window = windows.loc[(rank, int(step))]
            base = int(window["start_ns"]) - figures["window"][0]
            assert int(window["end_ns"]) - base == figures["window"][1]
            seen += 1
    assert seen == sum("empty" not in flags for flags in found.ledger["flags"])


def test_eight_ranks_waits_transfers_and_last_comers(corpus: Path) -> None:
    found, oracle = read(corpus, "kineto-dlrm-8rank")
    parts = found.matches.parts
    assert len(parts) == 64 and not parts["partial"].any() and set(parts["method"]) == {"inferred"}
    for rank, of_rank in enumerate(oracle):
        mine = parts[parts["rank"] == rank].sort_values("arrival_ns")
        assert mine["wait_ns"].tolist() == [op["wait"] for op in of_rank["ops"]]
        assert mine["transfer_ns"].tolist() == [op["transfer"] for op in of_rank["ops"]]
    assert parts.groupby("rank")["wait_ns"].sum().tolist() == [
        us * 1000 for us in (5580, 11125, 3280, 9571, 6370, 6041, 3342, 1534)
    ]
    last = parts.drop_duplicates("match_id")["last_rank"]
    assert Counter(last.tolist()) == {7: 5, 5: 2, 4: 1}
    assert found.steps["op_wait_ns"].tolist() == parts.groupby("rank")["wait_ns"].sum().tolist()


def test_two_sampled_ranks_of_128(corpus: Path) -> None:
    """Pairing by order would be wrong here: five of ten communications pair, by stream and end."""
    found, oracle = read(corpus, "kineto-sampled-2of128")
    parts = found.matches.parts
    for rank, of_rank in enumerate(oracle):
        both = found.ledger[found.ledger["rank"] == rank]
        total = both[list(TERM_OF.values())].sum()
        assert_terms(total, of_rank["both_steps"])
        mine = parts[parts["rank"] == rank].sort_values("arrival_ns")
        assert len(mine) == len(of_rank["ops"])
        for (_, part), op in zip(mine.iterrows(), of_rank["ops"], strict=True):
            if op["A"] is None:
                assert part["unmatched"]
            else:
                assert part["partial"] and part["method"] == "inferred"
                assert (part["wait_ns"], part["transfer_ns"]) == (op["wait"], op["transfer"])
        assert both["unsplit_ns"].sum() == both["visible_comm_ns"].sum()
    assert found.steps[found.steps["rank"] == 0]["op_wait_ns"].sum() == 31_865_000


def nsight_export(path: Path) -> Timeline:
    """The device rows of an Nsight Systems export, a rank a device."""
    t = Timeline(world=2, source="imported", hosts=("one", "one"))
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as data:
        names = dict(data.execute("select id, value from StringIds"))
        for device, start, end, stream, name in data.execute(
            "select deviceId, start, end, streamId, demangledName from CUPTI_ACTIVITY_KIND_KERNEL"
        ):
            text = names[name]
            kind = {"collective": ""} if "nccl" in text else {}
            t.row(device, "comm" if kind else "compute", start, end, stream=str(stream), name=text, **kind)
        for table in ("MEMCPY", "MEMSET"):
            for device, start, end, stream in data.execute(
                f"select deviceId, start, end, streamId from CUPTI_ACTIVITY_KIND_{table}"
            ):
                t.row(device, "memcpy", start, end, stream=f"copies {stream}", name=table)
    return t


def test_two_gpus_of_one_host(corpus: Path) -> None:
    oracle = json.loads((corpus / "nsys-2gpu" / "oracle.json").read_text())["gpus"]
    found = decompose(nsight_export(corpus / "nsys-2gpu" / "mfu_2gpu_before.sqlite").run())
    rows = found.ledger.set_index("rank")
    for rank in (0, 1):
        expected = oracle[str(rank)]
        assert rows.loc[rank, "step"] == "all"
        assert_terms(rows.loc[rank], expected)
        mine = found.matches.parts[found.matches.parts["rank"] == rank].sort_values("arrival_ns")
        assert mine["last_arrival_ns"].tolist() == [op["A"] for op in expected["ops"]]
        assert mine["wait_ns"].sum() == expected["wait_ops_total"]
        assert mine["transfer_ns"].sum() == expected["transfer_ops_total"]
    assert not found.matches.parts["unmatched"].any()


def test_a_host_trace_has_a_host_ledger(corpus: Path) -> None:
    run = open_run(corpus / "kineto-cpu-only")
    found = decompose(run)
    assert all("host" in flags for flags in found.ledger["flags"])
    assert found.ledger["compute_ns"].sum() == 0
    assert found.matches.parts["unmatched"].all() and len(found.matches.parts) == 10
    assert found.ledger["unsplit_ns"].tolist() == found.ledger["visible_comm_ns"].tolist()
    assert "host_ledger" in {item.code for item in run.health.items}


def test_an_old_schema_has_six_steps(corpus: Path) -> None:
    found = decompose(open_run(corpus / "kineto-old-schema"))
    (windows,) = found.windows.values()
    assert len(windows.steps) == 6
    assert found.ledger["visible_comm_ns"].sum() == 0
