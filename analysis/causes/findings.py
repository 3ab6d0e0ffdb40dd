"""Findings: at most five sentences, dearest first, each with its cost, its evidence and what to try.

A finding needs a cost of at least LEAST_SHARE of the mean step. None rests on time that could not be split or that
blocked nothing; one that rests on a number which the health report touches says so and has low confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median, quantiles

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.blame import Blame, Wait
from stepscope.analysis.causes.classes import UNSPLIT
from stepscope.analysis.causes.experts import Experts
from stepscope.analysis.causes.explanations import bound_by, busiest, why_idle
from stepscope.analysis.causes.pipeline import Pipeline
from stepscope.analysis.causes.reasons import basis
from stepscope.analysis.causes.stragglers import CAUSES, Excess, Straggler, comparable, explained
from stepscope.analysis.causes.summary import Means, counted_rows
from stepscope.analysis.records import Finding, Health
from stepscope.tracer.schema import RunMeta

MOST = 5
LEAST_SHARE = 0.02
"""Below this share of the mean step nothing is a finding."""

LEAST_TERM = 0.05
"""A whole term (communication, bubble, idle, copies) is worth a sentence from this share of the step on."""

STANDS_OUT = 1.5
"""A straggler costs at least this many times what the median rank costs; less is the ranks' taking turns."""

ONE_OFF = 0.2
"""A single wait of this share of the mean step, three times any other of the run, is told as a one-off."""

ENOUGH_STEPS = 3


@dataclass(frozen=True)
class Ground:
    """What findings rest on. Times ns; instants of the common clock."""

    meta: RunMeta
    health: Health
    ledger: pd.DataFrame
    means: Means
    classes: pd.DataFrame  # classes.COLUMNS
    blame: Blame
    waits: Mapping[int, Sequence[Wait]]
    stragglers: Sequence[Straggler]
    pipeline: Pipeline
    parts: pd.DataFrame  # Matches.parts with `step`
    stage_of: Callable[[int], int]
    starts: pd.DataFrame  # rank, step, start_ns (common clock)
    fits: pd.DataFrame  # alpha_beta.FIT_COLUMNS
    experts: Experts
    idle: pd.DataFrame  # idle.IDLE_COLUMNS
    longest_idle: tuple[int, int | str, int, int] | None = None  # rank, step, start, end

    @property
    def step_ns(self) -> float:
        """Mean step time."""
        return float(self.means.values["step_ns"])

    def mean(self, column: str) -> float:
        """Mean of a ledger column."""
        return float(self.means.values[column])

    @property
    def sure(self) -> str:
        """Confidence that the number of steps allows."""
        return "high" if len(self.means.steps) >= ENOUGH_STEPS else "medium"


def findings(ground: Ground) -> tuple[Finding, ...]:
    """The findings of a run, dearest first, at most MOST."""
    if not ground.means.values or ground.step_ns <= 0:
        return ()
    late = _persistently_late(ground)
    found = [
        *straggler_findings(ground, late),
        *_turns(ground, late),
        *_bubble(ground),
        *_communication(ground),
        *_idle(ground, late),
        *_copies(ground),
    ]
    worth = [one for one in found if one.cost_ns_per_step >= LEAST_SHARE * ground.step_ns]
    worth.sort(key=lambda one: (-one.cost_ns_per_step, one.text))
    return tuple(worth[:MOST])


def _finding(
    ground: Ground, text: str, cost: float, confidence: str, advice: str, rests_on: Sequence[str], **where: object
) -> Finding:
    """A finding; where health touches what it rests on, it says so and is of low confidence."""
    base = Finding(text[0].upper() + text[1:], round(cost), None, None, None, None, None, confidence, advice)
    one = replace(base, **where)  # type: ignore[arg-type]
    items = [item for item in ground.health.items if set(item.touches) & {"ledger", *rests_on}]
    touched = sorted({item.code for item in items if not _only_outside_means(ground, item.code)})
    if touched:
        one = replace(one, text=f"{one.text} (rests on touched data: {', '.join(touched)})", confidence="low")
    return one


CUT = ("cut_file", "stopped_recording")
"""Health codes whose step is flagged partial: it is in no mean, so no finding rests on it."""

