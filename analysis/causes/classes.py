"""Time by operation class: compute by phase, communication and waits by axis and collective (definitions.md, Words).

Each class is measured inside its term of the ledger, so that the classes of a term sum to it exactly. Names read
`compute forward`, `visible_comm dp all_reduce`, `imbalance dp all_reduce`; what could not be split into waiting and
transferring is a class of its own, `visible_comm dp all_reduce (unsplit)`, on which no finding rests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.columns import places
from stepscope.analysis.causes.summary import Means, step_key
from stepscope.analysis.intervals import Intervals
from stepscope.analysis.ledger.decompose import Decomposition, RankTime, step_column
from stepscope.analysis.run import Run
from stepscope.tracer.schema import AXES, COLLECTIVES, KINDS, PHASES, code_of

COLUMNS = ("rank", "step", "class", "ns")

CLASS_MEAN_COLUMNS = ("term", "phase", "axis", "collective", "unsplit", "ns_per_step", "share")
"""One row a class: `phase` of computations, `axis` and `collective` of communication and waits; empty where unknown."""

UNKNOWN_AXIS, UNKNOWN_COLLECTIVE = "unknown axis", "communication"
UNSPLIT = " (unsplit)"


def operation_classes(run: Run, decomposition: Decomposition) -> pd.DataFrame:
    """One row a (rank, step, class) that took time: COLUMNS, ns."""
    place: dict[str, int] = {}  # of each class among all of them
    pieces: list[tuple[np.ndarray, ...]] = []
    named = part_names(decomposition) if decomposition.matches.table is not None else None
    for rank, time in decomposition.time.items():
        windows = decomposition.windows[rank]
        steps = step_column(windows.steps)
        for name, where in class_intervals(run, decomposition, rank, time, named):
            measured = intervals.covered(where, windows.start_ns, windows.end_ns)
            at = np.flatnonzero(measured)
            code = place.setdefault(name, len(place))
            pieces.append((np.full(len(at), rank), steps[at], np.full(len(at), code), measured[at]))
    if not pieces:
        pieces.append((np.empty(0, np.int64), step_column([]), np.empty(0, np.int64), np.empty(0, np.int64)))
    ranks, step, which, ns = (np.concatenate(column) for column in zip(*pieces, strict=True))
    texts = pd.Series(list(place), dtype=str).array.take(which)  # few words become text once, not once a row
    return pd.DataFrame({"rank": ranks, "step": pd.Series(step.tolist()), "class": texts, "ns": ns})


def class_steps(classes: pd.DataFrame, mean: Means) -> list[dict[str, Fraction]]:
    """Per counted step, the mean over the ranks that count in it of every class: name -> ns."""
    total: dict[int | str, Counter[str]] = {step: Counter() for step in mean.steps}
    nobody: frozenset[int] = frozenset()
    columns = (classes[name].tolist() for name in COLUMNS)
    for rank, step, name, ns in zip(*columns, strict=True):
        if rank in mean.counted.get(step, nobody):
            total[step][name] += ns
    return [{name: Fraction(ns, len(mean.counted[step])) for name, ns in total[step].items()} for step in mean.steps]


def _class_totals(classes: pd.DataFrame, mean: Means) -> dict[str, Fraction]:
    """The sum over counted steps of `class_steps`, exactly; the classes of the first step first, each in the rows' order."""
    code, names = pd.factorize(classes["class"])
    step, labels = pd.factorize(classes["step"])
    place = {label: at for at, label in enumerate(mean.steps)}
    step = np.array([place.get(step_key(label), -1) for label in labels], np.int64)[step]
    counted = np.array([[rank in mean.counted[label] for rank in mean.ranks] for label in mean.steps], bool)
    counted = counted.reshape(len(mean.steps), len(mean.ranks))
    rank = places(classes["rank"].to_numpy(np.int64), np.array(mean.ranks, np.int64))
    rows = np.flatnonzero((step >= 0) & (rank >= 0))
    rows = rows[counted[step[rows], rank[rows]]]
    rows = rows[np.argsort(step[rows], kind="stable")]
    code, ranks = code[rows], counted.sum(axis=1)[step[rows]]
    found = {str(names[one]): Fraction(0) for one in code[np.sort(np.unique(code, return_index=True)[1])].tolist()}
    for number in np.unique(ranks).tolist():  # ranks that count in a step: mostly all of them in each
        of, total = ranks == number, np.zeros(len(names), np.int64)
        np.add.at(total, code[of], classes["ns"].to_numpy(np.int64)[rows[of]])
        for one in np.flatnonzero(total).tolist():
            found[str(names[one])] += Fraction(int(total[one]), number)
    return found


