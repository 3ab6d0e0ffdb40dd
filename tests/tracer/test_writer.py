"""Rank files: exact text, strict JSON for any names, crashes, full disks, two processes; run.json by rename."""

from __future__ import annotations

import errno
import json
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_reading import EPOCH, HandClock, all_reduce_site, read_strict, rows_of, small_meta, strict

from stepscope.tracer import writer as writer_module
from stepscope.tracer.recorder import Recorder
from stepscope.tracer.row_text import RowText, clean, microseconds
from stepscope.tracer.rows import (
    NOWHERE,
    BeginRow,
    CommRow,
    CommSite,
    ComputeRow,
    CounterRow,
    HostRow,
    StepRow,
    WaitRow,
)
from stepscope.tracer.schema import ClockMeta, RunMeta
from stepscope.tracer.writer import RankWriter, in_chunks, open_exclusively, write_meta

CONTEXT = ("layer.3", 3, "forward", 1, 0, 4)


def texts(row: Any, rank: int = 2, base: int = EPOCH) -> list[dict[str, Any]]:
    return [json.loads(text) for text in RowText(rank, base).texts(row)]


# -- one row of each, as docs/trace_format.md shows them -------------------------------------------------------------


def test_compute_row() -> None:
    row = ComputeRow(CONTEXT, EPOCH + 12_345, EPOCH + 862_465)
    assert RowText(2, EPOCH).texts(row) == [
        '{"ph":"X","cat":"kernel","name":"layer.3","pid":2,"tid":7,"ts":12.345,"dur":850.120,'
        '"args":{"stream":7,"phase":"forward","stage":1,"chunk":0,"microbatch":4,"layer":3}}'
    ]


def test_compute_row_of_a_simulated_run_carries_its_costs() -> None:
    (row,) = texts(ComputeRow(NOWHERE, EPOCH, EPOCH, (10, 20, 0, 0, 5, 3)))
    assert row["args"] == {
        "stream": 7,
        "phase": "other",
        "matmul_flops": 10,
        "matmul_bytes": 20,
        "attention_flops": 0,
        "attention_bytes": 0,
        "elementwise_bytes": 5,
        "kernels": 3,
    }


def test_communication_row_with_its_flow_and_the_name_of_its_stream() -> None:
    row = CommRow(CONTEXT, all_reduce_site(), 91, 6, EPOCH + 898_120, EPOCH + 900_000, EPOCH + 1_310_000)
    names, order, comm, start, step = texts(row)
    assert (names["ph"], names["name"], names["tid"], names["args"]) == ("M", "thread_name", 20, {"name": "dp"})
    assert order["args"] == {"sort_index": 20}
    assert comm == {
        "ph": "X",
        "cat": "kernel",
        "name": "all_reduce",
        "pid": 2,
        "tid": 20,
        "ts": 900.0,
        "dur": 410.0,
        "args": {
            "stream": 20,
            "axis": "dp",
            "strategy": "dp",
            "Collective name": "allreduce",
            "dtype": "float32",
            "In msg nelems": 4,
            "Out msg nelems": 4,
            "bytes": 16,
            "Group size": 2,
            "Process Group Name": "mesh_dp_0",
            "Process Group Description": "mesh_dp",
            "Process Group Ranks": "[0, 1]",
            "op_id": 91,
            "Seq": 6,
            "issue_ns": 898_120,
            "phase": "forward",
            "stage": 1,
            "chunk": 0,
            "microbatch": 4,
            "layer": 3,
        },
    }
    assert (start["ph"], start["tid"], start["ts"], start["id"]) == ("s", 7, 898.119, (2 << 32) + 91)
    assert (step["ph"], step["tid"], step["ts"], step["id"]) == ("t", 20, 900.0, (2 << 32) + 91)


