"""The ledger once more, nanosecond by nanosecond, in plain Python: what the product is checked against.

Written from docs/definitions.md alone. It asks of every single instant what the page asks of it, and knows no interval
algebra, no arrays and nothing of the product. For tiny timelines only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

TERMS = ("compute", "visible_comm", "bubble", "imbalance", "memcpy", "idle")


@dataclass
class Part:
    """One rank's share of one communication."""

    rank: int
    start: int
    end: int
    collective: str
    axis: str
    stream: str
    peer: int
    peer_from: int
    op_id: int
    order: int
    expected: int
    siblings: list[Part] = field(default_factory=list)  # all parts of the communication, itself included

    @property
    def others(self) -> list[Part]:
        return [part for part in self.siblings if part is not self]

    def at(self, rank: int) -> list[Part]:
        return [part for part in self.siblings if part.rank == rank and part is not self]

    def holders(self) -> list[Part]:
        """The others whose arrival this part may have had to await."""
        before_my_end = lambda found: [part for part in found if part.start < self.end]  # noqa: E731
        kind = self.collective
        if kind == "send":
            return before_my_end(self.others)
        if kind in ("broadcast", "scatter") and self.peer >= 0:
            return before_my_end(self.others) if self.rank == self.peer else self.at(self.peer)
        if kind in ("reduce", "gather") and self.peer >= 0:
            return self.others if self.rank == self.peer else before_my_end(self.at(self.peer))
        if kind == "ring_shift":
            return self.at(self.peer_from) + before_my_end(self.at(self.peer))
        return self.others

    def arrivals(self) -> list[tuple[int, int]]:
        """(arrival, rank) of itself and those it depends on, the latest first, lower ranks first among equals."""
        found = {(part.start, part.rank) for part in [*self.holders(), self]}
        return sorted(found, key=lambda pair: (-pair[0], pair[1]))

    @property
    def last_arrival(self) -> int:
        return self.arrivals()[0][0]

    @property
    def wait_end(self) -> int:
        return min(max(self.last_arrival, self.start), self.end)

    @property
    def complete(self) -> bool:
        return len(self.siblings) >= self.expected

    def waits_at(self, t: int) -> bool:
        return self.start <= t < self.wait_end

    @property
    def leader(self) -> int:
        """The last arriver, -1 if it does not lead."""
        arrivals = self.arrivals()
        if len(arrivals) < 2 or arrivals[0][0] == arrivals[1][0]:
            return -1
        return arrivals[0][1]