def class_means(classes: pd.DataFrame, mean: Means) -> pd.DataFrame:
    """CLASS_MEAN_COLUMNS of the counted ranks and steps, the longest first. `share`: of the mean step; they sum to those
    of the terms that they are part of (memory copies and idle have no classes)."""
    total = _class_totals(classes, mean)
    found = [(name, float(ns / len(mean.steps))) for name, ns in total.items()]
    found.sort(key=lambda one: -one[1])
    step = float(mean.step_ns or 0)
    rows = [(*taken_apart(name), ns, ns / step if step else np.nan) for name, ns in found]
    return pd.DataFrame(rows, columns=list(CLASS_MEAN_COLUMNS))


def taken_apart(name: str) -> tuple[str, str, str, str, bool]:
    """(term, phase, axis, collective, unsplit) of a class."""
    term, rest = name.split(" ", 1)
    if term == "compute":
        return term, rest, "", "", False
    axis, collective = rest.removesuffix(UNSPLIT).rsplit(" ", 1)
    return (
        term,
        "",
        "" if axis == UNKNOWN_AXIS else axis,
        "" if collective == UNKNOWN_COLLECTIVE else collective,
        rest.endswith(UNSPLIT),
    )


def class_intervals(
    run: Run, decomposition: Decomposition, rank: int, time: RankTime, named: Named | None = None
) -> Iterator[tuple[str, Intervals]]:
    """The classes of one rank with their instants (own clock); disjoint. `named`: of part_names, where it is at hand."""
    for phase, where in phase_intervals(run, rank, time.terms["compute"]).items():
        yield f"compute {phase}", where
    table, waits = decomposition.matches.table, decomposition.matches.waits
    if table is None or waits is None:
        return
    mine = table.of_rank(rank)
    names, code = part_names(decomposition) if named is None else named
    shift = (table["arrival_own"] - table["arrival"])[mine]
    start, end = waits.wait_end[mine] + shift, table["end_own"][mine]
    yield from _by_part((names, code[mine]), start, end, waits.split[mine], time.terms["visible_comm"])
    charged = time.charged
    blockers = code[charged.part]
    for term, chosen in (("bubble", charged.bubble), ("imbalance", ~charged.bubble)):
        for one in np.unique(blockers[chosen]).tolist():
            of = chosen & (blockers == one)
            yield f"{term} {names[one]}", intervals.union(charged.start[of], charged.end[of])


def _by_part(
    named: Named, start: np.ndarray, end: np.ndarray, split: np.ndarray, visible: Intervals
) -> Iterator[tuple[str, Intervals]]:
    """Visible communication by class; instants that several share go to what could be split, then by name."""
    left = visible
    names, code = named
    for sure in (True, False):
        for one in np.unique(code[split == sure]).tolist():
            of = (code == one) & (split == sure)
            taken = intervals.intersect(left, intervals.union(start[of], end[of]))
            left = intervals.subtract(left, taken)
            yield f"visible_comm {names[one]}{'' if sure else UNSPLIT}", taken


Named = tuple[list[str], np.ndarray]
"""Names in order, and of each part the place of its own."""


