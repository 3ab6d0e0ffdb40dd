"""A schedule as a picture, before anything runs: rows of text for a terminal, or an SVG file.

stage 0  F0F1F2F3......B0--F4B1--        two columns a unit of time; - goes on, . waits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from html import escape
from typing import NamedTuple

from stepscope.parallel_runtime.pp.schedules import Action
from stepscope.parallel_runtime.pp.validator import Timed

LETTERS = {"forward": "F", "backward": "B", "weight_grad": "W"}
COLOURS = {"forward": "#5b9df8", "backward": "#2bc4b0", "weight_grad": "#7cc66a"}
PAD, WAIT = "-", "."


class Segment(NamedTuple):
    """Some columns of one stage's row; `action` None where it waits."""

    action: Action | None
    text: str


def label_of(action: Action, chunks: int) -> str:
    """`F3`, or with several chunks a stage `F3a`, `F3b`, ..."""
    return f"{LETTERS[action.phase]}{action.microbatch}{chr(ord('a') + action.chunk) if chunks > 1 else ''}"


def columns_per_time(timed: Sequence[Sequence[Timed]], chunks: int) -> Fraction:
    """Just so many that every label fits into its action; 1 where nothing takes time."""
    needed = [
        Fraction(len(label_of(row.action, chunks))) / Fraction(row.end - row.start)
        for stage in timed
        for row in stage
        if row.end > row.start
    ]
    return max(needed, default=Fraction(1))


def segments(stage: Sequence[Timed], end: Fraction, scale: Fraction, chunks: int) -> Iterator[Segment]:
    """One stage's row from 0 to `end`, in columns of 1 / `scale`."""
    at = 0
    for row in stage:
        begin, close = round(Fraction(row.start) * scale), round(Fraction(row.end) * scale)
        if begin > at:
            yield Segment(None, WAIT * (begin - at))
        if close > begin:
            yield Segment(row.action, label_of(row.action, chunks).ljust(close - begin, PAD)[: close - begin])
        at = max(at, close)
    rest = round(end * scale) - at
    if rest > 0:
        yield Segment(None, WAIT * rest)


def folded(row: Sequence[Segment], width: int) -> list[list[Segment]]:
    """The row in lines of at most `width` columns; what crosses an end goes on in the next line."""
    lines: list[list[Segment]] = [[]]
    room = width
    for action, text in row:
        while text:
            if room == 0:
                lines.append([])
                room = width
            lines[-1].append(Segment(action, text[:room]))
            room, text = room - len(text[:room]), text[room:]
    return lines


def svg(timed: Sequence[Sequence[Timed]], chunks: int, title: str, width: int = 1200) -> str:
    """The same as a picture `width` pixels wide: a row a stage, later chunks darker, a title for each action."""
    end = max(Fraction(stage[-1].end) for stage in timed)
    left, row_height, top = 64, 26, 30
    scale = Fraction(width - left - 10) / end
    height = top + row_height * len(timed) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="13" fill="#222222">{escape(title)}</text>',
    ]
    for number, stage in enumerate(timed):
        y = top + number * row_height
        out.append(f'<text x="8" y="{y + 16}" fill="#222222">stage {number}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{width - left - 10}" height="{row_height - 4}" fill="#eeeeee"/>')
        for row in stage:
            x, wide = left + float(row.start * scale), float((row.end - row.start) * scale)
            label, shade = label_of(row.action, chunks), 1 - 0.45 * row.action.chunk / max(chunks - 1, 1)
            said = f"{row.action.phase} of microbatch {row.action.microbatch}, chunk {row.action.chunk}"
            out.append(
                f'<g><title>{said}: {float(row.start):g} to {float(row.end):g}</title><rect x="{x:.2f}" y="{y}"'
                f' width="{wide:.2f}" height="{row_height - 4}" fill="{COLOURS[row.action.phase]}"'
                f' fill-opacity="{shade:.2f}" stroke="#ffffff" stroke-width="0.7"/>'
            )
            if wide >= 7 * len(label):
                out.append(
                    f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle" fill="#111111">{label}</text>'
                )
            out.append("</g>")
    return "\n".join([*out, "</svg>", ""])