def test_wait_row_ends_the_flow() -> None:
    wait, flow = texts(WaitRow(CONTEXT, 91, "all_reduce", EPOCH + 1_100_000, EPOCH + 1_310_000))
    assert (wait["cat"], wait["name"], wait["tid"], wait["ts"], wait["dur"]) == (
        "wait",
        "wait all_reduce",
        7,
        1100,
        210,
    )
    assert wait["args"]["waits_for"] == 91
    assert wait["args"]["microbatch"] == 4
    assert (flow["ph"], flow["bp"], flow["ts"], flow["id"]) == ("f", "e", 1309.999, (2 << 32) + 91)


@pytest.mark.parametrize(
    ("collective", "peer", "peer_from", "expected"),
    [
        ("send", 5, -1, {"Src Rank": 2, "Dst Rank": 5}),
        ("receive", 5, -1, {"Src Rank": 5, "Dst Rank": 2}),
        ("ring_shift", 3, 1, {"Src Rank": 1, "Dst Rank": 3}),
        ("broadcast", 0, -1, {"Root Rank": 0}),
        ("all_reduce", -1, -1, {}),
    ],
)
def test_ends_of_a_communication(collective: str, peer: int, peer_from: int, expected: dict[str, int]) -> None:
    site = all_reduce_site(collective=collective, peer=peer, peer_from=peer_from)
    comm = texts(CommRow(NOWHERE, site, 1, 0, EPOCH, EPOCH, EPOCH))[2]
    assert {key: value for key, value in comm["args"].items() if key.endswith(" Rank")} == expected


def test_counters_steps_and_host_rows() -> None:
    assert texts(CounterRow("parameter_bytes", "", EPOCH, 12))[0]["args"] == {"value": 12}
    assert texts(CounterRow("tokens_per_expert", "layer.0 expert.3", EPOCH, 7))[0]["args"] == {"layer.0 expert.3": 7}
    assert texts(CounterRow("parameter_bytes", "", EPOCH, math.nan)) == []  # no sample rather than no JSON
    step = texts(StepRow(4, EPOCH, EPOCH + 5))[0]
    assert (step["cat"], step["name"], step["tid"], step["args"]) == ("user_annotation", "ProfilerStep#4", 1, {})
    assert texts(StepRow(4, EPOCH, EPOCH + 5, partial=True))[0]["args"] == {"partial": 1}
    begin = texts(BeginRow(4, EPOCH))[0]
    assert (begin["ph"], begin["name"], begin["args"]) == ("i", "step begins", {"step": 4})
    assert texts(HostRow("data", EPOCH, EPOCH + 1))[0]["dur"] == 0.001


def test_an_unfinished_communication_says_so() -> None:
    comm = texts(CommRow(NOWHERE, all_reduce_site(), 1, 0, EPOCH, EPOCH, EPOCH + 9, unfinished=True))[2]
    assert comm["args"]["unfinished"] == 1


@given(st.integers(-(10**18), 10**19))
def test_microseconds_are_exact(ns: int) -> None:
    whole, fraction = microseconds(ns).split(".")
    sign = -1 if whole.startswith("-") else 1
    assert len(fraction) == 3
    assert int(whole) * 1000 + sign * int(fraction) == ns


def test_names_lose_what_breaks_readers_and_nothing_else() -> None:
    assert clean('q"uote') == "q'uote"
    assert clean("C:\\Users\\x") == "C:/Users/x"
    assert clean("a\tb\x01\x7fc\ud800") == "a b  c\ufffd"
    assert clean("<b> é 層 😀 100 % {0} %s") == "<b> é 層 😀 100 % {0} %s"


