"""`stepscope doctor`, `stepscope import` and several paths, from the outside; what is shown while a run is read."""

from __future__ import annotations

import errno
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from trace_files import header, members, row, usual_steps, write_run

from stepscope.__main__ import status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import Progress, keep, open_run, rank_writer, store
from stepscope.analysis.ledger.decompose import decompose
from stepscope.commands.progress import shown_on
from stepscope.tracer.schema import RUN_FILE, rank_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def traces(place: Path, ranks: tuple[int, ...] = (0, 1)) -> list[Path]:
    """Traces that lie about: no run.json, names that say nothing of a run."""
    place.mkdir(parents=True)
    files = [place / f"profile-{rank}.json.gz" for rank in ranks]
    for rank, file in zip(ranks, files, strict=True):
        file.write_bytes(b"".join(members(header(rank), usual_steps(rank))))
    return files


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_a_sound_run_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a")
    assert status_of(["doctor", str(run)]) == 0
    assert capsys.readouterr().out.startswith("✓ health ok")


def test_damage_is_named_with_its_place_and_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a")
    damaged = run / rank_file(1)
    damaged.write_bytes(damaged.read_bytes()[:-200])
    assert status_of(["doctor", str(run)]) == 3
    shown = capsys.readouterr().out
    assert "cut_file" in shown and f"{rank_file(1)} at byte" in shown and "touches" in shown
    assert "Where the step went" not in shown
    assert status_of(["doctor", str(run), "--json", "-"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["health"]["status"] == "touched" and found["run"]["ranks"] == [0, 1]
    assert "cut_file" in {item["code"] for item in found["health"]["items"]}


def test_doctor_and_analyze_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", ranks=(0,))  # of a world of two
    health = {}
    for command in ("analyze", "doctor"):
        assert status_of([command, str(run), "--json", "-"]) == 3
        health[command] = json.loads(capsys.readouterr().out)["health"]
    assert health["analyze"] == health["doctor"]
    assert "missing_rank" in {item["code"] for item in health["doctor"]["items"]}


def test_what_was_ignored_is_listed_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces(tmp_path / "t")
    (tmp_path / "t" / "LICENSE").write_text("As is.")
    (tmp_path / "t" / "NOTICE").write_text("None.")
    (tmp_path / "t" / "config.json").write_text("{}")
    assert status_of(["doctor", str(tmp_path / "t"), "--json", "-"]) == 0
    [item] = [i for i in json.loads(capsys.readouterr().out)["health"]["items"] if i["code"] == "ignored_files"]
    assert item["text"] == (
        "3 files are no traces and were ignored: LICENSE, NOTICE (it is neither JSON nor another known format); "
        "config.json (it is JSON without a list of trace events)"
    )


def test_rules_of_ones_own_and_a_damaged_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that only a user knows communicates; a store that lost a file is read anew where that is asked for."""
    rows = [row("secret_ring", 0, 500, tid=20), row("gemm", 0, 100)]
    trace = {"traceEvents": rows, "distributedInfo": {"rank": 0, "world_size": 2}}
    (tmp_path / "t.json").write_text(json.dumps(trace))
    (tmp_path / "mine.toml").write_text('[communication]\nnames = ["secret_*"]\n')
    for command in ("doctor", "analyze"):
        assert status_of([command, str(tmp_path / "t.json")]) == 3
        assert "no communication was recognised" in capsys.readouterr().out
        assert status_of([command, str(tmp_path / "t.json"), "--rules", str(tmp_path / "mine.toml")]) == 3
        assert "no communication was recognised" not in capsys.readouterr().out
    [store_of_it] = (tmp_path / "cache" / "stepscope").iterdir()
    (store_of_it / "rank_00000.events.parquet").write_bytes(b"nothing")
    words = ["doctor", str(tmp_path / "t.json"), "--rules", str(tmp_path / "mine.toml")]
    assert status_of(words) == 1
    assert "open the run again with --refresh" in capsys.readouterr().err
    assert status_of([*words, "--refresh"]) == 3
    assert status_of(["doctor", str(tmp_path / "t.json"), "--rules", "absent.toml"]) == 1
    assert f"cannot read the rules in {Path('absent.toml').absolute()}" in capsys.readouterr().err


# -- import ------------------------------------------------------------------------------------------------------------


def test_a_kept_run_needs_its_traces_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = traces(tmp_path / "t")
    before = open_run([str(file) for file in files])
    out = tmp_path / "runs" / "kept"
    assert status_of(["import", *map(str, files), "--out", str(out)]) == 0
    assert f"stepscope analyze {out}" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "t")
    after = open_run(out)
    assert after.meta.name == "kept" and after.path == out and after.ranks == [0, 1]
    for rank in after.ranks:
        assert after.strings(rank) == before.strings(rank) and after.lanes(rank) == before.lanes(rank)
        for name, values in before.columns(rank).items():
            assert np.array_equal(values, after.columns(rank)[name]), name
    assert decompose(after).ledger.equals(decompose(before).ledger)
    assert [path.name for path in out.parent.iterdir()] == ["kept"], "nothing temporary is left"


def test_a_run_of_ours_can_be_kept_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    kept = keep.keep(str(run), tmp_path / "b")
    assert kept.meta.mesh == {"dp": 2} and kept.meta.source == "measured"
    assert decompose(kept).ledger.equals(decompose(open_run(run)).ledger)


@pytest.mark.parametrize("folder", ["kineto-triton", "kineto-cpu-only", "nsys-2gpu", "ndtimeline-st", "pp-vis-1f1b"])
def test_every_format_is_kept_whole(corpus: Path, tmp_path: Path, folder: str) -> None:
    before = open_run(corpus / folder)
    after = keep.keep(corpus / folder, tmp_path / "kept")
    assert after.ranks == before.ranks and after.health.items == before.health.items
    assert replace(after.meta, name="", run_id="") == replace(before.meta, name="", run_id="")
    for rank in before.ranks:
        assert after.strings(rank) == before.strings(rank) and after.lanes(rank) == before.lanes(rank)
        for name, values in before.columns(rank).items():
            assert np.array_equal(values, after.columns(rank)[name]), name


def test_import_says_what_touches_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = traces(tmp_path / "t", ranks=(1,))
    assert status_of(["import", str(file), "--out", str(tmp_path / "kept")]) == 3
    assert "missing_rank" in capsys.readouterr().out
    assert status_of(["analyze", str(tmp_path / "kept")]) == 3


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = traces(tmp_path / "t")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    assert status_of(["import", *map(str, files), "--out", str(tmp_path / "mine")]) == 1
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StepscopeError("the disk is full")])
def test_what_is_not_finished_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = traces(tmp_path / "t")

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(store.Builder, "commit", fail)
    with pytest.raises(type(error)):
        keep.keep([str(file) for file in files], tmp_path / "runs" / "kept")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = traces(tmp_path / "t")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rank_writer.RankWriter, "append", full)
    with pytest.raises(StepscopeError, match=r"no space left for .*kept"):
        keep.keep([str(file) for file in files], tmp_path / "runs" / "kept")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_kept_run_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    keep.keep([str(file) for file in traces(tmp_path / "t")], tmp_path / "kept")
    (tmp_path / "kept" / keep.KEPT_DIRECTORY / "manifest.json").write_text('{"store_version": 0}')
    with pytest.raises(StepscopeError, match="import the traces again"):
        open_run(tmp_path / "kept")
    (tmp_path / "kept" / RUN_FILE).unlink()
    with pytest.raises(StepscopeError):
        open_run(tmp_path / "kept")


# -- several paths -----------------------------------------------------------------------------------------------------


def test_several_files_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = traces(tmp_path / "t")
    assert status_of(["analyze", *map(str, files), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["ranks"] == [0, 1]
    assert status_of([*map(str, files)]) == 0
    assert "stepscope import" in capsys.readouterr().err


def test_two_runs_at_a_time_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert status_of(["analyze", str(a), str(b)]) == 1
    assert f"stepscope compare {a} {b}" in capsys.readouterr().err


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_tells_ranks_and_bytes_in_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    size = sum((run / rank_file(rank)).stat().st_size for rank in (0, 1))
    told: list[Progress] = []
    open_run(run, told.append, engine="serial")
    assert [told[0].stage, told[1].stage] == ["preparing", "reading"]
    assert {(one.files, one.bytes, one.unit) for one in told} == {(2, size, "ranks")}
    assert [one.bytes_done for one in told] == sorted(one.bytes_done for one in told)
    assert told[-1].files_done == 2 and told[-1].bytes_done == size
    assert any(one.files_done == 0 and one.bytes_done > 0 for one in told), "also within a file"
    again: list[Progress] = []
    open_run(run, again.append)
    assert again == [], "a second open reads no trace"


def test_a_bar_shows_it_and_goes_away() -> None:
    text = io.StringIO()
    out = Console(file=text, force_terminal=True, width=160, color_system=None)
    with shown_on(out) as call:
        call(Progress("preparing", 0, 8, 0, 4_000_000))
        call(Progress("reading", 3, 8, 1_000_000, 4_000_000))
    shown = text.getvalue()
    assert "reading traces" in shown and "3 of 8 ranks" in shown and "1.0/4.0 MB" in shown
    assert shown.endswith("\x1b[2K"), "its line is taken away"
    with shown_on(out):
        pass
    assert text.getvalue() == shown, "no call, no bar"


def test_a_pipe_sees_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["doctor", str(write_run(tmp_path / "a"))]) == 0
    assert capsys.readouterr().err == ""
