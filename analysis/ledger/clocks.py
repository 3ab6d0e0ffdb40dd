"""Clocks of the ranks against each other (docs/definitions.md, Clocks).

Ranks of one host share a clock. Recorded offsets are used as they are. Between hosts the offset is the median difference
of the ends of communications that end everywhere at once; where the hosts are not known, one clock is assumed until a
communication ends before somebody it needs has come.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.analysis.ledger.keys import Matched
from stepscope.analysis.ledger.parts import Parts
from stepscope.tracer.schema import COLLECTIVES, RunMeta, code_of

ENDS_TOGETHER = [
    code_of(COLLECTIVES, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
]

LONG_NS = 60_000_000_000
"""A drift is looked for only in recordings at least this long ..."""

DRIFT_SAMPLES = 16
"""... with this many samples, and kept when it halves the residual."""


@dataclass
class Clocks:
    """One value a rank place. A rank's time minus `offset_ns` (plus drift) is common time."""

    offset_ns: np.ndarray  # int64: how far the rank's clock is ahead of the common one at `origin_ns`
    drift_ppm: np.ndarray
    residual_ns: np.ndarray  # median distance of the samples from the estimate, 0 where nothing was estimated
    bound_ns: np.ndarray  # uncertainty
    samples: np.ndarray
    source: list[str]  # host (offset 0) | recorded | estimated
    origin_ns: int

    @classmethod
    def one(cls, ranks: int, origin_ns: int) -> Clocks:
        """All ranks on one clock."""
        zero = [np.zeros(ranks, np.int64) for _ in range(4)]
        return cls(zero[0], np.zeros(ranks), zero[1], zero[2], zero[3], ["host"] * ranks, origin_ns)

    def ahead(self, place: np.ndarray, time: np.ndarray) -> np.ndarray:
        """How far each rank's clock is ahead at its own times, ns."""
        answer = self.offset_ns[place]
        if self.drift_ppm.any():
            answer = answer + np.rint((time - self.origin_ns) * (self.drift_ppm[place] * 1e-6)).astype(np.int64)
        return answer

    def correct(self, parts: Parts) -> None:
        """Put `arrival` and `end` into common time."""
        for name in ("arrival", "end"):
            own = parts[f"{name}_own"]
            parts.columns[name] = own - self.ahead(parts["rank"], own)


def recorded(meta: RunMeta, parts: Parts) -> Clocks:
    """The clocks that the run itself measured; one clock where it did not."""
    origin = int(parts["arrival_own"].min()) if len(parts) else 0
    clocks = Clocks.one(len(parts.ranks), origin)
    for place, rank in enumerate(parts.ranks):
        if rank < len(meta.clock):
            told = meta.clock[rank]
            clocks.offset_ns[place], clocks.drift_ppm[place] = -told.offset_ns, 0.0 - told.drift_ppm
            clocks.bound_ns[place] = told.bound_ns
            if told.offset_ns or told.drift_ppm or told.bound_ns:
                clocks.source[place] = "recorded"
    return clocks


def needs_estimate(meta: RunMeta, parts: Parts) -> bool:
    """No recorded clocks, and not all on one known host."""
    hosts = {meta.hosts[rank] if rank < len(meta.hosts) else "" for rank in parts.ranks}
    return not meta.clock and len(parts.ranks) > 1 and (len(hosts) > 1 or "" in hosts)


def estimate(meta: RunMeta, parts: Parts, matched: Matched) -> Clocks:
    """Offsets from matched communications, `parts` being in the ranks' own clocks."""
    origin = int(parts["arrival_own"].min()) if len(parts) else 0
    clocks = Clocks.one(len(parts.ranks), origin)
    unit, unknown = _units(meta, parts.ranks)
    samples = _samples(parts, matched, unit)
    for _ in range(2):  # a rank may come to light only when another has been put right
        suspects = _violators(parts, matched, unit, clocks) if unknown.any() else np.zeros(len(unit), bool)
        wanted = np.where(unknown, suspects, True)
        _spread(samples, unit, wanted, clocks)
        clocks.correct(parts)
    return clocks


