"""Runs under the root: found anew at each look, a broken one harming no other, nothing outside the root."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest
import synthetic

from stepscope.analysis import units
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.dashboard.catalogue import Catalogue, Found
from stepscope.dashboard.loaded import LoadedRun, Progress, load
from stepscope.dashboard.pages import runs
from stepscope.dashboard.security import inside
from stepscope.tracer.schema import RunMeta, rank_file


def write_run(folder: Path, name: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(synthetic.pipeline(2, 1, 2, 2, 2, -1, run_id=name or folder.name).meta.to_json())
    return folder


def small(run_id: str, path: Path, progress: Progress) -> LoadedRun:
    progress("reading", 0.5)
    return load(run_id, synthetic.pipeline(2, 1, 2, 2, 2, -1, run_id=run_id), progress)


def test_runs_are_found_at_any_depth_and_new_ones_without_a_restart(tmp_path: Path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "deep" / "er" / "b")
    catalogue = Catalogue(tmp_path, small)
    assert {run.id for run in catalogue.found()} == {"a", "deep/er/b"}
    write_run(tmp_path / "c")
    assert {run.id for run in catalogue.found()} == {"a", "deep/er/b", "c"}
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "rank0.pt.trace.json.gz").write_bytes(b"")
    assert [run.error for run in catalogue.found() if run.id == "foreign"] == [""]


def test_a_root_that_is_itself_a_run(tmp_path: Path):
    write_run(tmp_path / "only")
    catalogue = Catalogue(tmp_path / "only", small)
    assert [run.id for run in catalogue.found()] == ["only"]
    assert catalogue.find("only") is not None


def test_a_broken_run_keeps_its_error_to_itself(tmp_path: Path):
    write_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")

    def fails(run_id: str, path: Path, progress: Progress) -> LoadedRun:
        if run_id == "bad":
            raise StepscopeError("no rank file in bad: record it again")
        return small(run_id, path, progress)

    catalogue = Catalogue(tmp_path, fails)
    assert {run.id: bool(run.error) for run in catalogue.found()} == {"good": False, "bad": True}
    bad, good = catalogue.open("bad"), catalogue.open("good")
    assert bad is not None and good is not None
    assert bad.done.wait(20) and good.done.wait(20)
    assert bad.error == "no rank file in bad: record it again"
    assert good.loaded is not None and good.error == ""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two ranks of two steps each that can be read, and their run.json, in `runs/a`."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(RunMeta("a", "a", complete=True, world_size=2).to_json())
    for rank in (0, 1):
        rows = [("user_annotation", f"ProfilerStep#{k}", 1, 1000 * k, 900, {}) for k in (0, 1)]
        rows += [("kernel", "block", 7, 1000 * k + 100, 500, {"stream": 7, "phase": "forward"}) for k in (0, 1)]
        events = [
            {"ph": "X", "cat": cat, "name": name, "pid": rank, "tid": tid, "ts": ts, "dur": dur, "args": args}
            for cat, name, tid, ts, dur, args in rows
        ]
        head = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": 10**18}
        (folder / rank_file(rank)).write_bytes(gzip.compress(json.dumps({**head, "traceEvents": events}).encode()))
    return folder


def shown(root: Path) -> str:
    """The cards of the runs under a directory, once all are opened, as text."""
    catalogue = Catalogue(root)
    for run in catalogue.found():
        opening = catalogue.glance(run)
        assert opening is not None and opening.done.wait(60)
    return str(runs.cards(catalogue))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", None])
def test_ranks_speak_for_a_run_whose_run_json_cannot_be_read(recorded: Path, content: bytes | None):
    (recorded / "run.json").unlink()
    if content is None:  # OSError
        (recorded / "run.json").mkdir()
    else:
        (recorded / "run.json").write_bytes(content)
    cards = shown(recorded.parent)
    assert "health touched" in cards and "broken" not in cards and "ss-error" not in cards
    assert open_run(recorded).health.status == "touched"


def test_a_run_of_which_nothing_can_be_read_says_all_that_is_wrong(recorded: Path):
    for file in recorded.iterdir():
        file.write_bytes(b"garbage")
    cards = shown(recorded.parent)
    assert "can be read" in cards and "run.json " in cards and "'broken'" in cards


def test_a_rank_file_that_leads_nowhere_takes_the_card_no_date_and_no_other_rank(recorded: Path):
    (recorded / "run.json").unlink()  # so that the files date the run
    (recorded / rank_file(1)).unlink()
    (recorded / rank_file(1)).symlink_to("gone")
    found = Catalogue(recorded.parent).found()
    assert [run.error for run in found] == [""] and not runs.when(found[0]).startswith("1970")
    assert "cannot be listed" not in shown(recorded.parent)
    assert runs.when(Found("x", recorded, (), None, "cannot be listed: Permission denied")) == units.DASH


def test_a_bug_of_ours_ends_on_the_runs_own_card(tmp_path: Path):
    write_run(tmp_path / "a")

    def breaks(run_id: str, path: Path, progress: Progress) -> LoadedRun:
        raise KeyError("surprise")

    opening = Catalogue(tmp_path, breaks).open("a")
    assert opening is not None and opening.done.wait(20)
    assert "KeyError" in opening.error


def test_opening_can_be_cancelled_and_begun_again(tmp_path: Path):
    write_run(tmp_path / "a")
    started, go = threading.Event(), threading.Event()

    def waits(run_id: str, path: Path, progress: Progress) -> LoadedRun:
        started.set()
        go.wait(20)
        return small(run_id, path, progress)

    catalogue = Catalogue(tmp_path, waits)
    opening = catalogue.open("a")
    assert opening is not None and started.wait(20)
    catalogue.cancel("a")
    go.set()
    assert opening.done.wait(20) and opening.loaded is None and "cancelled" in opening.error
    again = catalogue.open("a")
    assert again is not None and again is not opening and again.done.wait(20)
    assert again.loaded is not None


def test_a_run_that_changed_is_opened_anew(tmp_path: Path):
    run = write_run(tmp_path / "a")
    catalogue = Catalogue(tmp_path, small)
    first = catalogue.open("a")
    assert first is not None and first.done.wait(20)
    assert catalogue.open("a") is first
    (run / "rank_00000.trace.json.gz").write_bytes(b"more")
    second = catalogue.open("a")
    assert second is not None and second is not first


def test_forgotten_runs_keep_their_card_and_are_not_opened_anew_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stepscope.dashboard.catalogue.MAX_LOADED", 1)
    for name in ("a", "b"):
        write_run(tmp_path / name)
    calls: list[str] = []

    def counted(run_id: str, path: Path, progress: Progress) -> LoadedRun:
        calls.append(run_id)
        return small(run_id, path, progress)

    catalogue = Catalogue(tmp_path, counted)
    for found in [*catalogue.found(), *catalogue.found(), *catalogue.found()]:
        glance = catalogue.glance(found)
        assert glance is not None and glance.done.wait(20) and glance.summary is not None
    assert sorted(calls) == ["a", "b"]
    loaded = [name for name in "ab" if catalogue.loaded(name) is not None]
    assert len(loaded) == 1
    (gone,) = {"a", "b"} - set(loaded)
    again = catalogue.open(gone)
    assert again is not None and again.done.wait(20) and again.loaded is not None and len(calls) == 3


@pytest.mark.parametrize("bad", ["..", "../secret", "a/../../secret", "/etc", "", "a\0b", "x" * 2000, "nothing"])
def test_nothing_outside_the_root_is_reached(tmp_path: Path, bad: str):
    root = tmp_path / "root"
    write_run(root / "a")
    write_run(tmp_path / "secret")
    assert inside(root, bad) is None
    assert Catalogue(root, small).find(bad) is None


def test_a_link_that_leads_out_is_not_followed(tmp_path: Path):
    root = tmp_path / "root"
    write_run(root / "a")
    write_run(tmp_path / "secret")
    (root / "link").symlink_to(tmp_path / "secret")
    catalogue = Catalogue(root, small)
    assert catalogue.find("link") is None
    assert {run.id for run in catalogue.found()} == {"a"}
