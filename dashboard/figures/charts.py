"""Decomposition per rank, a value over ranks and steps, and the waterfall between two runs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from stepscope.analysis import units
from stepscope.analysis.compare import Pair
from stepscope.analysis.report.view import PARTS, Bar
from stepscope.dashboard import theme
from stepscope.dashboard.figures.style import marker, styled
from stepscope.dashboard.pages.parts import category_of


def label_of(part: str) -> str:
    """What a person reads for a part of a bar."""
    return theme.BY_KEY[category_of(part)].label


def rank_bars(bars: Sequence[Bar], mode: str) -> go.Figure:
    """One stacked bar each, every bar from 0 to exactly 100 % of its own step."""
    figure = go.Figure()
    labels = [f"{bar.label}  {units.duration(bar.total_ns)}" for bar in bars]
    for part in PARTS:
        values = [bar.parts.get(part, 0.0) for bar in bars]
        if not any(values):
            continue
        shares = [100 * v / bar.total_ns if bar.total_ns else 0.0 for v, bar in zip(values, bars, strict=True)]
        hover = [
            f"{label_of(part)} {units.duration(v)}, {units.share(s / 100)}" for v, s in zip(values, shares, strict=True)
        ]
        figure.add_bar(
            orientation="h",
            y=labels,
            x=shares,
            name=label_of(part),
            marker=marker(part, mode),
            customdata=hover,
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    widest = max((len(label) for label in labels), default=10)
    styled(figure, mode, height=60 + 24 * max(len(bars), 2), left=18 + 7 * widest)
    figure.update_layout(barmode="stack", bargap=0.24)
    figure.update_xaxes(
        range=[0, 100], tickvals=[0, 25, 50, 75, 100], ticktext=["0 %", "25 %", "50 %", "75 %", "100 %"]
    )
    figure.update_yaxes(autorange="reversed", tickfont={"color": theme.SURFACES[mode].text})
    return figure


def heatmap(frame: pd.DataFrame, column: str, labels: dict[int, str], mode: str, kind: str) -> go.Figure:
    """One cell a rank and step: `column` of the ledger, `kind` is `time` (ns) or `share` (of 1)."""
    table = frame.pivot(index="rank", columns="step", values=column)
    values = table.to_numpy(float)
    shown = units.duration if kind == "time" else units.share
    words = [[shown(v) for v in row] for row in values]
    surface = theme.SURFACES[mode]
    base = "#3b82f6" if mode == "light" else "#5b9df8"
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=[f"{step}" for step in table.columns],
            y=[labels[int(rank)] for rank in table.index],
            customdata=words,
            text=words if values.size <= 160 else None,
            texttemplate="%{text}" if values.size <= 160 else None,
            textfont={"size": 11},
            colorscale=[[0, surface.lane], [1, base]],
            xgap=2,
            ygap=2,
            zmin=0,
            zmax=1 if kind == "share" else None,
            showscale=False,
            hovertemplate="%{y} · step %{x}<br>%{customdata}<extra></extra>",
        )
    )
    widest = max((len(label) for label in labels.values()), default=8)
    row = 24 if len(table) <= 64 else max(3, 1536 // len(table))
    styled(figure, mode, height=64 + row * max(len(table), 2), left=18 + 7 * widest)
    figure.update_xaxes(type="category", title={"text": "step", "standoff": 6}, showgrid=False)
    figure.update_yaxes(
        type="category", autorange="reversed", tickfont={"color": surface.text}, nticks=min(len(table), 64)
    )
    return figure


def waterfall(pair: Pair, mode: str) -> go.Figure:
    """From A's mean step over the terms' deltas to B's; the whiskers are the noise band of each delta."""
    surface = theme.SURFACES[mode]
    figure = go.Figure()
    names = ["A", *(label_of(delta.name.removesuffix("_ns")) for delta in pair.terms), "B"]
    plain = {"color": surface.muted, "line": {"width": 0}}

    def total(name: str, ns: float) -> None:
        figure.add_bar(
            x=[name],
            y=[ns / 1e6],
            marker=plain,
            text=units.duration(ns),
            textposition="outside",
            cliponaxis=False,
            textfont={"color": surface.text, "size": 13},
            hovertemplate=f"{name}: {units.duration(ns)} a step<extra></extra>",
        )

    total("A", float(pair.step.a_ns))
    at = float(pair.step.a_ns)
    for name, delta in zip(names[1:-1], pair.terms, strict=True):
        change = float(delta.delta_ns)
        low, high = delta.low_ns, delta.high_ns
        band = (
            None
            if low is None or high is None
            else {
                "type": "data",
                "symmetric": False,
                "array": [(high - change) / 1e6],
                "arrayminus": [(change - low) / 1e6],
                "color": surface.text,
                "thickness": 1.2,
                "width": 4,
            }
        )
        sure = {True: "beyond the noise", False: "within the noise", None: "no noise band: too few steps"}[
            delta.beyond_noise
        ]
        spread = "" if low is None else f"<br>95 % band {units.signed_duration(low)} to {units.signed_duration(high)}"
        figure.add_bar(
            x=[name],
            y=[change / 1e6],
            base=[at / 1e6],
            error_y=band,
            marker=marker(delta.name.removesuffix("_ns"), mode),
            hovertemplate=f"{name} {units.signed_duration(change)}<br>A {units.duration(float(delta.a_ns))} → "
            f"B {units.duration(float(delta.b_ns))}{spread}<br>{sure}<extra></extra>",
        )
        top = max(at, at + change, at + (high if high is not None else change))
        strong = delta.beyond_noise
        figure.add_annotation(
            x=name,
            y=top / 1e6,
            text=units.signed_duration(change),
            showarrow=False,
            yshift=12,
            font={"size": 12, "color": surface.text if strong else surface.muted},
        )
        at += change
    total("B", float(pair.step.b_ns))
    styled(figure, mode, height=300, left=64, bottom=44)
    figure.update_layout(barmode="overlay", bargap=0.35, margin={"t": 26})
    figure.update_yaxes(gridcolor=surface.line, ticksuffix=" ms", rangemode="tozero")
    figure.update_xaxes(gridcolor="rgba(0,0,0,0)", tickfont={"color": surface.text, "size": 12}, type="category")
    return figure
