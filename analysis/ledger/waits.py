"""Waiting and transferring of every part, the last arriver and the straggler (docs/definitions.md, Waiting).

A part of rank r arrives at a and ends at e; A is the last arrival among those it depends on, itself included:
it waits `[a, min(A, e))` and transfers the rest. Whom it depends on is decided by what it does:

* most collectives are a clique: everybody depends on everybody;
* the rest are edges: a receive on its send, a broadcast leaf on its root, a reduce root on its leaves, a ring shift on
  the rank that it receives from. Where a part only gives (a send, a broadcast root, a reduce leaf, the sending half of a
  ring shift), a partner can have held it only if it arrived before this part's own end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.analysis.ledger.keys import Matched, code_columns
from stepscope.analysis.ledger.parts import RECEIVE, RING, SEND, Parts
from stepscope.tracer.schema import COLLECTIVES, code_of

GIVES_FROM_ROOT = [code_of(COLLECTIVES, name) for name in ("broadcast", "scatter")]
TAKES_TO_ROOT = [code_of(COLLECTIVES, name) for name in ("reduce", "gather")]

LEAST_SAMPLES = 8
"""From this many operations of one (group, kind, bytes) the wait of an unmatched one is estimated."""

QUEUE_GAP_NS = 10_000
"""A device starts a queued kernel within this of the end of the previous one on its stream."""


@dataclass
class Waits:
    """One value a part (same order as Parts), times in the common clock; places are positions in `Parts.ranks`."""

    present: np.ndarray  # ranks that take part and were recorded
    expected: np.ndarray  # ranks that take part
    last_arrival: np.ndarray  # A
    wait_end: np.ndarray  # min(max(A, a), e); the arrival where nothing can be split
    last: np.ndarray  # part that arrived last among those this one depends on, itself if it is the last
    leader: np.ndarray  # place of the last arriver, -1 where the lead is within the clock uncertainty or there is none
    straggler: np.ndarray  # the same after head of line
    violation: np.ndarray  # bool: A after the end of a part that cannot end before it
    estimate: np.ndarray  # estimated wait of an unmatched part, -1 for none

    @property
    def partial(self) -> np.ndarray:
        """Some, not all, of the others were recorded: A is a lower bound."""
        return (self.present > 1) & (self.present < self.expected)

    @property
    def unmatched(self) -> np.ndarray:
        """Nobody else was recorded."""
        return (self.present == 1) & (self.expected > 1)

    @property
    def split(self) -> np.ndarray:
        """Waiting and transferring can be told apart."""
        return self.present >= self.expected


def reckon(parts: Parts, matched: Matched, world_size: int, bound: np.ndarray) -> Waits:
    """Waits of all parts. `bound[place]`: clock uncertainty of each rank, ns."""
    size = len(parts)
    match, arrival, end = matched.match, parts["arrival"], parts["end"]
    present, expected = _participants(parts, match, world_size)
    edges = _edges(parts, match)
    directed = edges.directed
    last, second = _latest_of_cliques(parts, match)
    last_e, second_e = _latest_of_edges(parts, edges, size)
    last, second = np.where(directed, last_e, last), np.where(directed, second_e, second)
    last_arrival = arrival[last]
    wait_end = np.minimum(last_arrival, end)
    leader = _leaders(parts, last, second, bound)
    return Waits(
        present=present,
        expected=expected,
        last_arrival=last_arrival,
        wait_end=wait_end,
        last=last,
        leader=leader,
        straggler=_head_of_line(parts, last, leader),
        violation=last_arrival > end,
        estimate=_estimates(parts, (present == 1) & (expected > 1)),
    )


def _participants(parts: Parts, match: np.ndarray, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How many ranks of each part's communication were recorded, and how many there are."""
    present = np.bincount(match, minlength=1)[match]
    seen = _ranks_seen(parts)
    more = int(world_size > len(parts.ranks))  # of a group of unknown ranks one may then be missing
    sizes = [len(ranks) or seen.get(g, 1) + more for g, ranks in enumerate(parts.groups.ranks)]
    expected = np.array([*sizes, max(world_size, len(parts.ranks))], np.int64)[parts["group"]]
    expected = np.where(parts.point_to_point, np.minimum(expected, 2), expected)
    return present, np.maximum(expected, present)


def _ranks_seen(parts: Parts) -> dict[int, int]:
    """How many ranks have ever used each group."""
    known = parts["group"] >= 0
    pairs = np.unique(code_columns([parts["group"][known], parts["rank"][known]]), return_index=True)[1]
    groups, count = np.unique(parts["group"][known][pairs], return_counts=True)
    return dict(zip(groups.tolist(), count.tolist(), strict=True))


