"""A slow link: which operations it holds up, on which rank, and that the record says so."""

from __future__ import annotations

import pytest
import torch
from pool import Pool, gloo

from stepscope.parallel_runtime.comm import PIPELINE_STREAMS
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig, check
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.naming import run_name
from stepscope.parallel_runtime.slow_link import SlowLink, parse_link
from stepscope.tracer.recorder import CommSite, Recorder

LINK_MS = 30.0
TRAIN = TrainConfig(slow_link=(0, 1), slow_link_ms=LINK_MS)


def site(collective: str, ranks: tuple[int, ...], peer: int = -1, peer_from: int = -1) -> CommSite:
    return CommSite(
        collective=collective,
        axis="pp",
        strategy="pp",
        group="g",
        ranks=ranks,
        stream="pp",
        dtype="float32",
        in_elements=1,
        out_elements=1,
        bytes=4,
        peer=peer,
        peer_from=peer_from,
        name=collective,
    )


def test_only_what_goes_over_the_link_is_late_and_only_where_it_is_given() -> None:
    link = SlowLink.of(TRAIN)
    assert link == SlowLink(0, 1, 0.03)
    assert link.delay_of(site("send", (0, 1), peer=1), 0) == 0.03
    assert link.delay_of(site("receive", (0, 1), peer=1), 0) == 0.0  # the other direction
    assert link.delay_of(site("send", (0, 1), peer=0), 1) == 0.0
    assert link.delay_of(site("receive", (0, 1), peer=0), 1) == 0.0  # it is late because the send is
    assert link.delay_of(site("send", (0, 2), peer=2), 0) == 0.0
    assert link.delay_of(site("ring_shift", (0, 1, 2), peer=1, peer_from=2), 0) == 0.03
    assert link.delay_of(site("ring_shift", (0, 1, 2), peer=2, peer_from=1), 0) == 0.0
    assert link.delay_of(site("all_reduce", (0, 1, 2)), 0) == 0.03
    assert link.delay_of(site("all_reduce", (0, 2)), 0) == 0.0
    assert SlowLink.of(TrainConfig()) is None


@pytest.mark.parametrize(("text", "link"), [("0-1", (0, 1)), ("12-3", (12, 3)), (None, ())])
def test_a_link_is_two_ranks(text: str | None, link: tuple[int, ...]) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "0", "0-", "a-b", "0-1-2", "-1"])
def test_anything_else_is_no_link(text: str) -> None:
    with pytest.raises(ValueError, match="not two ranks with a dash between, such as 0-1"):
        parse_link(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slow_link": (0, 1)}, "slow_link and slow_link_ms belong together"),
        ({"slow_link_ms": 5.0}, "slow_link and slow_link_ms belong together: got no link and 5.0 ms"),
        ({"slow_link": (1, 1), "slow_link_ms": 5.0}, "two different ranks"),
        ({"slow_link": (0, 1), "slow_link_ms": -5.0}, "must not be negative"),
    ],
)
def test_illegal_links(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**arguments)


def test_a_link_lies_among_the_ranks_and_in_the_name() -> None:
    with pytest.raises(ValueError, match="slow_link 0-1 does not lie among the 1 ranks: take 0 to 0"):
        check(ModelConfig(), ParallelConfig(), TRAIN)
    assert run_name("tiny", ModelConfig(), ParallelConfig(pp=2), TRAIN).endswith("-link0-1")


def on_rank_messages(rank: int) -> dict[str, int] | None:
    """Durations in ns, by operation, of one message each way, a shift around the ring and a sum, over a link 0 -> 1."""
    recorder = Recorder(rank)
    comm = gloo(Mesh.of(ParallelConfig(pp=3)), rank, recorder, ("pp", "world", *PIPELINE_STREAMS))
    if comm is None:
        return None
    comm.slow_link = SlowLink.of(TRAIN)
    recorder.begin_step(0)
    tensor, moves = torch.ones(4), []
    if rank == 0:
        moves = [comm.send(tensor, "pp", 1, strategy="pp", stream="pp.forward.send")]
        moves += [comm.receive(tensor.clone(), "pp", 1, strategy="pp", stream="pp.backward.receive")]
    elif rank == 1:
        moves = [comm.receive(tensor.clone(), "pp", 0, strategy="pp", stream="pp.forward.receive")]
        moves[0].wait()
        moves += [comm.send(tensor, "pp", 0, strategy="pp", stream="pp.backward.send")]
    for move in moves:
        move.wait()
    shifted = comm.ring_shift(torch.full((2,), float(rank)), "world", strategy="cp").wait()
    summed = comm.all_reduce(torch.ones(2), "world", strategy="dp").wait()
    recorder.end_step()
    comm.close()
    assert shifted.tolist() == [float((rank - 1) % 3)] * 2
    assert summed.tolist() == [3.0, 3.0]
    return {row.name: row.end_ns - row.start_ns for row in recorder.operations() if row.kind == "comm"}


def test_what_crosses_a_slow_link_takes_longer_on_both_ends(pool: Pool) -> None:
    first, second, third, _ = pool.run(on_rank_messages)
    late = LINK_MS * 1e6
    assert first["send"] >= late
    assert min(first["all_reduce"], first["ring_shift"], second["ring_shift"]) >= late
    # the others started their part of the sum as soon as they had their part of the shift
    assert max(second["all_reduce"], third["all_reduce"]) >= late / 2
