"""What one rank's rows are kept in: lookups by id, membership, columns that grow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.ledger import rows
from stepscope.analysis.ledger.rows import Lookup, Members, _by_id, _Growing, looked_up

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "dp2_pp2_1f1b"

IDS = st.one_of(
    st.integers(0, 30),
    st.integers(0, 10**6),
    st.integers(2**40, 2**40 + 50),
    st.sampled_from([-(2**63) + 1, -16, 2**63 - 1]),
)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SLICE", 4)


@given(st.lists(IDS, max_size=40), st.lists(IDS, max_size=40))
def test_lookup_finds_the_first_of_equal_ids(ids: list[int], keys: list[int]) -> None:
    values = np.arange(100, 100 + len(ids))
    expected = [100 + ids.index(key) if key in ids else -1 for key in keys]
    table, wanted = np.array(ids, np.int64), np.array(keys, np.int64)
    assert Lookup(table, values)(wanted).tolist() == expected
    assert looked_up(wanted, table, values).tolist() == expected


@given(st.lists(st.one_of(st.just(-1), IDS), max_size=60), st.lists(IDS, max_size=40))
def test_members_are_those_that_are_there(ids: list[int], asked: list[int]) -> None:
    found = Members(np.array(ids, np.int64))(np.array(asked, np.int64)) if any(one != -1 for one in ids) else []
    assert list(found) == ([one in ids for one in asked] if any(one != -1 for one in ids) else [])


@given(st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=9), min_size=1, max_size=6))
def test_columns_grow_in_the_larger_type(parts: list[list[int]]) -> None:
    growing = _Growing()
    for part in parts:
        least = np.int8 if all(-128 <= one < 128 for one in part) else np.int64
        growing.append({"id": np.array(part, least), "even": np.array([one % 2 == 0 for one in part], bool)})
        assert growing.so_far("id").tolist()[len(growing.so_far("id")) - len(part) :] == part
    whole = growing.whole()
    assert whole["id"].tolist() == [one for part in parts for one in part]
    assert whole["even"].dtype == bool and whole["even"].tolist() == [one % 2 == 0 for part in parts for one in part]


def test_calls_of_one_id_stay_in_their_order() -> None:
    calls = {"launch_id": np.array([5, 3, 5, 3]), "start": np.array([10, 20, 30, 40])}
    assert {name: values.tolist() for name, values in _by_id(calls).items()} == {
        "launch_id": [3, 3, 5, 5],
        "start": [20, 40, 10, 30],
    }


def test_no_frame_is_made_to_read_and_to_reckon(tmp_path: Path) -> None:
    """Importing pandas costs as much as reading half a million events, importing numba more: neither unless asked for."""
    program = """
import sys
from pathlib import Path
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ledger.decompose import decompose
from stepscope.analysis.ledger.overlap import overlap_columns
decomposition = decompose(open_run(sys.argv[1]))
assert decomposition.columns["step_ns"].sum() > 0 and len(overlap_columns(decomposition)["step"])
print([name for name in ("pandas", "numba", "scipy") if name in sys.modules])
print(len(decomposition.ledger))
"""
    run = shutil.copytree(SAMPLE, tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True)
    names, rows_of_ledger = done.stdout.split("\n")[:2]
    assert names == "[]" and int(rows_of_ledger) > 0
