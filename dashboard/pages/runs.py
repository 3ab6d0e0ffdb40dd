"""Runs `/`: every run under the root, the newest first; pick one to open, two or more to compare."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from dash import dcc, html

from stepscope.analysis import units
from stepscope.dashboard import text
from stepscope.dashboard.catalogue import Catalogue, Found, Opening
from stepscope.dashboard.loaded import Summary
from stepscope.dashboard.pages import parts

REFRESH_MS = 2500


def run_address(run_id: str) -> str:
    """The address of a run's page."""
    return f"/run/{quote(run_id, safe='/')}"


def compare_address(run_ids: list[str]) -> str:
    """The address that compares runs, the first being the base."""
    return "/compare?runs=" + ",".join(quote(run_id, safe="/") for run_id in run_ids)


def page(catalogue: Catalogue) -> html.Div:
    """The page; its cards are refreshed by a callback."""
    return html.Div(
        [
            html.Div(
                [
                    html.Div(
                        [
                            html.H1("Runs"),
                            html.Span(
                                f"under {catalogue.root.name or catalogue.root}",
                                className="ss-of",
                                title=str(catalogue.root),
                            ),
                        ]
                    ),
                    html.Div(
                        [
                            html.Span(
                                "Pick two or more to compare", id="picked-text", className="ss-of", role="status"
                            ),
                            dcc.Link(
                                "Compare",
                                id="compare-link",
                                href="/compare",
                                className="ss-button ss-primary ss-disabled",
                            ),
                        ],
                        className="ss-row",
                    ),
                ],
                className="ss-page-head",
            ),
            html.Div(cards(catalogue), id="cards"),
            dcc.Interval(id="rescan", interval=REFRESH_MS),
        ],
        className="ss-runs",
    )


def cards(catalogue: Catalogue) -> list[Any]:
    """One row a run; runs that are not analysed yet are being opened and say so."""
    found = catalogue.found()
    if not found:
        return [
            parts.message(
                "No run here yet",
                f"Nothing under {catalogue.root} looks like a run directory. Record one, and it appears here:",
                html.Pre(f"stepscope run --dp 2 --pp 2 --steps 6 --out {catalogue.root}/first"),
            )
        ]
    head = ("", "Run", "Mesh", "Source", "Health", "Step time", "Where the mean step goes", "Recorded")
    rows = [_row(run, catalogue.glance(run) if run.stamp else None) for run in found]
    return [
        html.Table(
            [
                html.Thead(
                    html.Tr(
                        [html.Th(cell, scope="col", className="ss-num" if cell == "Step time" else "") for cell in head]
                    )
                ),
                html.Tbody(rows),
            ],
            className="ss-table ss-run-table",
        )
    ]


def _row(run: Found, opening: Opening | None) -> html.Tr:
    name = text.name(run.meta.name if run.meta else run.path.name, 80)
    summary = opening.summary if opening else None
    error = run.error if opening is None else opening.error
    if error and run.error not in error:  # a run whose run.json cannot be read is opened all the same
        error = f"{error}; {run.error}"
    pick = dcc.Checklist(
        options=[
            {"label": html.Span(f"compare {text.name(run.id, 80)}", className="ss-visually-hidden"), "value": run.id}
        ],
        value=[],
        id={"type": "pick", "run": run.id},
        className="ss-pick",
        persistence=True,
        persistence_type="session",
    )
    title = html.Div(
        [
            dcc.Link(name, href=run_address(run.id), className="ss-run-name"),
            html.Small(run.id) if run.id != name else None,
        ]
    )
    meta = summary.meta if summary else run.meta
    axes, _, ranks = text.mesh_label(meta.mesh, meta.world_size).partition(" · ") if meta else (units.DASH, "", "")
    mesh = [html.Span(axes, className="ss-whole"), html.Small(ranks, className="ss-whole") if ranks else None]
    if error:
        what: list[Any] = [html.Td(html.Div(text.name(error, 500), className="ss-error"), colSpan=2)]
    elif summary is None:
        doing = f"{opening.text} ({units.share(opening.share)})" if opening else "waiting"
        what = [
            html.Td(units.DASH, className="ss-num"),
            html.Td(html.Span([html.I(className="ss-spinner"), doing], className="ss-of")),
        ]
    else:
        what = _time(summary)
    health = parts.health_badge(summary.health if summary else None, error) if summary or error else units.DASH
    return html.Tr(
        [
            html.Td(pick),
            html.Td(title),
            html.Td(mesh),
            html.Td(parts.source_badge(meta.source) if meta else units.DASH),
            html.Td(health),
            *what,
            html.Td(html.Time(when(run), dateTime=run.meta.created if run.meta else "")),
        ],
        className="ss-broken" if error else "",
    )


def _time(summary: Summary) -> list[Any]:
    bar = summary.bar
    if bar is None:
        return [html.Td(units.DASH, className="ss-num"), html.Td("no whole step", className="ss-of")]
    return [
        html.Td(html.B(units.duration(bar.total_ns)), className="ss-num"),
        html.Td(parts.stacked_bar(list(bar.parts.items()), bar.total_ns, summary.scope), className="ss-bar-cell"),
    ]


def when(run: Found) -> str:
    """The time of recording, else that of the files, as `2025-01-31 14:05`, local time."""
    if run.meta and run.meta.created:
        try:
            return (
                datetime.fromisoformat(run.meta.created.replace("Z", "+00:00")).astimezone().strftime("%Y-%m-%d %H:%M")
            )
        except ValueError:
            return text.name(run.meta.created, 24)
    if not run.stamp or not run.stamp[0]:
        return units.DASH
    return datetime.fromtimestamp(run.stamp[0] / 1e9, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M")
