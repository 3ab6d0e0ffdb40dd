"""The report on a terminal: health first, then the figures, then what to do about them (rich; plain where piped).

Text that comes from traces (names, labels) only ever enters as rich.Text, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.analysis import units
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import view
from stepscope.analysis.report.details import details
from stepscope.analysis.report.model import Report
from stepscope.analysis.report.tables import Detail

STYLES = {
    "compute": "blue",
    "forward": "blue",
    "backward": "cyan",
    "weight_grad": "cyan",
    "recompute": "blue",
    "optimizer": "magenta",
    "other": "blue",
    "visible_comm": "yellow",
    "bubble": "bright_black",
    "imbalance": "red",
    "memcpy": "color(130)",
    "idle": "white",
}

FILL = {"bubble": "▒", "imbalance": "▓", "idle": "·"}
"""Waiting is hatched and idle empty, so that colour is never the only sign; everything else is solid."""

MOST_HEALTH = 6
MOST_ROWS = 32
MOST_STRAGGLERS = 8
MOST_DETAILS = 6
WIDE = 100
"""From this width on a bar stands beside the numbers of each rank."""


def clean(text: str, most: int = 400) -> str:
    """Text from a trace, safe to print: no control characters (terminal escapes), no lone surrogates, cut at `most`."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in str(text))
    return printable if len(printable) <= most else printable[: most - 1] + "…"


def print_report(report: Report, console: Console) -> None:
    """Print the whole report on `console`."""
    for block in blocks(report, console.width):
        console.print(block)


def blocks(report: Report, width: int) -> Iterator[RenderableType]:
    """The blocks of the report, from top to bottom, for a terminal of `width` columns."""
    yield _health(report)
    yield _title(report)
    bar = view.mean_bar(report)
    if bar is None:
        yield Text("No whole step was recorded, so there are no means; the ledger of each step is in --json.")
    else:
        yield _headline(report)
        yield from _section("Where the step went", _terms(bar, width))
        yield from _section("By rank", _ranks(report, width))
    if report.pipeline.stages > 1:
        yield from _section("Pipeline", _pipeline(report))
    overlap = view.overlap_rows(report)
    if overlap:
        yield from _section("Overlap of communication with compute", _overlap(overlap))
    for detail in details(report):
        yield from _section(detail.title, _detail(detail))
    if report.stragglers:
        yield from _section("Stragglers, dearest first", _stragglers(report))
    yield from _section("Findings", _findings(report))
    if view.findings_note(report):
        yield Padding(Text(view.findings_note(report), style="dim"), (0, 0, 0, 2))


def _section(title: str, body: RenderableType) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, style="bold")
    yield Padding(body, (0, 0, 0, 2), expand=False)


def _health(report: Report) -> RenderableType:
    ok = report.health.status == "ok"
    style = {"ok": "green", "touched": "yellow", "broken": "red"}[report.health.status]
    lines = [Text.assemble(("✓ " if ok else "! ", f"bold {style}"), (view.health_line(report), style))]
    items = sorted(report.health.items, key=lambda item: (not item.broken, not item.touches))
    for item in items[:MOST_HEALTH]:
        touches = f" [{', '.join(item.touches)}]" if item.touches else ""
        whose = f"rank {item.rank}"
        who = "" if item.rank is None or whose in item.text else f"{whose}: "
        lines.append(Text(f"  - {who}{clean(item.text)}{touches}", style="" if item.touches or item.broken else "dim"))
    if len(items) > MOST_HEALTH:
        lines.append(Text(f"  - and {len(items) - MOST_HEALTH} more (all of them: --json)", style="dim"))
    return Group(*lines)


def _title(report: Report) -> RenderableType:
    meta = report.meta
    where = "+".join(word for word in (meta.device, meta.backend) if word)
    facts = [view.mesh_text(report), f"{meta.source}{f' on {where}' if where else ''}", view.scope(report)]
    line = Text.assemble((clean(report.name, 80), "bold"))
    return Group(Text(), line, Text(" · ".join(clean(fact) for fact in facts), style="dim"))


def _headline(report: Report) -> RenderableType:
    line = Text.assemble("\nstep ", (units.duration(float(report.means.values["step_ns"])), "bold"))
    for label, value, _ in view.headline(report):
        line.append(f"   {label} ")
        line.append(value, style="bold")
    return line


def _terms(bar: view.Bar, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), show_header=False, pad_edge=False)
    table.add_column(min_width=21)
    table.add_column(justify="right", min_width=9)
    table.add_column(justify="right", min_width=7)
    table.add_column()
    room = max(min(width - 48, 60), 10)
    phases = [part for part in bar.parts if part in view.PHASE_PARTS]
    shown = [("compute", bar.compute_ns), *((part, bar.parts[part]) for part in phases)]
    shown += list(zip(TERMS[1:], bar.terms[1:], strict=True))
    for name, ns in shown:
        inner = name in view.PHASE_PARTS
        label = Text(f"  {view.LABELS[name]}" if inner else view.LABELS[name], style="dim" if inner else "")
        share = ns / bar.total_ns if bar.total_ns else None
        fill = Text() if name == "compute" and phases else _run_of(name, round(room * (share or 0)))
        table.add_row(label, units.duration(ns), units.share(share), fill)
    return table