def _units(meta: RunMeta, ranks: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each rank place: the number of its clock, numbered by lowest rank; and whether its host is unknown."""
    names: dict[str, int] = {}
    unit, unknown = [], []
    for rank in ranks:
        host = meta.hosts[rank] if rank < len(meta.hosts) else ""
        unit.append(names.setdefault(host or f"\0{rank}", len(names)))
        unknown.append(not host)
    return np.array(unit), np.array(unknown)


@dataclass
class _Samples:
    """Differences of ends: clock `unit` minus clock `base`, at `time` (of `unit`)."""

    base: np.ndarray
    unit: np.ndarray
    time: np.ndarray
    difference: np.ndarray


def _samples(parts: Parts, matched: Matched, unit: np.ndarray) -> _Samples:
    """One sample a communication and clock, against the lowest clock that took part."""
    rows = np.flatnonzero(np.isin(parts["collective"], ENDS_TOGETHER) & (matched.match >= 0) & ~parts["impossible"])
    units = unit[parts["rank"][rows]]
    order = np.lexsort((parts["rank"][rows], units, matched.match[rows]))
    rows, units = rows[order], units[order]
    match = matched.match[rows]
    fresh = np.ones(len(rows), bool)
    fresh[1:] = (match[1:] != match[:-1]) | (units[1:] != units[:-1])
    rows, units, match = rows[fresh], units[fresh], match[fresh]
    first = np.searchsorted(match, match, "left")
    other = np.flatnonzero(first != np.arange(len(rows)))
    end = parts["end_own"][rows]
    return _Samples(units[first[other]], units[other], end[other], end[other] - end[first[other]])


def _violators(parts: Parts, matched: Matched, unit: np.ndarray, clocks: Clocks) -> np.ndarray:
    """Ranks that took part in a communication that one end precedes another's arrival in, as the clocks now are."""
    rows = np.flatnonzero(np.isin(parts["collective"], ENDS_TOGETHER) & (matched.match >= 0))
    rows = rows[np.argsort(matched.match[rows], kind="stable")]
    guilty = clocks.offset_ns != 0
    if len(rows) == 0:
        return guilty
    match = matched.match[rows]
    first = np.flatnonzero(np.concatenate(([True], match[1:] != match[:-1])))
    count = np.diff(np.append(first, len(rows)))
    base = np.repeat(first, count)  # the lowest rank of each communication
    arrival, end = parts["arrival"][rows], parts["end"][rows]
    against_base = (arrival > end[base]) | (arrival[base] > end)
    guilty[parts["rank"][rows[against_base]]] = True
    if not guilty.any():
        late = np.maximum.reduceat(arrival, first)[np.repeat(np.arange(len(first)), count)]
        guilty[parts["rank"][rows[late > end]]] = True
        guilty[parts["rank"][rows[(arrival == late) & (late > np.minimum.reduceat(end, first).repeat(count))]]] = True
    guilty[unit == unit.min()] = False
    return guilty


def _spread(samples: _Samples, unit: np.ndarray, wanted: np.ndarray, clocks: Clocks) -> None:
    """Offsets of the wanted ranks, handed on from the first clock along the pairs of clocks with the most samples."""
    if len(samples.base) == 0:
        return
    code = samples.base * (int(unit.max()) + 1) + samples.unit
    pairs, inverse, count = np.unique(code, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    rows_of = dict(zip(pairs.tolist(), np.split(order, np.cumsum(count)[:-1]), strict=True))
    known: dict[int, tuple[float, float]] = {int(unit.min()): (0.0, 0.0)}
    by_size = sorted(rows_of, key=lambda pair: (-len(rows_of[pair]), pair))
    width = int(unit.max()) + 1
    while True:
        step = next(
            (pair for pair in by_size if (pair // width in known) != (pair % width in known)),
            None,
        )
        if step is None:
            return
        base, other = step // width, step % width
        rows = rows_of[step]
        offset, drift, residual = _fit(samples.time[rows] - clocks.origin_ns, samples.difference[rows])
        sign, source, target = (1, base, other) if base in known else (-1, other, base)
        places = np.flatnonzero((unit == target) & wanted).tolist()
        known[target] = (known[source][0] + sign * offset, known[source][1] + sign * drift) if places else (0.0, 0.0)
        for place in places:
            clocks.offset_ns[place] = round(known[target][0])
            clocks.drift_ppm[place] = known[target][1]
            clocks.residual_ns[place] = clocks.bound_ns[place] = residual
            clocks.samples[place], clocks.source[place] = len(rows), "estimated"


def _fit(time: np.ndarray, difference: np.ndarray) -> tuple[float, float, int]:
    """Offset at time 0 (ns), drift (ppm) and residual (ns) of the differences; Theil-Sen for the drift."""
    offset = float(np.median(difference))
    residual = float(np.median(np.abs(difference - offset)))
    if len(time) < DRIFT_SAMPLES or time.max() - time.min() < LONG_NS:
        return offset, 0.0, round(residual)
    few = np.unique(np.linspace(0, len(time) - 1, 128).astype(np.int64))
    some = np.argsort(time, kind="stable")[few]
    i, j = np.triu_indices(len(some), 1)
    apart = time[some][j] - time[some][i]
    slope = float(np.median((difference[some][j] - difference[some][i])[apart > 0] / apart[apart > 0]))
    start = float(np.median(difference - slope * time))
    left = float(np.median(np.abs(difference - start - slope * time)))
    return (start, slope * 1e6, round(left)) if left < residual / 2 else (offset, 0.0, round(residual))