LACKING_PARTNERS = ("unmatched", "partial_match", "unequal_counts", "missing_rank")
"""Health codes of communications without all their partners: what they touch is unsplit time."""


def _only_outside_means(ground: Ground, code: str) -> bool:
    """Whether what this health code touches lies outside the counted steps."""
    return code in CUT or (code in LACKING_PARTNERS and ground.mean("unsplit_ns") == 0)


# -- stragglers --------------------------------------------------------------------------------------------------------

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
    return [ground.blame.longest_wait_for(rank, step) for step in ground.means.steps]


def _persistently_late(ground: Ground) -> set[int]:
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
    """One finding for every rank of `late`, one for a stage that is late as a whole; and one for a wait without equal.

    `late`: the ranks that keep others waiting in most steps; any other can have a one-off.
    """
    steps = ground.means.steps
    waits = {one.rank: _waits(ground, one.rank) for one in ground.stragglers}
    every = sorted(wait for line in waits.values() for wait in line)
    stages = _late_stages(ground, late)
    found = [_late_stage(ground, stage, of) for stage, of in stages.items()]
    for one in ground.stragglers:
        mine = waits[one.rank]
        if ground.stage_of(one.rank) in stages:
            continue
        if one.rank in late:
            found.append(_persistent(ground, one, median(mine)))
        elif len(steps) > 1 and max(mine) == every[-1] >= ONE_OFF * ground.step_ns and every[-1] > 3 * every[-2]:
            found.append(_one_off(ground, one, mine))
    return found


def _name(ground: Ground, rank: int) -> str:
    places = ground.meta.coords[rank] if rank < len(ground.meta.coords) else {}
    named = [f"{axis}{place}" for axis, place in places.items() if ground.meta.mesh.get(axis, 1) > 1]
    return f"rank {rank}" + (f" ({' '.join(named)})" if named else "")


def _persistent(ground: Ground, one: Straggler, cost: float) -> Finding:
    why = _why(ground, one)
    others = ground.parts[ground.parts["step"].isin(ground.means.steps)]["match_id"].nunique()
    last = f"; last to arrive in {one.last_arrivals} of {others} communications" if one.last_arrivals else ""
    text = f"{_name(ground, one.rank)} keeps others waiting for {units.duration(cost)} a step{why}{last}"
    confidence = ground.sure if one.cause else "medium"
    advice = ADVICE.get(one.cause or "", "compare its timeline with that of a rank with the same work")
    return _finding(ground, text, cost, confidence, advice, WAITING, rank=one.rank, **_longest_wait(ground, one.rank))


def _late_stages(ground: Ground, late: Set[int]) -> dict[int, list[Straggler]]:
    """Pipeline stages of two ranks or more that are all late for the same reason -> their ranks, dearest first."""
    found: dict[int, list[Straggler]] = {}
    for stage in sorted({ground.stage_of(rank) for rank in late} - {-1}):
        ranks = [rank for rank in ground.means.ranks if ground.stage_of(rank) == stage]
        of = [one for one in ground.stragglers if one.rank in ranks]
        if 1 < len(ranks) < len(ground.means.ranks) and late >= set(ranks) and len({one.cause for one in of}) == 1:
            found[stage] = of
    return found


def _late_stage(ground: Ground, stage: int, of: Sequence[Straggler]) -> Finding:
    cost, first = max(median(_waits(ground, one.rank)) for one in of), of[0]
    ranks = ", ".join(str(one.rank) for one in sorted(of, key=lambda one: one.rank))
    text = (
        f"stage {stage} (ranks {ranks}) keeps the others waiting for {units.duration(cost)} a step{_why(ground, first)}"
    )
    advice = f"give stage {stage} fewer layers, or layers that cost less; if its work is equal, look at its hosts"
    confidence = ground.sure if first.cause else "medium"
    return _finding(
        ground, text, cost, confidence, advice, WAITING, rank=first.rank, **_longest_wait(ground, first.rank)
    )


