"""Which page an address shows, with what stands in the header beside it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

from dash import dcc, html

from stepscope.analysis.compare import Comparison, compare_reports
from stepscope.dashboard import text
from stepscope.dashboard.catalogue import Catalogue
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.pages import compare, parts, run, runs
from stepscope.dashboard.pages.parts import attributes

PATIENCE_S = 1.5
"""So long a page waits for a run to open before it shows how far it is."""


def page_of(catalogue: Catalogue, pathname: str, search: str) -> tuple[Any, Any]:
    """(page, crumbs) of an address."""
    if pathname in ("", "/"):
        return runs.page(catalogue), []
    if pathname.startswith("/run/"):
        return run_page(catalogue, unquote(pathname.removeprefix("/run/")))
    if pathname == "/compare":
        return _compare_page(catalogue, search)
    return parts.message("No such page", "Nothing lies at this address.", dcc.Link("All runs", href="/")), []


def _crumbs(*words: str) -> list[Any]:
    found: list[Any] = [dcc.Link("Runs", href="/")]
    for word in words:
        found += [
            html.Span("/", className="ss-of", **attributes({"aria-hidden": "true"})),
            html.Span(word, className="ss-crumb"),
        ]
    return found


def run_page(catalogue: Catalogue, run_id: str) -> tuple[Any, Any]:
    """(page, crumbs) of a run: laid out, being opened, or why it cannot be shown."""
    shown = text.name(run_id, 80)
    opening = catalogue.open(run_id)
    if opening is None:
        return parts.message(
            "No such run", f"{shown} is no run directory under {catalogue.root}.", dcc.Link("All runs", href="/")
        ), _crumbs(shown)
    opening.done.wait(PATIENCE_S)
    if opening.loaded is not None:
        return run.page(opening.loaded), _run_crumbs(opening.loaded)
    if opening.done.is_set():
        return parts.message(
            "This run cannot be shown", text.name(opening.error, 2000), dcc.Link("All runs", href="/")
        ), _crumbs(shown)
    return run.opening_page(run_id, opening), _crumbs(shown)


def _run_crumbs(loaded: LoadedRun) -> list[Any]:
    meta = loaded.run.meta
    facts = html.Span(text.mesh_label(meta.mesh, meta.world_size), className="ss-of")
    report = html.A(
        "Report",
        href=f"/api/report/{quote(loaded.id, safe='/')}",
        className="ss-button ss-push",
        download="",
        title="The whole report as one self-contained HTML page",
    )
    return [*_crumbs(text.name(meta.name, 80)), facts, parts.source_badge(meta.source), report]


def loaded_all(catalogue: Catalogue, ids: list[str]) -> tuple[list[LoadedRun], str]:
    """The runs, waiting for each; and what is wrong with the first that cannot be shown."""
    found = []
    for run_id in ids:
        opening = catalogue.open(run_id)
        if opening is None:
            return [], f"{text.name(run_id, 80)} is no run directory under {catalogue.root}."
        opening.done.wait()
        if opening.loaded is None:
            return [], f"{text.name(run_id, 80)}: {text.name(opening.error, 1000)}"
        found.append(opening.loaded)
    return found, ""


def compared(found: list[LoadedRun]) -> Comparison:
    """Laid-out runs against the first of them; ValueError where one has no whole step."""
    return compare_reports([one.report for one in found])


def _compare_page(catalogue: Catalogue, search: str) -> tuple[Any, Any]:
    ids = compare.wanted(search)
    back = dcc.Link("Pick runs", href="/")
    if len(ids) < 2:
        return parts.message("Compare needs two runs", "Pick two or more on the page of all runs.", back), _crumbs(
            "Compare"
        )
    found, problem = loaded_all(catalogue, ids)
    if problem:
        return parts.message("These runs cannot be compared", problem, back), _crumbs("Compare")
    try:
        return compare.page(found, compared(found)), _crumbs("Compare")
    except ValueError as error:
        return parts.message("These runs cannot be compared", text.name(str(error), 1000), back), _crumbs("Compare")