def part_names(decomposition: Decomposition) -> Named:
    """Of each part of the matched table: `axis collective` (`unknown` where the trace does not tell)."""
    table = decomposition.matches.table
    assert table is not None
    count = len(COLLECTIVES) + 1
    code = (table["axis"].astype(np.int64) + 1) * count + table["collective"] + 1
    codes, which = np.unique(code, return_inverse=True)
    axes, collectives = [UNKNOWN_AXIS, *AXES], [UNKNOWN_COLLECTIVE, *COLLECTIVES]
    names = [f"{axes[one // count]} {collectives[one % count]}" for one in codes.tolist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    return [names[one] for one in order], np.argsort(order)[which]


def phase_intervals(
    run: Run, rank: int, compute: Intervals, window: tuple[int, int] | None = None
) -> dict[str, Intervals]:
    """The rank's compute by phase: disjoint, together `compute`. Where phases overlap, the first of PHASES counts.

    `window`: only the rows that touch [start, end) are looked at; `compute` must lie inside it.
    """
    columns = run.columns(rank, "start_ns", "dur_ns", "kind", "phase")
    chosen = columns["kind"] == code_of(KINDS, "compute")
    start, phase = columns["start_ns"][chosen], columns["phase"][chosen]
    end = start + columns["dur_ns"][chosen]
    if window is not None:
        near = (start < window[1]) & (end > window[0])
        start, end, phase = start[near], end[near], phase[near]
    left, found = compute, {}
    alone = window is None and bool((start[1:] >= end[:-1]).all())  # no two rows at once: nothing to take apart
    for code, name in enumerate(PHASES[:-1]):
        of = phase == code
        if of.any():
            mine = intervals.union(start[of], end[of])
            found[name] = mine if alone else intervals.intersect(left, mine)
            left = left if alone else intervals.subtract(left, mine)
    if alone:
        rest = (phase < 0) | (phase >= len(PHASES) - 1)
        left = intervals.union(start[rest], end[rest])
    if len(left[0]):
        found[PHASES[-1]] = left
    return found


def picture(run: Run, decomposition: Decomposition, step: int | str, most_ranks: int = 64) -> pd.DataFrame:
    """One step as drawn: rank, start_ns, end_ns (common clock), what (a term, compute told apart by phase)."""
    pieces: list[tuple[np.ndarray, ...]] = []
    for rank in list(decomposition.time)[:most_ranks]:
        time, windows = decomposition.time[rank], decomposition.windows[rank]
        if step not in windows.steps:
            continue
        at = windows.steps.index(step)
        low, high = int(windows.start_ns[at]), int(windows.end_ns[at])
        ahead = ahead_at(decomposition, rank, low)
        compute = intervals.clip(time.terms["compute"], low, high)
        parts = {**phase_intervals(run, rank, compute, (low, high)), **time.terms}
        parts.pop("compute")
        for what, where in parts.items():
            what = "compute" if what == PHASES[-1] and set(parts) & set(PHASES[:-1]) == set() else what
            start, end = intervals.clip(where, low, high)
            pieces.append((np.full(len(start), rank), start - ahead, end - ahead, np.full(len(start), what, object)))
    if not pieces:
        return pd.DataFrame(columns=["rank", "start_ns", "end_ns", "what"])
    ranks, start, end, word = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.lexsort((start, ranks))
    return pd.DataFrame({"rank": ranks[order], "start_ns": start[order], "end_ns": end[order], "what": word[order]})


def ahead_of(decomposition: Decomposition, rank: int, instants: np.ndarray) -> np.ndarray:
    """How far the rank's clock is ahead of the common one at instants of its own, ns."""
    matches = decomposition.matches
    if matches.clock is None or matches.table is None:
        return np.zeros(len(instants), np.int64)
    return matches.clock.ahead(np.full(len(instants), matches.table.ranks.index(rank)), instants)


def ahead_at(decomposition: Decomposition, rank: int, instant: int) -> int:
    """The same at one instant."""
    return int(ahead_of(decomposition, rank, np.array([instant]))[0])
