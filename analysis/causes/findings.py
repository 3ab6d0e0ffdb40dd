"""Findings: at most five sentences, dearest first, each with its cost, its evidence and what to try.

A finding needs a cost of at least LEAST_SHARE of the mean step. None rests on time that could not be split or that
blocked nothing; one that rests on a number which the health report touches says so and has low confidence.
"""

from __future__ import annotations

from stepscope.analysis.causes.finding_communication import communication
from stepscope.analysis.causes.finding_stragglers import persistently_late, straggler_findings, turns
from stepscope.analysis.causes.finding_terms import bubble, copies, idle
from stepscope.analysis.causes.ground import LEAST_SHARE, MOST, Ground
from stepscope.analysis.records import Finding


def findings(ground: Ground) -> tuple[Finding, ...]:
    """The findings of a run, dearest first, at most MOST."""
    if not ground.means.values or ground.step_ns <= 0:
        return ()
    late = persistently_late(ground)
    found = [
        *straggler_findings(ground, late),
        *turns(ground, late),
        *bubble(ground),
        *communication(ground),
        *idle(ground, late),
        *copies(ground),
    ]
    worth = [one for one in found if one.cost_ns_per_step >= LEAST_SHARE * ground.step_ns]
    worth.sort(key=lambda one: (-one.cost_ns_per_step, one.text))
    return tuple(worth[:MOST])
