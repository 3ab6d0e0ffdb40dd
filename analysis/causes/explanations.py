"""What the models add to a finding, in words: whether latency or bytes cost, who is busiest, why a device is idle.

They return what to add to the sentence, most of them also what to try; empty where the numbers do not tell.
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.alpha_beta import FITTED, NS_PER_BYTE_TO_US_PER_MB
from stepscope.analysis.causes.experts import Experts
from stepscope.analysis.causes.idle import REASONS
from stepscope.analysis.causes.volumes import NOT_DIFFERING

Words = tuple[str, str]
NOTHING: Words = ("", "")

SKEWED = 1.25
"""Experts are named as uneven from this load of the busiest rank, over the mean, on."""

MOSTLY = 0.5
"""A reason is named when it explains this share of the idle time."""

LATENCY_ADVICE = {
    "dp": "larger gradient buckets (--bucket-mb): each message costs its latency, whatever its size",
    "tp": "a smaller tensor-parallel degree or larger microbatches: each of its messages costs its latency, whatever its size",
}

IDLE_ADVICE = {
    "synchronisation": "fewer calls that wait for the device (reading back a loss or a norm, blocking copies): the host then runs ahead",
    "launch_bound": "fewer, larger operations (fusion, compilation, graphs): the host launches them too late to keep the device busy",
    "queued": "operations wait for others of their stream, or for a core, before they begin: fewer or earlier ones, or another stream",
    "hand_over": "the program hands a communication to its stream: fewer and larger ones; where ranks share cores, more cores",
    "device_gap": "the device needs a moment between two operations: fewer, larger ones (fusion, compilation, graphs)",
    "held": "look at what the streams wait for: events of other streams, copies, work of another process on the device",
    "head": "what the host does before a step's first operation: prepare data ahead",
    "tail": "what the host does after a step's last operation: logging, checkpoints, reading back",
}


def bound_by(fits: pd.DataFrame, axis: str, collective: str) -> Words:
    """Latency or bandwidth, where the 95 % intervals of every fitted group of the axis and collective agree."""
    name = "send_receive" if collective in ("send", "receive") else collective
    told = fits[(fits["axis"] == axis) & (fits["collective"] == name) & (fits["status"] == FITTED)]
    if told.empty:
        return NOTHING
    size = told["median_bytes"] / NS_PER_BYTE_TO_US_PER_MB
    if (told["alpha_low_ns"] > told["slope_high_us_per_mb"] * size).all():
        alpha, whole = (units.duration(float(told[column].median())) for column in ("alpha_ns", "median_ns"))
        advice = LATENCY_ADVICE.get(axis, "fewer and larger messages: each costs its latency, whatever its size")
        return f"; latency bound: {alpha} of the {whole} of one", advice
    if (told["alpha_high_ns"] < told["slope_low_us_per_mb"] * size).all():
        bus = float(told["bus_gb_per_s"].median())
        rate = "" if units.undefined(bus) else f" at {units.significant(bus, 3)} GB/s"
        return f"; bandwidth bound{rate}", ""
    return NOTHING


def busiest(experts: Experts | None, axis: str, collective: str) -> Words:
    """The rank whose experts take most, where its exchange is what costs."""
    if experts is None or collective != "all_to_all" or axis != "ep" or (experts.rank_skew or 0) < SKEWED:
        return NOTHING
    top = experts.ranks.iloc[0]
    text = (
        f"; rank {int(top['rank'])} takes {units.significant(float(top['relative_load']), 3)} x the mean of the tokens"
    )
    return text, "balance the routing (a bias or an auxiliary loss), or place busy experts apart"


def off_theory(volumes: pd.DataFrame, axis: str, collective: str) -> str:
    """What to add where the recorded volume of an axis and collective is not the predicted one."""
    mine = volumes[(volumes["axis"] == axis) & (volumes["collective"] == collective)]
    odd = mine[~mine["verdict"].isin(NOT_DIFFERING)]
    if odd.empty:
        return ""
    worst = odd.iloc[0]
    return f"; not what theory predicts for {worst['strategy'].replace('_', ' ') or 'it'}: {worst['verdict']}"


def why_idle(idle: pd.DataFrame, ranks: Collection[int], steps: Collection[int | str]) -> Words:
    """The reason of most of the idle time of these ranks and steps."""
    rows = idle[idle["rank"].isin(list(ranks)) & idle["step"].isin(list(steps))]
    whole = float(rows["idle_ns"].sum()) if len(rows) else 0.0
    if not whole:
        return NOTHING
    shares = {reason: float(rows[f"{reason}_ns"].sum()) / whole for reason in REASONS}
    most = max(shares, key=lambda reason: shares[reason])
    if shares[most] < MOSTLY or most == "unexplained":
        return NOTHING
    return f", {units.share(shares[most])} of that {most.replace('_', ' ')}", IDLE_ADVICE.get(most, "")
