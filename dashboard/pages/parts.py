"""Pieces that every page uses: swatches, terms with their definition, the stacked bar of a step, badges, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html

from stepscope.analysis import units
from stepscope.analysis.records import Health
from stepscope.dashboard import text, theme

SOURCE_WORDS = {
    "measured": "times recorded on real processes",
    "simulated": "times of a virtual clock",
    "imported": "a trace that another program wrote",
}
HEALTH_WORDS = {"ok": "health ok", "touched": "health touched", "broken": "broken"}


def attributes(names: dict[str, Any]) -> dict[str, Any]:
    """HTML attributes that are no Python names (`aria-label`, `data-run`), to be spread into a component."""
    return names


def category_of(part: str) -> str:
    """The category (theme.CATEGORIES) that shows a part of a bar (report.view.PARTS)."""
    return "compute" if part == "other" else part


def swatch(key: str) -> html.I:
    """The colour and texture of a category, as in the timeline."""
    category = theme.BY_KEY[category_of(key)]
    return html.I(
        className=f"ss-swatch ss-t-{category.texture}",
        style={"--c": f"var(--ss-c-{category.key})"},
        **attributes({"aria-hidden": "true"}),
    )


def defined(label: str, definition: str | None, className: str = "") -> Any:
    """A word whose definition appears on hover and focus."""
    if not definition:
        return html.Span(label, className=className)
    word = html.Span(label, className=f"ss-term {className}", tabIndex=0)
    return dmc.Tooltip(
        word,
        label=definition,
        multiline=True,
        w=280,
        withArrow=True,
        openDelay=250,
        events={"hover": True, "focus": True, "touch": True},
    )


def term(key: str, label: str | None = None) -> Any:
    """A term of the ledger with its swatch and definition."""
    name = category_of(key)
    shown = label or theme.BY_KEY[name].label
    return html.Span([swatch(key), defined(shown, theme.DEFINITIONS.get(name))], className="ss-with-swatch")


def stacked_bar(parts: Sequence[tuple[str, float]], total: float, label: str, big: bool = False) -> html.Div:
    """One step as a bar that ends at exactly 100 %: (part, ns) in order, `total` their sum.

    `label` says what it is of. Wide pieces carry their name; every piece has its numbers as tooltip.
    """
    parts = [(part, ns) for part, ns in parts if ns >= 0.5]  # less than half a nanosecond is rounding
    pieces = []
    for part, ns in parts:
        category = theme.BY_KEY[category_of(part)]
        share = ns / total if total else 0.0
        words = f"{category.label} {units.duration(ns)}, {units.share(share)}"
        inside = (
            [html.Span(category.label, className="ss-bar-label")] if big and share > 0.012 * len(category.label) else []
        )
        pieces.append(
            html.Div(
                inside,
                className=f"ss-bar-piece ss-t-{category.texture}",
                title=words,
                style={"flexGrow": ns, "--c": f"var(--ss-c-{category.key})"},
            )
        )
    spoken = ", ".join(
        f"{theme.BY_KEY[category_of(part)].label} {units.share(ns / total if total else None)}" for part, ns in parts
    )
    return html.Div(
        pieces,
        className="ss-bar ss-bar-big" if big else "ss-bar",
        role="img",
        **attributes({"aria-label": f"{label}: {spoken or 'no time'}"}),
    )


def source_badge(source: str) -> Any:
    """measured, simulated or imported."""
    badge = html.Span(source, className=f"ss-badge ss-source-{source}")
    return dmc.Tooltip(badge, label=SOURCE_WORDS.get(source, source), withArrow=True, openDelay=250)


def health_badge(health: Health | None, error: str = "") -> html.Span:
    """A sign and a word: colour is not the only sign."""
    status = "broken" if error or health is None else health.status
    sign = {"ok": "✓", "touched": "!", "broken": "✕"}[status]
    return html.Span(
        [html.B(sign, **attributes({"aria-hidden": "true"})), HEALTH_WORDS[status]], className=f"ss-badge ss-{status}"
    )


def health_line(summary: str, health: Health) -> html.Details:
    """The health report: one line, all items when it is opened."""
    items = []
    for item in health.items:
        where = [f"rank {item.rank}" if item.rank is not None else "", text.name(item.file or "", 80)]
        if item.offset is not None:
            where.append(f"byte {item.offset}")
        touches = (
            f"touches {', '.join(name.removesuffix('_ns') for name in item.touches)}" if item.touches else "remark"
        )
        items.append(
            html.Li(
                [
                    html.Span(text.name(item.text, 400)),
                    html.Small(" · ".join([w for w in where if w] + [touches])),
                ]
            )
        )
    sign = {"ok": "✓", "touched": "!", "broken": "✕"}[health.status]
    head = html.Summary([html.B(sign, className="ss-sign", **attributes({"aria-hidden": "true"})), html.Span(summary)])
    body = html.Ul(items) if items else html.P("Nothing was repaired, missing, cut or inferred.")
    return html.Details([head, body], className=f"ss-health ss-{health.status}")


def table(
    head: Sequence[Any], rows: Iterable[Sequence[Any]], numeric: Sequence[int] = (), caption: str = ""
) -> html.Table:
    """A small table; `numeric` columns are right-aligned."""
    name = dict.fromkeys(numeric, "ss-num")
    return html.Table(
        [
            html.Caption(caption) if caption else None,
            html.Thead(html.Tr([html.Th(cell, scope="col", className=name.get(i, "")) for i, cell in enumerate(head)])),
            html.Tbody(
                [html.Tr([html.Td(cell, className=name.get(i, "")) for i, cell in enumerate(row)]) for row in rows]
            ),
        ],
        className="ss-table",
    )


def chart_head(title: str, of: str) -> html.Div:
    """What a chart shows, and what it is of."""
    return html.Div([html.H3(title), html.Span(of, className="ss-of")], className="ss-chart-head")


def message(title: str, words: str, *more: Any) -> html.Div:
    """A page that has only something to say."""
    return html.Div([html.H1(title), html.P(words), *more], className="ss-message")
