"""Run directories: what every row becomes, and what is said of directories that are not as they should be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from trace_files import BASE_NS, begin, header, members, meta, usual_steps, write_run

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import Progress, open_run
from stepscope.analysis.run import Run
from stepscope.tracer.schema import (
    AXES,
    COLLECTIVES,
    EVENT_COLUMNS,
    FLAG_PARTIAL,
    KINDS,
    PHASES,
    STRATEGIES,
    rank_file,
)


def codes(run: Run) -> list[str]:
    return [item.code for item in run.health.items]


def names(run: Run, rank: int) -> list[str]:
    strings = run.strings(rank)
    return [strings[code] for code in run.columns(rank, "name_id")["name_id"]]


def test_every_field_arrives(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    assert run.ranks == [0, 1] and run.health.status == "ok" and run.meta.name == "usual"
    rank = run.rank(1)
    assert [lane.name for lane in rank.lanes] == ["compute", "dp", "thread 1"]
    assert [(lane.role, lane.axis, lane.stream) for lane in rank.lanes] == [
        ("compute", "", 7),
        ("comm", "dp", 20),
        ("host", "", -1),
    ]
    events = rank.events
    assert set(events) == set(EVENT_COLUMNS)
    assert all(values.dtype == EVENT_COLUMNS[name] for name, values in events.items())
    assert names(run, 1) == ["block", "block", "wait all_reduce"] * 3 + ["all_reduce"] * 3 + [
        f"ProfilerStep#{k}" for k in range(3)
    ]
    forward, backward, wait = ({name: int(values[i]) for name, values in events.items()} for i in range(3))
    comm = {name: int(values[9]) for name, values in events.items()}
    assert forward["start_ns"] == BASE_NS + 110_000 and forward["dur_ns"] == 300_000 and forward["rank"] == 1
    assert (forward["stage"], forward["chunk"], forward["microbatch"], forward["layer"]) == (0, 0, 1, 2)
    assert [PHASES[row["phase"]] for row in (forward, backward)] == ["forward", "backward"]
    assert [KINDS[row["kind"]] for row in (forward, wait, comm)] == ["compute", "wait", "comm"]
    assert wait["op_id"] == comm["op_id"] == 0 and forward["op_id"] == -1
    assert (AXES[comm["axis"]], STRATEGIES[comm["strategy"]], COLLECTIVES[comm["collective"]]) == (
        "dp",
        "dp",
        "all_reduce",
    )
    assert (comm["bytes"], comm["in_elements"], comm["out_elements"], comm["seq"]) == (1024, 256, 256, 0)
    assert rank.strings[comm["group_id"]] == "dp_0" and rank.strings[comm["dtype_id"]] == "float32"
    assert comm["issue_ns"] == BASE_NS + 610_000 and comm["peer"] == -1 and comm["launch_id"] == -1


def test_counters_are_samples_of_series(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    counters, strings = run.counters(0), run.strings(0)
    rows = [
        (strings[name], strings[key], int(value), int(time) - BASE_NS)
        for name, key, value, time in zip(
            counters["name_id"], counters["key_id"], counters["value"], counters["time_ns"], strict=True
        )
    ]
    assert rows == [
        ("tokens_per_expert", f"expert {e}", (e + 1) * k, 910_000 + k * 1_000_000) for e in (0, 1) for k in range(3)
    ]


def test_peers_of_point_to_point(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", ranks=())
    rows = usual_steps(0, 1)
    comm = rows[0][-2]
    for index, (word, args) in enumerate(
        {
            "send": {"Src Rank": 0, "Dst Rank": 1},
            "recv": {"Src Rank": 1, "Dst Rank": 0},
            "ring_shift": {"Src Rank": 3, "Dst Rank": 1},
        }.items()
    ):
        one = json.loads(json.dumps(comm))
        one["name"], one["ts"] = word, 2000 + index
        one["args"] |= {"Collective name": word, **args}
        rows[0].append(one)
    (path / rank_file(0)).write_bytes(b"".join(members(header(0), rows)))
    events, strings = open_run(path).rank(0).events, open_run(path).strings(0)
    peers = {
        strings[events["name_id"][i]]: (
            COLLECTIVES[events["collective"][i]],
            int(events["peer"][i]),
            int(events["peer_from"][i]),
        )
        for i in np.flatnonzero(events["kind"] == KINDS.index("comm"))
    }
    assert peers["send"] == ("send", 1, -1)
    assert peers["recv"] == ("receive", 1, -1)
    assert peers["ring_shift"] == ("ring_shift", 1, 3)


def test_only_the_asked_columns_are_read(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    asked = []
    load = run._load
    run._load = lambda rank, columns: asked.append(columns) or load(rank, columns)  # type: ignore[method-assign]
    run.columns(0, "start_ns", "dur_ns")
    run.columns(0, "dur_ns", "kind")
    run.lanes(0)
    assert asked == [("start_ns", "dur_ns"), ("kind",), ()]
    with pytest.raises(KeyError, match="no rank 5"):
        run.columns(5, "kind")


@pytest.mark.parametrize("missing", ["nothing", "bracket", "half a member", "half an event in the last member"])
def test_a_cut_file_keeps_every_complete_event(tmp_path: Path, missing: str) -> None:
    path = write_run(tmp_path / "run")
    parts = members(header(1), usual_steps(1))
    whole = names(open_run(path), 1)
    data = {
        "nothing": b"".join(parts),
        "bracket": b"".join(parts[:-1]),
        "half a member": b"".join(parts[:3]) + parts[3][:-30],
        "half an event in the last member": b"".join(parts[:3]) + gzip.compress(gzip.decompress(parts[3])[:-150]),
    }[missing]
    (path / rank_file(1)).write_bytes(data)
    run = open_run(path)
    kept = names(run, 1)
    flagged = [name for name, flag in zip(kept, run.columns(1, "flags")["flags"], strict=True) if flag & FLAG_PARTIAL]
    if missing == "nothing":
        assert codes(run) == [] and flagged == []
        return
    assert codes(run) == ["cut_file"] and run.health.status == "touched" and run.ranks == [0, 1]
    item = run.health.items[0]
    assert item.rank == 1 and item.file == rank_file(1) and "last step is partial" in item.text
    uncompressed = sum(len(gzip.decompress(part)) for part in parts[: 4 if missing == "bracket" else 3])
    assert item.offset is not None and item.offset >= uncompressed - 1
    assert kept.count("ProfilerStep#1") == 1 and flagged == ["ProfilerStep#2"]
    if missing == "bracket":
        assert sorted(kept) == sorted(whole)
    else:
        assert kept.count("block") >= 4


def test_the_begin_of_a_lost_step_becomes_its_annotation(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    steps = [[begin(k, 10 + 1000 * k, pid=1), *rows[1:], rows[0]] for k, rows in enumerate(usual_steps(1)[1:], 1)]
    parts = members(header(1), steps)
    assert names_and_flags(path, parts) == [("ProfilerStep#1", 0), ("ProfilerStep#2", 0)]
    text = gzip.decompress(parts[2])
    cut = [*parts[:2], gzip.compress(text[: text.rindex(b'"ProfilerStep#2"')])]
    assert names_and_flags(path, cut) == [("ProfilerStep#1", 0), ("ProfilerStep#2", FLAG_PARTIAL)]
    events, strings = open_run(path).rank(1).events, open_run(path).strings(1)
    row = int(np.flatnonzero(events["flags"] & FLAG_PARTIAL)[0])
    assert strings[events["name_id"][row]] == "ProfilerStep#2"
    assert events["start_ns"][row] == BASE_NS + 2_010_000 and events["dur_ns"][row] == 800_000
    in_the_first = [parts[0], gzip.compress(gzip.decompress(parts[1])[:600])]
    assert names_and_flags(path, in_the_first) == [("ProfilerStep#1", FLAG_PARTIAL)]


def names_and_flags(path: Path, parts: list[bytes]) -> list[tuple[str, int]]:
    """The step annotations of rank 1 when its file consists of `parts`."""
    (path / rank_file(1)).write_bytes(b"".join(parts))
    run = open_run(path)
    flags = run.columns(1, "flags")["flags"].tolist()
    return [(name, flag) for name, flag in zip(names(run, 1), flags, strict=True) if name.startswith("Prof")]


def test_a_recording_that_stopped_within_a_step_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    rows = usual_steps(1)
    rows[2][0]["args"]["partial"] = 1
    rows[2][-2]["args"]["unfinished"] = 1
    (path / rank_file(1)).write_bytes(b"".join(members(header(1), rows)))
    run = open_run(path)
    assert codes(run) == ["stopped_recording"] and run.health.status == "touched"
    flagged = np.flatnonzero(run.columns(1, "flags")["flags"] & FLAG_PARTIAL)
    assert [names(run, 1)[row] for row in flagged] == ["all_reduce", "ProfilerStep#2"]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08garbage", b"no trace at all", gzip.compress(b'{"a": [1, 2]}')])
def test_a_broken_rank_file_leaves_the_others_analysable(tmp_path: Path, content: bytes) -> None:
    path = write_run(tmp_path / "run")
    (path / rank_file(1)).write_bytes(content)
    run = open_run(path)
    assert run.ranks == [0] and codes(run) == ["broken_rank"] and run.health.status == "broken"
    assert run.health.items[0].file == rank_file(1)
    assert len(run.columns(0, "kind")["kind"]) == 15


@pytest.mark.parametrize("target", ["gone.json.gz", rank_file(1), "directory"])
def test_a_rank_file_that_leads_nowhere_is_left_out_like_any_broken_one(tmp_path: Path, target: str) -> None:
    path = write_run(tmp_path / "run")
    content = (path / rank_file(1)).read_bytes()
    (path / rank_file(1)).unlink()
    if target == "directory":
        (path / rank_file(1)).mkdir()
    else:  # to nothing, or to itself
        (path / rank_file(1)).symlink_to(target)
    run = open_run(path)
    assert run.ranks == [0] and codes(run) == ["broken_rank"] and run.health.status == "broken"
    assert run.health.items[0].file == rank_file(1) and run.health.items[0].rank == 1
    if target == "gone.json.gz":  # the store does not outlive the target's return
        (path / target).write_bytes(content)
        assert open_run(path).ranks == [0, 1]


def test_every_rank_broken_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", ranks=(0,))
    (path / rank_file(0)).write_bytes(b"nothing")
    with pytest.raises(StepscopeError, match=r"no rank of .* can be read"):
        open_run(path)
    assert not list(path.glob(".stepscope*"))


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", ranks=(0, 2, 3), world_size=4))
    assert run.ranks == [0, 2, 3] and codes(run) == ["missing_rank"]
    assert run.health.items[0].rank == 1 and "1 of 4 ranks" in run.health.items[0].text


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / rank_file(1)).write_bytes((path / rank_file(0)).read_bytes())
    with pytest.raises(StepscopeError, match=r"rank_00000.* and rank_00001.* rank 0"):
        open_run(path)
    (path / "rank_00000.trace.json").write_bytes(b"")
    with pytest.raises(StepscopeError, match="both rank 0"):
        open_run(path)


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", complete=False))
    assert codes(run) == ["incomplete_run"] and run.health.items[0].touches


@pytest.mark.parametrize("content", [None, b"{", b'{"run_id": 1}', b"\xff\xfe"])
def test_without_run_json_the_rank_files_speak(tmp_path: Path, content: bytes | None) -> None:
    path = write_run(tmp_path / "run")
    (path / "run.json").unlink()
    if content is not None:
        (path / "run.json").write_bytes(content)
    run = open_run(path)
    assert codes(run) == ["no_run_json"] and run.health.status == "touched"
    assert run.health.items[0].text.startswith("run.json ")
    assert run.meta.world_size == 2 and run.meta.backend == "gloo" and run.meta.name == "run"
    assert [(group.name, group.axis, group.ranks) for group in run.meta.groups] == [("dp_0", "dp", (0, 1))]


def test_what_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="there is no"):
        open_run(tmp_path / "absent")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(meta().to_json())
    with pytest.raises(StepscopeError, match="no rank file"):
        open_run(tmp_path / "run")


def test_progress_counts_ranks_and_bytes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    seen: list[Progress] = []
    open_run(path, progress=seen.append)
    assert list(dict.fromkeys((state.stage, state.files_done) for state in seen)) == [
        ("preparing", 0),
        ("reading", 0),
        ("reading", 1),
        ("reading", 2),
    ]
    assert seen[-1].bytes_done == seen[-1].bytes == sum((path / rank_file(r)).stat().st_size for r in (0, 1))
    told = len(seen)
    open_run(path, progress=seen.append)
    assert len(seen) == told  # nothing left to read


def test_several_processes_read_what_one_reads(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    path = write_run(tmp_path / "b")
    (path / rank_file(1)).write_bytes(b"".join(members(header(1), usual_steps(1))[:-1]))
    (tmp_path / "a" / rank_file(1)).write_bytes((path / rank_file(1)).read_bytes())
    alone, together = open_run(tmp_path / "a", engine="serial"), open_run(path, engine="processes", workers=2)
    assert together.ranks == alone.ranks and together.health.items == alone.health.items
    for rank in alone.ranks:
        for name, values in alone.columns(rank).items():
            np.testing.assert_array_equal(values, together.columns(rank)[name])
