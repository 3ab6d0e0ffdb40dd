"""Which parts belong to one communication: the three keys of docs/definitions.md, best first.

1. `seq`: the process group, point to point (with its ends) or not, and the recorded sequence number;
2. `order`: the group, operation, type and element count, and the place in the order of those, found by sliding and
   verified by time, for a recording may begin later on one rank than on another;
3. `inferred`: no group is known: the operation and the stream's role, ends that agree, intervals that overlap.

Never the order of a name alone: what cannot be verified stays unmatched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.ledger.parts import Parts

METHODS = ("seq", "order", "inferred")
SEQ, ORDER, INFERRED = range(3)

TOLERANCE_NS = 500_000
"""Key 3: the ends of one operation on two ranks agree within this."""

SEARCH_SHIFTS = 64
"""Key 2 without overlap in time (clocks apart): how far one rank's recording may begin after another's, in operations."""


PairUp = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(starts, ends, other starts, other ends) of two sequences -> places of the pairs in each."""


@dataclass
class Matched:
    """Of each part: `match` (-1: alone with its key) and `method` (index into METHODS, -1 for none)."""

    match: np.ndarray
    method: np.ndarray

    @classmethod
    def nothing(cls, size: int) -> Matched:
        return cls(np.full(size, -1, np.int64), np.full(size, -1, np.int64))

    def add(self, rows: np.ndarray, label: np.ndarray, method: int) -> None:
        """Rows with one label (any integers) are one communication."""
        _, dense = np.unique(label, return_inverse=True)
        self.match[rows] = dense + (int(self.match.max(initial=-1)) + 1)
        self.method[rows] = method


def code_columns(columns: list[np.ndarray]) -> np.ndarray:
    """One integer a row: equal where all columns are equal. Order preserving (the first column counts most)."""
    code = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        low = int(column.min(initial=0))
        span = int(column.max(initial=0)) - low + 1
        if size * span >= 1 << 62:
            _, code = np.unique(code, return_inverse=True)
            size = int(code.max(initial=0)) + 1
        if size * span >= 1 << 62:
            _, column = np.unique(column, return_inverse=True)
            low, span = 0, int(column.max(initial=0)) + 1
        code = code * span + (column.astype(np.int64) - low)
        size *= span
    return code


def occurrence(code: np.ndarray, order: np.ndarray) -> np.ndarray:
    """How many rows of the same code come before each row in `order` (a permutation, by time)."""
    by_code = order[np.argsort(code[order], kind="stable")]
    sorted_code = code[by_code]
    first = (
        np.flatnonzero(np.concatenate(([True], sorted_code[1:] != sorted_code[:-1]))) if len(code) else np.empty(0, int)
    )
    count = np.diff(np.append(first, len(code)))
    answer = np.empty(len(code), np.int64)
    answer[by_code] = np.arange(len(code)) - np.repeat(first, count)
    return answer


# -- key 1 -------------------------------------------------------------------------------------------------------------


def by_sequence(parts: Parts, matched: Matched) -> None:
    """Key 1. A number that comes twice on a rank (a counter that began anew) is told apart by its order."""
    rows = np.flatnonzero((parts["group"] >= 0) & (parts["seq"] >= 0))
    if len(rows) == 0:
        return
    code = code_columns(
        [
            parts["group"][rows],
            parts.point_to_point[rows],
            parts["source"][rows],
            parts["destination"][rows],
            parts["seq"][rows],
        ]
    )
    again = occurrence(code_columns([code, parts["rank"][rows]]), np.argsort(parts["arrival"][rows], kind="stable"))
    matched.add(rows, code_columns([code, again]) if again.any() else code, SEQ)


def doubt_messages(parts: Parts, matched: Matched) -> None:
    """Undo key 1 for messages that it left alone or paired without any overlap in time: they go on to key 2.

    Other writers number a rank's point to point of a whole group, so that the two ends may count differently.
    """
    rows = np.flatnonzero(parts.point_to_point & (matched.match >= 0))
    if len(rows) == 0:
        return
    _, inverse, count = np.unique(matched.match[rows], return_inverse=True, return_counts=True)
    late = np.full(len(count), np.iinfo(np.int64).min)
    early = np.full(len(count), np.iinfo(np.int64).max)
    np.maximum.at(late, inverse, parts["arrival"][rows])
    np.minimum.at(early, inverse, parts["end"][rows])
    doubtful = rows[((count < 2) | (late >= early))[inverse]]
    matched.match[doubtful] = matched.method[doubtful] = -1


# -- key 2 -------------------------------------------------------------------------------------------------------------


def by_order(parts: Parts, matched: Matched) -> None:
    """Key 2, for parts of a known group without a sequence number."""
    rows = np.flatnonzero((parts["group"] >= 0) & (matched.match < 0))
    if len(rows) == 0:
        return
    operation = np.where(parts["collective"][rows] >= 0, parts["collective"][rows], 1000 + parts["kernel"][rows])
    facing = np.where(
        parts.point_to_point[rows] & (parts["source"][rows] >= 0), 999, operation
    )  # a send meets a receive
    size = np.where(facing == 999, parts["bytes"][rows], parts["in_elements"][rows])
    code = code_columns(
        [parts["group"][rows], facing, parts["source"][rows], parts["destination"][rows], parts["dtype"][rows], size]
    )
    for members in _classes(code):
        _align(parts, rows[members], matched, ORDER, shifted_pairs)


def _classes(code: np.ndarray) -> list[np.ndarray]:
    """Row numbers of each code."""
    order = np.argsort(code, kind="stable")
    edges = np.flatnonzero(code[order][1:] != code[order][:-1]) + 1
    return np.split(order, edges)


