"""How every Plotly chart looks in each theme."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from stepscope.dashboard import theme

FONT = "Inter, system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
CONFIG: Any = {"displayModeBar": False, "responsive": True, "displaylogo": False, "showTips": False}


def marker(key: str, mode: str) -> dict[str, Any]:
    """Bar colour and texture of a category: hatched as in the timeline."""
    category = theme.BY_KEY["compute" if key == "other" else key]
    colour = theme.colour(category.key, mode)
    surface = theme.SURFACES[mode]
    if category.key == "idle":
        return {"color": surface.card, "line": {"color": colour, "width": 1}}
    if category.texture in ("diagonal", "outline"):
        pattern = {"shape": "/", "fgcolor": colour, "bgcolor": surface.lane, "size": 5, "solidity": 0.4}
        return {"color": colour, "pattern": pattern, "line": {"color": colour, "width": 0.6}}
    return {"color": colour, "line": {"width": 0}}


def styled(figure: go.Figure, mode: str, height: int, left: int = 150, right: int = 24, bottom: int = 34) -> go.Figure:
    """The common look: no frame, quiet grid, fixed ranges, our type."""
    surface = theme.SURFACES[mode]
    figure.update_layout(
        template="none",
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": surface.muted},
        margin={"l": left, "r": right, "t": 8, "b": bottom},
        showlegend=False,
        hoverlabel={
            "font": {"family": FONT, "size": 12, "color": surface.card},
            "bgcolor": surface.text,
            "bordercolor": surface.text,
        },
        bargap=0.28,
        uirevision="keep",
    )
    figure.update_xaxes(
        gridcolor=surface.line, linecolor=surface.line, zeroline=False, fixedrange=True, automargin=False
    )
    figure.update_yaxes(
        gridcolor="rgba(0,0,0,0)", linecolor=surface.line, zeroline=False, fixedrange=True, automargin=False
    )
    return figure
