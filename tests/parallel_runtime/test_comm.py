"""The door to communication: what every operation gives, what it records, and the hangs that its rules prevent."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import GROUPS, Pool, gloo

from stepscope.parallel_runtime.comm import (
    PIPELINE_STREAMS,
    STREAMS,
    Comm,
    CommunicationError,
    DryComm,
    Ready,
    group_metas,
    process_groups_of,
    stream_of,
)
from stepscope.parallel_runtime.comm_gloo import GlooComm
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.schema import AXES, GroupMeta, Operation, plan_of

ALL = (
    "pp",
    "dp",
    "shard.gather",
    "tp",
    "cp",
    "cp.kv",
    "cp.dkv",
    "ep",
    "edp",
    "dp_cp",
    "world",
    "embedding",
    *PIPELINE_STREAMS,
)


def every_operation(comm: Comm) -> dict[str, list[float]]:
    """One of each over a pp2 x dp2 mesh; the inputs tell who sent them."""
    rank = comm.rank
    mine = torch.tensor([rank, 10.0 + rank])
    out = {
        "all_reduce": comm.all_reduce(mine.clone(), "dp", strategy="dp"),
        "max": comm.all_reduce(mine.clone(), "dp", strategy="dp", reduction="max"),
        "all_gather": comm.all_gather(mine, "shard", strategy="zero3", stream="shard.gather"),
        "reduce_scatter": comm.reduce_scatter(torch.arange(4.0) * (1 + rank), "dp", strategy="zero3"),
        "all_to_all": comm.all_to_all(torch.full((3,), float(rank)), "world", *uneven(rank), strategy="ep"),
        "broadcast": comm.broadcast(mine.clone(), "pp", 1, strategy="pp"),
        "ring_shift": comm.ring_shift(mine, "world", strategy="cp"),
    }
    first = comm.index("pp") == 0
    away, back = ("pp.forward", "pp.backward") if first else ("pp.backward", "pp.forward")
    out["send"] = comm.send(mine, "pp", int(first), strategy="pp", stream=f"{away}.send")
    out["receive"] = comm.receive(torch.empty(2), "pp", int(first), strategy="pp", stream=f"{back}.receive")
    return {name: handle.wait().tolist() for name, handle in out.items()}


def uneven(rank: int) -> tuple[list[int], list[int]]:
    """Rank r sends its rows to r, r and r+1 (of four), so each receives two of its own and one from the one before."""
    sends = [0, 0, 0, 0]
    sends[rank] += 2
    sends[(rank + 1) % 4] += 1
    receives = [0, 0, 0, 0]
    receives[rank] += 2
    receives[(rank - 1) % 4] += 1
    return sends, receives


def on_rank_every_operation(rank: int) -> tuple[dict[str, list[float]], list[Operation]]:
    recorder = Recorder(rank)
    comm = gloo(Mesh(pp=2, dp=2), rank, recorder, ALL)
    assert comm is not None
    recorder.begin_step(0)
    out = every_operation(comm)
    recorder.end_step()
    comm.close()
    return out, recorder.operations()


def test_values_of_every_operation(pool: Pool) -> None:
    results = [out for out, _ in pool.run(on_rank_every_operation)]
    for rank, out in enumerate(results):
        dp = (rank // 2 * 2, rank // 2 * 2 + 1)  # pp outermost: replicas are neighbours
        place = dp.index(rank)
        assert out["all_reduce"] == [sum(dp), 20.0 + sum(dp)]
        assert out["max"] == [dp[1], 10.0 + dp[1]]
        assert out["all_gather"] == [dp[0], 10.0 + dp[0], dp[1], 10.0 + dp[1]]
        total = 2 + sum(dp)
        assert out["reduce_scatter"] == [total * x for x in ((0, 1), (2, 3))[place]]
        before = (rank - 1) % 4
        assert sorted(out["all_to_all"]) == sorted([rank, rank, before])
        assert out["broadcast"] == [2 + rank % 2, 12.0 + rank % 2]
        assert out["ring_shift"] == [before, 10.0 + before]
        partner = (rank + 2) % 4
        assert out["receive"] == [partner, 10.0 + partner]


def test_rows_of_every_operation(pool: Pool) -> None:
    rows = [[row for row in operations if row.kind == "comm"] for _, operations in pool.run(on_rank_every_operation)]
    by_name = [{row.collective: row for row in rank} for rank in rows]
    first = by_name[1]
    assert [row.op_id for row in rows[1]] == list(range(1, 10))
    gather = first["all_gather"]
    assert (gather.group, gather.axis, gather.strategy, gather.stream) == (
        "mesh_shard.gather_0",
        "dp",
        "zero3",
        "shard.gather",
    )
    assert (gather.ranks, gather.dtype, gather.in_elements, gather.out_elements) == ((0, 1), "float32", 2, 4)
    sizes = {name: (row.in_elements, row.out_elements, row.bytes) for name, row in first.items()}
    assert sizes == {
        "all_reduce": (2, 2, 8),  # message sizes as nccl-tests counts them
        "all_gather": (2, 4, 16),  # the whole output
        "reduce_scatter": (4, 2, 16),  # the whole input
        "all_to_all": (3, 3, 12),  # what this rank holds
        "broadcast": (2, 2, 8),
        "ring_shift": (2, 2, 8),
        "send": (2, 2, 8),
        "receive": (2, 2, 8),
    }
    assert [row.seq for row in rows[1] if row.group == "mesh_dp_0"] == [0, 1, 2]
    assert (first["ring_shift"].peer, first["ring_shift"].peer_from) == (2, 0)
    assert (first["broadcast"].peer, first["send"].peer, first["receive"].peer) == (3, 3, 3)
    assert first["send"].group == by_name[3]["receive"].group == "mesh_pp.forward_1"
    assert all(row.issue_ns <= row.start_ns <= row.end_ns for rank in rows for row in rank)
    assert all(row.axis in AXES for rank in rows for row in rank)


def test_dry_gives_the_same_rows(pool: Pool) -> None:
    for rank, (_, operations) in enumerate(pool.run(on_rank_every_operation)):
        recorder = Recorder(rank)
        recorder.begin_step(0)
        every_operation(DryComm(Mesh(pp=2, dp=2), rank, recorder, ALL))
        recorder.end_step()
        assert plan_of(recorder.operations()) == plan_of(operations)


def test_point_to_point_is_numbered_by_direction() -> None:
    recorder = Recorder(1)
    comm = DryComm(Mesh(pp=3), 1, recorder, PIPELINE_STREAMS)
    recorder.begin_step(0)
    for peer, direction in ((2, "forward"), (0, "backward"), (2, "forward")):
        comm.send(torch.empty(1), "pp", peer, strategy="pp", stream=f"pp.{direction}.send").wait()
    for _ in range(2):
        comm.receive(torch.empty(1), "pp", 0, strategy="pp", stream="pp.forward.receive").wait()
    recorder.end_step()
    rows = [row for row in recorder.operations() if row.kind == "comm"]
    assert [(row.collective, row.peer, row.seq) for row in rows] == [
        ("send", 2, 0),
        ("send", 0, 0),
        ("send", 2, 1),
        ("receive", 0, 0),
        ("receive", 0, 1),
    ]


def test_one_rank_communicates_nothing() -> None:
    recorder = Recorder(0)
    comm = DryComm(Mesh(dp=2), 0, recorder, ("tp", "dp"))
    recorder.begin_step(0)
    x = torch.arange(2.0)
    handles = [
        comm.all_reduce(x, "tp", strategy="tp"),
        comm.all_gather(x, "tp", strategy="tp"),
        comm.all_gather(x, "tp", strategy="tp", output=torch.empty(2)),
        comm.reduce_scatter(x, "tp", strategy="tp"),
        comm.reduce_scatter(x, "tp", strategy="tp", output=torch.empty(2)),
        comm.all_to_all(x, "tp", [2], [2], strategy="ep"),
        comm.broadcast(x, "tp", 0, strategy="tp"),
        comm.ring_shift(x, "tp", strategy="cp"),
    ]
    recorder.end_step()
    assert all(isinstance(handle, Ready) and handle.wait().tolist() == [0.0, 1.0] for handle in handles)
    assert [row.kind for row in recorder.operations()] == ["compute"]


def test_second_wait_is_free() -> None:
    recorder = Recorder(0)
    comm = DryComm(Mesh(dp=2), 0, recorder, ("dp",))
    recorder.begin_step(0)
    handle = comm.all_reduce(torch.zeros(1), "dp", strategy="dp")
    assert handle.wait() is handle.wait()
    recorder.end_step()
    assert [row.kind for row in recorder.operations()] == ["compute", "comm", "compute", "wait", "compute"]


def test_sites_are_built_once_and_forgotten_when_they_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = DryComm(Mesh(dp=2), 0, NullRecorder(), ("dp",))
    monkeypatch.setattr("stepscope.parallel_runtime.comm.SITE_CACHE", 3)
    for size in (1, 2, 2, 3, 4, 5):
        comm.all_reduce(torch.zeros(size), "dp", strategy="dp").wait()
    assert [site.in_elements for site in comm._sites.values()] == [4, 5]


def test_undeclared_or_wrong_stream_is_a_bug() -> None:
    comm = DryComm(Mesh(dp=2, tp=2), 0, NullRecorder(), ("dp",))
    with pytest.raises(AssertionError, match="not declared"):
        comm.all_reduce(torch.zeros(1), "tp", strategy="tp")
    with pytest.raises(AssertionError, match="does not serve"):
        comm.all_reduce(torch.zeros(1), "tp", strategy="tp", stream="dp")


def test_every_rank_makes_the_same_groups_in_the_same_order() -> None:
    mesh = Mesh(pp=2, dp=2)
    groups = process_groups_of(mesh, ("pp.forward.send", "pp.forward.receive", "dp", "tp", "dp"))
    assert [(g.name, g.view, g.ranks) for g in groups] == [
        ("mesh_dp_0", "dp", (0, 1)),
        ("mesh_dp_1", "dp", (2, 3)),
        ("mesh_pp.forward_0", "pp", (0, 2)),
        ("mesh_pp.forward_1", "pp", (1, 3)),
    ]
    assert groups == process_groups_of(mesh, ("dp", "pp.forward.receive", "pp.forward.send"))
    assert group_metas(mesh, ("embedding",))[1] == GroupMeta("mesh_embedding_1", "pp", (1, 3))
    assert all(mesh.axis_of(stream_of(stream).view) in AXES for stream in (*STREAMS, "edp", "world", "pp_dp_cp_tp"))


# -- streams are first in, first out -----------------------------------------------------------------------------------


def on_rank_fifo(rank: int) -> list[tuple[int, int]]:
    recorder = Recorder(rank)
    comm = gloo(Mesh(dp=4), rank, recorder, ("dp", "world"))
    assert comm is not None
    recorder.begin_step(0)
    handles = [comm.all_reduce(torch.ones(size), "dp", strategy="dp") for size in (200_000, 1, 50_000, 1)]
    for handle in reversed(handles):  # waiting in another order changes nothing
        assert handle.wait()[0] == 4.0
    recorder.end_step()
    comm.close()
    assert threading.active_count() == 1 or not any(t.name.startswith("stream") for t in threading.enumerate())
    return [(row.start_ns, row.end_ns) for row in recorder.operations() if row.kind == "comm"]


def test_a_stream_runs_in_the_order_of_submission(pool: Pool) -> None:
    for times in pool.run(on_rank_fifo):
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times))


def on_rank_overlap(rank: int) -> list[Operation]:
    """The training thread is not held up by an issue, only by a wait."""
    recorder = Recorder(rank)
    comm = gloo(Mesh(dp=4), rank, recorder, ("dp",))
    assert comm is not None
    recorder.begin_step(0)
    if rank == 3:
        time.sleep(0.1)
    handle = comm.all_reduce(torch.ones(1), "dp", strategy="dp")
    recorder.block("independent work")
    handle.wait()
    recorder.end_step()
    comm.close()
    return recorder.operations()


def test_the_wait_is_recorded_apart_from_compute(pool: Pool) -> None:
    rows = pool.run(on_rank_overlap)[0]
    assert [row.kind for row in rows] == ["compute", "comm", "compute", "compute", "wait", "compute"]
    communication, work, wait = rows[1], rows[3], rows[4]
    assert wait.op_id == communication.op_id
    assert work.name == "independent work"
    assert work.end_ns <= wait.start_ns <= communication.end_ns <= wait.end_ns


def on_rank_gradient_mode(rank: int) -> bool:
    """Grad mode belongs to the thread: a worker writes into a leaf that requires grad only without it."""
    comm = gloo(Mesh(dp=4), rank, NullRecorder(), ("dp",))
    assert comm is not None
    leaf = torch.ones(8, requires_grad=True)
    comm.all_gather(torch.ones(2, requires_grad=True), "dp", strategy="zero3", output=leaf).wait()
    comm.close()
    return leaf.requires_grad and leaf.is_leaf


def test_workers_build_no_graph(pool: Pool) -> None:
    assert pool.run(on_rank_gradient_mode) == [True] * 4


def on_rank_idle_worker(rank: int) -> list[float] | None:
    comm = gloo(Mesh(dp=2), rank, NullRecorder(), ("dp",))
    if comm is None:
        return None
    out = comm.all_reduce(torch.tensor([1.0 + rank]), "dp", strategy="dp").wait().tolist()
    comm.close()
    return out


def test_a_mesh_smaller_than_the_world(pool: Pool) -> None:
    assert pool.run(on_rank_idle_worker) == [[3.0], [3.0], None, None]


# -- the three hangs: each rule broken on purpose hangs, kept as the program keeps it, it runs ---------------------------
# Broken, the rule is shown on bare process groups with a short timeout: the operation ends in an error, not a hang.

SHORT_S = 1.0


def bare_group(name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A process group of its own with a short timeout."""
    from datetime import timedelta

    key = (name, ranks)
    if key not in GROUPS:
        GROUPS[key] = dist.new_group(list(ranks), timedelta(seconds=SHORT_S), "gloo")
    return GROUPS[key]


