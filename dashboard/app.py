"""The Dash application: the shell with its three pages, and the routes that feed the timeline."""

from __future__ import annotations

from pathlib import Path

import dash_mantine_components as dmc
from dash import Dash, dcc, html
from flask import Response

from stepscope.dashboard import api, theme
from stepscope.dashboard.callbacks import register
from stepscope.dashboard.catalogue import Catalogue
from stepscope.dashboard.pages.parts import attributes
from stepscope.dashboard.security import protect

INDEX = """<!DOCTYPE html>
<html lang="en" data-mantine-color-scheme="light">
<head>
{%metas%}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="/assets/icon.svg">
<link rel="stylesheet" href="/theme.css">
<script src="/assets/early_theme.js"></script>
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""


def theme_css() -> str:
    """The colours of theme.py as CSS variables: `--ss-c-KEY` of a category, `--ss-NAME` of a surface."""
    blocks = []
    for mode, selector in (("light", ":root"), ("dark", ':root[data-mantine-color-scheme="dark"]')):
        surface = theme.SURFACES[mode]
        rules = [f"--ss-c-{c.key}:{theme.colour(c.key, mode)}" for c in theme.CATEGORIES]
        rules += [f"--ss-{name}:{getattr(surface, name)}" for name in surface.__dataclass_fields__]
        blocks.append(f"{selector}{{color-scheme:{mode};{';'.join(rules)}}}")
    return "\n".join(blocks)


def shell() -> dmc.MantineProvider:
    """Header, place of the page, and what outlives a change of page."""
    header = html.Header(
        [
            dcc.Link(
                [html.Img(src="/assets/icon.svg", alt="", width=22, height=22), html.Span("stepscope")],
                href="/",
                className="ss-logo",
            ),
            html.Nav(id="crumbs", className="ss-crumbs", **attributes({"aria-label": "Where you are"})),
            html.Button(
                "◐",
                id="theme-button",
                className="ss-button ss-icon",
                type="button",
                title="Light or dark",
                **attributes({"aria-label": "Switch between light and dark"}),
            ),
        ],
        className="ss-header",
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Store(id="theme"),
            dcc.Store(id="sink"),
            dcc.Store(id="title"),
            header,
            html.Main(id="page", className="ss-main"),
        ],
        id="provider",
        defaultColorScheme="light",
        theme={
            "fontFamily": "Inter, system-ui, sans-serif",
            "primaryColor": "blue",
            "defaultRadius": "sm",
            "fontSizes": {"sm": "13px"},
        },
    )


def create_app(catalogue: Catalogue | Path) -> Dash:
    """The application over the runs of a catalogue, or of all runs under a directory. Everything is served locally."""
    if isinstance(catalogue, Path):
        catalogue = Catalogue(catalogue)
    app = Dash(
        "stepscope.dashboard",
        assets_folder=str(Path(__file__).parent / "assets"),
        assets_ignore="early_.*",
        title="stepscope",
        update_title=None,  # type: ignore[arg-type]
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=INDEX,
    )
    app.layout = shell()
    register(app, catalogue)
    server = app.server
    server.register_blueprint(api.routes(catalogue))
    css = theme_css()

    @server.get("/theme.css")
    def theme_route() -> Response:
        return Response(css, mimetype="text/css")

    protect(server, app.csp_hashes())
    return app
