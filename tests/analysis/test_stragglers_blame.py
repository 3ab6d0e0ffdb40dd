"""Who made whom wait: small cases worked by hand, then properties."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.causes.blame import Wait, blame


def test_a_late_rank_is_charged_what_each_other_waited() -> None:
    # definitions: arrivals 0, 60, 62, 64: waits 64/4/2/0, straggler rank 3
    waits = {rank: [Wait(0, start, 64, on=3)] for rank, start in ((0, 0), (1, 60), (2, 62))}
    result = blame(waits)
    assert result.charged[0] == {0: Counter({3: 64}), 1: Counter({3: 4}), 2: Counter({3: 2})}
    assert result.cost_of(3) == 70
    assert result.longest_wait_for(3, 0) == 64


def test_waiting_inside_a_wait_goes_to_the_one_who_works() -> None:
    # 2 waits for 1 from 0 to 100; 1 waits for 0 until 70 and then works
    waits = {2: [Wait(0, 0, 100, on=1)], 1: [Wait(0, 0, 70, on=0)]}
    assert blame(waits).charged[0] == {2: Counter({0: 70, 1: 30}), 1: Counter({0: 70})}


def test_a_circle_of_waits_ends() -> None:
    # 0 waits for 1 while 1 waits for 0: each is charged to the other, none to itself
    waits = {0: [Wait(0, 0, 10, on=1)], 1: [Wait(0, 0, 10, on=0)]}
    assert blame(waits).charged[0] == {0: Counter({1: 10}), 1: Counter({0: 10})}


def test_lateness_that_was_inherited_before_goes_back_to_its_cause() -> None:
    # dp 2 x pp 2: rank 1 (stage 0) is 30 late, so rank 3 (stage 1) receives 30 late: 40 instead of the structural 10.
    # At the end ranks 0 and 2 wait 30 for their dp partners 1 and 3, which both work then: all of it is rank 1's.
    waits = {
        2: [Wait(0, 0, 10, on=0, structural=True), Wait(0, 170, 200, on=3)],
        3: [Wait(0, 0, 40, on=1, structural=True)],
        0: [Wait(0, 180, 210, on=1)],
    }
    result = blame(waits, {0: {(1, 0): 10}}, {0: 0, 1: 0, 2: 1, 3: 1})
    assert result.charged[0] == {3: Counter({1: 30}), 2: Counter({1: 30}), 0: Counter({1: 30})}
    assert result.cost_of(1) == 90
    assert result.longest_wait_for(1, 0) == 30


def test_a_structural_bubble_is_nobodys_fault_and_is_free_only_once() -> None:
    waits = {1: [Wait(0, 0, 6, on=0, structural=True), Wait(0, 8, 12, on=0, structural=True)]}
    assert blame(waits, {0: {(1, 0): 7}}, {0: 0, 1: 1}).charged[0] == {1: Counter({0: 3})}
    assert blame(waits, {0: {(1, 0): 10}}, {0: 0, 1: 1}).cost_of(0) == 0


def test_the_allowance_is_new_in_every_step() -> None:
    waits = {1: [Wait(k, 100 * k, 100 * k + 6, on=0, structural=True) for k in range(3)]}
    result = blame(waits, {k: {(1, 0): 5} for k in range(3)}, {0: 0, 1: 1})
    assert [result.cost_of(0, k) for k in range(3)] == [1, 1, 1]


def test_who_waited_longer_before_does_not_inherit() -> None:
    # 0 had waited 20 for 2, then waits 5 for 1, which had waited 20 as well: the 5 are 1's own
    waits = {0: [Wait(0, 0, 20, on=2), Wait(0, 50, 55, on=1)], 1: [Wait(0, 0, 20, on=2)]}
    assert blame(waits).charged[0][0] == Counter({2: 20, 1: 5})


RANKS = 4


@st.composite
def wait_lines(draw: st.DrawFn) -> dict[int, list[Wait]]:
    lines = {}
    for rank in range(RANKS):
        edges = sorted(draw(st.sets(st.integers(0, 60), max_size=8)))
        pairs = zip(edges[::2], edges[1::2], strict=False)
        others = st.sampled_from([r for r in range(RANKS) if r != rank])
        lines[rank] = [Wait(0, start, end, on=draw(others)) for start, end in pairs]
    return lines


@settings(deadline=None)
@given(wait_lines())
def test_every_exposed_nanosecond_is_charged_once_and_never_to_the_one_who_waits(lines: dict[int, list[Wait]]) -> None:
    charged = blame(lines).charged.get(0, {})
    for rank, line in lines.items():
        counter = charged.get(rank, Counter())
        assert sum(counter.values()) == sum(wait.end_ns - wait.start_ns for wait in line)
        assert counter[rank] == 0


@settings(deadline=None)
@given(wait_lines(), st.integers(0, 1000))
def test_charges_do_not_depend_on_when_the_step_happened(lines: dict[int, list[Wait]], shift: int) -> None:
    moved = {
        r: [w._replace(start_ns=w.start_ns + shift, end_ns=w.end_ns + shift) for w in ws] for r, ws in lines.items()
    }
    assert blame(moved).charged == blame(lines).charged