def _why(ground: Ground, one: Straggler) -> str:
    """`: slower compute, 30 ms more in forward than its peers`."""
    if one.cause is None:
        return ""
    rows = counted_rows(ground.ledger).merge(ground.starts, on=["rank", "step"], how="left")
    ledger, wait = Excess(rows), sum(_waits(ground, one.rank)) / len(ground.means.steps)
    _, peers = explained(ledger, one.rank, ground.means.ranks, wait, ground.stage_of)
    outside = ground.stage_of(peers[0]) != ground.stage_of(one.rank) and -1 not in map(ground.stage_of, peers)
    than = "the other stages" if outside else "its peers"
    columns = [name for name in comparable(one.rank, peers, ground.stage_of) if CAUSES[name] == basis(one.cause)]
    excess, column = max((ledger.of(one.rank, peers, name), name) for name in columns)
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
        phase = f" in {most.replace('_', ' ')}" if most and most != "other" and by_phase[most] > excess / 2 else ""
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
    return _finding(ground, text, cost, "medium", advice, WAITING, rank=one.rank, **where)


def _longest_wait(ground: Ground, rank: int, step: int | str | None = None) -> dict[str, object]:
    """Step, operation of `rank` and interval of the longest single wait for `rank` in counted steps."""
    steps = set(ground.means.steps) if step is None else {step}
    waits = [w for line in ground.waits.values() for w in line if w.on == rank and w.step in steps]
    if not waits:
        return {"step": step}
    longest = max(waits, key=lambda w: (w.end_ns - w.start_ns, -w.start_ns))
    parts = ground.parts[(ground.parts["match_id"] == longest.match) & (ground.parts["rank"] == rank)]
    op_id = int(parts["op_id"].iloc[0]) if len(parts) else -1
    return {
        "step": longest.step,
        "op_id": op_id if op_id >= 0 else None,
        "start_ns": longest.start_ns,
        "end_ns": longest.end_ns,
    }


def _turns(ground: Ground, named: Set[int]) -> list[Finding]:
    """Imbalance that no single rank explains."""
    imbalance = ground.mean("imbalance_ns")
    explained = sum(
        counter[rank]
        for step in ground.means.steps
        for counter in ground.blame.charged.get(step, {}).values()
        for rank in counter
        if rank in named
    ) / (len(ground.means.steps) * len(ground.means.ranks))
    left = imbalance - explained
    if left < LEAST_TERM * ground.step_ns:
        return []
    text = f"ranks wait {units.duration(left)} a step for each other by turns, with no rank that stands out"
    advice = "more even work per step or fewer synchronisations; on shared cores this is their noise"
    return [_finding(ground, text, left, "low", advice, WAITING)]


# -- terms -------------------------------------------------------------------------------------------------------------


def _bubble(ground: Ground) -> list[Finding]:
    """The bubble that the schedule itself needs: without what stragglers added."""
    p, steps, ranks = ground.pipeline, ground.means.steps, ground.means.ranks
    beyond = sum(ground.blame.beyond_of(rank, step) for step in steps for rank in ranks)
    added = beyond / (len(steps) * len(ranks))
    own = ground.mean("bubble_ns") - added
    if p.stages < 2 or own < LEAST_TERM * ground.step_ns:
        return []
    schedule = f"{p.schedule or 'the schedule'} with {p.stages} stages and {p.microbatches} microbatches"
    theory = f"; theory for {schedule}: {units.share(p.theory_of_step)}" if p.theory_of_step is not None else ""
    text = f"the pipeline bubble takes {units.duration(own)} a step ({units.share(own / ground.step_ns)} of it{theory})"
    if added >= 0.01 * ground.step_ns:  # else the number would contradict the ledger's
        text += f"; late ranks lengthen it by {units.duration(added)}"
    advice = "more microbatches per step shrink it; so do virtual stages (interleaving) or a zero-bubble schedule"
    return [_finding(ground, text, own, ground.sure, advice, ("bubble_ns",))]


def _communication(ground: Ground) -> list[Finding]:
    """Exposed transfer, one finding an axis and collective; what could not be split is left out."""
    rows = ground.classes[
        ground.classes["step"].isin(ground.means.steps) & ground.classes["rank"].isin(ground.means.ranks)
    ]
    rows = rows[rows["class"].str.startswith("visible_comm ") & ~rows["class"].str.endswith(UNSPLIT)]
    found = []
    for name, total in rows.groupby("class")["ns"].sum().items():
        cost = Fraction(int(total), len(ground.means.ranks) * len(ground.means.steps))
        if cost >= LEAST_TERM * ground.step_ns:
            axis, collective = str(name).removeprefix("visible_comm ").rsplit(" ", 1)
            found.append(_exposed(ground, axis, collective, float(cost)))
    return found


