"""Findings about ranks: who keeps the others waiting, a stage that is late as a whole, a wait without equal, turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from statistics import median, quantiles

import numpy as np

from stepscope.analysis import units
from stepscope.analysis.causes.ground import LEAST_SHARE, LEAST_TERM, MOST, Ground, finding
from stepscope.analysis.causes.pipeline import replica_of
from stepscope.analysis.causes.reasons import bases
from stepscope.analysis.causes.stragglers import CAUSES, Excess, Straggler, comparable, explained
from stepscope.analysis.records import Finding

STANDS_OUT = 1.5
"""A straggler costs at least this many times what the median rank costs; less is the ranks' taking turns."""

NEARLY_ALL = 0.9
"""A phase with this share of what a rank computes longer is told as all of it."""

ALIKE = 3
"""So many late ranks of one stage with one cause are told in one sentence."""

MOST_NAMED = 8
"""Of more ranks of a stage than these the rest is counted."""

ONE_OFF = 0.2
"""A single wait of this share of the mean step, three times any other of the run, is told as a one-off."""

WAITING = ("bubble_ns", "imbalance_ns", "stragglers")

ADVICE = {
    "slower compute": "compare its compute rows with its peers' (clocks, thermals, a shared host, more work on its shard)",
    "late host": "look at what its host does in the gaps: data loading, garbage collection, logging, a blocking call",
    "slower communication": "compare its transfers with its peers': link, placement, message sizes",
    "data loading": "prepare its batches ahead: more loader workers, prefetching, a faster store",
    "garbage collection": "collect garbage on all ranks at the same step (gc.disable(), then gc.collect() every so many steps)",
    "expert load": "balance the experts: auxiliary loss or bias, a capacity, or the busy experts on different ranks",
    "memory copies": "look at its copies: pinned memory, offloading, a copy that the others do not make",
}


def _waits(ground: Ground, rank: int) -> list[int]:
    """The longest wait for `rank` in each counted step, ns."""
    return ground.blame.longest_waits_for(rank, ground.means.steps)