ANY_TEXT = st.text(alphabet=st.characters(), max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ANY_TEXT, min_size=9, max_size=9),
    st.lists(st.integers(0, 10**12), min_size=2, max_size=2),
    st.one_of(st.integers(), st.floats()),
)
def test_any_names_and_values_are_strict_json(names: list[str], spans: list[int], value: float) -> None:
    name, phase, group, stream, dtype, axis, key, host, label = names
    context = (name, 0, phase, 0, 0, 0)
    site = CommSite("all_reduce", axis, phase, group, (0, 1), stream, dtype, name=label)
    start, end = EPOCH + min(spans), EPOCH + max(spans)
    rows = [
        ComputeRow(context, start, end),
        CommRow(context, site, 1, 0, start, start, end),
        WaitRow(context, 1, label, start, end),
        CounterRow(name, key, start, value),
        HostRow(host, start, end),
    ]
    text = RowText(0, EPOCH)
    objects = [strict(one) for row in rows for one in text.texts(row)]
    objects += [strict(one) for one in text.process_texts(host)]
    spans_written = [o for o in objects if o["ph"] == "X"]
    assert len(spans_written) == 4
    assert all("\n" not in one for row in rows for one in text.texts(row))
    "".join(one for row in rows for one in text.texts(row)).encode()  # no lone surrogate


# -- whole files -------------------------------------------------------------------------------------------------------


def train(recorder: Recorder, steps: range) -> None:
    for step in steps:
        recorder.begin_step(step)
        recorder.block("layer.0", phase="forward", layer=0)
        op_id = recorder.issue(all_reduce_site(), step)
        recorder.resume()
        recorder.communicated(op_id, recorder.clock.now(), recorder.clock.now())
        recorder.wait(op_id)
        recorder.resume()
        recorder.counter("parameter_bytes", 1024)
        recorder.end_step()


def test_a_file_is_strict_json_with_the_header_of_torch_profiler(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 1, small_meta(), base_ns=EPOCH)
    with Recorder(1, writer, HandClock(tick=1000).clock()) as recorder:
        train(recorder, range(3))
    assert writer.path == tmp_path / "rank_00001.trace.json.gz"
    trace = read_strict(writer.path)
    assert trace["schemaVersion"] == 1
    assert trace["baseTimeNanoseconds"] == EPOCH
    facts = trace["distributedInfo"]
    assert (facts["backend"], facts["rank"], facts["world_size"], facts["pg_count"]) == ("gloo", 1, 2, 2)
    assert facts["pg_config"][0] == {
        "pg_name": "mesh_dp_0",
        "pg_desc": "mesh_dp",
        "backend_config": "gloo",
        "pg_size": 2,
        "ranks": [0, 1],
    }
    assert '"rank": 1' in members(writer.path)[0].splitlines()[0]  # readers look for it by this spelling
    assert [row["name"] for row in rows_of(trace, "user_annotation")] == [f"ProfilerStep#{k}" for k in range(3)]
    assert len(rows_of(trace, "wait")) == 3
    names = {row["tid"]: row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "thread_name"}
    assert names == {1: "host", 7: "compute", 20: "dp"}
    (process,) = [row for row in trace["traceEvents"] if row["name"] == "process_name"]
    assert process["args"]["name"] == "rank 1 (pp 0, dp 1)"
    assert recorder.summary()["dropped"] == 0


def settle(writer: RankWriter) -> None:
    """Return when everything submitted before has been written."""
    done = threading.Event()

    def last() -> Any:
        done.set()
        yield from ()

    writer.submit(last(), steps=0)
    assert done.wait(30)


