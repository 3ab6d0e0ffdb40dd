"""Tables of operations and pipeline dumps in whatever form they come: one job, worked out by hand, in all of them.

Two stages, two replicas, two steps: forward 1 s, backward 2 s; stage 1 starts when stage 0 is done and hands back:
0-1 and 3-5 on stage 0, 1-2 and 2-4 on stage 1. A step takes 5 s, a rank computes 3 s of it and waits 2 s for the other.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from stepscope.__main__ import status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ingest.pp_vis import FIELDS
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Run

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id")
TIMES = {0: (("forward-compute", 0.0, 1.0), ("backward-compute", 3.0, 2.0))}
TIMES[1] = (("forward-compute", 1.0, 1.0), ("backward-compute", 2.0, 2.0))
ROWS = [
    (dp, stage, step, name, start, length, 0)
    for step in (0, 1)
    for dp in (0, 1)
    for stage in (0, 1)
    for name, start, length in TIMES[stage]
]
JOB = pd.DataFrame(ROWS, columns=list(COLUMNS))
CSV = JOB.to_csv(index=False)
S = 10**9


def parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    return buffer.getvalue()


def opened(directory: Path, name: str, content: bytes) -> Run:
    (directory / name).write_bytes(content)
    return open_run(directory)


def columns_of(run: Run, *names: str) -> list[tuple[Any, ...]]:
    ledger = decompose(run).ledger
    return sorted(set(ledger[list(names)].itertuples(index=False, name=None)))


def said(run: Run) -> dict[str, HealthItem]:
    return {item.code: item for item in run.health.items}


WAYS = {
    "text by another name": ("job.txt", CSV.encode()),
    "capital letters": ("JOB.CSV", CSV.encode()),
    "compressed without saying so": ("job", gzip.compress(CSV.encode())),
    "compressed as .csv": ("job.csv", gzip.compress(CSV.encode())),
    "called compressed": ("job.csv.gz", CSV.encode()),
    "quoted": ("job.csv", JOB.to_csv(index=False, quoting=1).encode()),
    "with blanks": ("job.csv", CSV.replace(",", ", ").encode()),
    "semicolons": ("job.csv", JOB.to_csv(index=False, sep=";").encode()),
    "tabs": ("job.tsv", JOB.to_csv(index=False, sep="\t").encode()),
    "byte order mark": ("job.csv", b"\xef\xbb\xbf" + CSV.encode()),
    "parquet": ("job.parquet", parquet(JOB)),
    "parquet called csv": ("job.csv", parquet(JOB)),
    "parquet with an index": ("job.parquet", parquet(JOB.set_index("optype"))),
    "parquet of durations": (
        "job.parquet",
        parquet(JOB.assign(**{c: pd.to_timedelta(JOB[c], unit="s") for c in ("start_ts", "duration")})),
    ),
    "parquet of dates": ("job.parquet", parquet(JOB.assign(start_ts=pd.to_datetime(JOB["start_ts"], unit="s")))),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_job_in_every_form(tmp_path: Path, way: str) -> None:
    run = opened(tmp_path, *WAYS[way])
    assert columns_of(run, "step_ns", "compute_ns", "bubble_ns", "idle_ns") == [(5 * S, 3 * S, 2 * S, 0)]
    assert not run.health.items


def test_lines_that_cannot_be_read_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    run = opened(tmp_path, "job.csv", CSV.encode() + b"0,0,1,forward-compute,5.0,1.0,0,9,9\n0,0,1,f\xe9,0,1,0\n")
    assert columns_of(run, "step_ns", "compute_ns") == [(5 * S, 3 * S)]
    assert said(run)["lost_event"].text.startswith("1 line of the table has more values")
    assert "f\ufffd" in said(run)["unknown_operation"].text


def test_a_compressed_table_that_was_cut_keeps_its_rows(tmp_path: Path) -> None:
    run = opened(tmp_path, "job.csv.gz", gzip.compress(CSV.encode())[:-6])
    assert columns_of(run, "step_ns", "compute_ns") == [(5 * S, 3 * S)]
    assert said(run)["cut_file"].touches == ("ledger", "summary")


def test_without_microbatches_waiting_cannot_be_told_and_health_says_so(tmp_path: Path) -> None:
    run = opened(tmp_path, "job.csv", JOB.drop(columns="mb_id").to_csv(index=False).encode())
    assert columns_of(run, "compute_ns", "bubble_ns", "idle_ns", "method") == [(3 * S, 0, 2 * S, "direct")]
    assert said(run)["no_waits"].touches == ("bubble_ns", "idle_ns", "pipeline")
    assert status_of(["analyze", str(tmp_path), "--quiet"]) == 3


def test_times_that_do_not_fit_are_an_error_in_words(tmp_path: Path) -> None:
    table = pd.DataFrame([(0, 0, k, "forward-compute", t, 1.0, 0) for k in (0, 1) for t in (-4e9, 3.9e9)])
    with pytest.raises(StepscopeError, match="in another unit"):
        opened(tmp_path, "job.csv", table.to_csv(index=False, header=list(COLUMNS)).encode())


def test_a_replica_that_is_not_there(tmp_path: Path) -> None:
    """The second of three: ranks are as if it were there, and it is missed."""
    run = opened(tmp_path, "job.csv", JOB.assign(dp_rank=JOB["dp_rank"] * 2).to_csv(index=False).encode())
    assert run.ranks == [0, 2, 3, 5] and columns_of(run, "compute_ns", "bubble_ns") == [(3 * S, 2 * S)]
    assert said(run)["missing_rank"].text.startswith("2 of 6 ranks have no file (1, 4)")


def test_replicas_that_no_run_has_so_many_of_are_counted(tmp_path: Path) -> None:
    run = opened(tmp_path, "job.csv", JOB.assign(dp_rank=JOB["dp_rank"] * 900_000).to_csv(index=False).encode())
    assert run.ranks == [0, 1, 2, 3] and columns_of(run, "compute_ns") == [(3 * S,)]


# -- dumps of a pipeline -----------------------------------------------------------------------------------------------


def dump(*times: tuple[float, float]) -> str:
    """Forward and backward of one microbatch, in ms, in two iterations."""
    (f, f_end), (b, b_end) = times
    one = {"fwd_start": [f], "fwd_end": [f_end], "bwd_start": [b], "bwd_end": [b_end]}
    return json.dumps({"0": one, "1": one})


DUMPS = (dump((0, 1), (3, 5)), dump((1, 2), (2, 4)))
MS = 10**6


@pytest.mark.parametrize("how", ["plain", "compressed", "byte order mark"])
def test_dumps_in_every_form(tmp_path: Path, how: str) -> None:
    for rank, text in enumerate(DUMPS):
        data = b"\xef\xbb\xbf" * (how == "byte order mark") + text.encode()
        end = ".gz" if how == "compressed" else ""
        (tmp_path / f"pp_rank_{rank}.json{end}").write_bytes(gzip.compress(data) if end else data)
    (tmp_path / "config.json").write_text('{"pp_size": 2}')
    run = open_run(tmp_path)
    assert columns_of(run, "step_ns", "compute_ns", "bubble_ns") == [(5 * MS, 3 * MS, 2 * MS)]
    assert not run.health.items  # the configuration is used, not ignored


def test_dumps_are_read_by_url(tmp_path: Path) -> None:
    for rank, text in enumerate(DUMPS):
        (tmp_path / f"pp_rank_{rank}.json").write_text(text)
    (tmp_path / "config.json").write_text('{"pp_size": 4}')
    run = open_run(f"file://{tmp_path}/pp_rank_*.json")
    assert columns_of(run, "compute_ns", "bubble_ns") == [(3 * MS, 2 * MS)] and run.meta.mesh == {"pp": 4}


def test_another_configuration_is_read_anew(tmp_path: Path) -> None:
    for rank, text in enumerate(DUMPS):
        (tmp_path / f"pp_rank_{rank}.json").write_text(text)
    assert open_run(tmp_path).meta.mesh == {"pp": 2}
    (tmp_path / "config.json").write_text('{"pp_size": 4}')
    assert open_run(tmp_path).meta.mesh == {"pp": 4}


def test_chunks_of_a_dump_are_not_told_apart_and_health_says_so(tmp_path: Path) -> None:
    for rank, text in enumerate(DUMPS):
        (tmp_path / f"pp_rank_{rank}.json").write_text(text)
    (tmp_path / "config.json").write_text('{"pp_size": 2, "vp_size": 2}')
    assert status_of(["analyze", str(tmp_path), "--quiet"]) == 3
    run = open_run(tmp_path)
    assert columns_of(run, "compute_ns", "idle_ns") == [(3 * MS, 2 * MS)] and "no_waits" in said(run)


@pytest.mark.parametrize("number", ["20261130120000", "40000"])
def test_a_number_in_a_name_that_is_no_rank(tmp_path: Path, number: str) -> None:
    (tmp_path / "pp_rank_0.json").write_text(DUMPS[0])
    (tmp_path / f"pp_rank_{number}.json").write_text(DUMPS[1])
    (tmp_path / "config.json").write_text('{"pp_size": 100000000000}')
    run = open_run(tmp_path)
    assert run.ranks == [0, 1] and columns_of(run, "compute_ns", "bubble_ns") == [(3 * MS, 2 * MS)]


@pytest.mark.parametrize("time", ["-1e14", "NaN", "1e400", '"0"'])
def test_what_is_no_time_leaves_the_stage_out(tmp_path: Path, time: str) -> None:
    (tmp_path / "pp_rank_0.json").write_text(DUMPS[0].replace("[0]", f"[{time}]", 1))
    (tmp_path / "pp_rank_1.json").write_text(DUMPS[1])
    run = open_run(tmp_path)
    assert run.ranks == [1] and "which is no time" in said(run)["broken_rank"].text


def test_a_stage_that_is_not_there(tmp_path: Path) -> None:
    """One of four: the others are of one pipeline all the same, and nobody's plan is taken for another's."""
    parts = {"plain": (JOB, 0), "third": (JOB.assign(stage=JOB["stage"] + 2), 2)}
    (tmp_path / "job.csv").write_text(pd.concat([table for table, _ in parts.values()]).to_csv(index=False))
    whole = open_run(tmp_path)
    table = pd.read_csv(tmp_path / "job.csv")
    (tmp_path / "job.csv").write_text(table[table["stage"] != 1].to_csv(index=False))
    run = open_run(tmp_path)
    assert (
        run.ranks == [0, 1, 4, 5, 6, 7] and run.meta.coords == whole.meta.coords and run.meta.mesh == {"pp": 4, "dp": 2}
    )
    assert len(whole.meta.pipeline_table) == 8 and run.meta.pipeline_table == ()
    assert status_of(["analyze", str(tmp_path), "--quiet"]) == 3


def test_a_dump_without_any_operation_leaves_the_stage_out(tmp_path: Path) -> None:
    (tmp_path / "pp_rank_0.json").write_text(json.dumps({"0": {key: [] for key in FIELDS}}))
    (tmp_path / "pp_rank_1.json").write_text(DUMPS[1])
    run = open_run(tmp_path)
    assert run.ranks == [1] and "it has no operation" in said(run)["broken_rank"].text
