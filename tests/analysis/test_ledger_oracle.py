"""The ledger equals an independent reckoning of every single nanosecond."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from oracle import TERMS, Oracle
from random_timelines import number_rows, random_timeline

from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.overlap import overlap
from stepscope.tracer.schema import ClockMeta

CASES = 320


@pytest.mark.parametrize("block", range(8))
def test_random_timelines(block: int) -> None:
    for seed in range(block * CASES // 8, (block + 1) * CASES // 8):
        check(seed)


def check(seed: int) -> None:
    timeline = random_timeline(seed)
    number_rows(timeline)
    oracle = Oracle(timeline)
    run = timeline.run()
    found = decompose(run)
    together = overlap(run, found)
    beside = found.steps.set_index(["rank", "step"])
    rows = found.ledger.set_index(["rank", "step"])
    expected_rows = {(rank, number) for rank in oracle.ranks for number, _, _ in oracle.steps[rank]}
    assert set(rows.index) == expected_rows, seed
    for rank in oracle.ranks:
        segments = found.segments(rank)
        for number, start, end in oracle.steps[rank]:
            expected = oracle.row(rank, start, end)
            row = rows.loc[(rank, number)]
            where = f"seed {seed} rank {rank} step {number}"
            got = {term: int(row[f"{term}_ns"]) for term in TERMS}
            assert got == {term: expected[term] for term in TERMS}, where
            assert int(row["step_ns"]) == end - start == sum(got.values()), where
            for name in ("hidden_comm", "hidden_wait", "unsplit"):
                assert int(row[f"{name}_ns"]) == expected[name], f"{where} {name}"
            extra = beside.loc[(rank, number)]
            assert int(extra["op_wait_ns"]) == expected["op_wait"], where
            assert int(extra["nonblocking_ns"]) == expected["nonblocking"], where
            assert ("nonblocking" in row["flags"]) == (expected["nonblocking"] > 0), where  # windows of < 100 ns
            if oracle.waits[rank]:
                assert int(extra["blocking_comm_ns"]) == expected["blocking"], where
            else:
                assert np.isnan(extra["blocking_comm_ns"]), where
            mine = segments[segments["step"] == number]
            drawn = [term for a, b, term in mine[["start_ns", "end_ns", "term"]].to_numpy() for _ in range(a, b)]
            assert drawn == [oracle.term(rank, t) for t in range(start, end)], where
            check_overlap(together, expected, rank, number, where)
    check_parts(found, oracle, seed)


def check_overlap(together, expected, rank: int, number: int, where: str) -> None:  # type: ignore[no-untyped-def]
    mine = together[(together["rank"] == rank) & (together["step"] == number)]
    keys = {key[1:] for key in expected if isinstance(key, tuple) and key[0] == "comm"}
    assert {tuple(key) for key in mine[["axis", "collective", "stream"]].to_numpy()} == keys, where
    for row in mine.to_dict("records"):
        key = (row["axis"], row["collective"], row["stream"])
        assert row["comm_ns"] == expected[("comm", *key)], where
        assert row["transfer_ns"] == expected[("transfer", *key)], where
        assert row["comm_overlap"] == expected[("hidden", *key)] / expected[("comm", *key)], where


def check_parts(found, oracle: Oracle, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Every part's wait, last arriver and straggler."""
    got = {
        (row["rank"], row["stream"], row["arrival_ns"], row["end_ns"], row["group"], row["seq"], row["collective"]): row
        for row in found.matches.parts.to_dict("records")
    }
    count = 0
    for rank in oracle.ranks:
        for part in oracle.parts[rank]:
            rows = [row for key, row in got.items() if key[:4] == (rank, part.stream, part.start, part.end)]
            rows = [row for row in rows if row["collective"] == part.collective]
            alone = len(part.siblings) == 1 and part.expected > 1
            wait = -1 if alone else part.wait_end - part.start
            assert wait in [row["wait_ns"] for row in rows], f"seed {seed}: {part}"
            if len(rows) == 1:
                row = rows[0]
                assert row["last_rank"] == part.leader, f"seed {seed} rank {rank}"
                assert row["straggler"] == oracle.straggler(part), f"seed {seed} rank {rank}"
                assert row["partial"] == (1 < len(part.siblings) < part.expected), seed
                assert row["unmatched"] == alone, seed
            count += 1
    assert count == len(found.matches.parts), seed


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_recorded_offset_changes_nothing(seed: int) -> None:
    """A rank whose clock is ahead by what the run recorded has the same ledger; its segments are in its own clock."""
    timeline = random_timeline(seed)
    plain = decompose(timeline.run())
    ahead = [1_000_003 * rank for rank in range(timeline.world)]
    timeline.clock = [ClockMeta(offset_ns=-shift) for shift in ahead]
    for row in timeline.rows:
        row["start"] += ahead[row["rank"]]
        row["end"] += ahead[row["rank"]]
    shifted = decompose(timeline.run())
    pd.testing.assert_frame_equal(plain.ledger, shifted.ledger)
    pd.testing.assert_frame_equal(plain.matches.parts, shifted.matches.parts)
    for rank in plain.windows:
        moved = plain.segments(rank)
        moved[["start_ns", "end_ns"]] += ahead[rank]
        pd.testing.assert_frame_equal(moved, shifted.segments(rank))


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_stretched_trace_has_a_stretched_ledger(seed: int) -> None:
    """All times ten million times longer (and far from 0): every figure grows by just that, nothing is rounded."""
    timeline = random_timeline(seed)
    plain = decompose(timeline.run()).ledger
    timeline.origin = 1_700_000_000_000_000_000
    for row in timeline.rows:
        row["start"] *= 10_000_019
        row["end"] *= 10_000_019
    stretched = decompose(timeline.run()).ledger
    columns = [name for name in plain.columns if name.endswith("_ns")]
    pd.testing.assert_frame_equal(plain[columns] * 10_000_019, stretched[columns])
