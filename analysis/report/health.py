"""The health report on its own: every item in full, for a terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from stepscope.analysis.records import JSON_SCHEMA_VERSION, HealthItem
from stepscope.analysis.report.terminal import clean
from stepscope.analysis.report.view import health_words
from stepscope.analysis.run import Run
from stepscope.analysis.units import counted

STYLES = {"ok": "green", "touched": "yellow", "broken": "red"}


def health_json(run: Run) -> dict[str, Any]:
    """`schema`, `health` as the public format has it, and of `run` its name, source, path, world size and ranks."""
    meta = run.meta
    facts = {
        "name": meta.name or meta.run_id,
        "source": meta.source,
        "path": str(run.path) if run.path else None,
        "world_size": meta.world_size,
        "ranks": list(run.ranks),
    }
    return {"schema": JSON_SCHEMA_VERSION, "health": run.health.to_json(), "run": facts}


def print_health(run: Run, console: Console) -> None:
    """Status, what was read, then all items: those that touch figures first."""
    status = run.health.status
    mark = "✓" if status == "ok" else "!"
    console.print(Text.assemble((f"{mark} ", f"bold {STYLES[status]}"), (health_words(run.health), STYLES[status])))
    meta = run.meta
    of = f"{len(run.ranks)} of {counted(meta.world_size, 'rank')}"
    console.print(Text(clean(f"{meta.name or meta.run_id} · {meta.source} · {of}"), style="dim"))
    for item in sorted(run.health.items, key=lambda one: (not one.broken, not one.touches)):
        console.print(Text.assemble("\n", (item.code, "bold"), f"  {clean(item.text, 4000)}"))
        where = _where(item)
        if where:
            console.print(Padding(Text(where, style="dim"), (0, 0, 0, 2), expand=False))


def _where(item: HealthItem) -> str:
    """Which rank, which file at which byte, which figures."""
    facts = []
    if item.rank is not None:
        facts.append(f"rank {item.rank}")
    if item.file is not None:
        at = f" at byte {item.offset}" if item.offset is not None and item.offset >= 0 else ""
        facts.append(f"{clean(item.file)}{at}")
    if item.touches:
        facts.append(f"touches {', '.join(item.touches)}")
    return " · ".join(facts)
