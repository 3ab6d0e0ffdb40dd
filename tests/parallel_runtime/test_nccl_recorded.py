"""The CUDA door and the recorder's clock on what real GPUs did: recorded steps (recorded/README.md) run again.

The host calls at its recorded moments, the device works at its recorded ones; what lies between (streams, events, waits,
anchors, rows) is ours. Rows must agree with the recorded intervals to the resolution of an event.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_device import (
    COMPUTE_STREAM,
    FOLDER,
    RESOLUTION_NS,
    Device,
    OutOfOrder,
    Wait,
    Work,
    recorded,
    recorded_ranks,
)

from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.parallel_runtime import comm_nccl
from stepscope.parallel_runtime.comm_nccl import NcclComm, NcclHandle
from stepscope.parallel_runtime.comm_streams import group_metas
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer import device_times
from stepscope.tracer.clock import Clock
from stepscope.tracer.device_times import DeviceClock
from stepscope.tracer.recorder import Recorder
from stepscope.tracer.schema import Operation, RunMeta
from stepscope.tracer.writer import RankWriter, write_meta

sys.path.insert(0, str(FOLDER))

SAME = RESOLUTION_NS  # half a step at each end, and a float32 of 220 ms is good to 16 ns
BLOCK = 50  # pieces of work between two marks
START = 1_000_000_000
"""Host time at which the recorded step begins: before it the door is made."""


def moved(rows: list[Work | Wait]) -> list[Work | Wait]:
    """The recorded step on the clock of the replay."""
    return [
        Wait(row.host + START)
        if isinstance(row, Wait)
        else row._replace(host=row.host + START, start=row.start + START, end=row.end + START)
        for row in rows
    ]


JOINED = START + 189_587_222
LAST_END = START + 189_871_920  # of the recorded collectives: the next work of the compute stream began 0.9 ms later

A100, V100 = moved(recorded("a100_ddp_step.csv")), moved(recorded("v100_step.csv"))


class Replay:
    """One recorded step through the door and the recorder: what the step of a training program does, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_ns: int = 0) -> None:
        self.device = Device(call_ns)
        self.device.host = START - 10_000_000
        monkeypatch.setattr(device_times, "time", self.device)
        monkeypatch.setattr(comm_nccl, "run_operation", lambda job, group: self.device.current.run(self.next))
        monkeypatch.setattr(comm_nccl, "open_communicators", lambda *arguments: None)
        monkeypatch.setattr(comm_nccl, "make_process_groups", lambda *arguments: {"dp": "the group"})
        self.recorder = Recorder(0, clock=Clock(0))
        self.comm = NcclComm(Mesh(dp=2), 0, self.recorder, ("dp",), cuda=self.device)
        self.next: Any = None
        self.handles: list[Any] = []
        self.collectives: list[Work] = []
        self.before: list[int] = []  # when the compute stream had done what it held at each issue
        self.blocks: list[list[Work]] = []
        self.waiting: list[
            tuple[int, Work]
        ] = []  # (number of the collective, first work of the compute stream after it)

    def run(self, rows: list[Work | Wait]) -> list[Operation]:
        """All rows. The trace does not say which collective a wait is for: broadcasts are waited for at once, all-reduces at
        JOINED, the last recorded wait while one of them was still on the wire."""
        self.device.host = START
        self.recorder.begin_step(0)
        for row in rows:
            self.device.host = max(self.device.host, row.host)
            if isinstance(row, Wait):
                while row.host == JOINED and self.handles:
                    self.handles.pop(0).wait()
            elif row.collective:
                self.issue(row)
            else:
                self.compute(row)
        assert not self.handles
        self.recorder.end_step()
        ended = self.device.host
        self.comm.end_step()
        assert self.device.host == ended and not self.device.naps, "the training thread waited"
        self.comm.close()
        return self.recorder.operations()

    def compute(self, work: Work) -> None:
        if not self.blocks or len(self.blocks[-1]) == BLOCK:
            self.recorder.block(f"block {len(self.blocks)}")
            self.blocks.append([])
        self.blocks[-1].append(work)
        self.device.compute.run(work)

    def issue(self, work: Work) -> None:
        self.next = work
        self.before.append(self.device.compute.reached)
        self.collectives.append(work)
        tensor = torch.zeros(work.bytes // 4, device="meta")
        if work.collective == "broadcast":
            self.comm.broadcast(tensor, "dp", 0, strategy="dp").wait()
        else:
            self.handles.append(self.comm.all_reduce(tensor, "dp", strategy="dp"))


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    return Replay(monkeypatch)


def of_kind(rows: list[Operation], kind: str) -> list[Operation]:
    return [row for row in rows if row.kind == kind]


def test_what_was_recorded() -> None:
    """The figures of recorded/README.md, and what the tests below rest on."""
    work = [row for row in A100 if isinstance(row, Work)]
    assert (len(work), sum(row.stream == COMPUTE_STREAM for row in work), len(A100) - len(work)) == (1258, 1251, 28)
    assert [row.collective for row in work if row.stream != COMPUTE_STREAM] == ["broadcast"] * 2 + ["allreduce"] * 5
    lead = sorted(row.start - row.host for row in work)
    assert lead[0] > 5_000 and lead[len(lead) // 2] < 15_000
    behind = [row.start - row.host for row in V100 if isinstance(row, Work)]
    assert len(behind) == 1219 and min(behind) > 60_000_000


def test_communication_rows_are_the_recorded_kernels(replay: Replay) -> None:
    """They end with the kernel. They begin where the stream could have begun it: after the work that the compute stream held,
    and not after the kernel did (which has its launch to wait for)."""
    rows = of_kind(replay.run(A100), "comm")
    assert [row.collective for row in rows] == ["broadcast"] * 2 + ["all_reduce"] * 5
    for row, work, ready in zip(rows, replay.collectives, replay.before, strict=True):
        assert row.bytes == work.bytes
        assert abs(row.end_ns - work.end) <= SAME
        assert max(ready, work.host) - SAME <= row.start_ns <= work.start + SAME
        assert work.start - row.start_ns < 20_000 + SAME  # the recorded launch, no more
    for earlier, later in pairwise(rows):
        assert later.start_ns >= earlier.end_ns


def test_a_wait_ends_no_earlier_than_what_it_waits_for(replay: Replay) -> None:
    """To the resolution of an event: the two are read at different times, from different anchors."""
    rows = replay.run(A100)
    ends = {row.op_id: row.end_ns for row in of_kind(rows, "comm")}
    waits = of_kind(rows, "wait")
    assert {wait.op_id for wait in waits} == set(ends) and len(waits) == 7
    for wait in waits:
        assert wait.end_ns >= ends[wait.op_id] - SAME and wait.end_ns >= wait.start_ns
    first, *others, last = (wait for wait in waits if wait.name == "wait all_reduce")
    assert abs(first.start_ns - JOINED) <= SAME and abs(last.end_ns - LAST_END) <= 2 * SAME
    assert abs(last.end_ns - last.start_ns - (LAST_END - JOINED)) <= SAME, "only the last one was still on the wire"
    assert all(wait.end_ns == wait.start_ns for wait in (first, *others))


def test_compute_rows_hold_the_recorded_work_and_nothing_overlaps(replay: Replay) -> None:
    rows = replay.run(A100)
    compute = {
        number: [row for row in of_kind(rows, "compute") if row.name == f"block {number}"] for number in range(26)
    }
    assert len(replay.blocks) == 26
    for number, block in enumerate(replay.blocks):
        pieces = compute[number]
        for work in block:
            assert any(row.start_ns - SAME <= work.start and work.end <= row.end_ns + SAME for row in pieces), work
    on_the_thread = sorted((row.start_ns, row.end_ns) for row in rows if row.kind in ("compute", "wait"))
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(on_the_thread))
    assert abs(on_the_thread[0][0] - START) <= SAME and len(on_the_thread) > 26 + 7


def test_the_order_that_we_ask_for_is_the_one_that_the_hardware_kept(replay: Replay) -> None:
    """Each piece of work began after all that our calls told its stream to wait for (the device looks at every one)."""
    replay.run(A100)
    (lane,) = replay.device.streams
    assert len(lane.work) == 7 and len(replay.device.compute.work) == 1251


def test_work_before_a_wait_is_noticed(replay: Replay) -> None:
    """The same step with a collective that ends 20 ms later than the work that waited for it began."""
    index = max(i for i, row in enumerate(A100) if isinstance(row, Work) and row.collective)
    late = [row._replace(end=row.end + 20_000_000) if i == index else row for i, row in enumerate(A100)]
    with pytest.raises(OutOfOrder):
        replay.run(late)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch, Replay], None]] = {
    "a wait that does not reach the device": lambda patch, _: patch.setattr(NcclHandle, "_block", lambda handle: None),
    "an operation that does not wait for the compute stream": lambda patch, replay: patch.setattr(
        replay.device.streams[0], "wait_stream", lambda other: None
    ),
}


