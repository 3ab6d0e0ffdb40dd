"""What happens on a page: which page is shown, opening runs, charts in the theme's colours, tables, comparing."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
import plotly.graph_objects as go
from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, html, no_update

from stepscope.analysis import units
from stepscope.analysis.report import view
from stepscope.dashboard import questions
from stepscope.dashboard.catalogue import Catalogue
from stepscope.dashboard.figures import charts
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pages import compare, runs, tabs
from stepscope.dashboard.router import Shown, compared, loaded_all, page_of, run_page

GRID_COLUMNS = [
    {"field": "name", "headerName": "Name", "flex": 3, "minWidth": 200},
    {"field": "rank", "headerName": "Rank", "type": "rightAligned", "width": 90},
    {"field": "lane", "headerName": "Lane", "width": 150},
    {"field": "category", "headerName": "First part", "width": 180},
    {"field": "start", "headerName": "Start", "type": "rightAligned", "width": 140},
    {"field": "duration", "headerName": "Duration", "type": "rightAligned", "width": 140},
]


def register(app: Dash, catalogue: Catalogue) -> None:
    """All callbacks of the application."""
    _shell(app, catalogue)
    _runs(app, catalogue)
    _run(app, catalogue)
    _compare(app, catalogue)


# -- shell -------------------------------------------------------------------------------------------------------------


def _shell(app: Dash, catalogue: Catalogue) -> None:
    app.clientside_callback(
        ClientsideFunction("stepscope", "theme"),
        Output("theme", "data"),
        Output("provider", "forceColorScheme"),
        Input("theme-button", "n_clicks"),
    )

    @app.callback(
        Output("page", "children"),
        Output("crumbs", "children"),
        Output("title", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
    )
    def show(pathname: str | None, search: str | None) -> Shown:
        return page_of(catalogue, pathname or "/", search or "")

    @app.callback(
        Output("page", "children", allow_duplicate=True),
        Output("crumbs", "children", allow_duplicate=True),
        Output("title", "data", allow_duplicate=True),
        Output("opening-text", "children"),
        Output("opening-bar", "value"),
        Input("opening-poll", "n_intervals"),
        State("opening-run", "data"),
        prevent_initial_call=True,
    )
    def poll(_: int, run_id: str) -> tuple[Any, Any, Any, Any, Any]:
        opening = catalogue.open(run_id)
        if opening is None or opening.done.is_set():
            return *run_page(catalogue, run_id), no_update, no_update
        return no_update, no_update, no_update, f"{opening.text} …", 100 * opening.share

    app.clientside_callback(
        ClientsideFunction("stepscope", "title"),
        Output("sink", "data", allow_duplicate=True),
        Input("title", "data"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output("url", "pathname"),
        Input("opening-cancel", "n_clicks"),
        State("opening-run", "data"),
        prevent_initial_call=True,
    )
    def cancel(_: int, run_id: str) -> str:
        catalogue.cancel(run_id)
        return "/"


# -- runs --------------------------------------------------------------------------------------------------------------


def _runs(app: Dash, catalogue: Catalogue) -> None:
    @app.callback(
        Output("cards", "children"),
        Output("rescan", "interval"),
        Input("rescan", "n_intervals"),
        State("cards", "children"),
        prevent_initial_call=True,
    )
    def rescan(_: int, before: Any) -> tuple[Any, int]:
        now = runs.cards(catalogue)
        same = _plain(now) == _plain(before)
        return (no_update if same else now), runs.REFRESH_MS

    @app.callback(
        Output("compare-link", "href"),
        Output("compare-link", "className"),
        Output("picked-text", "children"),
        Input({"type": "pick", "run": ALL}, "value"),
    )
    def picked(values: list[list[str]]) -> tuple[str, str, str]:
        chosen = [run_id for value in values for run_id in value or []]
        enough = len(chosen) >= 2
        words = (
            f"{len(chosen)} picked"
            if enough
            else "Pick two or more to compare"
            if not chosen
            else "Pick one more to compare"
        )
        return (
            runs.compare_address(chosen) if enough else "/compare",
            "ss-button ss-primary" + ("" if enough else " ss-disabled"),
            words,
        )


def _plain(component: Any) -> str:
    """A component's JSON without what the browser changed in it (the ticks of the checkboxes)."""
    import json

    from plotly.utils import PlotlyJSONEncoder

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: clean(v) for k, v in value.items() if v is not None}
            if isinstance(kept.get("id"), dict) and kept["id"].get("type") == "pick":
                kept.pop("value", None)
            return kept
        return [clean(v) for v in value] if isinstance(value, list) else value

    return json.dumps(clean(json.loads(json.dumps(component, cls=PlotlyJSONEncoder))), sort_keys=True)


