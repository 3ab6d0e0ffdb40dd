"""The column store: read back what was written, rebuilt when the sources change, never half, never mixed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import header, members, usual_steps, write_run

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run, rank_writer, store
from stepscope.analysis.run import RankData, Run, empty_columns, sort_events
from stepscope.tracer.schema import COUNTER_COLUMNS, EVENT_COLUMNS, KINDS, Lane, RunMeta, rank_file


def same(a: RankData, b: RankData) -> None:
    assert a.strings == b.strings and a.lanes == b.lanes
    for ours, theirs in ((a.events, b.events), (a.counters, b.counters)):
        assert set(ours) == set(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
            assert ours[name].dtype == theirs[name].dtype, name


@st.composite
def rank_data(draw: st.DrawFn) -> RankData:
    rows = draw(st.integers(0, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    events = empty_columns(EVENT_COLUMNS, rows)
    for name, dtype in EVENT_COLUMNS.items():
        if draw(st.booleans()):
            limit = np.iinfo(dtype).max
            events[name] = random.integers(-1, draw(st.sampled_from([1, 100, limit])), rows).astype(dtype)
    counters = empty_columns(COUNTER_COLUMNS, draw(st.integers(0, 5)))
    strings = tuple(draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4)))
    return RankData(sort_events(events), strings, (Lane(0, "a", "compute", "", 7, "0", "7"),), counters)


@settings(max_examples=40, deadline=None)
@given(rank_data())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, data: RankData) -> None:
    place = tmp_path_factory.mktemp("store") / "run.store"
    with store.Builder(place) as builder:
        entry = rank_writer.write_rank(builder.path, builder.build, 3, data)
        meta = json.loads(RunMeta("id", "name").to_json())
        builder.commit({"sources": {}, "meta": meta, "health": [], "ranks": [entry], "replace": False})
    manifest = store.read_manifest(place)
    assert manifest is not None
    run = store.open_store(place, manifest, place)
    same(run.rank(3), data)
    np.testing.assert_array_equal(
        store.open_store(place, manifest, place).columns(3, "start_ns")["start_ns"], data.events["start_ns"]
    )


def test_a_second_open_reads_no_trace_and_says_the_same(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", ranks=(0,), complete=False)
    parts = members(header(0), usual_steps(0))
    (path / rank_file(0)).write_bytes(b"".join(parts[:-1]))
    first = open_run(path)
    kept = first.rank(0)
    stamp = (path / ".stepscope" / "manifest.json").stat().st_mtime_ns
    second = open_run(path)
    assert (path / ".stepscope" / "manifest.json").stat().st_mtime_ns == stamp
    assert second.health.items == first.health.items
    assert [item.code for item in second.health.items] == ["incomplete_run", "missing_rank", "cut_file"]
    same(second.rank(0), kept)


@pytest.mark.parametrize("change", ["source", "version", "refresh", "damaged manifest"])
def test_it_is_built_anew_when_it_must(tmp_path: Path, change: str) -> None:
    path = write_run(tmp_path / "run")
    manifest = path / ".stepscope" / "manifest.json"
    open_run(path)
    before = json.loads(manifest.read_text())
    if change == "source":
        (path / rank_file(1)).write_bytes(b"".join(members(header(1), usual_steps(1, count=2))))
    elif change == "version":
        manifest.write_text(json.dumps(before | {"store_version": 0}))
    elif change == "damaged manifest":
        manifest.write_text("{")
    run = open_run(path, refresh=change == "refresh")
    assert json.loads(manifest.read_text())["build"] != before["build"]
    assert len(run.columns(1, "kind")["kind"]) == (10 if change == "source" else 15)
    assert [entry.name for entry in path.iterdir() if entry.name.startswith(".stepscope")] == [".stepscope"]


def test_a_run_that_was_rebuilt_meanwhile_is_not_mixed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    old = open_run(path)
    old.columns(0, "kind")
    open_run(path, refresh=True)
    with pytest.raises(StepscopeError, match="rebuilt by another process"):
        old.columns(0, "start_ns")


def test_a_lost_file_is_said(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    run = open_run(path)
    (path / ".stepscope" / store.events_file(0)).unlink()
    with pytest.raises(StepscopeError, match="incomplete or damaged"):
        run.columns(0, "kind")


def test_a_place_that_cannot_be_written_falls_back_to_the_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run")
    monkeypatch.setattr(
        store, "_can_create", lambda directory: False
    )  # a read-only mount: root may write anywhere else
    run = open_run(path)
    assert not (path / ".stepscope").exists()
    [place] = list((own_cache / "stepscope").iterdir())
    same(open_run(path).rank(1), run.rank(1))
    assert list((own_cache / "stepscope").iterdir()) == [place]


@pytest.mark.parametrize("cache_full", [False, True])
def test_a_full_disk_falls_back_to_the_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, cache_full: bool
) -> None:
    path = write_run(tmp_path / "run")
    append = rank_writer.RankWriter.append

    def full(writer: rank_writer.RankWriter, columns: Any) -> None:
        if cache_full or path in writer.directory.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(writer, columns)

    monkeypatch.setattr(rank_writer.RankWriter, "append", full)
    if cache_full:
        with pytest.raises(StepscopeError, match=r"no space left .* set XDG_CACHE_HOME"):
            open_run(path)
    else:
        assert open_run(path).ranks == [0, 1]
        assert len(list((own_cache / "stepscope").iterdir())) == 1
    assert not list(path.glob(".stepscope*"))


def test_the_memory_that_a_caller_chose_comes_back_however_threads_overlap() -> None:
    chosen = pa.default_memory_pool()
    first, second = store.plain_memory(), store.plain_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert pa.default_memory_pool().backend_name == "system"
    second.__exit__(None, None, None)
    assert pa.default_memory_pool().backend_name == chosen.backend_name


def test_an_error_leaves_no_half_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stepscope.analysis.ingest.build._assemble", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_run(path)
    assert sorted(entry.name for entry in path.iterdir()) == [rank_file(0), rank_file(1), "run.json"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path, own_cache: Path) -> None:
    """Beside a store that is opened; in the cache that of any. Nothing else, whatever it is called, and nothing in use."""
    path, cache = write_run(tmp_path / "run"), own_cache / "stepscope"
    left = (".stepscope.new-00000old", f".stepscope.old-{'0' * 32}", f"b-{'1' * 16}.new-00000old")
    others = (".stepscope.new-000fresh", ".stepscope.new-mine", f"x.new-1-{'1' * 16}")
    for name in (*left, *others):
        place = (path if name.startswith(".") else cache) / name
        place.mkdir(parents=True)
        age = 0 if "fresh" in name else 7200
        os.utime(place, (place.stat().st_mtime - age,) * 2)
    open_run(path)
    shutil.copy(path / rank_file(0), tmp_path / "trace.json.gz")
    open_run(tmp_path / "trace.json.gz")
    assert sorted(entry.name for entry in path.glob(".stepscope*")) == [".stepscope", *others[:2]]
    assert len(list(cache.iterdir())) == 2 and (cache / others[2]).is_dir()


def _open_and_count(path: str, gate: object, answers: object) -> None:
    gate.wait()  # type: ignore[attr-defined]
    run: Run = open_run(path)
    answers.put(sum(len(run.columns(rank, "kind")["kind"]) for rank in run.ranks))  # type: ignore[attr-defined]


def test_processes_that_open_the_same_run_at_once_all_see_it_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", count=20)
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_open_and_count, args=(str(path), gate, answers)) for _ in range(4)]
    for worker in workers:
        worker.start()
    counts = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert counts == [200] * 4
    assert [entry.name for entry in path.glob(".stepscope*")] == [".stepscope"]


def test_a_second_open_imports_only_what_it_needs(tmp_path: Path) -> None:
    """A store is opened by its manifest: no compiler, no frames, no Parquet, no database."""
    trace = tmp_path / "profile.json.gz"
    trace.write_bytes(b"".join(members(header(0, 1), usual_steps(0))))
    open_run(trace)
    heavy = ("numba", "pandas", "pyarrow", "sqlite3", "multiprocessing", "fsspec")
    for path in (trace, write_run(tmp_path / "run")):
        open_run(path)
        code = (
            "import sys; from stepscope.analysis.ingest import open_run\n"
            f"assert open_run({str(path)!r}).ranks\n"
            f"print([name for name in {heavy!r} if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "[]\n"


def test_columns_of_rare_rows_are_read_where_such_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_writer, "ROW_GROUP", 4)
    run = open_run(write_run(tmp_path / "run"))
    comm = KINDS.index("comm")
    pieces = list(run.pieces(0, "kind", "rank", rare=("start_ns", "rank"), kinds=(comm,)))
    whole = run.columns(0, "kind", "start_ns", "rank")
    told = [bool((piece["kind"] == comm).any()) for piece in pieces]
    assert set(told) == {True, False}
    at = 0
    for piece, some in zip(pieces, told, strict=True):
        size = len(piece["kind"])
        for name in ("start_ns", "rank"):
            expected = whole[name][at : at + size] if some else np.full(size, -1)
            np.testing.assert_array_equal(piece[name], expected)
            assert piece[name].dtype == whole[name].dtype
        at += size
    assert at == len(whole["kind"])


def test_pieces_are_the_columns_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_writer, "ROW_GROUP", 4)
    run = open_run(write_run(tmp_path / "run"))
    names = ("start_ns", "kind", "rank", "lane")  # one of them is a constant
    pieces = list(run.pieces(0, *names))
    whole = run.columns(0, *names)
    assert len(list(run.pieces(0, *names, "dur_ns"))) == 1  # of so few rows of which columns are in memory
    assert len(pieces) > 1 and {len(piece["kind"]) for piece in pieces[:-1]} == {4}
    for name in names:
        np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces]), whole[name])
    [constant] = run.pieces(0, "rank")
    assert len(constant["rank"]) == len(whole["rank"])
    in_memory = Run.from_memory(run.meta, {0: run.rank(0)})
    [piece] = in_memory.pieces(0, "start_ns")
    np.testing.assert_array_equal(piece["start_ns"], whole["start_ns"])
    with pytest.raises(KeyError):
        next(run.pieces(7, "kind"))


def test_pieces_of_a_store_that_is_gone_or_damaged_are_refused(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    [file] = (tmp_path / "run").rglob(store.events_file(0))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(StepscopeError, match="incomplete or damaged"):
        next(run.pieces(0, "start_ns"))


def test_a_run_forgets_the_columns_of_ranks_used_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(write_run(tmp_path / "run"))
    size = run.columns(0, "start_ns")["start_ns"].nbytes
    first, second = run.columns(0, "start_ns"), run.columns(1, "start_ns")
    assert run.columns(0, "start_ns")["start_ns"] is first["start_ns"], "both are kept while there is room"
    monkeypatch.setattr("stepscope.analysis.run.CACHE_BYTES", size + 1)
    run.columns(0, "dur_ns")
    assert run.columns(0, "start_ns")["start_ns"] is first["start_ns"], "never those of the rank at hand"
    assert run.columns(1, "start_ns")["start_ns"] is not second["start_ns"]
