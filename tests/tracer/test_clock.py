"""The anchor and the offset between hosts, on clocks whose error is known."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.tracer.clock import Clock, OffsetSample, anchor, answer, ask, clock_of_ranks, host_offsets
from stepscope.tracer.schema import ClockMeta


def test_the_anchor_is_the_systems_clock() -> None:
    clock = anchor()
    before, ours, after = time.time_ns(), clock.epoch_ns(), time.time_ns()
    assert before - 1_000_000 <= ours <= after + 1_000_000  # the system's clock may be slewed meanwhile


class Wire:
    """Virtual time: a ping takes `there` ns, its answer `back` ns; rank 0's clock is `ahead` of rank 1's."""

    def __init__(self, delays: list[tuple[int, int]], ahead: int) -> None:
        self.delays, self.ahead, self.true_ns = delays, ahead, 0
        self.answers: list[int] = []

    def send(self, peer: int, value: int) -> None:
        there, back = self.delays[len(self.answers) % len(self.delays)]
        self.true_ns += there
        self.answers.append(self.true_ns + self.ahead)
        self.true_ns += back

    def receive(self, peer: int) -> int:
        return self.answers[-1]

    def asker(self) -> Clock:
        return Clock(0, lambda: self.true_ns)


def test_the_shortest_round_trip_counts() -> None:
    wire = Wire([(900, 10), (20, 10), (5, 700)], ahead=500)
    sample = ask(0, wire.send, wire.receive, wire.asker(), rounds=3)
    # the second ping: left at 910, answered at 930 + 500, back at 940: middle 925, offset 505, at most 15 wrong
    assert sample == OffsetSample(925, 505, 15)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.integers(-(10**12), 10**12),
)
def test_the_bound_holds_whatever_the_delays(delays: list[tuple[int, int]], ahead: int) -> None:
    wire = Wire(delays, ahead)
    sample = ask(0, wire.send, wire.receive, wire.asker(), rounds=len(delays))
    assert abs(sample.offset_ns - ahead) <= sample.bound_ns


def test_an_offset_needs_a_round() -> None:
    wire = Wire([(1, 1)], 0)
    with pytest.raises(ValueError, match="at least one round"):
        ask(0, wire.send, wire.receive, wire.asker(), rounds=0)


def test_ranks_of_three_hosts_over_real_threads() -> None:
    """Four ranks on hosts a, a, b, c, whose clocks are known: every pair of ranks talks over its own queue."""
    hosts = ["a", "a", "b", "c"]
    ahead = {"a": 0, "b": 10**9, "c": -3 * 10**9}  # of each host's clock
    queues = {(source, target): queue.SimpleQueue() for source in range(4) for target in range(4)}
    found: list[dict[str, OffsetSample]] = [{} for _ in hosts]

    def run(rank: int) -> None:
        found[rank] = host_offsets(
            rank,
            hosts,
            lambda peer, value: queues[rank, peer].put(value),
            lambda peer: queues[peer, rank].get(timeout=30),
            Clock(ahead[hosts[rank]]),
            rounds=20,
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[1:] == [{}, {}, {}]
    assert set(found[0]) == {"b", "c"}
    for host, sample in found[0].items():
        assert abs(sample.offset_ns + ahead[host]) <= sample.bound_ns
    metas = clock_of_ranks(hosts, [found[0]])
    assert metas[:2] == (ClockMeta(), ClockMeta())
    assert metas[2].offset_ns == pytest.approx(-(10**9), abs=metas[2].bound_ns)
    assert metas[3].offset_ns == pytest.approx(3 * 10**9, abs=metas[3].bound_ns)


def test_one_host_needs_no_message() -> None:
    def refuse(*arguments: int) -> int:
        raise AssertionError("a message on one host")

    assert host_offsets(0, ["a", "a"], refuse, refuse, Clock(0)) == {}
    assert clock_of_ranks(["a", "a"], []) == (ClockMeta(), ClockMeta())


def test_a_drifting_clock_is_bounded_over_the_whole_run() -> None:
    start, end = OffsetSample(0, 100, 10), OffsetSample(1_000_000_000, 1100, 20)
    (_, meta) = clock_of_ranks(["a", "b"], [{"b": start}, {"b": end}])
    assert meta.drift_ppm == pytest.approx(1.0)  # 1000 ns in a second
    assert (meta.offset_ns, meta.bound_ns) == (605, 515)  # covers 90 .. 1120


def test_answering_takes_as_many_pings_as_are_asked() -> None:
    sent: list[int] = []
    answer(1, lambda peer, value: sent.append(value), lambda peer: 0, Clock(5, lambda: 10), rounds=3)
    assert sent == [15, 15, 15]