def _run_of(part: str, cells: int) -> Text:
    return Text(FILL.get(part, "█") * cells, style=STYLES[part])


def _stacked(bar: view.Bar, cells: int) -> Text:
    """A bar of exactly `cells` characters; each part ends at its rounded cumulative share."""
    line, done, total = Text(), 0, 0.0
    for part, ns in bar.parts.items():
        total += ns
        edge = round(cells * total / bar.total_ns) if bar.total_ns else 0
        line.append_text(_run_of(part, edge - done))
        done = edge
    return line


def _ranks(report: Report, width: int) -> RenderableType:
    bars = view.rank_bars(report)
    scale = units.time_scale([bar.total_ns for bar in bars])
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column(f"in {scale.unit}", no_wrap=True)
    for name in ("step", *TERMS):
        table.add_column(view.SHORT_LABELS.get(name, name).replace(" ", "\n"), justify="right")
    wide = width >= WIDE
    if wide:
        table.add_column("share of the step", no_wrap=True)
    room = max(width - 84, 12)
    for bar in bars[:MOST_ROWS]:
        cells = [Text(bar.label), *(Text(scale(n)) for n in (bar.total_ns, *bar.terms))]
        table.add_row(*cells, *([_stacked(bar, room)] if wide else []))
    if len(bars) > MOST_ROWS:
        more = Text(f"... and {len(bars) - MOST_ROWS} more (--html shows all, --json has the ledger)", style="dim")
        return Group(table, more)
    return table


def _pipeline(report: Report) -> RenderableType:
    p = report.pipeline
    facts = [
        f"schedule {p.schedule or 'not recognised'}",
        units.counted(p.stages, "stage"),
        units.counted(p.microbatches, "microbatch", "microbatches") if p.microbatches else f"{units.DASH} microbatches",
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("bubble")
    table.add_column("of the step", justify="right")
    table.add_column("of the microbatches' compute", justify="right")
    for row in view.pipeline_rows(report):
        table.add_row(*row)
    return Group(Text(clean(", ".join(facts))), table)


def _overlap(rows: Sequence[tuple[str, ...]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("axis", "collective", "stream"):
        table.add_column(name)
    table.add_column("overlap efficiency", justify="right")
    table.add_column("comm overlap", justify="right")
    for row in rows[:MOST_ROWS]:
        table.add_row(*(Text(clean(cell, 24)) for cell in row))
    return table


def _detail(detail: Detail) -> RenderableType:
    """The head of a table, or one line for it: the page and the JSON have all of it."""
    if detail.short:
        return Text(clean(detail.short))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    heads, rows = detail.narrow()
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place >= detail.numbers_from else "left")
    for row in rows[:MOST_DETAILS]:
        table.add_row(*(Text(clean(cell, 60)) for cell in row))
    rest = len(detail.rows) - MOST_DETAILS
    notes = [f"and {rest} more (--html shows all, --json has them)"] if rest > 0 else []
    notes += [detail.note] if detail.note else []
    return Group(table, *(Text(clean(note), style="dim") for note in notes))


def _stragglers(report: Report) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("rank")
    table.add_column("others waited a step, summed", justify="right")
    table.add_column("last to arrive", justify="right")
    table.add_column("cause")
    table.add_column("pattern")
    worth = view.notable(report)
    for one in worth[:MOST_STRAGGLERS]:
        cost = units.duration(one.cost_ns_per_step)
        words = (Text(one.cause or units.DASH), Text(one.pattern or units.DASH))
        table.add_row(view.rank_label(report, one.rank), cost, units.counted(one.last_arrivals, "time"), *words)
    rest = len(report.stragglers) - min(len(worth), MOST_STRAGGLERS)
    note = Text(f"{rest} more rank{'s' if rest != 1 else ''} cost next to nothing or less (--json)", style="dim")
    groups = [Text(clean(line)) for line in view.group_lines(report)[:MOST_STRAGGLERS]] if worth else []
    return Group(*([table] if worth else []), *([note] if rest else []), *groups)


def _findings(report: Report) -> RenderableType:
    if not report.findings:
        return Text("none: nothing costs enough to name" if report.means.values else "none: no whole step")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for index, finding in enumerate(report.findings):
        facts = f"{units.duration(finding.cost_ns_per_step)} a step · confidence {finding.confidence}"
        where = view.evidence(report, index)
        lines = [Text(clean(finding.text)), Text(f"{facts} · see {where}" if where else facts, style="dim")]
        lines += [Text.assemble(("try: ", "green"), clean(finding.advice))] if finding.advice else []
        table.add_row(Text(f"{index + 1}.", style="bold"), Group(*lines))
    return table
