"""Sizes that files tell of a run and that do not fit in each other: said, never changed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from stepscope.analysis.records import HealthItem
from stepscope.analysis.units import counted
from stepscope.tracer.schema import RUN_FILE, RunMeta

if TYPE_CHECKING:
    from stepscope.analysis.ingest.build import Entry

WITHIN_OTHERS = ("ep", "edp")
"""Axes of the mesh that are another view of the ranks of dp, cp and tp: they add none."""


def odd_sizes(meta: RunMeta, entries: list[Entry]) -> list[HealthItem]:
    """What does not fit in the sizes that files tell: the mesh in the world, and one file's world in another's."""
    items = []
    ranks = prod(size for axis, size in meta.mesh.items() if axis not in WITHIN_OTHERS)
    if meta.mesh and ranks != meta.world_size:
        mesh = " x ".join(f"{axis} {size}" for axis, size in meta.mesh.items() if axis not in WITHIN_OTHERS)
        text = (
            f"the mesh ({mesh}) has {counted(ranks, 'rank')}, the run {meta.world_size}: what follows from degrees"
            " (theory, tokens of a step) may be of another layout"
        )
        file = RUN_FILE if meta.source != "imported" else None
        items.append(HealthItem("odd_mesh", text, file=file, touches=("pipeline", "summary", "volumes", "memory")))
    worlds: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry["facts"]["world_size"]:
            worlds.setdefault(entry["facts"]["world_size"], []).append(entry)
    if len(worlds) > 1 or (worlds and meta.world_size not in worlds):
        said = ", ".join(f"{size} in {_files(worlds[size])}" for size in sorted(worlds))
        text = f"the files' headers tell other world sizes ({said}) than {meta.world_size}, which is taken"
        if len(worlds) > 1:
            text = f"the files' headers tell different world sizes ({said}): {meta.world_size} is taken"
        text += "; what was missed by ranks that are not there, or are of another run, is a guess"
        touches = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "unsplit_ns", "collectives", "stragglers")
        items.append(HealthItem("odd_world", text, touches=touches))
    return items


def _files(entries: list[Entry]) -> str:
    """Some of the files, by name."""
    return ", ".join(entry["file"] for entry in entries[:3]) + (", ..." if len(entries) > 3 else "")
