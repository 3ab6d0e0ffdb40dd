"""The timeline's place on a page: assets/mount.js fills it with toolbar, legend, canvas and inspector."""

from __future__ import annotations

from dash import html

from stepscope.dashboard.pages.parts import attributes

KEYS = (
    "Timeline. W and S zoom, A and D pan, arrow keys move between operations, Enter selects, F fits, slash searches, "
    "Escape clears. Question mark lists all keys."
)


def canvas(run_id: str, name: str) -> html.Div:
    """The element that becomes the canvas of one run."""
    return html.Div(
        className="ss-timeline",
        tabIndex=0,
        role="application",
        **attributes({"data-run": run_id, "aria-label": f"{KEYS} Run {name}."}),
    )


def panel(run_id: str, name: str) -> html.Section:
    """One run's timeline with everything around it; its state is the address bar's."""
    return html.Section(
        [
            html.Div(className="ss-tools", **attributes({"data-tools": "full"})),
            canvas(run_id, name),
            html.Div(className="ss-inspector"),
        ],
        className="ss-panel ss-timeline-panel",
        **attributes({"aria-label": "Timeline"}),
    )


def linked(runs: list[tuple[str, str]]) -> html.Section:
    """Several runs over each other on one transform, aligned at the start of a step that is chosen above."""
    rows = []
    for letter, (run_id, name) in zip("ABCDEFGH", runs, strict=False):
        rows.append(
            html.Section(
                [
                    html.Div([html.B(letter), html.Span(name)], className="ss-linked-name"),
                    canvas(run_id, name),
                    html.Div(className="ss-inspector"),
                ],
                className="ss-panel",
                **attributes({"aria-label": f"Timeline of {letter}"}),
            )
        )
    return html.Section(
        [html.Div(className="ss-tools", **attributes({"data-tools": "linked"})), *rows],
        className="ss-linked",
        **attributes({"data-linked": "true"}),
    )