def test_mistakes_show_in_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks above rest on: without a wait rows break the order that they state."""
    with monkeypatch.context() as patch:
        replay = Replay(patch)
        MISTAKES["a wait that does not reach the device"](patch, replay)
        rows = replay.run(A100)
        ends = {row.op_id: row.end_ns for row in of_kind(rows, "comm")}
        assert any(wait.end_ns < ends[wait.op_id] - SAME for wait in of_kind(rows, "wait"))
    with monkeypatch.context() as patch:
        replay = Replay(patch)
        MISTAKES["an operation that does not wait for the compute stream"](patch, replay)
        rows = of_kind(replay.run(A100), "comm")
        assert any(row.start_ns < ready - SAME for row, ready in zip(rows, replay.before, strict=True))


def test_an_anchor_is_off_by_half_of_what_its_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded calls of cudaEventRecord take some 2 us: all rows lie 1 us early or less, and all alike."""
    rows = of_kind(Replay(monkeypatch, call_ns=2_000).run(A100), "comm")
    work = [row for row in A100 if isinstance(row, Work) and row.collective]
    errors = [row.end_ns - piece.end for row, piece in zip(rows, work, strict=True)]
    assert all(abs(error + 1_000) <= SAME for error in errors), errors


# -- a device that is far behind its host ----------------------------------------------------------------------------------