def test_streams_are_numbered_in_the_order_of_their_first_use(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    with Recorder(0, writer) as recorder:
        recorder.begin_step(0)
        for stream in ("pp.forward.send", "dp", "pp.forward.send"):
            recorder.communicated(recorder.issue(all_reduce_site(stream=stream), 0), 1, 2)
        recorder.end_step()
    assert [row["tid"] for row in rows_of(read_strict(writer.path), "kernel") if row["tid"] != 7] == [20, 21, 20]


def members(path: Path) -> list[str]:
    """The texts of a file's whole gzip members."""
    data, found = path.read_bytes(), []
    while data:
        decompressor = zlib.decompressobj(31)
        found.append(decompressor.decompress(data).decode())
        assert decompressor.eof
        data = decompressor.unused_data
    return found


def test_each_step_is_one_member_and_its_annotation_comes_last(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    with Recorder(0, writer) as recorder:
        train(recorder, range(2))
        recorder.begin_step(2)  # in flight when the recording ends
    found = members(writer.path)
    assert "traceEvents" in found[0]
    begins = [text for text in found if "step begins" in text]
    steps = [text for text in found if "ProfilerStep#" in text]
    assert (len(begins), len(steps)) == (3, 3)
    for number, text in enumerate(steps):
        assert f'"ProfilerStep#{number}"' in text.splitlines()[-1]
    assert found[-1] == "\n]}\n"


def test_a_step_in_flight_at_an_exception_is_written_as_partial(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    clock = HandClock(tick=1000)
    with pytest.raises(RuntimeError, match="boom"), Recorder(0, writer, clock.clock()) as recorder:
        train(recorder, range(1))
        recorder.begin_step(1)
        recorder.block("layer.0")
        hung = recorder.issue(all_reduce_site(), 5)
        recorder.wait(hung)
        clock.now += 50_000
        raise RuntimeError("boom")
    trace = read_strict(writer.path)
    steps = rows_of(trace, "user_annotation")
    assert [(row["name"], row["args"].get("partial", 0)) for row in steps] == [
        ("ProfilerStep#0", 0),
        ("ProfilerStep#1", 1),
    ]
    (unfinished,) = [row for row in rows_of(trace, "kernel") if "unfinished" in row["args"]]
    assert (unfinished["args"]["op_id"], unfinished["args"]["Seq"]) == (hung, 5)  # names what nobody joined
    last_wait = rows_of(trace, "wait")[-1]
    end = steps[-1]["ts"] + steps[-1]["dur"]
    assert last_wait["args"]["waits_for"] == hung
    assert last_wait["dur"] > 50
    assert unfinished["ts"] + unfinished["dur"] == pytest.approx(end)
    assert last_wait["ts"] + last_wait["dur"] == pytest.approx(end)


def test_a_communication_that_ends_in_the_next_step_is_written_once(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    with Recorder(0, writer, HandClock(tick=10).clock()) as recorder:
        recorder.begin_step(0)
        slow = recorder.issue(all_reduce_site(), 0)
        recorder.end_step()
        settle(writer)
        recorder.begin_step(1)
        recorder.communicated(slow, 7, 99)
        recorder.end_step()
    comm = [row for row in rows_of(read_strict(writer.path), "kernel") if row["tid"] == 20]
    assert [(row["ts"], row["dur"]) for row in comm] == [(0.007, 0.092)]


def _killed(directory: str) -> None:
    writer = RankWriter(Path(directory), 0, small_meta(), base_ns=EPOCH)
    recorder = Recorder(0, writer)
    train(recorder, range(4))
    settle(writer)  # steps so long that the one before is written meanwhile
    recorder.begin_step(4)
    recorder.block("layer.0")
    settle(writer)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_loses_only_the_step_in_flight(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(str(tmp_path),))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    text = "".join(members(tmp_path / "rank_00000.trace.json.gz"))  # every member is whole
    with pytest.raises(json.JSONDecodeError):
        strict(text)
    trace = strict(text + "\n]}")  # only the brackets are missing
    assert [row["name"] for row in rows_of(trace, "user_annotation")] == [f"ProfilerStep#{k}" for k in range(4)]
    begun = [row["args"]["step"] for row in trace["traceEvents"] if row["name"] == "step begins"]
    assert begun == [0, 1, 2, 3, 4]  # the file names the step that was cut


def test_two_writers_never_share_a_file(tmp_path: Path) -> None:
    first = RankWriter(tmp_path, 0, small_meta())
    with pytest.raises(ValueError, match=r"rank_00000\.trace\.json\.gz exists.*new directory"):
        RankWriter(tmp_path, 0, small_meta())
    first.close()
    with pytest.raises(ValueError, match="exists"):  # nor is an earlier run overwritten
        RankWriter(tmp_path, 0, small_meta())


class FullDisk(FileIO):
    """A file on a disk that takes `room` bytes; a write across the limit is short, as the system's is."""

    room = 10**9

    def write(self, data: Any) -> int:
        taken = min(len(data), max(0, self.room - self.tell()))
        if taken == 0 and len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:taken])


def test_a_full_disk_ends_recording_with_one_warning_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files: list[FullDisk] = []

    def open_file(path: Path) -> FullDisk:
        files.append(FullDisk(path, "xb"))
        return files[-1]

    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH, open_file=open_file)  # type: ignore[arg-type]
    recorder = Recorder(0, writer)
    with caplog.at_level(logging.WARNING):
        train(recorder, range(2))
        settle(writer)
        files[0].room = writer._good + 30  # the next member is cut in its middle
        train(recorder, range(2, 6))
        recorder.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert "training goes on" in warnings[0]
    assert recorder.summary()["dropped"] == 4
    trace = strict("".join(members(writer.path)) + "\n]}")  # cut back to whole members
    assert [row["name"] for row in rows_of(trace, "user_annotation")] == ["ProfilerStep#0", "ProfilerStep#1"]


def test_a_disk_full_from_the_start_stops_nothing_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def open_file(path: Path) -> FullDisk:
        file = FullDisk(path, "xb")
        file.room = 0
        return file

    with caplog.at_level(logging.WARNING):
        writer = RankWriter(tmp_path, 0, small_meta(), open_file=open_file)  # type: ignore[arg-type]
        with Recorder(0, writer) as recorder:
            train(recorder, range(3))
    assert len(caplog.records) == 1
    assert recorder.summary()["dropped"] == 3


def test_a_writer_that_lags_drops_steps_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BACKLOG_STEPS", 2)
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    blocked = True

    def slow() -> Any:
        while blocked:
            time.sleep(0.001)
        yield [StepRow(0, EPOCH, EPOCH + 1)]

    writer.submit(slow())
    for step in range(1, 11):
        writer.submit(in_chunks([StepRow(step, EPOCH, EPOCH + 1)]))
    blocked = False
    writer.close()
    written = rows_of(read_strict(writer.path), "user_annotation")
    assert writer.dropped > 0
    assert len(written) + writer.dropped == 11


def test_an_unexpected_error_in_the_writing_thread_reaches_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    with caplog.at_level(logging.WARNING):
        writer.submit([["no row"]])  # type: ignore[list-item]
        writer.submit(in_chunks([StepRow(0, EPOCH, EPOCH + 1)]))
        writer.close()
    assert len(caplog.records) == 1
    assert writer.dropped == 2


def test_without_a_base_the_times_count_from_the_hour(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, small_meta())
    writer.close()
    writer.close()  # twice is safe
    assert read_strict(writer.path)["baseTimeNanoseconds"] % 3_600_000_000_000 == 0
    assert 0 <= time.time_ns() - writer.base_ns < 2 * 3_600_000_000_000


def test_a_signal_while_closing_still_completes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RankWriter(tmp_path, 0, small_meta(), base_ns=EPOCH)
    join = writer._thread.join
    calls: list[float] = []

    def interrupted(timeout: float) -> None:
        calls.append(timeout)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join(timeout)

    monkeypatch.setattr(writer._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert read_strict(writer.path)["traceEvents"]


# -- run.json ----------------------------------------------------------------------------------------------------------


def test_run_json_is_replaced_whole(tmp_path: Path) -> None:
    write_meta(tmp_path, small_meta())
    write_meta(tmp_path, small_meta(complete=True, clock=(ClockMeta(), ClockMeta(5, 0.1, 2))))
    meta = RunMeta.from_json((tmp_path / "run.json").read_text())
    assert meta.complete
    assert meta.clock[1].offset_ns == 5
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_meta_that_is_no_json_leaves_the_old_one(tmp_path: Path) -> None:
    write_meta(tmp_path, small_meta())
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_meta(tmp_path, small_meta(train={"loss": math.nan}))
    assert RunMeta.from_json((tmp_path / "run.json").read_text()).train == {}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_exclusive_creation_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match="x exists"):
        open_exclusively(tmp_path / "x")
