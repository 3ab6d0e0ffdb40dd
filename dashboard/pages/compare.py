"""Compare `/compare?runs=a,b`: a waterfall with noise, two timelines on one transform, deltas; three or more runs: bars."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from dash import dcc, html

from stepscope.analysis import units
from stepscope.analysis.compare import Comparison, Delta, Pair
from stepscope.analysis.report import Report, view
from stepscope.dashboard import text, theme
from stepscope.dashboard.figures.style import CONFIG
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pages import parts, timeline
from stepscope.dashboard.pages.parts import attributes
from stepscope.dashboard.pages.runs import run_address

MAX_RUNS = 8
MAX_NAMES = 40


def wanted(search: str) -> list[str]:
    """Run ids of `?runs=a,b`, each once, at most MAX_RUNS."""
    listed = parse_qs((search or "").lstrip("?")).get("runs", [""])[0].split(",")
    return list(dict.fromkeys(one for one in listed if one))[:MAX_RUNS]


def page(runs: list[LoadedRun], comparison: Comparison) -> html.Div:
    """The page of two or more runs that are laid out; the first is the base."""
    several = len(runs) > 2
    pair = comparison.pairs[0]
    names = [(run.id, text.name(run.run.meta.name, 80)) for run in runs]
    return html.Div(
        [
            html.Div(
                [
                    _side("A", runs[0]),
                    html.Span("→", className="ss-arrow", **attributes({"aria-hidden": "true"})),
                    _side("B", runs[1]),
                    _verdict(pair),
                ],
                className="ss-sides",
            ),
            _bars(runs) if several else None,
            html.Section(
                [
                    parts.chart_head(
                        "From A to B",
                        f"mean step, term by term; whiskers: 95 % band of each delta · {_scopes(runs)}",
                    ),
                    dcc.Graph(id={"type": "chart", "kind": "waterfall"}, config=CONFIG, className="ss-chart"),
                    _terms(pair),
                ],
                className="ss-card",
            ),
            timeline.linked(names[:2]),
            _classes(pair),
            dcc.Store(id="compare-runs", data=[run.id for run in runs]),
        ],
        className="ss-compare",
    )


def _scopes(runs: list[LoadedRun]) -> str:
    return " · ".join(f"{letter}: {view.scope(run.report)}" for letter, run in zip("AB", runs, strict=False))


def _side(letter: str, run: LoadedRun) -> html.Div:
    report: Report = run.report
    step = report.means.step_ns
    return html.Div(
        [
            html.B(letter, className="ss-letter"),
            html.Div(
                [
                    dcc.Link(text.name(report.name, 80), href=run_address(run.id), className="ss-run-name"),
                    html.Small(f"{text.mesh_label(report.meta.mesh, report.meta.world_size)} · {report.meta.source}"),
                ]
            ),
            html.B(units.duration(None if step is None else float(step)), className="ss-side-time"),
            parts.health_badge(report.health),
        ],
        className="ss-card ss-side",
    )


def _verdict(pair: Pair) -> html.Div:
    step = pair.step
    words = {True: "beyond the noise", False: "within the noise", None: "no noise band: too few whole steps"}[
        step.beyond_noise
    ]
    band = (
        ""
        if step.low_ns is None
        else f" · band {units.signed_duration(step.low_ns)} to {units.signed_duration(step.high_ns)}"
    )
    return html.Div(
        [
            html.B(units.signed_duration(float(step.delta_ns)), className="ss-delta"),
            html.Span(f"{units.signed_share(step.relative)} a step", className="ss-value"),
            html.Small(words + band),
        ],
        className="ss-card ss-verdict",
        role="status",
    )


SURE = {True: "beyond noise", False: "within noise", None: units.DASH}


def _delta_table(rows: list[tuple[Any, Delta]], caption: str = "") -> html.Table:
    """Deltas in one unit, so that they can be added by eye: (name, delta) rows."""
    deltas = [delta for _, delta in rows]
    scale = units.time_scale([float(v) for d in deltas for v in (d.a_ns, d.b_ns)])
    head = [
        "",
        f"A, {scale.unit}",
        f"B, {scale.unit}",
        f"change, {scale.unit}",
        "relative",
        f"95 % band, {scale.unit}",
        "",
    ]

    def signed(ns: float | None) -> str:
        return ("+" if ns and ns > 0 else "") + scale(ns)

    cells = []
    for name, delta in rows:
        change = signed(float(delta.delta_ns))
        band = units.DASH if delta.low_ns is None else f"{signed(delta.low_ns)} to {signed(delta.high_ns)}"
        strong = html.B(change) if delta.beyond_noise else change
        relative = units.signed_share(delta.relative)
        sure = SURE[delta.beyond_noise] if delta.a_ns or delta.b_ns else units.DASH
        cells.append([name, scale(float(delta.a_ns)), scale(float(delta.b_ns)), strong, relative, band, sure])
    return parts.table(head, cells, numeric=(1, 2, 3, 4, 5), caption=caption)


def _terms(pair: Pair) -> html.Table:
    rows: list[tuple[Any, Delta]] = [(parts.term(delta.name.removesuffix("_ns")), delta) for delta in pair.terms]
    return _delta_table(
        [*rows, (html.B("step"), pair.step)], "The deltas of the terms add up to the step's exactly (before rounding)."
    )


def _classes(pair: Pair) -> html.Section:
    rows = [(_class_name(d.name), d) for d in pair.classes if d.a_ns or d.b_ns][:MAX_NAMES]
    nothing = html.P("No operation class on either side.", className="ss-of")
    return html.Section(
        [
            parts.chart_head(
                "By operation class", "exposed time a step, mean over ranks and steps, the largest change first"
            ),
            _delta_table(rows) if rows else nothing,
            html.Div([_only("A", pair.only_in_a), _only("B", pair.only_in_b)], className="ss-only"),
        ],
        className="ss-card",
    )


def _class_name(name: str) -> str:
    """`visible_comm dp all_reduce` as `visible communication · dp · all-reduce`."""
    first, *rest = text.name(name, 80).split()
    label = theme.BY_KEY[first].label if first in theme.BY_KEY else first.replace("_", " ")
    return " · ".join([label, *(word.replace("_", "-") for word in rest)])


def _only(letter: str, names: tuple[str, ...]) -> html.Div:
    shown = [html.Li(text.name(name, 120)) for name in names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(html.Li(f"and {len(names) - MAX_NAMES} more"))
    body = html.Ul(shown) if shown else html.P("no name", className="ss-of")
    return html.Div([html.H4(f"Only in {letter}"), body])


def _bars(runs: list[LoadedRun]) -> html.Section:
    """Three or more runs: a stacked bar each on one scale, sortable."""
    return html.Section(
        [
            html.Div(
                [
                    parts.chart_head("All runs", "mean step of each, one scale; the waterfall below is of A and B"),
                    dcc.Dropdown(
                        id="bars-order",
                        value="given",
                        clearable=False,
                        searchable=False,
                        className="ss-dropdown",
                        options=[
                            {"value": "given", "label": "as given"},
                            {"value": "step", "label": "by step time"},
                            {"value": "tokens", "label": "by tokens/s"},
                        ],
                    ),
                ],
                className="ss-row ss-between",
            ),
            html.Div(bar_rows(runs, "given"), id="bars"),
        ],
        className="ss-card",
    )


def bar_rows(runs: list[LoadedRun], order: str) -> list[Any]:
    """The rows of `_bars` in an order: given, step (shortest first), tokens (most first)."""
    found = []
    for letter, run in zip("ABCDEFGH", runs, strict=False):
        bar = view.mean_bar(run.report)
        if bar is not None:
            found.append((letter, run, bar, run.report.throughput.tokens_per_s))
    longest = max((bar.total_ns for _, _, bar, _ in found), default=1.0)
    if order == "step":
        found.sort(key=lambda one: one[2].total_ns)
    if order == "tokens":
        found.sort(key=lambda one: -(one[3] or 0.0))
    return [
        html.Div(
            [
                html.B(letter, className="ss-letter"),
                dcc.Link(text.name(run.run.meta.name, 60), href=run_address(run.id), className="ss-run-name"),
                html.Div(
                    html.Div(
                        parts.stacked_bar(list(bar.parts.items()), bar.total_ns, run.run.meta.name),
                        style={"width": f"{100 * bar.total_ns / longest:.3f}%"},
                    ),
                    className="ss-grow",
                ),
                html.B(units.duration(bar.total_ns), className="ss-num"),
                html.Span(f"{units.count(tokens)} tokens/s", className="ss-num ss-of"),
            ],
            className="ss-bars-row",
        )
        for letter, run, bar, tokens in found
    ]
