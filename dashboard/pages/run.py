"""Run `/run/<id>`: health, headline, findings, timeline, and tables behind tabs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from stepscope.analysis import units
from stepscope.analysis.records import TERMS, Finding
from stepscope.analysis.report import Report, view
from stepscope.dashboard import text, theme
from stepscope.dashboard.catalogue import Opening
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pages import parts, tabs, timeline
from stepscope.dashboard.pages.parts import attributes

POLL_MS = 400


def opening_page(run_id: str, opening: Opening) -> html.Div:
    """While a run is being read: what is being done, how far it is, and a way out."""
    return html.Div(
        [
            html.H1(f"Opening {text.name(run_id, 80)}"),
            html.P(opening.text, id="opening-text", role="status"),
            dmc.Progress(
                id="opening-bar", value=100 * opening.share, animated=True, **attributes({"aria-label": "Progress"})
            ),
            html.Button("Cancel", id="opening-cancel", className="ss-button", type="button"),
            dcc.Interval(id="opening-poll", interval=POLL_MS),
            dcc.Store(id="opening-run", data=run_id),
        ],
        className="ss-message",
    )


def page(loaded: LoadedRun) -> html.Div:
    """The page of a run that is laid out."""
    report: Report = loaded.report
    return html.Div(
        [
            parts.health_line(view.health_line(report), report.health),
            html.Div([headline(report), findings(report, loaded)], className="ss-top"),
            timeline.panel(loaded.id, text.name(report.name, 80)),
            dcc.Store(id="run-id", data=loaded.id),
            tabs.tabs(report),
        ],
        className="ss-run",
    )


# -- headline ----------------------------------------------------------------------------------------------------------


def headline(report: Report) -> html.Section:
    """Step time, the six terms as one bar with ms and %, and the figures beside it."""
    means = report.means.values
    bar = view.mean_bar(report)
    if bar is None or not means:
        return html.Section(
            [
                html.H2("No whole step"),
                html.P("Nothing can be averaged: every step is partial or empty.", className="ss-of"),
            ],
            className="ss-card ss-headline",
        )
    step = float(means["step_ns"])
    terms = []
    for name in TERMS:
        ns = float(means[f"{name}_ns"])
        terms.append(
            html.Div(
                [
                    parts.term(name, _short(name)),
                    html.B(units.duration(ns), className="ss-value"),
                    html.Span(units.share(ns / step if step else None), className="ss-of"),
                ],
                className="ss-headline-term" + ("" if ns else " ss-zero"),
            )
        )
    beside = [
        html.Div([parts.defined(label, definition, "ss-of"), html.B(value)], className="ss-figure")
        for label, value, definition in view.headline(report)
    ]
    step_word = parts.defined("mean step", theme.DEFINITIONS["step"], "ss-of")
    return html.Section(
        [
            html.Div(
                [
                    html.Div(
                        [step_word, html.B(units.duration(step), className="ss-step-time")], className="ss-figure"
                    ),
                    *beside,
                ],
                className="ss-figures",
            ),
            parts.stacked_bar(list(bar.parts.items()), bar.total_ns, view.scope(report), big=True),
            html.Div(terms, className="ss-headline-terms"),
            html.Div(_detail(bar, means), className="ss-headline-detail"),
            html.P(view.scope(report), className="ss-of ss-scope"),
        ],
        className="ss-card ss-headline",
        **attributes({"aria-label": "Headline"}),
    )


def _detail(bar: view.Bar, means: Mapping[str, Any]) -> list[Any]:
    """The phases of compute, and what runs beside the partition: measured, not part of the sum."""
    phases = [
        html.Span(
            [parts.term(name, "other compute" if name == "other" else None), html.B(units.duration(bar.parts[name]))]
        )
        for name in view.COMPUTE_PARTS
        if bar.parts.get(name, 0.0) >= 0.5  # less than that is rounding
    ]
    beside = [
        html.Span([parts.term(name), html.B(units.duration(float(means[f"{name}_ns"])))])
        for name in ("hidden_comm", "hidden_wait")
        if f"{name}_ns" in means
    ]
    return [
        html.Div([html.Span("by phase", className="ss-of"), *phases]),
        html.Div([html.Span("not in the sum", className="ss-of"), *beside]),
    ]


def _short(term: str) -> str:
    return {"visible_comm": "visible comm", "memcpy": "memory copy"}.get(term, theme.TERM_LABEL[term])


def findings(report: Report, loaded: LoadedRun) -> html.Section:
    """At most five sentences, dearest first; a click shows the evidence on the timeline."""
    rows: list[Any] = [_finding(finding, loaded) for finding in report.findings[:5]]
    if not rows:
        rows = [html.P("Nothing stands out: no term has a cause worth naming.", className="ss-of")]
    return html.Section(
        [
            html.Div(
                [html.H2("Findings"), html.Span("dearest first · click shows it on the timeline", className="ss-of")],
                className="ss-chart-head",
            ),
            html.Div(rows, className="ss-findings"),
        ],
        className="ss-card",
        **attributes({"aria-label": "Findings"}),
    )


def _finding(finding: Finding, loaded: LoadedRun) -> html.Button:
    start, end = _interval(finding, loaded)
    evidence = {
        "data-finding": "true",
        "data-rank": "" if finding.rank is None else str(finding.rank),
        "data-start": "" if start is None else str(start),
        "data-end": "" if end is None else str(end),
        "data-op": "" if finding.op_id is None or finding.op_id < 0 else str(finding.op_id),
        "aria-pressed": "false",
    }
    return html.Button(
        [
            html.B(units.duration(finding.cost_ns_per_step), className="ss-cost", title="cost a step"),
            html.Span(
                [
                    html.Span(text.name(finding.text, 300), className="ss-finding-text"),
                    html.Small(
                        f"{text.name(finding.advice, 300)} · {finding.confidence} confidence"
                        if finding.advice
                        else f"{finding.confidence} confidence"
                    ),
                ]
            ),
        ],
        className="ss-finding",
        type="button",
        **attributes(evidence),
    )


def _interval(finding: Finding, loaded: LoadedRun) -> tuple[int | None, int | None]:
    """When a finding shows, ns after the run's origin: its own interval, else its step, else the typical step."""
    if finding.start_ns is not None and finding.end_ns is not None:
        return finding.start_ns - loaded.origin, finding.end_ns - loaded.origin
    wanted = loaded.report.picture_step if finding.step is None else finding.step
    step = next((s for s in loaded.steps if s["step"] == wanted), None)
    return (step["start"], step["end"]) if step else (None, None)
