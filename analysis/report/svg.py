"""The drawings of the HTML page: stacked bars and one step on every rank, as plain SVG without scripts.

Every mark carries a title (its name, time and share), waiting is hatched and idle empty: colour is never the only sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.report.view import LABELS, Bar

HATCHED = ("bubble", "imbalance")
OVER = (*HATCHED, "idle")
"""Parts whose label is written over a pattern and needs a halo."""

WIDTH = 1000.0
GUTTER = 170.0
"""Left of the bars, for their labels; the unit is a pixel on a page of full width."""

LETTER = 6.6
"""About the width of one character of a label."""

PATTERNS = """<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>
<pattern id="hatch-bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line class="hatch-bubble-line" x1="1.5" y1="0" x2="1.5" y2="6"/></pattern>
<pattern id="hatch-imbalance" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<line class="hatch-imbalance-line" x1="1.5" y1="0" x2="1.5" y2="6"/></pattern>
</defs></svg>"""


def rectangle(part: str, x: float, y: float, width: float, height: float, title: str) -> str:
    """One mark of a part, with what it is as tooltip."""
    inset = 0.5 if part in OVER else 0.0
    box = f'x="{x + inset:.2f}" y="{y + inset:.2f}" width="{max(width - 2 * inset, 0.2):.2f}" height="{height - 2 * inset:.2f}"'
    return f'<rect class="{part}" {box} rx="2"><title>{escape(title)}</title></rect>'


def swatch(part: str) -> str:
    """The legend's sample of a part."""
    return f'<svg viewBox="0 0 16 12" aria-hidden="true">{rectangle(part, 0, 0, 16, 12, LABELS[part])}</svg>'


def _inside(part: str, text: str, x: float, y: float, width: float) -> str:
    if len(text) * LETTER + 10 > width:
        return ""
    style = "over" if part in OVER else f"in {part}-label"
    return f'<text class="{style}" x="{x + width / 2:.2f}" y="{y:.2f}" text-anchor="middle">{escape(text)}</text>'


def _stack(bar: Bar, longest: float, x: float, y: float, width: float, height: float, long_labels: bool) -> str:
    pieces, at = [], x
    for part, ns in bar.parts.items():
        wide = width * ns / longest if longest else 0.0
        share = units.share(ns / bar.total_ns if bar.total_ns else None)
        title = f"{bar.label}: {LABELS[part]} {units.duration(ns)}, {share} of the step"
        pieces.append(rectangle(part, at, y, wide, height, title))
        label = f"{LABELS[part]} {share}"
        label = label if long_labels and len(label) * LETTER + 10 <= wide else share
        pieces.append(_inside(part, label, at, y + height / 2 + 4, wide))
        at += wide
    return "".join(pieces)


def mean_step(bar: Bar) -> str:
    """One wide bar of the mean step."""
    name = escape(f"Mean step of {units.duration(bar.total_ns)}, by part")
    body = _stack(bar, bar.total_ns, 0, 0, WIDTH, 44, long_labels=True)
    return f'<svg viewBox="0 0 {WIDTH:.0f} 46" role="img" aria-label="{name}">{body}</svg>'


