"""Who made whom wait: small cases worked by hand, then properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_blame import Wait, plain_blame, table_of

from stepscope.analysis.causes.blame import Allowance, Blame, blame

Free = Mapping[int, Mapping[tuple[int, int], int]]
"""Step -> (stage, stage waited for) -> structural ns."""


def blamed(
    waits: Mapping[int, Sequence[Wait]], free: Free | None = None, stage_of: Mapping[int, int] | None = None
) -> Blame:
    """`blame` of a few waits and of an allowance written out."""
    table, free = table_of(waits), free or {}
    rows = [
        (*pair, place, ns) for place, step in enumerate(table.steps) for pair, ns in free.get(int(step), {}).items()
    ]
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return blame(table, Allowance.of(len(table.steps), *columns), stage_of)


def charged(found: Blame) -> dict[int, dict[int, dict[int, int]]]:
    """Step -> waiting rank -> rank at fault -> ns."""
    answer: dict[int, dict[int, dict[int, int]]] = {}
    columns = (column.tolist() for column in (found.step, found.waiting, found.fault, found.ns))
    for step, waiting, fault, ns in zip(*columns, strict=True):
        line = answer.setdefault(int(found.steps[step]), {}).setdefault(found.ranks[waiting], {})
        assert found.ranks[fault] not in line
        line[found.ranks[fault]] = ns
    return answer


def test_a_late_rank_is_charged_what_each_other_waited() -> None:
    # definitions: arrivals 0, 60, 62, 64: waits 64/4/2/0, straggler rank 3
    waits = {rank: [Wait(0, start, 64, on=3)] for rank, start in ((0, 0), (1, 60), (2, 62))}
    result = blamed(waits)
    assert charged(result)[0] == {0: {3: 64}, 1: {3: 4}, 2: {3: 2}}
    assert result.costs_of(3, [0]) == [70]
    assert result.longest_waits_for(3, [0]) == [64]


def test_waiting_inside_a_wait_goes_to_the_one_who_works() -> None:
    # 2 waits for 1 from 0 to 100; 1 waits for 0 until 70 and then works
    waits = {2: [Wait(0, 0, 100, on=1)], 1: [Wait(0, 0, 70, on=0)]}
    assert charged(blamed(waits))[0] == {2: {0: 70, 1: 30}, 1: {0: 70}}


def test_a_circle_of_waits_ends() -> None:
    # 0 waits for 1 while 1 waits for 0: each is charged to the other, none to itself
    waits = {0: [Wait(0, 0, 10, on=1)], 1: [Wait(0, 0, 10, on=0)]}
    assert charged(blamed(waits))[0] == {0: {1: 10}, 1: {0: 10}}


def test_lateness_that_was_inherited_before_goes_back_to_its_cause() -> None:
    # dp 2 x pp 2: rank 1 (stage 0) is 30 late, so rank 3 (stage 1) receives 30 late: 40 instead of the structural 10.
    # At the end ranks 0 and 2 wait 30 for their dp partners 1 and 3, which both work then: all of it is rank 1's.
    waits = {
        2: [Wait(0, 0, 10, on=0, structural=True), Wait(0, 170, 200, on=3)],
        3: [Wait(0, 0, 40, on=1, structural=True)],
        0: [Wait(0, 180, 210, on=1)],
    }
    result = blamed(waits, {0: {(1, 0): 10}}, {0: 0, 1: 0, 2: 1, 3: 1})
    assert charged(result)[0] == {3: {1: 30}, 2: {1: 30}, 0: {1: 30}}
    assert result.costs_of(1, [0]) == [90]
    assert result.longest_waits_for(1, [0]) == [30]


def test_a_structural_bubble_is_nobodys_fault_and_is_free_only_once() -> None:
    waits = {1: [Wait(0, 0, 6, on=0, structural=True), Wait(0, 8, 12, on=0, structural=True)]}
    assert charged(blamed(waits, {0: {(1, 0): 7}}, {0: 0, 1: 1}))[0] == {1: {0: 3}}
    assert blamed(waits, {0: {(1, 0): 10}}, {0: 0, 1: 1}).costs_of(0, [0]) == [0]


def test_the_allowance_is_new_in_every_step() -> None:
    waits = {1: [Wait(k, 100 * k, 100 * k + 6, on=0, structural=True) for k in range(3)]}
    result = blamed(waits, {k: {(1, 0): 5} for k in range(3)}, {0: 0, 1: 1})
    assert result.costs_of(0, range(4)) == [1, 1, 1, 0]


def test_who_waited_longer_before_does_not_inherit() -> None:
    # 0 had waited 20 for 2, then waits 5 for 1, which had waited 20 as well: the 5 are 1's own
    waits = {0: [Wait(0, 0, 20, on=2), Wait(0, 50, 55, on=1)], 1: [Wait(0, 0, 20, on=2)]}
    assert charged(blamed(waits))[0][0] == {2: 20, 1: 5}


# -- properties --------------------------------------------------------------------------------------------------------

RANKS = 5


@st.composite
def wait_lines(draw: st.DrawFn, steps: int = 1) -> dict[int, list[Wait]]:
    """Disjoint waits of some ranks for others, for themselves and for nobody; many instants are shared. Step k lasts
    [30 k, 30 k + 30)."""
    lines: dict[int, list[Wait]] = {}
    for rank in range(RANKS):
        lines[rank] = []
        for step in range(steps):
            edges = sorted(draw(st.sets(st.integers(30 * step, 30 * step + 30), max_size=8)))
            for start, end in zip(edges[::2], edges[1::2], strict=False):
                on, structural = draw(st.integers(0 if steps == 1 else -1, RANKS - 1)), draw(st.booleans())
                if steps > 1 or on != rank:
                    lines[rank].append(Wait(step, start, end, on, structural))
    return lines


@settings(deadline=None, max_examples=200)
@given(wait_lines())
def test_every_exposed_nanosecond_is_charged_once_and_never_to_the_one_who_waits(lines: dict[int, list[Wait]]) -> None:
    plain = {rank: [wait._replace(structural=False) for wait in line] for rank, line in lines.items()}
    found = charged(blamed(plain)).get(0, {})
    for rank, line in lines.items():
        mine = found.get(rank, {})
        assert sum(mine.values()) == sum(wait.end_ns - wait.start_ns for wait in line)
        assert rank not in mine
        assert all(ns > 0 for ns in mine.values())


@settings(deadline=None)
@given(wait_lines(), st.integers(0, 1 << 60))
def test_charges_do_not_depend_on_when_the_step_happened(lines: dict[int, list[Wait]], shift: int) -> None:
    moved = {
        r: [w._replace(start_ns=w.start_ns + shift, end_ns=w.end_ns + shift) for w in ws] for r, ws in lines.items()
    }
    assert charged(blamed(moved)) == charged(blamed(lines))


STAGES = st.lists(st.sampled_from((-1, 0, 1, 4)), min_size=RANKS, max_size=RANKS)
ALLOWANCES = st.dictionaries(
    st.integers(0, 2),
    st.dictionaries(st.tuples(st.sampled_from((0, 1, 4)), st.sampled_from((0, 1, 4))), st.integers(0, 30)),
)


@settings(deadline=None, max_examples=400)
@given(wait_lines(steps=3), ALLOWANCES, STAGES)
def test_blame_of_all_steps_at_once_is_that_of_one_wait_after_the_other(
    lines: dict[int, list[Wait]], free: Free, stages: list[int]
) -> None:
    stage_of = dict(enumerate(stages))
    found, (plain, beyond) = blamed(lines, free, stage_of), plain_blame(lines, free, stage_of)
    assert charged(found) == {step: line for step, line in plain.items() if line}
    for rank in range(RANKS):
        every = [plain.get(step, {}) for step in range(3)]
        assert found.beyond_of(rank, range(3)) == [beyond.get(step, {}).get(rank, 0) for step in range(3)]
        assert found.costs_of(rank, range(3)) == [sum(one[rank] for one in line.values()) for line in every]
        longest = [max((one[rank] for one in line.values()), default=0) for line in every]
        assert found.longest_waits_for(rank, range(3)) == longest