def _align(parts: Parts, rows: np.ndarray, matched: Matched, method: int, pair_up: PairUp) -> None:
    """Match the sequences of one class rank by rank against a pivot: the rank with the most of them still alone.

    Every row is in the end matched, at least with itself.
    """
    rows = rows[np.lexsort((parts["arrival"][rows], parts["rank"][rows]))]
    label = np.full(len(rows), -1, np.int64)
    edges = np.flatnonzero(np.diff(parts["rank"][rows])) + 1
    left = np.split(np.arange(len(rows)), edges)  # of each rank: what is still alone, by arrival
    while left:
        mine = left.pop(int(np.argmax([len(one) for one in left])))
        label[mine] = mine
        rest = []
        for theirs in left:
            i, j = pair_up(*(parts[name][rows[side]] for side in (mine, theirs) for name in ("arrival", "end")))
            label[theirs[j]] = label[mine[i]]
            rest.append(np.delete(theirs, j))
        left = [one for one in rest if len(one)]
    matched.add(rows, label, method)


def shifted_pairs(
    start: np.ndarray, end: np.ndarray, other_start: np.ndarray, other_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs `(i, i - shift)` of two sequences in order, at the one shift that time speaks for; only verified pairs.

    Sequences that overlap in time vote for their shift. Where nothing overlaps (clocks apart) the shift is taken at
    which the differences of the ends spread least, and pairs far from their median are left out.
    """
    first = np.searchsorted(end, other_start, "right")
    touching = (first < len(start)) & (start[np.minimum(first, len(start) - 1)] < other_end)
    if touching.any():
        votes = first[touching] - np.flatnonzero(touching)
        values, count = np.unique(votes, return_counts=True)
        best = values[np.lexsort((np.abs(values), -count))[0]]
        i, j = _at_shift(int(best), len(start), len(other_start))
        keep = (start[i] < other_end[j]) & (other_start[j] < end[i])
        return i[keep], j[keep]
    return _steadiest(end, other_end)


def _at_shift(shift: int, size: int, other: int) -> tuple[np.ndarray, np.ndarray]:
    j = np.arange(max(0, -shift), min(other, size - shift))
    return j + shift, j


def _steadiest(end: np.ndarray, other_end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shift with the steadiest difference of ends; three pairs at least, else no evidence."""
    best = (np.inf, 0, np.empty(0, np.int64), np.empty(0, np.int64))
    for shift in range(-SEARCH_SHIFTS, SEARCH_SHIFTS + 1):
        i, j = _at_shift(shift, len(end), len(other_end))
        if len(i) < max(3, min(len(end), len(other_end)) // 2):
            continue
        difference = end[i] - other_end[j]
        spread = np.abs(difference - np.median(difference))
        keep = spread <= TOLERANCE_NS
        score = (float(np.median(spread)), abs(shift))
        if keep.sum() >= 3 and score < best[:2]:
            best = (*score, i[keep], j[keep])
    return best[2], best[3]


# -- key 3 -------------------------------------------------------------------------------------------------------------


def by_time(parts: Parts, matched: Matched, allowed: np.ndarray) -> None:
    """Key 3, for parts without a group whose rank is in `allowed` (bool a rank place)."""
    rows = np.flatnonzero((parts["group"] < 0) & (matched.match < 0) & allowed[parts["rank"]])
    if len(rows) == 0:
        return
    kinds = [_kind_of_kernel(text) for text in parts.texts]
    _, kernel_kind = np.unique([*kinds, ""], return_inverse=True)
    operation = np.where(
        parts["collective"][rows] >= 0, parts["collective"][rows], 1000 + kernel_kind[parts["kernel"][rows]]
    )
    code = code_columns([operation, _stream_role(parts)[rows]])
    for members in _classes(code):
        _align(parts, rows[members], matched, INFERRED, nearest_pairs)


def _kind_of_kernel(name: str) -> str:
    """A communication kernel's name without template, protocol and type: what it does."""
    found = re.match(r"(?:void )?([A-Za-z]+(?:Dev)?Kernel_[A-Za-z]+)", name)
    return found.group(1) if found else name


def _stream_role(parts: Parts) -> np.ndarray:
    """Of each part: its stream's place among the communication streams of its rank, by first use."""
    code = code_columns([parts["rank"], parts["lane"]])
    streams, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    order = np.lexsort((parts["arrival"][first], parts["rank"][first]))
    ranks = parts["rank"][first][order]
    begin = np.searchsorted(ranks, ranks, "left")
    role = np.empty(len(streams), np.int64)
    role[order] = np.arange(len(streams)) - begin
    return role[inverse]


def nearest_pairs(
    start: np.ndarray, end: np.ndarray, other_start: np.ndarray, other_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of mutually nearest ends, within TOLERANCE_NS, whose intervals overlap: unique and order preserving."""
    by_end, other_by_end = np.argsort(end, kind="stable"), np.argsort(other_end, kind="stable")
    mine, theirs = end[by_end], other_end[other_by_end]
    to, back = _nearest(mine, theirs), _nearest(theirs, mine)
    i = np.flatnonzero(back[to] == np.arange(len(mine)))
    i, j = by_end[i], other_by_end[to[i]]
    keep = (np.abs(end[i] - other_end[j]) <= TOLERANCE_NS) & (start[i] < other_end[j]) & (other_start[j] < end[i])
    return i[keep], j[keep]


def _nearest(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Place in `among` (sorted) of the value nearest to each of `values`; the earlier one of two equally near."""
    right = np.clip(np.searchsorted(among, values, "left"), 0, len(among) - 1)
    left = np.maximum(right - 1, 0)
    return np.where(np.abs(values - among[left]) <= np.abs(among[right] - values), left, right)
