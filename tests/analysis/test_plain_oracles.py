"""Matching by order, comparing and blaming, beside plain loops on small random cases."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle
from plain_blame import Wait, table_of
from random_timelines import number_rows, random_timeline
from test_compare import plain_run
from timelines import Timeline

from stepscope.analysis.causes.exposed import holders
from stepscope.analysis.compare import compare, noise_band
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.match import match
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import Report, analyze

# -- matching ----------------------------------------------------------------------------------------------------------


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Timeline, list[dict[int, int]]]:
    """All-reduces and all-gathers without numbers; each rank begins to record with some operation of each group.

    Gives the timeline, and for every operation the arrival of each rank that recorded it.
    """
    world, count = draw(st.integers(2, 3)), draw(st.integers(4, 7))
    line = Timeline(world=world, source="imported", hosts=("one",) * world)
    groups = [tuple(range(world)), (0, world - 1)]
    for number, ranks in enumerate(groups):
        line.group(f"g{number}", "dp", *ranks)
    first = {(rank, group): draw(st.integers(0, 2)) for rank in range(world) for group in (0, 1)}
    truth, at, done = [], 0, {0: 0, 1: 0}
    for _ in range(count):
        group = draw(st.integers(0, 1))
        at += draw(st.integers(2_000_000, 9_000_000))
        arrivals = {rank: at + draw(st.integers(0, 400_000)) for rank in groups[group]}
        end = max(arrivals.values()) + 50_000
        there = {rank: arrival for rank, arrival in arrivals.items() if done[group] >= first[rank, group]}
        for rank, arrival in there.items():
            line.comm(rank, arrival, end, group=f"g{group}", in_elements=8, dtype="float32", stream=f"s{group}")
        done[group] += 1
        if there:
            truth.append(there)
    return line, truth


@settings(max_examples=120)
@given(recordings())
def test_order_never_pairs_two_different_operations(case: tuple[Timeline, list[dict[int, int]]]) -> None:
    """Operations lie 2 ms apart and more, so the shift between recordings is certain: each match is one operation."""
    line, truth = case
    if not truth:
        return
    parts = match(line.run()).parts
    found = {
        frozenset(zip(part["rank"].tolist(), part["arrival_ns"].tolist(), strict=True))
        for _, part in parts.groupby("match_id")
    }
    assert found == {frozenset(one.items()) for one in truth}


# -- comparing ---------------------------------------------------------------------------------------------------------


def plainly(report: Report) -> tuple[dict[str, Fraction], dict[str, Fraction]]:
    """Mean step and terms, and mean classes, by loops over the rows that count."""
    whole = [
        row for row in report.ledger.to_dict("records") if not {"partial", "empty", "slow_first"} & set(row["flags"])
    ]
    by_step: dict[object, list[dict]] = {}
    for row in whole:
        by_step.setdefault(row["step"], []).append(row)
    everywhere = {step for step, rows in by_step.items() if len(rows) == len({row["rank"] for row in whole})}
    counted = {step: rows for step, rows in by_step.items() if step in (everywhere or by_step)}
    names = ("step_ns", *(f"{term}_ns" for term in TERMS))
    terms, classes = dict.fromkeys(names, Fraction(0)), {}
    for step, rows in counted.items():
        share = len(rows) * len(counted)
        for row in rows:
            for name in names:
                terms[name] += Fraction(int(row[name]), share)
            mine = report.classes[(report.classes["step"] == step) & (report.classes["rank"] == row["rank"])]
            for name, ns in zip(mine["class"], mine["ns"], strict=True):
                classes[name] = classes.get(name, Fraction(0)) + Fraction(int(ns), share)
    return terms, classes


@pytest.mark.parametrize("seed", range(0, 120, 2))
def test_a_comparison_equals_plain_loops(seed: int) -> None:
    reports = []
    for one in (seed, seed + 1):
        line = random_timeline(one)
        number_rows(line)
        reports.append(analyze(line.run()))
    if not all(report.means.values for report in reports):
        return
    (pair,) = compare([line_run(seed), line_run(seed + 1)]).pairs
    (terms_a, classes_a), (terms_b, classes_b) = (plainly(report) for report in reports)
    for delta in (pair.step, *pair.terms):
        assert (delta.a_ns, delta.b_ns) == (terms_a[delta.name], terms_b[delta.name])
        assert delta.delta_ns == terms_b[delta.name] - terms_a[delta.name]
    assert {delta.name for delta in pair.classes} == {*classes_a, *classes_b}
    for delta in pair.classes:
        assert (delta.a_ns, delta.b_ns) == (classes_a.get(delta.name, 0), classes_b.get(delta.name, 0))
    sizes = [abs(delta.delta_ns) for delta in pair.classes]
    assert sizes == sorted(sizes, reverse=True)


def line_run(seed: int):  # type: ignore[no-untyped-def]
    line = random_timeline(seed)
    number_rows(line)
    return line.run()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=2, max_size=3))
def test_the_band_of_two_or_three_steps_is_that_of_all_resamples(steps: list[tuple[int, int]]) -> None:
    """With so few steps every draw can be listed; each extreme has more than 2.5 %, so the band ends there."""
    a, b = (np.array([[step[side]] for step in steps], float) for side in (0, 1))
    differences = [Fraction(step[1] - step[0]) for step in steps]
    mean = sum(differences, Fraction(0)) / len(steps)
    draws = itertools.product(differences, repeat=len(steps))
    wide = (len(steps) / (len(steps) - 1)) ** 0.5
    every = sorted(float(sum(draw, Fraction(0)) / len(steps) - mean) * wide for draw in draws)
    found = noise_band(a, b)
    assert found is not None
    assert found[0][0] == pytest.approx(float(mean) + every[0], abs=1e-3)
    assert found[1][0] == pytest.approx(float(mean) + every[-1], abs=1e-3)


def test_many_runs_are_each_beside_the_first() -> None:
    lengths = (100, 120, 90)
    comparison = compare([plain_run([length] * 3) for length in lengths])
    assert [pair.step.delta_ns for pair in comparison.pairs] == [20, -10]


# -- blame -------------------------------------------------------------------------------------------------------------


@st.composite
def waiting(draw: st.DrawFn) -> dict[int, list[Wait]]:
    """Disjoint waits of up to four ranks for each other, 30 ns long in all."""
    ranks = range(draw(st.integers(2, 4)))
    found: dict[int, list[Wait]] = {}
    for rank in ranks:
        cuts = sorted(draw(st.lists(st.integers(0, 30), max_size=6, unique=True)))
        pairs = zip(cuts[0::2], cuts[1::2], strict=False)
        others = [other for other in ranks if other != rank]
        found[rank] = [Wait(0, low, high, draw(st.sampled_from(others))) for low, high in pairs]
    return found


def holder_at(waits: dict[int, list[Wait]], rank: int, instant: int) -> int | None:
    """Whom a rank waits for in the end at one instant, by following from rank to rank, never twice through one."""
    seen, here, holder = {rank}, rank, None
    while True:
        mine = [one for one in waits[here] if one.start_ns <= instant < one.end_ns]
        if not mine or mine[0].on in seen:
            return holder
        holder = here = mine[0].on
        seen.add(here)


@settings(max_examples=200)
@given(waiting())
def test_whom_a_wait_goes_back_to_is_decided_instant_by_instant(waits: dict[int, list[Wait]]) -> None:
    table = table_of(waits)
    held = holders(table.rank, table.start, table.end, table.on, np.arange(len(waits)) * 100)
    found: dict[int, dict[int, int]] = {rank: {} for rank in waits}
    for wait, holder, ns in zip(*(column.tolist() for column in held), strict=True):
        mine = found[int(table.rank[wait])]
        mine[holder] = mine.get(holder, 0) + ns
    for rank in waits:
        plain: dict[int, int] = {}
        for one in waits[rank]:
            for instant in range(one.start_ns, one.end_ns):
                holder = holder_at(waits, rank, instant)
                if holder is not None and holder != rank:
                    plain[holder] = plain.get(holder, 0) + 1
        assert found[rank] == plain


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_links_equal_plain_loops(seed: int) -> None:
    """Medians by sorting, exposed time nanosecond by nanosecond."""
    line = random_timeline(seed)
    number_rows(line)
    oracle, report = Oracle(line), analyze(line.run())
    steps = set(report.means.steps)
    rows = decompose(line.run()).matches.parts.to_dict("records")
    windows = {rank: {n: (low, high) for n, low, high in oracle.steps[rank]} for rank in oracle.ranks}

    def counted(row: dict) -> bool:
        inside = [n for n, (low, high) in windows[row["rank"]].items() if low <= row["arrival_ns"] < high]
        doubtful = row["unmatched"] or row["partial"] or row["violation"] or row["impossible"]
        return bool(inside) and inside[0] in steps and not doubtful

    messages: dict[tuple, list[tuple[int, int]]] = {}
    for row in rows:
        others = [one for one in rows if (one["match_id"], one["rank"]) == (row["match_id"], row["source"])]
        if row["source"] < 0 or not counted(row) or len(others) != 1:
            continue
        (other,) = others
        if other["unmatched"] or other["partial"] or other["violation"] or other["impossible"]:
            continue
        ring = row["collective"] == "ring_shift"
        takes = min(row["transfer_ns"], other["transfer_ns"]) if ring else row["transfer_ns"]
        key = (row["axis"], "ring_shift" if ring else "send_receive", row["source"], row["rank"])
        messages.setdefault(key, []).append((takes, row["end_ns"]))
    found = {
        (row["axis"], row["collective"], row["source"], row["target"]): row for row in report.links.to_dict("records")
    }
    assert set(found) == set(messages)
    for key, sent in messages.items():
        assert found[key]["median_transfer_ns"] == np.median([takes for takes, _ in sent])
        assert found[key]["messages_per_step"] == len(sent) / len(steps)
        moving = {instant for takes, end in sent for instant in range(end - takes, end)}
        for rank, name in ((key[3], "target"), (key[2], "source")):
            shown = sum(
                oracle.term(rank, instant) == "visible_comm"
                for low, high in windows[rank].values()
                for instant in moving & set(range(low, high))
            )
            assert found[key][f"{name}_exposed_ns_per_step"] == pytest.approx(shown / len(steps)), key
