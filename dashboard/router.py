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

Shown = tuple[Any, Any, str]
"""A page, the crumbs in the header, and the page's title."""

PATIENCE_S = 1.5
"""So long a page waits for a run to open before it shows how far it is."""


def page_of(catalogue: Catalogue, pathname: str, search: str) -> Shown:
    """What an address shows."""
    if pathname in ("", "/"):
        return runs.page(catalogue), [], text.title("Runs")
    if pathname.startswith("/run/"):
        return run_page(catalogue, unquote(pathname.removeprefix("/run/")))
    if pathname == "/compare":
        return _compare_page(catalogue, search)
    page = parts.message("No such page", "Nothing lies at this address.", dcc.Link("All runs", href="/"))
    return page, [], text.title("No such page")


def _crumbs(*words: str) -> list[Any]:
    found: list[Any] = [dcc.Link("Runs", href="/")]
    for word in words:
        found += [
            html.Span("/", className="ss-of", **attributes({"aria-hidden": "true"})),
            html.Span(word, className="ss-crumb"),
        ]
    return found


def run_page(catalogue: Catalogue, run_id: str) -> Shown:
    """A run: laid out, being opened, or why it cannot be shown."""
    shown = text.name(run_id, 80)
    back = dcc.Link("All runs", href="/")
    opening = catalogue.open(run_id)
    if opening is None:
        page = parts.message("No such run", f"{shown} is no run directory under {catalogue.root}.", back)
        return page, _crumbs(shown), text.title("No such run")
    opening.done.wait(PATIENCE_S)
    loaded = opening.loaded
    if loaded is not None:
        return run.page(loaded), _run_crumbs(loaded), text.title(text.name(loaded.run.meta.name or run_id, 80))
    if opening.done.is_set():
        page = parts.message("This run cannot be shown", text.name(opening.error, 2000), back)
    else:
        page = run.opening_page(run_id, opening)
    return page, _crumbs(shown), text.title(shown)


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


def _compare_page(catalogue: Catalogue, search: str) -> Shown:
    ids = compare.wanted(search)
    back = dcc.Link("Pick runs", href="/")
    crumbs, title = _crumbs("Compare"), text.title("Compare")
    if len(ids) < 2:
        words = "Pick two or more on the page of all runs."
        return parts.message("Compare needs two runs", words, back), crumbs, title
    found, problem = loaded_all(catalogue, ids)
    if not problem:
        try:
            names = " / ".join(text.name(one.run.meta.name, 40) for one in found[:4])
            return compare.page(found, compared(found)), crumbs, text.title(names, "Compare")
        except ValueError as error:
            problem = text.name(str(error), 1000)
    return parts.message("These runs cannot be compared", problem, back), crumbs, title
