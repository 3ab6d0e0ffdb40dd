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
from stepscope.dashboard.figures.style import CONFIG
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pages import parts, timeline
from stepscope.dashboard.pages.parts import attributes

POLL_MS = 400

TABS = (
    ("ranks", "Per rank"),
    ("heat", "Rank × step"),
    ("overlap", "Overlap"),
    ("stragglers", "Stragglers"),
    ("pipeline", "Pipeline"),
    ("events", "Events"),
)


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
            tabs(report),
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
        html.Div([html.Span("compute by phase", className="ss-of"), *phases]),
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


# -- tabs --------------------------------------------------------------------------------------------------------------


def tabs(report: Report) -> html.Section:
    """Charts and tables; each is drawn when its tab is opened."""
    shown = [(key, label) for key, label in TABS if key != "pipeline" or report.pipeline.stages > 1]
    return html.Section(
        [
            dmc.Tabs(
                [
                    dmc.TabsList(
                        [dmc.TabsTab(label, value=key) for key, label in shown], **attributes({"aria-label": "Details"})
                    ),
                ],
                id="tabs",
                value="ranks",
                variant="default",
            ),
            html.Div(id="tab-body", className="ss-tab-body"),
        ],
        className="ss-card ss-tabs",
        **attributes({"aria-label": "Details"}),
    )


def tab_body(loaded: LoadedRun, key: str) -> list[Any]:
    """The content of one tab."""
    report: Report = loaded.report
    scope = view.scope(report)
    if key == "ranks":
        return [
            parts.chart_head("Where each rank's step goes", f"share of the rank's own mean step · {scope}"),
            dcc.Graph(id={"type": "chart", "kind": "ranks"}, config=CONFIG, className="ss-chart"),
        ]
    if key == "heat":
        return [
            parts.chart_head("One value over ranks and steps", "every step, also those outside the means"),
            dmc.Select(
                id="heat-value",
                data=heat_choices(),
                value="imbalance_ns",
                allowDeselect=False,
                size="xs",
                w=240,
                **attributes({"aria-label": "Value"}),
            ),
            dcc.Graph(id={"type": "chart", "kind": "heat"}, config=CONFIG, className="ss-chart"),
        ]
    if key == "overlap":
        return _overlap(report)
    if key == "stragglers":
        return _stragglers(report, loaded)
    if key == "pipeline":
        return _pipeline(report)
    return _events()


def heat_choices() -> list[dict[str, str]]:
    """What the heatmap can show: columns of the ledger."""
    terms = [{"value": f"{term}_ns", "label": theme.TERM_LABEL[term]} for term in TERMS]
    more = [
        ("step_ns", "step time"),
        ("hidden_comm_ns", "hidden communication"),
        ("overlap_efficiency", "overlap efficiency"),
        ("comm_overlap", "comm overlap"),
    ]
    return terms + [{"value": value, "label": label} for value, label in more]


def _overlap(report: Report) -> list[Any]:
    head = [
        "Axis",
        "Collective",
        "Stream",
        parts.defined("Overlap efficiency", theme.DEFINITIONS["overlap_efficiency"]),
        parts.defined("Comm overlap", theme.DEFINITIONS["comm_overlap"]),
    ]
    rows = [[*(_cell(word) for word in row[:3]), *row[3:]] for row in view.overlap_rows(report)]
    nothing = html.P("No communication was recorded: overlap is undefined.", className="ss-of")
    return [
        parts.chart_head(
            "Overlap of communication and compute", f"by axis, collective and stream · {view.scope(report)}"
        ),
        parts.table(head, rows, numeric=(3, 4)) if rows else nothing,
        parts.chart_head(
            "Overlap efficiency of each rank and step", "all axes together; a dash where nothing was transferred"
        ),
        dcc.Graph(id={"type": "chart", "kind": "overlap"}, config=CONFIG, className="ss-chart"),
    ]


def _cell(word: str) -> str:
    return text.name(word, 60).replace("_", "-")


def _stragglers(report: Report, loaded: LoadedRun) -> list[Any]:
    rows = [
        [
            f"rank {one.rank}" + (f" · {loaded.rank_label(one.rank)}" if loaded.rank_label(one.rank) else ""),
            units.duration(one.cost_ns_per_step),
            str(one.last_arrivals),
            one.cause or units.DASH,
        ]
        for one in report.stragglers
    ]
    head = [
        "Rank",
        parts.defined("Cost a step", view.DEFINITIONS["cost"]),
        parts.defined("Last arrivals", "Matched communications of whole steps to which this rank came last."),
        "Cause",
    ]
    body = parts.table(head, rows, numeric=(1, 2)) if rows else html.P("No rank made another wait.", className="ss-of")
    return [parts.chart_head("Who made the others wait", f"dearest first · {view.scope(report)}"), body]


def _pipeline(report: Report) -> list[Any]:
    facts = report.pipeline
    rows = [[what, of_step, of_work] for what, of_step, of_work in view.pipeline_rows(report)]
    head = [
        "Bubble",
        parts.defined("of the step", view.DEFINITIONS["of_step"]),
        parts.defined("of the ideal work", view.DEFINITIONS["of_work"]),
    ]
    shape = f"{facts.schedule or 'unknown schedule'} · {facts.stages} stages · {facts.microbatches or units.DASH} microbatches"
    return [parts.chart_head("Pipeline bubble, measured beside theory", shape), parts.table(head, rows, numeric=(1, 2))]


def _events() -> list[Any]:
    return [
        parts.chart_head(
            "Operations", "the longest first, of the range or view of the timeline; click one to see it there"
        ),
        html.Div(
            [
                dcc.Input(
                    id="events-search",
                    type="text",
                    placeholder="name contains …",
                    debounce=0.3,
                    className="ss-input",
                    maxLength=200,
                ),
                html.Button("Of what is in view", id="events-refresh", className="ss-button", type="button"),
                html.Button("CSV", id="events-csv", className="ss-button", type="button"),
                html.Span(id="events-count", className="ss-of", role="status"),
            ],
            className="ss-row",
        ),
        html.Div(id="events-grid"),
        dcc.Store(id="events-range"),
    ]