def _exposed(ground: Ground, axis: str, collective: str, cost: float) -> Finding:
    parts = ground.parts[(ground.parts["axis"] == axis) & (ground.parts["collective"] == collective)]
    counted = parts[parts["step"].isin(ground.means.steps)]
    each = len(counted) / max(len(ground.means.ranks) * len(ground.means.steps), 1)
    size = float(counted["bytes"].median()) if len(counted) and (counted["bytes"] >= 0).any() else None
    of = f"{units.significant(each, 3)} a step and rank" + (f" of {units.size(size)}" if size else "")
    text = f"the {axis} {collective.replace('_', '-')} is exposed for {units.duration(cost)} a step ({of})"
    if axis == "tp" and _spans_hosts(ground.meta, axis):
        text += "; its groups span hosts"
    bound, faster = bound_by(ground.fits, axis, collective)
    uneven, even = busiest(ground.experts, axis, collective)
    advice = even or faster or _communication_advice(ground, axis, size)
    where: dict[str, object] = {}
    if len(counted):
        one = counted.iloc[int(counted["transfer_ns"].to_numpy().argmax())]
        where = {"rank": int(one["rank"]), "step": one["step"], "end_ns": int(one["end_ns"])}
        where["start_ns"] = int(one["end_ns"] - one["transfer_ns"])
        where["op_id"] = int(one["op_id"]) if one["op_id"] >= 0 else None
    return _finding(ground, f"{text}{bound}{uneven}", cost, ground.sure, advice, ("visible_comm_ns",), **where)


def _spans_hosts(meta: RunMeta, axis: str) -> bool:
    """Whether a process group of this axis has ranks on more than one host."""
    hosts = dict(enumerate(meta.hosts))
    return any(len({hosts.get(rank) for rank in group.ranks}) > 1 for group in meta.groups if group.axis == axis)


SMALL_MESSAGE = 64 * 1024


def _communication_advice(ground: Ground, axis: str, size: float | None) -> str:
    if axis == "dp" and ground.meta.parallel.get("overlap") is False:
        return "let the gradient reduction overlap backward (drop --no-overlap)"
    if axis == "dp" and size is not None and size < SMALL_MESSAGE:
        return "larger gradient buckets (--bucket-mb): each of these is small, so latency counts more than bytes"
    return {
        "dp": "start reductions earlier, larger microbatches per step, or shard over fewer ranks",
        "pp": "larger microbatches, or stages whose boundary activation is smaller",
        "tp": "a smaller tensor-parallel degree, or keep its group inside one host",
    }.get(axis, "hide it under compute, send less, or use a faster link")


def _idle(ground: Ground, named: Set[int]) -> list[Finding]:
    """Time with nothing in flight, without the ranks that are already named as late."""
    rows = counted_rows(ground.ledger)
    rest = rows[~rows["rank"].isin(named)] if set(rows["rank"]) - named else rows
    cost = float(rest["idle_ns"].mean())
    if cost < LEAST_TERM * ground.step_ns:
        return []
    whose = "" if len(rest) == len(rows) else " on the ranks that are not late"
    text = f"nothing is in flight for {units.duration(cost)} a step ({units.share(cost / ground.step_ns)} of it){whose}"
    where: dict[str, object] = {}
    if ground.longest_idle is not None:
        rank, step, start, end = ground.longest_idle
        where = {"rank": rank, "step": step, "start_ns": start, "end_ns": end}
    reason, advice = why_idle(ground.idle, set(rest["rank"]), ground.means.steps)
    advice = advice or (
        "host work between operations: fewer and larger operations, data prepared ahead, no reading back of tensors"
    )
    return [_finding(ground, text + reason, cost, ground.sure, advice, ("idle_ns",), **where)]


def _copies(ground: Ground) -> list[Finding]:
    cost = ground.mean("memcpy_ns")
    if cost < LEAST_TERM * ground.step_ns:
        return []
    text = f"memory copies alone take {units.duration(cost)} a step ({units.share(cost / ground.step_ns)} of it)"
    advice = "pinned host memory and asynchronous copies, or fewer of them"
    return [_finding(ground, text, cost, ground.sure, advice, ("memcpy_ns",))]