def times_out(operations: list) -> bool:
    """Whether running these in order, as one queue does, ends in a failure."""
    try:
        for operation in operations:
            operation()
    except RuntimeError:
        return True
    return False


def on_rank_one_queue(rank: int, salt: str) -> bool:
    """1: both stages send before they receive; a send is a rendezvous, so neither receive is ever posted."""
    group = bare_group(f"one queue {salt}", (0, 1))
    if rank > 1:
        return False
    peer, x = 1 - rank, torch.zeros(1000)
    return times_out([lambda: dist.send(x, peer, group), lambda: dist.recv(x, peer, group)])


def on_rank_opposite_order(rank: int, salt: str) -> bool:
    """2: one queue serves two groups, and two members submit to them in opposite order."""
    first, second = bare_group(f"first {salt}", (0, 1)), bare_group(f"second {salt}", (0, 1))
    if rank > 1:
        return False
    x = torch.zeros(10)
    reduce = [lambda: dist.all_reduce(x, group=first), lambda: dist.all_reduce(x, group=second)]
    return times_out(reduce if rank == 0 else reduce[::-1])


def on_rank_different_groups(rank: int, salt: str) -> bool:
    """3: a send on one group never meets a receive on another."""
    first, second = bare_group(f"sends {salt}", (0, 1)), bare_group(f"receives {salt}", (0, 1))
    if rank > 1:
        return False
    x = torch.zeros(1000)
    return times_out([lambda: dist.send(x, 1, first)] if rank == 0 else [lambda: dist.recv(x, 0, second)])


