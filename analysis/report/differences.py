"""A comparison on a terminal and as Markdown for a review comment."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.analysis import units
from stepscope.analysis.compare import Comparison, Delta, Pair
from stepscope.analysis.report.side_by_side import heads_and_rows, letters, table
from stepscope.analysis.report.terminal import clean
from stepscope.analysis.report.view import SHORT_LABELS, health_line, mesh_text, scope

MOST_CLASSES = 8
MOST_NAMES = 6
NOISE = {True: "beyond", False: "within", None: "unknown"}
"""What a table says of a change beside its noise band."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the comparison on `console`: health of every run first."""
    for block in blocks(comparison):
        console.print(block)


def blocks(comparison: Comparison) -> Iterator[RenderableType]:
    """The blocks of the comparison from top to bottom."""
    for letter, report in zip(letters(len(comparison.reports)), comparison.reports, strict=True):
        ok = report.health.status == "ok"
        mark = Text("✓ " if ok else "! ", style="green" if ok else "yellow")
        yield Text.assemble(mark, (f"{letter}  ", "bold"), (clean(report.name, 80), "bold"), f"  {health_line(report)}")
        yield Text(f"     {mesh_text(report)} · {scope(report)}", style="dim")
    yield Text("\nAll runs, mean step", style="bold")
    yield Padding(table(comparison.reports), (0, 0, 0, 2), expand=False)
    for number, pair in enumerate(comparison.pairs):
        letter = letters(len(comparison.reports))[number + 1]
        yield Text()
        yield Text(f"A → {letter}, per step", style="bold")
        yield Padding(_table([pair.step, *pair.terms], letter), (0, 0, 0, 2), expand=False)
        if pair.per_token and _tokens_differ(comparison, number):
            yield Text(f"A → {letter}, per token", style="bold")
            yield Padding(_table(pair.per_token, letter), (0, 0, 0, 2), expand=False)
        changed = [delta for delta in pair.classes if delta.delta_ns][:MOST_CLASSES]
        if changed:
            yield Text("Largest changes by operation class", style="bold")
            yield Padding(_table(changed, letter), (0, 0, 0, 2), expand=False)
        yield from (Text(line, style="dim") for line in only_in(pair, letter))


def _tokens_differ(comparison: Comparison, number: int) -> bool:
    first, other = comparison.reports[0], comparison.reports[number + 1]
    return first.throughput.tokens_per_step != other.throughput.tokens_per_step


def label(name: str) -> str:
    """`visible communication` for `visible_comm_ns`; the class's own name for a class."""
    plain = name.removesuffix("_ns")
    return "step" if plain == "step" else SHORT_LABELS.get(plain, plain.replace("_", " "))


def cells(delta: Delta, scale: units.Scale) -> list[str]:
    """One row in the table's unit: label, A, B, change, relative change, noise band, whether the change is beyond it."""
    band = units.DASH
    if delta.low_ns is not None and delta.high_ns is not None:
        band = f"{signed(scale, delta.low_ns)} … {signed(scale, delta.high_ns)}"
    return [
        clean(label(delta.name), 60),
        scale(float(delta.a_ns)),
        scale(float(delta.b_ns)),
        signed(scale, float(delta.delta_ns)),
        units.signed_share(delta.relative) if delta.a_ns else units.DASH,
        band if delta.delta_ns else units.DASH,
        NOISE[delta.beyond_noise] if delta.delta_ns else "same",
    ]


def signed(scale: units.Scale, ns: float) -> str:
    """A difference in the unit of a table, with its sign."""
    return f"+{scale(ns)}" if ns > 0 else scale(ns)


def scale_of(deltas: Sequence[Delta]) -> units.Scale:
    """The unit of a table of deltas."""
    return units.time_scale([float(side) for delta in deltas for side in (delta.a_ns, delta.b_ns)])


def _table(deltas: Sequence[Delta], letter: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    scale = scale_of(deltas)
    for place, head in enumerate(heads(scale, letter)):
        table.add_column(head, justify="left" if place in (0, 6) else "right", no_wrap=place > 0)
    for delta in deltas:
        style = ""
        if delta.beyond_noise:
            style = "red" if delta.delta_ns > 0 else "green"
        row = cells(delta, scale)
        bold = "bold" if label(delta.name) == "step" else ""
        changed: list[Text | str] = [Text(row[3], style=style or bold), *row[4:6], Text(row[6], style=style)]
        table.add_row(Text(row[0], style=bold), *row[1:3], *changed)
    return table


def heads(scale: units.Scale, letter: str) -> list[str]:
    """The heads of a table."""
    return [f"in {scale.unit}", "A", letter, "change", "", "noise band", "noise"]


def only_in(pair: Pair, letter: str) -> list[str]:
    """One line a side about operations that the other lacks; none where both have the same."""
    lines = []
    for side, names in (("A", pair.only_in_a), (letter, pair.only_in_b)):
        if names:
            shown = ", ".join(clean(name, 40) for name in names[:MOST_NAMES])
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            lines.append(f"Operations only in {side}: {shown}{more}")
    return lines


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown: all runs in one table, then one a pair; text from traces cannot break out of its cell."""
    lines = ["### stepscope compare", ""]
    for letter, report in zip(letters(len(comparison.reports)), comparison.reports, strict=True):
        facts = (mesh_text(report), scope(report), health_line(report))
        lines.append(f"- **{letter}** {_cell(report.name)}: {'; '.join(_cell(fact) for fact in facts)}")
    all_heads, rows = heads_and_rows(comparison.reports)
    lines += ["", *_rows(all_heads, rows, ":--|:--" + "|--:" * (len(all_heads) - 2))]
    for number, pair in enumerate(comparison.pairs):
        letter = letters(len(comparison.reports))[number + 1]
        lines += _pair_table("per step", (pair.step, *pair.terms), letter)
        if pair.per_token and _tokens_differ(comparison, number):
            lines += _pair_table("per token", pair.per_token, letter)
        lines += ["", *(_cell(line) for line in only_in(pair, letter))]
    return "\n".join(lines).rstrip() + "\n"


def _pair_table(title: str, deltas: Sequence[Delta], letter: str) -> list[str]:
    scale = scale_of(deltas)
    first, *others = heads(scale, letter)
    rows = [cells(delta, scale) for delta in deltas]
    return ["", *_rows([f"{title}, {first}", *others], rows, ":--|--:|--:|--:|--:|--:|:--")]


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{sides}|"]
    return lines + [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]


def _cell(text: str) -> str:
    """Plain text inside Markdown: markup escaped, no line breaks."""
    return "".join(f"\\{c}" if c in "\\`*_[]|#~" else c for c in html.escape(clean(text), quote=False))
