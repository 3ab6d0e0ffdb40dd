"""Every pair of ways to run in parallel, and which equality case of which file shows that it is right.

A *way* is an axis and how it works: plain data parallelism and each level of ZeRO are ways of dp, each mode a way of cp, each
schedule a way of pp. `pairs()` lists every two ways of different axes; a case covers the pair whose ways are exactly its
own. What a pair needs beside itself (experts lie over dp where the other way is a pipeline) is no way of the case.
`table()` is the matrix of docs/numerics.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from equality import CLASSIC, GROUPED, TIED, TRAIN, Case

from stepscope.parallel_runtime.config import ParallelConfig

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "dp": {"dp": {"dp": 2}, **{f"zero{level}": {"dp": 2, "zero": level} for level in (1, 2, 3)}},
    "tp": {"tp": {"tp": 2}, "sp": {"tp": 2, "sp": True}},
    "cp": {f"cp {mode}": {"cp": 2, "cp_mode": mode} for mode in ("ring", "ulysses", "allgather")},
    "ep": {"ep": {"ep": 2}},
    "pp": {
        **{name: {"pp": 2, "schedule": name} for name in ("naive", "gpipe", "1f1b")},
        "interleaved": {"pp": 2, "schedule": "interleaved", "chunks": 2},
        "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    },
}
"""Axis -> way -> the fields of a ParallelConfig that make it."""

AXIS_OF = {way: axis for axis, ways in WAYS.items() for way in ways}

Pair = frozenset[str]

FEW = replace(TRAIN, microbatches=2)
SMALL = {"seq": 8, "vocab": 32}
MODELS = (
    replace(GROUPED, **SMALL),
    replace(CLASSIC, **SMALL),
    replace(TIED, kv_heads=2, **SMALL),
)  # no bias, every bias, a tied table
WIDE = {"hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 40}  # key and value heads for tp 2 and two ranks of ulysses
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn": 20, "balance_rate": 0.05, "aux_weight": 0.5}
BALANCES = ("bias", "aux", "capacity")


def ways_of(parallel: ParallelConfig) -> Pair:
    """The ways that a layout uses."""
    ways = set()
    if parallel.zero:
        ways.add(f"zero{parallel.zero}")
    elif parallel.dp > 1:
        ways.add("dp")
    if parallel.tp > 1:
        ways.add("sp" if parallel.sp else "tp")
    if parallel.cp > 1:
        ways.add(f"cp {parallel.cp_mode}")
    if parallel.ep > 1:
        ways.add("ep")
    if parallel.pp > 1:
        ways.add(parallel.schedule)
    if "ep" in ways and "dp" in ways and {AXIS_OF[way] for way in ways} == {"dp", "ep", "pp"}:
        ways.remove("dp")  # experts lie over the ranks of one stage: with a pipeline alone there is but one
    return frozenset(ways)


def pairs() -> list[Pair]:
    """Every two ways of different axes, in the order of WAYS."""
    return [
        frozenset((one, other)) for one, other in itertools.combinations(AXIS_OF, 2) if AXIS_OF[one] != AXIS_OF[other]
    ]


def case_of(pair: Pair) -> Case:
    """The smallest layout of a pair, two ranks an axis; models alternate, so that each meets each axis."""
    one, other = sorted(pair, key=list(AXIS_OF).index)
    fields = WAYS[AXIS_OF[one]][one] | WAYS[AXIS_OF[other]][other]
    if {AXIS_OF[one], AXIS_OF[other]} == {"ep", "pp"}:
        fields = {"dp": 2} | fields
    number = pairs().index(pair)
    model = MODELS[number % len(MODELS)]
    if {"cp ulysses"} < pair and fields.get("tp"):
        model = replace(model, **WIDE)
    if "ep" in pair:
        model = replace(model, **EXPERTS, balance=BALANCES[number % len(BALANCES)])
    if "pp" not in (AXIS_OF[one], AXIS_OF[other]):
        model = replace(model, layers=2)
    train = replace(FEW, microbatches=4) if AXIS_OF[other] == "pp" else FEW
    return Case(f"{one} {other}", ParallelConfig(**fields), model, train)


def covered(files: Mapping[str, Iterable[Case]]) -> dict[Pair, str]:
    """Pair (or a single way) -> the letter of the first file that has a case of exactly it."""
    found: dict[Pair, str] = {}
    for letter, cases in files.items():
        for case in cases:
            found.setdefault(ways_of(case.parallel), letter)
    return found


def table(found: Mapping[Pair, str]) -> str:
    """The matrix in Markdown: rows and columns are ways, cells the letters of `found`; ways of one axis exclude each other."""
    columns = [way for way in AXIS_OF if AXIS_OF[way] != "dp"]
    lines = ["| | alone | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for row in AXIS_OF:
        cells = [found.get(frozenset((row,)), "–")]  # experts lie over the ranks of another axis
        for column in columns:
            below = list(AXIS_OF).index(column) > list(AXIS_OF).index(row)
            apart = AXIS_OF[column] == AXIS_OF[row]
            cells.append(found.get(frozenset((row, column)), "") if below and not apart else "")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