# -- run ---------------------------------------------------------------------------------------------------------------


def _run(app: Dash, catalogue: Catalogue) -> None:
    def need(run_id: str) -> LoadedRun | None:
        opening = catalogue.open(run_id)
        if opening is None:
            return None
        opening.done.wait()
        return opening.loaded

    @app.callback(Output("tab-body", "children"), Input("tabs", "value"), State("run-id", "data"))
    def tab(key: str, run_id: str) -> Any:
        loaded = need(run_id)
        return tabs.tab_body(loaded, key) if loaded else html.P("The run is gone.", className="ss-of")

    @app.callback(
        Output({"type": "chart", "kind": MATCH}, "figure"),
        Input("theme", "data"),
        Input({"type": "chart", "kind": MATCH}, "id"),
        State("run-id", "data", allow_optional=True),
        State("compare-runs", "data", allow_optional=True),
        Input("heat-value", "value", allow_optional=True),
    )
    def chart(
        mode: str | None, identity: dict[str, str], run_id: str | None, ids: list[str] | None, value: str | None
    ) -> go.Figure:
        mode = mode or "light"
        if identity["kind"] == "waterfall":
            found, _ = loaded_all(catalogue, ids or [])
            return charts.waterfall(compared(found).pairs[0], mode) if len(found) > 1 else go.Figure()
        loaded = need(run_id or "")
        if loaded is None:
            return go.Figure()
        labels = {rank: view.rank_label(loaded.report, rank) for rank in loaded.report.ranks}
        if identity["kind"] == "ranks":
            return charts.rank_bars(view.rank_bars(loaded.report), mode)
        column = "overlap_efficiency" if identity["kind"] == "overlap" else value or "imbalance_ns"
        return charts.heatmap(loaded.report.ledger, column, labels, mode, "time" if column.endswith("_ns") else "share")

    app.clientside_callback(
        ClientsideFunction("stepscope", "range"),
        Output("events-range", "data"),
        Input("events-refresh", "n_clicks"),
        Input("events-search", "value"),
    )

    @app.callback(
        Output("events-grid", "children"),
        Output("events-count", "children"),
        Input("events-range", "data"),
        State("events-search", "value"),
        State("run-id", "data"),
    )
    def events(shown: dict[str, Any] | None, wanted: str | None, run_id: str) -> tuple[Any, str]:
        loaded = need(run_id)
        if loaded is None:
            return None, ""
        start, end = (int(shown["start"]), int(shown["end"])) if shown else (0, loaded.span_ns)
        rows, total = questions.table(loaded, (wanted or "")[:200], start, max(end, start + 1))
        for row in rows:
            row["start"] = units.duration(row.pop("start_ns"))
            row["duration"] = units.duration(row.pop("duration_ns"))
        grid = dag.AgGrid(
            id="events-table",
            rowData=rows,
            columnDefs=GRID_COLUMNS,
            defaultColDef={"sortable": False, "resizable": True, "suppressMovable": True},
            dashGridOptions={
                "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
                "rowHeight": 28,
                "headerHeight": 32,
                "animateRows": False,
                "suppressCellFocus": False,
            },
            csvExportParams={"fileName": "operations.csv"},
            className="ss-grid",
        )
        where = f"between {units.duration(start)} and {units.duration(end)}"
        listed = f"{total:,} operation{'' if total == 1 else 's'} {where}".replace(",", "\u202f") + (
            f", the longest {len(rows)} listed" if total > len(rows) else ""
        )
        return grid, listed

    app.clientside_callback(
        ClientsideFunction("stepscope", "row"),
        Output("sink", "data"),
        Input("events-table", "selectedRows"),
        prevent_initial_call=True,
    )

    @app.callback(Output("events-table", "exportDataAsCsv"), Input("events-csv", "n_clicks"), prevent_initial_call=True)
    def csv(_: int) -> bool:
        return True


# -- compare -----------------------------------------------------------------------------------------------------------


def _compare(app: Dash, catalogue: Catalogue) -> None:
    @app.callback(
        Output("bars", "children"),
        Input("bars-order", "value"),
        State("compare-runs", "data"),
        prevent_initial_call=True,
    )
    def order(value: str, ids: list[str]) -> Any:
        found, _ = loaded_all(catalogue, ids)
        return compare.bar_rows(found, value)