def test_a_device_90_ms_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host times of the marks would lie 63 to 91 ms early; the device's are right, and only the writing thread waits."""
    device = Device()
    monkeypatch.setattr(device_times, "time", device)
    device.host = START - 10_000_000
    clock = DeviceClock(device, device.sleep)
    assert clock.anchor()
    device.host = START
    marks, wanted = [], []
    for number, work in enumerate(row for row in V100 if isinstance(row, Work)):
        device.host = max(device.host, work.host)
        if number % BLOCK == 0:
            marks.append((clock.stamp(), number))
            wanted.append(max(device.compute.reached, device.host))
        device.compute.run(work)
    marks.append((clock.stamp(), -1))
    wanted.append(device.compute.reached)
    assert not device.naps and not clock.anchor(), "the device is busy: the old anchor stays"
    early = [end - int(stamp) for (stamp, _), end in zip(marks[1:], wanted[1:], strict=True)]
    assert min(early) > 60_000_000, "the host's own clock would say this much too early"
    settled = [time for time, _ in clock.settle(marks)]
    assert device.naps > 50
    assert all(abs(time - end) <= SAME for time, end in zip(settled, wanted, strict=True))
    assert settled == sorted(settled)


def test_counting_from_a_later_event_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that never lets the device rest counts from its last operation: 100 such changes add up to little."""
    device = Device()
    monkeypatch.setattr(device_times, "time", device)
    device.host = START - 10_000_000
    clock = DeviceClock(device, device.sleep)
    clock.anchor()
    device.host = 10 * START
    changes, worst = 0, 0
    for number, work in enumerate(row for row in V100 if isinstance(row, Work)):
        device.compute.run(work)
        if number % 12 == 0:
            event = device.Event(enable_timing=True)
            event.at = work.end
            worst = max(worst, abs(clock.ns(event) - work.end))
            clock.rebase(event)
            changes += 1
    assert changes > 100 and worst < changes * RESOLUTION_NS / 4


# -- eight ranks: from events to the ledger ----------------------------------------------------------------------------------

WAITED_US = (5580, 11125, 3280, 9571, 6370, 6041, 3342, 1534)
"""What each rank's collectives waited, as computed apart from this project, from the kernels: the sum over eight of them."""

