"""Findings about the other terms: the schedule's bubble, idle time, memory copies."""

from __future__ import annotations

from collections.abc import Set

from stepscope.analysis import units
from stepscope.analysis.causes.explanations import why_idle
from stepscope.analysis.causes.ground import LEAST_TERM, Ground, finding
from stepscope.analysis.causes.summary import counted_rows
from stepscope.analysis.records import Finding


def bubble(ground: Ground) -> list[Finding]:
    """The bubble that the schedule itself needs: without what stragglers added."""
    p, steps, ranks = ground.pipeline, ground.means.steps, ground.means.ranks
    beyond = sum(sum(ground.blame.beyond_of(rank, steps)) for rank in ranks)
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
    return [finding(ground, text, own, ground.sure, advice, ("bubble_ns",), **ground.where("bubble"))]


def idle(ground: Ground, named: Set[int]) -> list[Finding]:
    """Time with nothing in flight, without the ranks that are already named as late."""
    rows = counted_rows(ground.ledger)
    rest = rows[~rows["rank"].isin(named)] if set(rows["rank"]) - named else rows
    cost = float(rest["idle_ns"].mean())
    if cost < LEAST_TERM * ground.step_ns:
        return []
    whose = "" if len(rest) == len(rows) else " on the ranks that are not late"
    text = f"nothing is in flight for {units.duration(cost)} a step ({units.share(cost / ground.step_ns)} of it){whose}"
    reason, advice = why_idle(ground.idle, set(rest["rank"]), ground.means.steps)
    advice = advice or (
        "host work between operations: fewer and larger operations, data prepared ahead, no reading back of tensors"
    )
    return [finding(ground, text + reason, cost, ground.sure, advice, ("idle_ns",), **ground.where("idle"))]


def copies(ground: Ground) -> list[Finding]:
    cost = ground.mean("memcpy_ns")
    if cost < LEAST_TERM * ground.step_ns:
        return []
    text = f"memory copies alone take {units.duration(cost)} a step ({units.share(cost / ground.step_ns)} of it)"
    advice = "pinned host memory and asynchronous copies, or fewer of them"
    return [finding(ground, text, cost, ground.sure, advice, ("memcpy_ns",), **ground.where("memcpy"))]
