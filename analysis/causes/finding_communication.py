"""Findings about communication: a slow link, and exposed transfer of an axis and collective."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.audit import groups_across_hosts
from stepscope.analysis.causes.classes import UNSPLIT, taken_apart
from stepscope.analysis.causes.explanations import bound_by, busiest, off_theory
from stepscope.analysis.causes.ground import LEAST_TERM, Ground, finding
from stepscope.analysis.records import Finding

SLOW_LINK = 3.0
"""A link is slow when its messages take this many times as long as those of the other links of its axis."""


def communication(ground: Ground) -> list[Finding]:
    """Slow links, and exposed transfer, one finding an axis and collective; what could not be split is left out."""
    found, told = _slow_links(ground)
    rows = ground.classes[
        ground.classes["step"].isin(ground.means.steps) & ground.classes["rank"].isin(ground.means.ranks)
    ]
    rows = rows[rows["class"].str.startswith("visible_comm ") & ~rows["class"].str.endswith(UNSPLIT)]
    for name, total in rows.groupby("class")["ns"].sum().items():
        _, _, axis, collective, _ = taken_apart(str(name))
        cost = float(Fraction(int(total), len(ground.means.ranks) * len(ground.means.steps)))
        cost -= told.get((axis, collective), 0.0) / len(ground.means.ranks)
        if cost >= LEAST_TERM * ground.step_ns:
            found.append(_exposed(ground, axis, collective, cost))
    return found


def _slow_links(ground: Ground) -> tuple[list[Finding], dict[tuple[str, str], float]]:
    """One finding a slow link; and by (axis, collective) the exposed ns a step, over all ranks, that they tell of."""
    found, told = [], defaultdict[tuple[str, str], float](float)
    slow = ground.links[ground.links["relative"].astype(float) >= SLOW_LINK]
    for row in slow.to_dict("records"):
        link = {str(name): value for name, value in row.items()}
        excess = 1 - 1 / link["relative"]
        cost = link["target_exposed_ns_per_step"] * excess
        if cost < LEAST_TERM * ground.step_ns:
            continue
        found.append(_slow_link(ground, link, cost))
        both = ("ring_shift", "ring_shift") if link["collective"] == "ring_shift" else ("receive", "send")
        told[link["axis"], both[0]] += cost
        told[link["axis"], both[1]] += link["source_exposed_ns_per_step"] * excess
    return found, told


def _slow_link(ground: Ground, link: dict[str, Any], cost: float) -> Finding:
    source, target = link["source"], link["target"]
    places = f"rank {source} to rank {target}"
    if link["axis"] == "pp" and min(link["source_stage"], link["target_stage"]) >= 0:
        places += f" (stage {link['source_stage']} to stage {link['target_stage']})"
    size = f" of {units.size(link['median_bytes'])}" if link["median_bytes"] > 0 else ""
    text = (
        f"the {link['axis']} link from {places} is slow: a message{size} takes"
        f" {units.duration(link['median_transfer_ns'])}, {units.significant(link['relative'], 3)} times what it takes on"
        f" the others; exposed for {units.duration(link['target_exposed_ns_per_step'])} a step"
    )
    hosts = [ground.meta.hosts[rank] if rank < len(ground.meta.hosts) else "" for rank in (source, target)]
    between = "the network between their hosts" if len(set(hosts)) > 1 else "what else uses it, and how it is routed"
    advice = f"look at the way from rank {source} to rank {target}: {between}"
    parts = ground.parts[(ground.parts["rank"] == target) & (ground.parts["source"] == source)]
    counted = parts[parts["step"].isin(ground.means.steps) & (parts["axis"] == link["axis"])]
    return finding(ground, text, cost, ground.sure, advice, ("visible_comm_ns",), **_longest(counted))


def _longest(parts: pd.DataFrame) -> dict[str, object]:
    """Rank, step, operation and interval of the longest transfer of some parts."""
    if parts.empty:
        return {}
    one = parts.iloc[int(parts["transfer_ns"].to_numpy().argmax())]
    return {
        "rank": int(one["rank"]),
        "step": one["step"],
        "start_ns": int(one["end_ns"] - one["transfer_ns"]),
        "end_ns": int(one["end_ns"]),
        "op_id": int(one["op_id"]) if one["op_id"] >= 0 else None,
    }


def _exposed(ground: Ground, axis: str, collective: str, cost: float) -> Finding:
    parts = ground.parts[(ground.parts["axis"] == axis) & (ground.parts["collective"] == collective)]
    counted = parts[parts["step"].isin(ground.means.steps) & parts["rank"].isin(ground.means.ranks)]
    each = len(counted) / max(len(ground.means.ranks) * len(ground.means.steps), 1)
    size = float(counted["bytes"].median()) if len(counted) and (counted["bytes"] >= 0).any() else None
    of = f"{units.significant(each, 3)} a step and rank" + (f" of {units.size(size)}" if size else "")
    what = collective.replace("_", "-") or "communication of an unknown kind"
    what = f"{axis} {what}" if axis else f"{what} of an unknown axis"
    text = f"the {what} is exposed for {units.duration(cost)} a step ({of})"
    if axis == "tp" and groups_across_hosts(ground.meta, axis):
        text += "; its groups span hosts"
    bound, faster = bound_by(ground.fits, axis, collective)
    uneven, even = busiest(ground.experts, axis, collective)
    advice = even or faster or _communication_advice(ground, axis, size)
    if ground.meta.source == "imported":
        advice = advice.replace(" (--bucket-mb)", "")  # an option of ours is none of theirs
    audit = off_theory(ground.volumes, axis, collective)
    words = f"{text}{bound}{uneven}{audit}"
    return finding(ground, words, cost, ground.sure, advice, ("visible_comm_ns",), **_longest(counted))


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