# -- cliques -----------------------------------------------------------------------------------------------------------


def _latest_of_cliques(parts: Parts, match: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each part: the part of its match that arrived last (the lowest rank of equals), and the one before it (-1)."""
    order = np.lexsort((-parts["arrival"], match))  # parts come by rank, and equals stay so
    sorted_match = match[order]
    first = (
        np.flatnonzero(np.concatenate(([True], sorted_match[1:] != sorted_match[:-1])))
        if len(match)
        else np.empty(0, int)
    )
    follower = np.minimum(first + 1, len(match) - 1)
    alone = sorted_match[follower] != sorted_match[first]
    alone |= follower == first
    second = np.where(alone, -1, order[follower])
    return order[first][match], second[match]


# -- edges -------------------------------------------------------------------------------------------------------------


@dataclass
class _Edges:
    """`part` depends on `on`; a `giving` edge counts only if `on` arrived before `part` ended."""

    part: np.ndarray
    on: np.ndarray
    giving: np.ndarray
    directed: np.ndarray  # bool a part: its dependencies are these edges and not its whole match


class _Finder:
    """Finds the part of a rank in a match."""

    def __init__(self, parts: Parts, match: np.ndarray) -> None:
        self.ranks = len(parts.ranks)
        key = match * self.ranks + parts["rank"]
        self.order = np.argsort(key, kind="stable")
        self.keys = key[self.order]

    def find(self, match: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Part, or -1."""
        key = match * self.ranks + place
        at = np.minimum(np.searchsorted(self.keys, key), max(len(self.keys) - 1, 0))
        return np.where((place >= 0) & (self.keys[at] == key), self.order[at], -1)


def _edges(parts: Parts, match: np.ndarray) -> _Edges:
    collective, here = parts["collective"], np.array(parts.ranks, np.int64)[parts["rank"]]
    peer = parts["peer"].astype(np.int64)
    ring = (collective == RING) & (peer >= 0) & (parts["peer_from"] >= 0)
    pair = parts.point_to_point & (parts["source"] >= 0)
    rooted = np.isin(collective, GIVES_FROM_ROOT + TAKES_TO_ROOT) & (peer >= 0)
    directed = ring | pair | rooted
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    if directed.any():
        finder = _Finder(parts, match)
        place = _places(parts)

        def edge(rows: np.ndarray, rank: np.ndarray, giving: np.ndarray) -> None:
            on = finder.find(match[rows], place(rank[rows]))
            keep = on >= 0
            found.append((rows[keep], on[keep], giving[rows][keep]))

        rows = np.flatnonzero(ring)
        edge(rows, parts["peer_from"].astype(np.int64), np.zeros(len(parts), bool))
        edge(rows[(peer != parts["peer_from"])[rows]], peer, np.ones(len(parts), bool))
        edge(
            np.flatnonzero(pair),
            np.where(collective == SEND, parts["destination"], parts["source"]),
            collective != RECEIVE,
        )
        edge(np.flatnonzero(rooted & (here != peer)), peer, np.isin(collective, TAKES_TO_ROOT))
        found.append(_from_roots(match, np.flatnonzero(rooted), here == peer, np.isin(collective, GIVES_FROM_ROOT)))
    columns = [np.concatenate([one[i] for one in found]) if found else np.empty(0, np.int64) for i in range(3)]
    return _Edges(columns[0], columns[1], columns[2].astype(bool), directed)


def _places(parts: Parts):  # type: ignore[no-untyped-def]
    """Function: global ranks -> places in `parts.ranks`, -1 for one that was not recorded."""
    ranks = np.array(parts.ranks, np.int64)

    def place(rank: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(ranks, rank), len(ranks) - 1)
        return np.where(ranks[at] == rank, at, -1)

    return place


def _from_roots(
    match: np.ndarray, rooted: np.ndarray, is_root: np.ndarray, giving: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges from each root to all other parts of its match."""
    rooted = rooted[np.argsort(match[rooted], kind="stable")]
    members = match[rooted]
    roots = rooted[is_root[rooted]]
    low = np.searchsorted(members, match[roots], "left")
    count = np.searchsorted(members, match[roots], "right") - low
    part = np.repeat(roots, count)
    on = rooted[np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)]
    other = part != on
    return part[other], on[other], giving[part[other]]


def _latest_of_edges(parts: Parts, edges: _Edges, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each directed part: who arrived last among itself and those that can have held it, and who before (-1)."""
    arrival, end = parts["arrival"], parts["end"]
    last, second = np.arange(size), np.full(size, -1, np.int64)
    keep = ~edges.giving | (arrival[edges.on] < end[edges.part])
    mine = np.flatnonzero(edges.directed)
    part = np.concatenate((edges.part[keep], mine))
    on = np.concatenate((edges.on[keep], mine))
    if len(part) == 0:
        return last, second
    order = np.lexsort((parts["rank"][on], -arrival[on], part))
    part, on = part[order], on[order]
    first = np.flatnonzero(np.concatenate(([True], part[1:] != part[:-1])))
    last[part[first]] = on[first]
    follower = first[first + 1 < len(part)] + 1
    follower = follower[part[follower] == part[follower - 1]]
    second[part[follower]] = on[follower]
    return last, second


# -- stragglers --------------------------------------------------------------------------------------------------------


def _leaders(parts: Parts, last: np.ndarray, second: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Place of the last arriver where its lead over the one before exceeds the uncertainty of both clocks, else -1."""
    arrival, rank = parts["arrival"], parts["rank"]
    before = np.maximum(second, 0)
    lead = arrival[last] - arrival[before]
    certain = (second >= 0) & (lead > bound[rank[last]] + bound[rank[before]])
    return np.where(certain, rank[last], -1)


def _head_of_line(parts: Parts, last: np.ndarray, leader: np.ndarray) -> np.ndarray:
    """The straggler: a last arriver that had queued behind its stream's previous communication inherits that one's."""
    before = _queued_behind(parts)
    parent = np.where(leader >= 0, before[last], -1)
    parent = np.where((parent >= 0) & (leader[np.maximum(parent, 0)] >= 0), parent, np.arange(len(parts)))
    while True:  # each round doubles the length of the chains that are followed
        further = parent[parent]
        if (further == parent).all():
            return leader[parent]
        parent = further


def _queued_behind(parts: Parts) -> np.ndarray:
    """Of each part: the previous communication of its stream if that one's end let it start, else -1.

    It must have been issued before that end. Where the issue is not recorded only a start at that very instant counts;
    a device that was only launched may have waited for its inputs as well, so there the start must follow closely.
    """
    size = len(parts)
    if size == 0:
        return np.empty(0, np.int64)
    lane = code_columns([parts["rank"], parts["lane"]])
    start = parts["arrival_own"] - int(parts["arrival_own"].min())
    on_axis = np.unique(lane, return_inverse=True)[1] * (int(start.max()) + 1) + start  # parts are sorted by it
    full = np.flatnonzero(parts["end_own"] > parts["arrival_own"])  # an empty row lets nobody wait
    before = np.searchsorted(on_axis[full], on_axis, "left") - 1
    previous = np.concatenate((full, [-1]))[before]
    at = np.maximum(previous, 0)
    same = (previous >= 0) & (lane[at] == lane)
    end = parts["end_own"][at]  # issue and launch are in the rank's own clock as well
    gap = parts["arrival_own"] - end
    issue, launch = parts["issue_ns"], parts["launch_ns"]
    on_device = np.where(launch >= 0, (launch < end) & (gap <= QUEUE_GAP_NS), gap == 0)
    queued = np.where(issue >= 0, issue < end, on_device)
    return np.where(same & (gap >= 0) & queued, previous, -1)


# -- estimate ----------------------------------------------------------------------------------------------------------


def _estimates(parts: Parts, unmatched: np.ndarray) -> np.ndarray:
    """What an unmatched part's duration exceeds the 5th percentile of its (group, kind, bytes) by, from eight samples up."""
    answer = np.full(len(parts), -1, np.int64)
    usable = np.flatnonzero(~parts["impossible"])
    if not unmatched.any() or len(usable) == 0:
        return answer
    kind = np.where(parts["collective"] >= 0, parts["collective"], 1000 + parts["kernel"])
    code = code_columns([parts["group"], kind, parts["bytes"]])[usable]
    duration = (parts["end"] - parts["arrival"])[usable]
    order = np.lexsort((duration, code))
    edges = np.flatnonzero(np.concatenate(([True], code[order][1:] != code[order][:-1], [True])))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if high - low >= LEAST_SAMPLES:
            quick = int(duration[order[low + (high - low - 1) // 20]])
            rows = order[low:high]
            rows = rows[unmatched[usable[rows]]]
            answer[usable[rows]] = np.maximum(duration[rows] - quick, 0)
    return answer
