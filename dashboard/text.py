"""Names from traces, and the few units that only the dashboard shows; times, bytes and shares: analysis.units."""

from __future__ import annotations

from stepscope.analysis import units

NAME_LENGTH = 160
"""Names from traces are cut at this many characters."""


def name(text: str, length: int = NAME_LENGTH) -> str:
    """A name from a trace: cut, and without control characters (which markup and layout could trip over)."""
    clean = "".join(c if c.isprintable() else " " for c in text[: length + 1])
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def bandwidth(bytes_per_s: float | None) -> str:
    """`12.3 GB/s`; a dash for undefined."""
    text = units.size(bytes_per_s)
    return text if text == units.DASH else f"{text}/s"


def title(*words: str) -> str:
    """A page's title, as the browser's tab shows it: `slow · stepscope`."""
    return " · ".join([*words, "stepscope"])


def ranks_label(coords: dict[str, int]) -> str:
    """Mesh coordinates outermost first: `pp1 dp0`."""
    return " ".join(f"{axis}{index}" for axis, index in coords.items())


def mesh_label(mesh: dict[str, int], world_size: int) -> str:
    """`pp2 dp2 · 4 ranks`; axes of size 1 say nothing."""
    axes = " ".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1)
    ranks = units.counted(world_size, "rank")
    return f"{axes} · {ranks}" if axes else ranks
