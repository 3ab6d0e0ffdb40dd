"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis import units


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (1, "1 ns"),
        (999, "999 ns"),
        (1000, "1 µs"),
        (999_949, "999.9 µs"),
        (999_950, "1 ms"),  # rounds up into the next unit, never "1000 µs"
        (12_345_678, "12.35 ms"),
        (1_204_000_000, "1.204 s"),
        (987_654_000_000_000, "987700 s"),
        (-340_000, "-340 µs"),
        (0.25, "0.25 ns"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_durations(ns: float | None, text: str) -> None:
    assert units.duration(ns) == text


def test_one_is_not_many() -> None:
    assert [units.counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [units.counted(n, "row has", "rows have") for n in (1, 2)] == ["1 row has", "2 rows have"]


def test_signs_and_shares() -> None:
    assert units.signed_duration(1_200_000) == "+1.2 ms"
    assert units.signed_duration(-340_000) == "−340 µs"
    assert units.signed_duration(0) == "0 ns"
    assert units.signed_duration(None) == "–"
    assert units.share(9 / 33) == "27.3 %"
    assert units.share(0) == "0 %"
    assert units.share(None) == "–"
    assert units.signed_share(-0.031) == "−3.1 %"
    assert units.signed_share(0.414) == "+41.4 %"
    assert units.size(4_194_304) == "4.194 MB"
    assert units.count(21_630.4) == "21.63 k"
    assert units.count(None) == "–"


@settings(deadline=None)
@given(st.floats(1e-3, 1e18, allow_nan=False))
def test_at_most_four_significant_digits_and_close_to_the_value(ns: float) -> None:
    number, unit = units.duration(ns).split(" ")
    assert len(number.replace(".", "").lstrip("0").rstrip("0")) <= 4
    factor = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert math.isclose(float(number) * factor, ns, rel_tol=5.1e-4)
    assert unit == "s" or float(number) < 1000


def test_a_column_has_one_unit_and_tells_zero_from_little() -> None:
    scale = units.time_scale([12_345_678, 3, None, math.nan])
    assert (scale.unit, scale(12_345_678), scale(3), scale(0), scale(None)) == ("ms", "12.35", "0.00", "0", "–")
    assert units.time_scale([]).unit == "ns"