@pytest.mark.parametrize("broken", [on_rank_one_queue, on_rank_opposite_order, on_rank_different_groups])
def test_what_hangs_when_a_rule_is_broken(pool: Pool, broken) -> None:
    results = pool.run(broken, broken.__name__)
    pool.kill()  # its connections are spent
    assert any(results[:2])


def on_rank_rules_kept(rank: int) -> list[float]:
    """The same three situations through the door: sends first on both ends, two streams in opposite order."""
    comm = gloo(Mesh(pp=2, dp=2), rank, NullRecorder(), ALL)
    assert comm is not None
    last = comm.index("pp")
    away, back = ("pp.backward", "pp.forward") if last else ("pp.forward", "pp.backward")
    messages = [torch.full((1000,), float(number)) for number in range(8)]
    handles = [comm.send(x, "pp", 1 - last, strategy="pp", stream=f"{away}.send") for x in messages]
    inboxes = [
        comm.receive(torch.empty(1000), "pp", 1 - last, strategy="pp", stream=f"{back}.receive") for _ in messages
    ]
    submit = [
        lambda: comm.all_reduce(torch.ones(1), "dp", strategy="dp"),
        lambda: comm.all_gather(torch.ones(1), "shard", strategy="zero3", stream="shard.gather"),
    ]
    handles += [call() for call in (submit if comm.index("dp") else submit[::-1])]
    received = [float(inbox.wait()[-1]) for inbox in inboxes]
    for handle in handles:
        handle.wait()
    comm.close()
    return received


def test_what_runs_when_the_rules_are_kept(pool: Pool) -> None:
    assert pool.run(on_rank_rules_kept) == [[float(number) for number in range(8)]] * 4


def on_rank_peer_stays_away(rank: int) -> str:
    comm = GlooComm(Mesh(dp=4), rank, NullRecorder(), ("dp",), timeout_s=SHORT_S)
    if rank == 3:
        return ""
    try:
        comm.all_reduce(torch.zeros(1), "dp", strategy="dp").wait()
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_an_error_of_the_worker_reaches_wait_and_names_the_operation(pool: Pool) -> None:
    results = pool.run(on_rank_peer_stays_away)
    pool.kill()
    assert results[0].startswith("rank 0: all_reduce number 0 on mesh_dp_0 (ranks 0, 1, 2, 3):")
    assert "no error" not in results
