"""The routes that feed the timeline: one binary view, one overview, and small exact answers as JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
from flask import Blueprint, Response, abort, request

from stepscope.dashboard import details, questions, theme
from stepscope.dashboard.catalogue import Catalogue
from stepscope.dashboard.level_of_detail import MAX_BINS, pack_overview, pack_view
from stepscope.dashboard.loaded import LoadedRun

MAX_LANES = 400
OVERVIEW_ROWS = 48
MAX_SEARCH = 200
FARTHEST_NS = 1 << 62
"""Numbers beyond are refused: the sum of two within still fits the 64 bits that times have."""


def routes(catalogue: Catalogue) -> Blueprint:
    """The blueprint `/api/...` over the runs of one catalogue."""
    api = Blueprint("api", __name__, url_prefix="/api")

    def run_of(run_id: str) -> LoadedRun:
        loaded = catalogue.loaded(run_id)
        if loaded is None:
            opening = catalogue.open(run_id)
            if opening is None:
                abort(404, "no such run")
            opening.done.wait(120)
            loaded = opening.loaded
        if loaded is None:
            abort(409, "the run could not be opened")
        return loaded

    @api.get("")
    @api.get("/")
    @api.get("/<path:_rest>")
    def nothing(_rest: str = "") -> Response:
        """Else the dashboard's pages would answer."""
        abort(404, "no such route")

    @api.get("/theme")
    def theme_route() -> Response:
        return _json(theme.for_browser())

    @api.get("/meta/<path:run_id>")
    def meta(run_id: str) -> Response:
        return _json(run_of(run_id).describe())

    @api.get("/view/<path:run_id>")
    def view(run_id: str) -> Response:
        loaded = run_of(run_id)
        lanes = _integers("lanes", MAX_LANES)
        try:
            chosen = [(i, loaded.tracks[i]) for i in lanes if 0 <= i < len(loaded.tracks)]
            first, bins, bin_ns = _integer("first"), _integer("bins"), _integer("bin_ns")
            if (abs(first) + abs(bins)) * abs(bin_ns) > FARTHEST_NS:
                abort(400, "the view lies too far from the run")
            body = pack_view(chosen, first, bins, bin_ns, loaded.labels.text_of)
        except ValueError as error:
            abort(400, str(error))
        return _binary(body)

    @api.get("/overview/<path:run_id>")
    def overview(run_id: str) -> Response:
        loaded = run_of(run_id)
        bins = min(max(_integer("bins"), 1), MAX_BINS)
        edges = np.linspace(0, loaded.span_ns, bins + 1).astype(np.int64)
        accounts = [[loaded.tracks[ids[0]]] for ids in loaded.of_rank.values() if len(ids)]
        rows = min(OVERVIEW_ROWS, len(accounts)) or 1
        cut = [round(i * len(accounts) / rows) for i in range(rows + 1)]
        groups = [[t for one in accounts[a:b] for t in one] for a, b in pairwise(cut)]
        return _binary(pack_overview([g for g in groups if g], edges))

    @api.get("/event/<path:run_id>")
    def event(run_id: str) -> Response:
        loaded = run_of(run_id)
        try:
            return _json(details.event(loaded, _integer("track"), _integer("index")))
        except IndexError as error:
            abort(404, str(error))

    @api.get("/same/<path:run_id>")
    def same(run_id: str) -> Response:
        loaded = run_of(run_id)
        try:
            found = questions.same_name(loaded, _integer("track"), _integer("index"), _integer("direction"))
        except IndexError as error:
            abort(404, str(error))
        return _json(None if found is None else details.event(loaded, *found))

    @api.get("/locate/<path:run_id>")
    def locate(run_id: str) -> Response:
        loaded = run_of(run_id)
        found = questions.locate(loaded, _integer("rank"), _integer("op_id"), _integer("start"))
        return _json(None if found is None else details.event(loaded, *found))

    @api.get("/sums/<path:run_id>")
    def sums(run_id: str) -> Response:
        loaded = run_of(run_id)
        ranks = _integers("ranks", 1 << 20) if request.args.get("ranks") else None
        start, end = _integer("start"), _integer("end")
        if end <= start:
            abort(400, "the range is empty")
        return _json(questions.range_sums(loaded, start, end, ranks))

    @api.get("/search/<path:run_id>")
    def search(run_id: str) -> Response:
        loaded = run_of(run_id)
        wanted = request.args.get("q", "")[:MAX_SEARCH]
        after = _integer("after") if request.args.get("after") else None
        return _json(questions.search(loaded, wanted, min(max(_integer("bins"), 1), MAX_BINS), after))

    @api.get("/report/<path:run_id>")
    def report(run_id: str) -> Response:
        from stepscope.analysis.report.html import to_html

        loaded = run_of(run_id)
        page = Response(to_html(loaded.report), mimetype="text/html")
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in loaded.run.meta.name)[:80]
        page.headers["Content-Disposition"] = f'attachment; filename="{name or "report"}.html"'
        return page

    return api


def _integer(name: str) -> int:
    try:
        found = int(request.args.get(name, ""))
    except ValueError:
        abort(400, f"{name} must be an integer")
    if abs(found) > FARTHEST_NS:
        abort(400, f"{name} must lie within {FARTHEST_NS} of 0")
    return found


def _integers(name: str, most: int) -> list[int]:
    """`3-9,12`: at most `most` of them."""
    found: list[int] = []
    for part in request.args.get(name, "").split(",")[:most]:
        low, _, high = part.partition("-")
        try:
            first, last = int(low), int(high or low)
        except ValueError:
            abort(400, f"{name} must be like 3-9,12")
        found += range(first, min(last, first + most) + 1)
        if len(found) > most:
            abort(400, f"{name}: at most {most}")
    return found


def _json(value: Any) -> Response:
    response = Response(json.dumps(value, separators=(",", ":"), allow_nan=False), mimetype="application/json")
    response.headers["Cache-Control"] = "no-store"
    return response


def _binary(body: bytes) -> Response:
    response = Response(body, mimetype="application/octet-stream")
    response.headers["Cache-Control"] = "private, no-store"
    return response
