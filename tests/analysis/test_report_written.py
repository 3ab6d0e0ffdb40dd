"""The public JSON as text: column by column it says what it says object by object."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import pipeline_run
from random_timelines import number_rows, random_timeline
from timelines import Timeline

from stepscope.analysis.report import analyze, dumps
from stepscope.analysis.report.written import Lists, Numbers, Table, plain

WORDS = st.sampled_from(["", "a", "dp", 'a "quote"', "100 %", "%s", "ü\n", "\ud800"])
ANYTHING = st.one_of(
    WORDS,
    st.integers(-(1 << 70), 1 << 70),
    st.booleans(),
    st.none(),
    st.floats(),
    st.lists(st.one_of(st.integers(), st.none(), WORDS), max_size=3),
    st.tuples(WORDS, WORDS),
    st.tuples(st.integers(0, 1), st.booleans(), WORDS),
    st.sampled_from([np.int64(7), np.float64("nan"), pd.NA, np.bool_(True)]),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Columns of every kind that reports have, and names with all signs."""
    size = draw(st.integers(0, 5))

    def line(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    anything = np.empty(size, object)
    anything[:] = line(ANYTHING)
    lists = line(st.lists(st.integers(-1, 1 << 60), min_size=1, max_size=3))
    first = np.cumsum([0, *map(len, lists)])[:-1].astype(np.int64)
    flat = np.array([one for each in lists for one in each], np.int64)
    return Table(
        {
            "whole": pd.Series(line(st.integers(-(1 << 62), 1 << 62)), dtype="int64"),
            "gaps": pd.Series(line(st.one_of(st.integers(0, 9), st.none())), dtype="Int64"),
            "float %": pd.Series(line(st.floats()), dtype="float64"),
            "yes": np.array(line(st.booleans()), bool),
            'word "x"': pd.Series(line(WORDS), dtype="object"),
            "said": pd.Series(line(st.sampled_from(["a", "b", None])), dtype="object"),
            "steps": pd.Series(line(st.integers(0, 9)), dtype="object"),
            "mixed": pd.Series(anything, dtype="object"),
            "known": Numbers(np.array(line(st.integers(-1, 9)), np.int64)),
            "lists": Lists(flat, first),
            "missing": Lists(flat, first, missing=True),
        },
        ("whole", "gaps", "float %", "yes", 'word "x"', "said", "steps", "mixed", "known", "lists", "missing"),
    )


@settings(max_examples=300, deadline=None)
@given(tables())
def test_rows_as_text_are_the_objects(table: Table) -> None:
    assert table.rows() == [json.dumps(row, allow_nan=False) for row in table.records()]
    nested = {"a": table, "b": {"c": table, "d": 1}, "e": [1, 2], "f": {}, "g": []}
    assert dumps(nested) == dumps(plain(nested))


def test_a_table_by_hand() -> None:
    table = Table({"a": np.array([1, 2]), "b": Lists(np.array([5, -1, 7]), np.array([0, 2]), missing=True)}, ("a", "b"))
    assert table.records() == [{"a": 1, "b": [5, None]}, {"a": 2, "b": [7]}]
    assert table.rows() == ['{"a": 1, "b": [5, null]}', '{"a": 2, "b": [7]}']
    assert dumps({"t": table}) == '{\n "t": [\n  {"a": 1, "b": [5, null]},\n  {"a": 2, "b": [7]}\n ]\n}\n'


@given(st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_lists_in_another_order(lists: list[list[int]], dice: Any) -> None:
    first = np.cumsum([0, *map(len, lists)])[:-1]
    column = Lists(np.array([one for each in lists for one in each]), first)
    order = list(range(len(lists)))
    dice.shuffle(order)
    assert column[np.array(order)].objects() == [lists[at] for at in order]


@pytest.mark.parametrize("seed", range(40))
def test_a_report_as_text_is_its_objects_as_text(seed: int) -> None:
    line = random_timeline(seed)
    number_rows(line)
    report = analyze(line.run())
    assert report.json_text() == dumps(report.to_json())


def test_a_pipeline_and_nothing_at_all() -> None:
    for run in (pipeline_run(4, 8, 2, slow={1: 4}), Timeline(world=1).run()):
        report = analyze(run)
        assert report.json_text() == dumps(report.to_json())
        assert len(report.collectives) == len(report.to_json()["collectives"])
