"""Behind the tabs of a run's page: charts and tables, each drawn when its tab is opened."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from stepscope.analysis import units
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import Report, view
from stepscope.dashboard import text, theme
from stepscope.dashboard.figures.style import CONFIG
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pages import parts
from stepscope.dashboard.pages.parts import attributes

TABS = (
    ("ranks", "Per rank"),
    ("heat", "Rank × step"),
    ("overlap", "Overlap"),
    ("stragglers", "Stragglers"),
    ("pipeline", "Pipeline"),
    ("events", "Events"),
)


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
            one.pattern or units.DASH,
        ]
        for one in report.stragglers
    ]
    head = [
        "Rank",
        parts.defined("Cost a step", view.DEFINITIONS["cost"]),
        parts.defined("Last arrivals", "Matched communications of whole steps to which this rank came last."),
        "Cause",
        parts.defined("Pattern", view.DEFINITIONS["pattern"]),
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
    microbatches = (
        units.counted(facts.microbatches, "microbatch", "microbatches")
        if facts.microbatches
        else f"{units.DASH} microbatches"
    )
    shape = " · ".join([facts.schedule or "unknown schedule", units.counted(facts.stages, "stage"), microbatches])
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
