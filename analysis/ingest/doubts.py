"""What in a foreign trace looks wrong, or may have been taken for the wrong thing: said, never changed."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.run import Columns
from stepscope.tracer.schema import KINDS, Lane

_COMPUTE, _COMM, _HOST = (KINDS.index(kind) for kind in ("compute", "comm", "host"))
_SHOWN = 5


def launches(events: Columns, strings: list[str], note: Note) -> None:
    """Device rows that start before the call that launched them, and kernel launches that nothing ran of."""
    known = events["launch_id"] >= 0
    calls = np.flatnonzero(known & (events["kind"] == _HOST))
    device = np.flatnonzero(known & (events["kind"] != _HOST))
    if not len(calls) or not len(device):
        return
    calls = calls[np.argsort(events["launch_id"][calls], kind="stable")]
    at = np.minimum(np.searchsorted(events["launch_id"][calls], events["launch_id"][device]), len(calls) - 1)
    joined = events["launch_id"][calls[at]] == events["launch_id"][device]
    early = joined & (events["start_ns"][device] < events["start_ns"][calls[at]])
    if early.any():
        lead = int((events["start_ns"][calls[at]] - events["start_ns"][device])[early].max())
        note(
            "earlier_than_launch",
            f"{int(early.sum())} device rows start before the call that launched them (by up to {lead} ns): "
            "host and device clocks disagree",
            touches=("ledger",),
        )
    launching = np.array(["launch" in name.lower() for name in strings] or [False])
    kernel_calls = calls[launching[np.maximum(events["name_id"][calls], 0)] & (events["name_id"][calls] >= 0)]
    lost = int((~np.isin(events["launch_id"][kernel_calls], events["launch_id"][device])).sum())
    if lost:
        note("launch_without_kernel", f"{lost} of {len(kernel_calls)} kernel launches have no device row")


def unrecognised(events: Columns, lanes: tuple[Lane, ...], strings: list[str], world: int | None, note: Note) -> None:
    """No communication although there are several ranks; compute kernels on a stream that otherwise communicates."""
    kinds = events["kind"]
    compute = kinds == _COMPUTE
    if world is not None and world > 1 and compute.any() and not (kinds == _COMM).any():
        note(
            "no_communication",
            f"the trace is of one of {world} ranks, yet no communication was recognised; the longest kernels: "
            f"{_longest(events, compute, strings)}. If one of them communicates, name it in a rules file",
            touches=("visible_comm_ns", "overlap_efficiency", "collectives"),
        )
    on_comm_lane = compute & np.isin(events["lane"], [lane.index for lane in lanes if lane.role == "comm"])
    if on_comm_lane.any():
        note(
            "unnamed_on_comm_stream",
            f"{int(on_comm_lane.sum())} kernels on communication streams fit no communication rule and count as "
            f"compute: {_longest(events, on_comm_lane, strings)}",
        )


def _longest(events: Columns, chosen: np.ndarray, strings: list[str]) -> str:
    """Names of the chosen rows by total time, the longest first."""
    ids, inverse = np.unique(events["name_id"][chosen], return_inverse=True)
    totals = np.bincount(inverse, weights=events["dur_ns"][chosen])
    order = np.argsort(-totals, kind="stable")[:_SHOWN]
    parts = [f"{strings[ids[i]][:60] if ids[i] >= 0 else '?'} ({totals[i] / 1000:.0f} us)" for i in order.tolist()]
    return ", ".join(parts)
