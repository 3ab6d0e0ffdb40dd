"""`stepscope.open`: what the page shows is true, importing the package stays light, frames have units and no zeros for unknown."""

from __future__ import annotations

import doctest
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from pipeline_runs import MS, pipeline_run
from test_compare import plain_run
from trace_files import write_run

import stepscope
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.opened import OpenedRun

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_s_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dp4", "dp4_slow_rank"):
        leave = shutil.ignore_patterns(".stepscope")
        shutil.copytree(ROOT / "sample_traces" / name, tmp_path / "sample_traces" / name, ignore=leave)
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(ROOT / "docs" / "python.md")
    found = doctest.testfile(page, module_relative=False, optionflags=options, encoding="utf-8")
    assert found.attempted > 15
    assert found.failed == 0


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", count=2)
    code = (
        "import sys, stepscope; heavy = {'numpy', 'pandas', 'pyarrow', 'torch'} & set(sys.modules); assert not heavy, heavy;"
        f"stepscope.open({str(path)!r}).ledger(); assert 'pandas' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(StepscopeError):
        stepscope.open("no such run")


def test_a_pipeline_run_in_frames() -> None:
    run = OpenedRun(pipeline_run(4, 8, 2, slow={2: 6, 3: 6}))
    assert len(run.ledger()) == 8 * 3
    assert run.pipeline()["schedule"].tolist() == ["1f1b"]
    assert run.pipeline()["theory_of_step"].tolist() == [pytest.approx(3 / 11)]
    assert run.stragglers()["rank"].tolist()[:2] == [2, 3]
    assert run.stragglers(by="stage")["name"].iloc[0] == "1"
    assert run.stragglers(by="host").empty and "cost_ns_per_step" in run.stragglers(by="host")
    with pytest.raises(ValueError, match="rank, host or stage"):
        run.stragglers(by="node")
    assert "pp 4 · dp 2" in repr(run) and "health ok" in repr(run)
    first = run.ledger()
    first["step_ns"] = 0
    assert run.ledger()["step_ns"].min() > 0  # frames are copies


def test_collectives_have_a_row_a_rank_and_unknown_is_no_zero() -> None:
    frame = OpenedRun(pipeline_run(1, 4, 4, slow={2: 5})).collectives()
    assert len(frame) == 3 * 4
    assert frame["rank"].tolist()[:4] == [0, 1, 2, 3]
    assert frame["wait_ns"].tolist()[:4] == [5 * MS, 5 * MS, 0, 5 * MS]
    assert str(frame["wait_ns"].dtype) == "Int64"
    empty = OpenedRun(plain_run([100, 100]))
    assert empty.collectives().empty and "wait_ns" in empty.collectives()
    assert empty.stragglers().columns.tolist() == ["rank", "last_arrivals", "cost_ns_per_step", "cause", "pattern"]


def test_every_part_of_the_report_is_a_frame_with_units() -> None:
    run = OpenedRun(pipeline_run(2, 4, 2, slow={1: 3}))
    frames = {
        name: getattr(run, name)()
        for name in (
            *("ledger", "steps", "summary", "classes", "throughput", "overlap", "collectives", "matching", "clocks"),
            *("alpha_beta", "outliers", "links", "volumes", "memory", "experts", "idle", "compute_per_transfer"),
            *("contention", "stragglers", "pipeline", "stages", "findings"),
        )
    }
    listed = {word for word in (ROOT / "docs" / "python.md").read_text("utf-8").split("`") if word.startswith("run.")}
    assert {f"run.{name}()" for name in frames} <= listed
    public = {name for name, value in vars(OpenedRun).items() if not name.startswith("_") and callable(value)}
    assert public == {*frames, "compare"}  # nothing is left out here
    for name, frame in frames.items():
        assert isinstance(frame, pd.DataFrame), name
        for column in frame.columns:
            words = str(column)
            timed = any(word in words for word in ("alpha", "wait", "arrival", "cost", "transfer", "bound"))
            assert not timed or words.endswith(UNITS), (name, column)
    assert len(run.links()) == 4
    assert run.throughput().isna().all(axis=None)
    assert run.memory(of="peaks").empty and run.experts(by="expert").empty
    for wrong in (lambda: run.memory(of="heap"), lambda: run.experts(by="layer")):
        with pytest.raises(ValueError, match="say "):
            wrong()


UNITS = ("_ns", "_ns_per_step", "_us_per_mb", "last_arrivals", "bound")


def test_comparing_in_frames() -> None:
    sides = []
    for length, batch in ((1000, 10), (1500, 20)):
        run = plain_run([length] * 3)
        run.meta.model["seq"], run.meta.train["global_batch"] = 10, batch
        sides.append(OpenedRun(run))
    base, other = sides
    frame = base.compare(other)
    assert frame.loc[0, ["name", "a_ns_per_step", "b_ns_per_step", "delta_ns_per_step", "relative"]].tolist() == [
        "step",
        1000,
        1500,
        500,
        0.5,
    ]
    assert frame["delta_ns_per_step"].iloc[1:].sum() == 500
    assert base.compare(other, per="token").loc[0, "b_ns_per_token"] == 7.5
    assert base.compare(other, by="classes")["name"].tolist() == ["compute other"]
    with pytest.raises(ValueError, match="does not say how many tokens"):
        base.compare(OpenedRun(plain_run([100, 100])), per="token")
    for wrong in ({"by": "kernels"}, {"per": "second"}, {"by": "classes", "per": "token"}):
        with pytest.raises(ValueError, match="compare by"):
            base.compare(other, **wrong)
    one_step = OpenedRun(plain_run([100])).compare(OpenedRun(plain_run([120])))
    assert pd.isna(one_step.loc[0, "low_ns_per_step"])