class Oracle:
    """Reads the rows of a tests.timelines.Timeline (duck-typed)."""

    def __init__(self, timeline: Any) -> None:
        self.groups = {group.name: group for group in timeline.groups}
        self.coords = timeline.coords()
        self.ranks = list(range(timeline.world) if timeline.present is None else timeline.present)
        rows = [row for row in timeline.rows if row["rank"] in self.ranks]
        self.compute = self._spans(rows, "compute")
        self.memcpy = self._spans(rows, "memcpy")
        self.waits = defaultdict(list)
        for row in rows:
            if row["kind"] == "wait":
                self.waits[row["rank"]].append((row["start"], row["end"], row["op_id"]))
        self.parts = self._parts(rows)
        self.steps = {rank: self._steps(rows, rank) for rank in self.ranks}

    @staticmethod
    def _spans(rows: list[dict[str, Any]], kind: str) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            if row["kind"] == kind:
                found[row["rank"]].append((row["start"], row["end"]))
        return found

    def _parts(self, rows: list[dict[str, Any]]) -> dict[int, list[Part]]:
        found: dict[int, list[Part]] = defaultdict(list)
        together: dict[tuple[Any, ...], list[Part]] = defaultdict(list)
        for row in rows:
            if row["kind"] != "comm":
                continue
            kind, rank, peer = row["collective"], row["rank"], row.get("peer", -1)
            group = self.groups[row["group"]]
            pair = kind in ("send", "receive")
            ends = ((rank, peer) if kind == "send" else (peer, rank)) if pair else ()
            part = Part(
                rank,
                row["start"],
                row["end"],
                kind,
                row.get("axis") or group.axis,
                row["stream"],
                peer,
                row.get("peer_from", -1),
                row.get("op_id", -1),
                row["order"],
                2 if pair else len(group.ranks),
            )
            key = (group.name, pair, ends, row["seq"])
            together[key].append(part)
            part.siblings = together[key]
            found[rank].append(part)
        return found

    @staticmethod
    def _steps(rows: list[dict[str, Any]], rank: int) -> list[tuple[int, int, int]]:
        marks = sorted(
            (row["start"], row["end"], int(row["name"].split("#")[1]))
            for row in rows
            if row["rank"] == rank and row["kind"] == "host" and "#" in row["name"]
        )
        ends = [start for start, _, _ in marks[1:]] + [marks[-1][1]] if marks else []
        return [(number, start, end) for (start, _, number), end in zip(marks, ends, strict=True)]

    # -- one instant ---------------------------------------------------------------------------------------------------

    def computing(self, rank: int, t: int) -> bool:
        return any(start <= t < end for start, end in self.compute[rank])

    def in_flight(self, rank: int, t: int) -> list[Part]:
        return [part for part in self.parts[rank] if part.start <= t < part.end]

    def exposed_wait(self, rank: int, t: int) -> list[Part]:
        """The waiting operations, if the instant is an exposed wait; else nothing."""
        if self.computing(rank, t):
            return []
        flying = self.in_flight(rank, t)
        return flying if flying and all(part.waits_at(t) for part in flying) else []

    def blocker(self, rank: int, t: int, waiting: list[Part]) -> tuple[Part, bool]:
        """The operation that counts, and whether the next computation did not depend on it."""
        later = [start for start, end in self.compute[rank] if start > t and end > start]
        limit = min(later) if later else None
        named = {op for start, end, op in self.waits[rank] if start <= t < end and op >= 0}
        in_time = [part for part in waiting if limit is None or part.end <= limit]
        chosen = [part for part in waiting if part.op_id in named]
        for pool in (
            [part for part in chosen if part in in_time] or chosen,
            in_time,
            waiting,
        ):
            if pool:
                best = min(pool, key=lambda part: (-part.end, part.axis != "pp", -part.last_arrival, part.order))
                return best, not chosen and best not in in_time
        raise AssertionError("somebody waits")

    def own_pipeline_last(self, part: Part) -> int:
        """Last arrival of the ranks of this rank's pipeline, where the collective joins several stages."""
        if not self.coords or part.collective in ("send", "receive"):
            return part.start
        if len({self.coords[one.rank].get("pp", 0) for one in part.siblings}) < 2:
            return part.start
        beside = lambda rank: {axis: i for axis, i in self.coords[rank].items() if axis != "pp"}  # noqa: E731
        return max(one.start for one in part.siblings if beside(one.rank) == beside(part.rank))

    def wait_class(self, rank: int, t: int, through: tuple[int, ...] = ()) -> str:
        """bubble, imbalance, or nothing when the rank is in no exposed wait."""
        waiting = self.exposed_wait(rank, t)
        if not waiting:
            return ""
        part, _ = self.blocker(rank, t, waiting)
        late = part.arrivals()[0][1]
        if late not in (*through, rank):
            inherited = self.wait_class(late, t, (*through, rank))
            if inherited:
                return inherited
        return "bubble" if part.axis == "pp" or t < self.own_pipeline_last(part) else "imbalance"

    def term(self, rank: int, t: int) -> str:
        if self.computing(rank, t):
            return "compute"
        if self.in_flight(rank, t):
            return self.wait_class(rank, t) or "visible_comm"
        if any(start <= t < end for start, end in self.memcpy[rank]):
            return "memcpy"
        return "idle"

    # -- sums ----------------------------------------------------------------------------------------------------------

    def row(self, rank: int, start: int, end: int) -> Counter[str]:
        """All figures of one window, ns."""
        total: Counter[str] = Counter()
        for t in range(start, end):
            term = self.term(rank, t)
            total[term] += 1
            flying = self.in_flight(rank, t)
            moving = [part for part in flying if not part.waits_at(t)]
            total["op_wait"] += len(flying) - len(moving)
            if term == "compute" and flying:
                total["hidden_comm" if moving else "hidden_wait"] += 1
            if term == "visible_comm" and not any(part.complete for part in moving):
                total["unsplit"] += 1
            if term in ("bubble", "imbalance") and self.blocker(rank, t, flying)[1]:
                total["nonblocking"] += 1
            if term == "visible_comm":
                named = {op for begin, stop, op in self.waits[rank] if begin <= t < stop and op >= 0}
                total["blocking"] += any(part.op_id in named for part in flying)
            for key in {(part.axis, part.collective, part.stream) for part in flying}:
                mine = [part for part in flying if (part.axis, part.collective, part.stream) == key]
                total[("comm", *key)] += 1  # type: ignore[index]
                total[("hidden", *key)] += term == "compute"  # type: ignore[index]
                total[("transfer", *key)] += any(part in moving for part in mine)  # type: ignore[index]
        return total

    def straggler(self, part: Part) -> int:
        """The last arriver, or whom it had queued behind."""
        leader = part.leader
        if leader < 0:
            return -1
        mine = next(one for one in part.siblings if one.rank == leader)
        before = [
            one
            for one in self.parts[leader]
            if one.stream == mine.stream and one is not mine and one.end == mine.start and one.end > one.start
        ]
        inherited = self.straggler(before[0]) if before else -1
        return inherited if inherited >= 0 else leader