def persistently_late(ground: Ground) -> set[int]:
    """The ranks that keep others waiting in most steps, for clearly longer than the median rank does."""
    ranks, found = ground.means.ranks, set()
    costs = sorted([one.cost_ns_per_step for one in ground.stragglers] + [0] * (len(ranks) - len(ground.stragglers)))
    typical = costs[(len(costs) - 1) // 2] if costs else 0
    for one in ground.stragglers:
        mine = _waits(ground, one.rank)
        usual = quantiles(mine, n=4)[0] if len(mine) > 1 else float(mine[0])
        if usual >= LEAST_SHARE * ground.step_ns and one.cost_ns_per_step >= STANDS_OUT * typical:
            found.add(one.rank)
    return found


def straggler_findings(ground: Ground, late: Set[int]) -> list[Finding]:
    """One finding for every rank of `late`, one for a stage that is late as a whole or for ALIKE ranks and more with one
    stage and cause; and one for a wait without equal.

    `late`: the ranks that keep others waiting in most steps; any other can have a one-off.
    """
    steps = ground.means.steps
    waits = {one.rank: _waits(ground, one.rank) for one in ground.stragglers}
    every = sorted(wait for line in waits.values() for wait in line)
    stages = _late_stages(ground, late)
    made: list[tuple[float, Callable[[], Finding]]] = []  # what each costs, and how it is told
    for stage, of in stages.items():
        cost = max(median(waits[one.rank]) for one in of)
        made.append((cost, partial(_late_stage, ground, stage, of, cost)))
    alike = _alike(ground, late, stages, {rank: median(line) for rank, line in waits.items()})
    for of in alike:
        cost = max(median(waits[one.rank]) for one in of)
        made.append((cost, partial(_late_together, ground, of, cost)))
    told = {one.rank for of in alike for one in of}
    delayed = _delayed(ground, late)
    for one in ground.stragglers:
        mine = waits[one.rank]
        if ground.stage_of(one.rank) in stages or one.rank in told or one.rank in delayed:
            continue
        if one.rank in late:
            passed_on = [(median(waits[rank]), rank) for rank, by in delayed.items() if by == one.rank]
            made.append((median(mine), partial(_persistent, ground, one, median(mine), passed_on)))
        elif len(steps) > 1 and max(mine) == every[-1] >= ONE_OFF * ground.step_ns and every[-1] > 3 * every[-2]:
            made.append((max(mine) / len(mine), partial(_one_off, ground, one, mine)))
    made.sort(key=lambda one: -one[0])
    return [tell() for _, tell in made[:MOST]]  # of a thousand late ranks no more can be among the findings


def _name(ground: Ground, rank: int) -> str:
    places = ground.meta.coords[rank] if rank < len(ground.meta.coords) else {}
    named = [f"{axis}{place}" for axis, place in places.items() if ground.meta.mesh.get(axis, 1) > 1]
    return f"rank {rank}" + (f" ({' '.join(named)})" if named else "")


def _delayed(ground: Ground, late: Set[int]) -> dict[int, int]:
    """Late ranks that do nothing longer than others -> the dearest straggler of their pipeline that does: they only pass on
    what it delays, work that comes later than the schedule has it."""
    found = {}
    known = [one for one in ground.stragglers if one.cause is not None and one.rank in late]
    for one in ground.stragglers:
        if one.cause is None and one.rank in late and ground.pipeline.stages > 1 and ground.meta.coords:
            mine = replica_of(ground.meta, one.rank)
            by = [other for other in known if replica_of(ground.meta, other.rank) == mine]
            if by and by[0].cost_ns_per_step > one.cost_ns_per_step:
                found[one.rank] = by[0].rank
    return found


def _persistent(ground: Ground, one: Straggler, cost: float, passed_on: Sequence[tuple[float, int]]) -> Finding:
    """`passed_on`: what others wait for ranks that it delays, and those."""
    shown = _shown(ground, one)
    why = _why(ground, one, shown)
    others = ground.parts[ground.parts["step"].isin(ground.means.steps)]["match_id"].nunique()
    last = f"; last to arrive in {one.last_arrivals} of {others} communications" if one.last_arrivals else ""
    further = "".join(
        f"; {_name(ground, rank)}, which it delays, passes on {units.duration(more)}"
        for more, rank in sorted(passed_on, reverse=True)[:2]
    )
    text = f"{_name(ground, one.rank)} keeps others waiting for {units.duration(cost)} a step{why}{last}{further}"
    confidence = _confidence(ground, one, shown)
    advice = ADVICE.get(one.cause or "", "compare its timeline with that of a rank with the same work")
    return finding(ground, text, cost, confidence, advice, WAITING, rank=one.rank, **_longest_wait(ground, one.rank))


def _late_stages(ground: Ground, late: Set[int]) -> dict[int, list[Straggler]]:
    """Pipeline stages of two ranks or more that are all late for the same reason -> their ranks, dearest first."""
    found: dict[int, list[Straggler]] = {}
    for stage in sorted({ground.stage_of(rank) for rank in late} - {-1}):
        ranks = [rank for rank in ground.means.ranks if ground.stage_of(rank) == stage]
        of = [one for one in ground.stragglers if one.rank in ranks]
        if 1 < len(ranks) < len(ground.means.ranks) and late >= set(ranks) and len({one.cause for one in of}) == 1:
            found[stage] = of
    return found


def _alike(
    ground: Ground, late: Set[int], stages: Collection[int], waits: Mapping[int, float]
) -> list[list[Straggler]]:
    """Late ranks of one stage (none of `stages`) with one cause, where they are ALIKE or more: dearest first.

    `waits`: what each costs; one that costs less than half of the dearest is not like it.
    """
    groups: dict[tuple[int, str | None], list[Straggler]] = {}
    for one in ground.stragglers:
        if one.rank in late and ground.stage_of(one.rank) not in stages:
            groups.setdefault((ground.stage_of(one.rank), one.cause), []).append(one)
    found = []
    for of in groups.values():
        most = max(waits[one.rank] for one in of)
        alike = [one for one in of if waits[one.rank] >= most / 2]
        found += [alike] if len(alike) >= ALIKE else []
    return found


def _late_together(ground: Ground, of: Sequence[Straggler], cost: float) -> Finding:
    first = of[0]
    shown, stage = _shown(ground, first), ground.stage_of(first.rank)
    where = f" of stage {stage}" if stage >= 0 and ground.pipeline.stages > 1 else ""
    text = (
        f"{len(of)} ranks{where} ({_named(of)}) each keep others waiting, for up to {units.duration(cost)} a step"
        f"{_why(ground, first, shown)}"
    )
    advice = ADVICE.get(first.cause or "", "compare their timelines with that of a rank with the same work")
    where_longest = _longest_wait(ground, first.rank)
    return finding(
        ground, text, cost, _confidence(ground, first, shown), advice, WAITING, rank=first.rank, **where_longest
    )


def _named(of: Sequence[Straggler]) -> str:
    """`1, 4, 7`; of many the first ones and how many there are beside them."""
    ranks = ", ".join([str(rank) for rank in sorted(one.rank for one in of)][:MOST_NAMED])
    return ranks + (f" and {len(of) - MOST_NAMED} more" if len(of) > MOST_NAMED else "")


def _late_stage(ground: Ground, stage: int, of: Sequence[Straggler], cost: float) -> Finding:
    first = of[0]
    shown = _shown(ground, first)
    text = f"stage {stage} (ranks {_named(of)}) keeps the others waiting for {units.duration(cost)} a step{_why(ground, first, shown)}"
    advice = f"give stage {stage} fewer layers, or layers that cost less; if its work is equal, look at its hosts"
    confidence = _confidence(ground, first, shown)
    return finding(
        ground, text, cost, confidence, advice, WAITING, rank=first.rank, **_longest_wait(ground, first.rank)
    )


Shown = tuple[Excess, list[int], str]
"""Where a rank exceeds its peers most: in the ledger, beside these peers, in this column."""


def _shown(ground: Ground, one: Straggler) -> Shown | None:
    """Where the cause of a straggler shows; None without one."""
    if one.cause is None:
        return None
    ledger, wait = ground.excess, sum(_waits(ground, one.rank)) / len(ground.means.steps)
    _, peers = explained(ledger, one.rank, ground.means.ranks, wait, ground.stage_of)
    columns = comparable(one.rank, peers, ground.stage_of)
    columns = [name for name in columns if CAUSES[name] in bases(one.cause)]
    return ledger, peers, max(columns, key=lambda name: (ledger.of(one.rank, peers, name), name))


def _confidence(ground: Ground, one: Straggler, shown: Shown | None) -> str:
    """Medium without a cause, and where its steps differ so much that their mean may be chance."""
    if shown is None:
        return "medium"
    ledger, peers, column = shown
    return ground.sure if ledger.steady(one.rank, peers, column) else "medium"


def _why(ground: Ground, one: Straggler, shown: Shown | None) -> str:
    """`: slower compute, 30 ms more in forward than its peers`."""
    if shown is None:
        return ""
    ledger, peers, column = shown
    excess = ledger.of(one.rank, peers, column)
    outside = ground.stage_of(peers[0]) != ground.stage_of(one.rank) and -1 not in map(ground.stage_of, peers)
    than = "the other stages" if outside else "its peers"
    phase = ""
    if column == "start_ns":
        return f": {one.cause}, its step begins {units.duration(excess)} after its peers'"
    if column == "compute_ns":
        counted = ground.classes[ground.classes["step"].isin(ground.means.steps)]
        phases = counted[counted["class"].str.startswith("compute ")]
        by_phase = {
            str(name).removeprefix("compute "): Excess(part).of(one.rank, peers, "ns")
            for name, part in phases.groupby("class")
            if set(part["rank"]) >= {one.rank, *peers}
        }
        most = max(by_phase, key=lambda name: by_phase[name], default="")
        if most and most != "other" and by_phase[most] > excess / 2:
            where = f"in {most.replace('_', ' ')}"
            nearly_all = by_phase[most] >= NEARLY_ALL * excess
            phase = f" {where}" if nearly_all else f" ({units.duration(by_phase[most])} of it {where})"
    return f": {one.cause}, {units.duration(excess)} more{phase} than {than}"


def _one_off(ground: Ground, one: Straggler, waits: Sequence[int]) -> Finding:
    at = max(range(len(waits)), key=lambda i: waits[i])
    step = ground.means.steps[at]
    text = f"{_name(ground, one.rank)} kept others waiting for {units.duration(waits[at])} once, in step {step}"
    cost = waits[at] / len(waits)
    where = _longest_wait(ground, one.rank, step)
    advice = (
        "look at that step alone: a one-off pause (garbage collection, checkpoint, another job) is no tuning problem"
    )
    return finding(ground, text, cost, "medium", advice, WAITING, rank=one.rank, **where)


def _longest_wait(ground: Ground, rank: int, step: int | str | None = None) -> dict[str, object]:
    """Step, operation of `rank` and interval of the longest single wait for `rank` in counted steps."""
    table, steps = ground.waits, set(ground.means.steps) if step is None else {step}
    counted = np.array([one in steps for one in table.steps], bool)
    for_it = np.flatnonzero((table.on == rank) & counted[table.step])
    if not len(for_it):
        return {"step": step}
    length = (table.end - table.start)[for_it]
    for_it = for_it[length == length.max()]
    longest = int(for_it[table.start[for_it].argmin()])
    parts = ground.parts[(ground.parts["match_id"] == table.match[longest]) & (ground.parts["rank"] == rank)]
    op_id = int(parts["op_id"].iloc[0]) if len(parts) else -1
    return {
        "step": table.steps[int(table.step[longest])],
        "op_id": op_id if op_id >= 0 else None,
        "start_ns": int(table.start[longest]),
        "end_ns": int(table.end[longest]),
    }


def turns(ground: Ground, named: Set[int]) -> list[Finding]:
    """Imbalance that no single rank explains."""
    imbalance = ground.mean("imbalance_ns")
    steps, ranks = ground.means.steps, ground.means.ranks
    explained = ground.blame.charged_to(named, steps) / (len(steps) * len(ranks))
    left = imbalance - explained
    if left < LEAST_TERM * ground.step_ns:
        return []
    text = f"ranks wait {units.duration(left)} a step for each other by turns, with no rank that stands out"
    advice = "more even work per step or fewer synchronisations; on shared cores this is their noise"
    return [finding(ground, text, left, "low", advice, WAITING, **ground.where("imbalance"))]