def rank_stacks(bars: Sequence[Bar]) -> str:
    """One bar a rank, all on one time axis."""
    longest = max((bar.total_ns for bar in bars), default=0.0)
    room, pitch = WIDTH - GUTTER - 76, 26
    height = pitch * len(bars) + 26
    pieces = [_ticks(longest, GUTTER, room, height - 18)]
    for row, bar in enumerate(bars):
        y = row * pitch + 2.0
        pieces.append(f'<text x="0" y="{y + 14:.1f}">{escape(bar.label)}</text>')
        pieces.append(_stack(bar, longest, GUTTER, y, room, 20, long_labels=False))
        end = GUTTER + (room * bar.total_ns / longest if longest else 0) + 8
        pieces.append(
            f'<text class="soft" x="{end:.1f}" y="{y + 14:.1f}">{escape(units.duration(bar.total_ns))}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height}" role="img" aria-label="Mean step of each rank, by part">{"".join(pieces)}</svg>'


def _ticks(longest: float, x: float, room: float, bottom: float) -> str:
    """Vertical lines at round times, labelled below."""
    if longest <= 0:
        return ""
    step = round_step(longest / 6)
    pieces, at = [], 0.0
    while at <= longest * 1.0001:
        place = x + room * at / longest
        pieces.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{bottom:.1f}"/>')
        label = units.duration(at) if at else "0"
        pieces.append(
            f'<text class="soft" x="{place:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{escape(label)}</text>'
        )
        at += step
    return "".join(pieces)


def round_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `raw`."""
    power = 10.0 ** (len(str(int(max(raw, 1)))) - 1)
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= raw)


MOST_MARKS = 700
"""Marks drawn a rank: beyond that neighbours merge into what covers most of their pixels."""


def step_picture(picture: pd.DataFrame, labels: dict[int, str]) -> str:
    """One step on every rank, on one time axis: `picture` has rank, start_ns, end_ns, what."""
    first, last = int(picture["start_ns"].min()), int(picture["end_ns"].max())
    span, room, pitch = max(last - first, 1), WIDTH - GUTTER - 10, 28
    ranks = list(labels)
    height = pitch * len(ranks) + 26
    pieces = [_ticks(float(span), GUTTER, room, height - 18)]
    for row, rank in enumerate(ranks):
        y = row * pitch + 2.0
        pieces.append(f'<text x="0" y="{y + 15:.1f}">{escape(labels[rank])}</text>')
        for start, end, what in merged(picture[picture["rank"] == rank], span):
            x, wide = GUTTER + room * (start - first) / span, room * (end - start) / span
            title = f"{labels[rank]}: {LABELS[what]} for {units.duration(end - start)}, {units.duration(start - first)} into the step"
            pieces.append(rectangle(what, x, y, wide, 22, title))
            pieces.append(_inside(what, LABELS[what], x, y + 15, wide))
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height}" role="img" aria-label="One step on every rank">{"".join(pieces)}</svg>'


def merged(rows: pd.DataFrame, span: int) -> list[tuple[int, int, str]]:
    """(start, end, what) in order; neighbours of one kind join, and more than MOST_MARKS fall into equal slices.

    A slice shows the part that fills most of it, so that a picture of any trace stays small.
    """
    marks: list[tuple[int, int, str]] = []
    for start, end, what in zip(rows["start_ns"].tolist(), rows["end_ns"].tolist(), rows["what"].tolist(), strict=True):
        if marks and marks[-1][2] == what and marks[-1][1] == start:
            marks[-1] = (marks[-1][0], end, what)
        else:
            marks.append((start, end, what))
    if len(marks) <= MOST_MARKS:
        return marks
    return _sliced(marks, max(span // MOST_MARKS, 1))


def _sliced(marks: Sequence[tuple[int, int, str]], slice_ns: int) -> list[tuple[int, int, str]]:
    filled: dict[int, dict[str, int]] = {}
    origin = marks[0][0]
    for start, end, what in marks:
        for number in range((start - origin) // slice_ns, (end - 1 - origin) // slice_ns + 1):
            low, high = origin + number * slice_ns, origin + (number + 1) * slice_ns
            share = filled.setdefault(number, {})
            share[what] = share.get(what, 0) + min(end, high) - max(start, low)
    result: list[tuple[int, int, str]] = []
    for number, share in sorted(filled.items()):
        what = max(share, key=lambda name: share[name])
        start, end = origin + number * slice_ns, min(origin + (number + 1) * slice_ns, marks[-1][1])
        if result and result[-1][2] == what and result[-1][1] == start:
            result[-1] = (result[-1][0], end, what)
        else:
            result.append((start, end, what))
    return result