SPREAD_NS = 5_000
"""A row begins with its stream, a kernel of this job 8 to 13 us later, launched as it then is: by so much arrivals may differ."""


def replay_rank(monkeypatch: pytest.MonkeyPatch, directory: Path, meta: RunMeta, rank: int, works: list[Work]) -> None:
    """One rank's collectives through its door and its recorder into its file; each is waited for at once."""
    device = Device()
    with monkeypatch.context() as patch:
        patch.setattr(device_times, "time", device)
        patch.setattr(comm_nccl, "open_communicators", lambda *arguments: None)
        patch.setattr(comm_nccl, "make_process_groups", lambda *arguments: {"dp": "the group"})
        patch.setattr(comm_nccl, "run_operation", lambda job, group: device.current.run(upcoming.pop(0)))
        upcoming = [
            work._replace(host=work.host + START, start=work.start + START, end=work.end + START) for work in works
        ]
        recorder = Recorder(rank, RankWriter(directory, rank, meta, base_ns=0), Clock(0))
        device.host = START - 1_000_000
        comm = NcclComm(Mesh(dp=8), rank, recorder, ("dp",), cuda=device)
        device.host = START
        recorder.begin_step(0)
        for work in list(upcoming):
            device.host = max(device.host, work.host)
            tensor = torch.zeros(8, device="meta")
            if work.what == "sendrecv":
                comm.all_to_all(tensor, "dp", [1] * 8, [1] * 8, strategy="ep").wait()
            else:
                comm.all_reduce(tensor, "dp", strategy="dp").wait()
        device.synchronize()
        recorder.end_step()
        comm.end_step()
        comm.close()
        recorder.close()


def test_waits_and_stragglers_of_eight_ranks_come_out_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Recorded starts and ends of 64 kernels, through events, rows, rank files and matching: what each rank waited is what an
    independent reckoning says, to the launches, and so is who came last."""
    jobs = recorded_ranks("dlrm_8_ranks.csv")
    groups, coordinates = group_metas(Mesh(dp=8), ("dp",)), tuple({"dp": rank} for rank in range(8))
    meta = RunMeta("dlrm", "dlrm", hosts=("one",) * 8, world_size=8, mesh={"dp": 8}, coords=coordinates, groups=groups)
    write_meta(tmp_path, meta)
    for rank, works in jobs.items():
        replay_rank(monkeypatch, tmp_path, meta, rank, works)
    write_meta(tmp_path, replace(meta, complete=True))
    parts = decompose(open_run(tmp_path)).matches.parts
    assert len(parts) == 64 and parts["match_id"].nunique() == 8
    waited = parts.groupby("rank")["wait_ns"].sum()
    for rank, expected in enumerate(WAITED_US):
        assert abs(waited[rank] - expected * 1000) < 8 * SPREAD_NS, rank
    last = parts.loc[parts.groupby("match_id")["arrival_ns"].idxmax(), "rank"]
    assert Counter(last) == {7: 5, 5: 2, 4: 1}


# -- where the traces are at hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trace", "step"),
    [
        ("a100_ddp_step.csv", "kineto-nccl-a100/nccl_data.json.gz", "ProfilerStep#5"),
        ("v100_step.csv", "kineto-v100-ns/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", "ProfilerStep#102"),
        ("dlrm_8_ranks.csv", "kineto-dlrm-8rank", ""),
    ],
)
def test_the_files_are_what_the_script_cuts(corpus: Path, name: str, trace: str, step: str) -> None:
    from cut import cut, cut_collectives

    if not step:
        assert cut_collectives(corpus / trace) == (FOLDER / name).read_text()
        return
    assert cut(corpus / trace, step) == (FOLDER / name).read_text()
