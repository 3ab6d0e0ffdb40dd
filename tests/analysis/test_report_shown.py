"""The report as people see it: terminal and HTML."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from pipeline_runs import pipeline_run
from rich.console import Console
from timelines import Timeline

from stepscope.analysis import units
from stepscope.analysis.records import Health, HealthItem
from stepscope.analysis.report import Report, analyze, html, svg, view
from stepscope.analysis.report.details import details
from stepscope.analysis.report.differences import markdown, print_comparison
from stepscope.analysis.report.html import to_html
from stepscope.analysis.report.tables import Detail
from stepscope.analysis.report.terminal import STYLES, clean, print_report

EVIL = '<script>alert("x")</script>&\x1b[31m'


@pytest.fixture(scope="module")
def report() -> Report:
    return analyze(pipeline_run(2, 4, 2, slow={1: 4}))


def evil_report() -> Report:
    line = Timeline(world=2, mesh={"dp": 2})
    line.group(EVIL, "dp", 0, 1)
    for k in range(2):
        line.step(100 * k, 100 * k + 100, k)
        for rank in (0, 1):
            line.compute(rank, 100 * k, 100 * k + 20, name=EVIL)
        parts = {0: (100 * k + 20, 100 * k + 100), 1: (100 * k + 60, 100 * k + 100)}
        line.collective(EVIL, k, parts, axis="dp", stream=EVIL, name=EVIL)
    run = line.run()
    object.__setattr__(run.meta, "name", EVIL)
    run.health.add("evil", EVIL, file=EVIL, touches=("imbalance_ns",))
    return analyze(run)


def printed(report: Report, width: int, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    print_report(report, console)
    return out.getvalue()


# -- terminal ----------------------------------------------------------------------------------------------------------


def test_agreement_with_theory_is_claimed_only_of_what_theory_says(report: Report) -> None:
    """Two kinds that agree; then theory does not know the bytes of one (tokens may be dropped)."""
    columns = {"stage": 0, "axis": "ep", "strategy": "ep", "verdict": "as predicted", "operations": 4.0, "bytes": 8.0}
    both = {"operations_theory": 4.0, "bytes_theory": 8.0, "sent_bytes": 4.0, "sent_bytes_theory": 4.0}
    frame = pd.DataFrame([{**columns, **both, "collective": name} for name in ("all_to_all", "all_reduce")])
    shown = " ".join(printed(replace(report, volumes=frame), 160).split())
    assert "bytes and operations of all 2 kinds of communication are as predicted" in shown
    frame.loc[0, ["bytes_theory", "sent_bytes_theory"]] = None
    shown = " ".join(printed(replace(report, volumes=frame), 160).split())
    assert "as predicted: bytes of 1 and operations of 2 of 2 kinds of communication" in shown


def volume_table(report: Report, frame: pd.DataFrame) -> Detail:
    (table,) = [one for one in details(replace(report, volumes=frame)) if one.title == "Volumes"]
    return table


def test_without_theory_the_volumes_are_what_was_recorded(report: Report) -> None:
    """No empty columns: only what is known of all or of some, and one line that says why there is no theory."""
    nothing = dict.fromkeys(("operations_theory", "bytes_theory", "sent_bytes_theory"))
    bare = {"stage": -1, "axis": "", "strategy": "", "verdict": "", "bytes": None, "sent_bytes": None, **nothing}
    rows = [{**bare, "collective": "all_reduce", "operations": 3.0}, {**bare, "collective": "", "operations": 2.5}]
    table = volume_table(report, pd.DataFrame(rows))
    assert table.narrow() == (["collective", "operations"], [["all-reduce", "3"], [units.DASH, "2.5"]])
    assert table.note == "There is no theory beside it: the run does not say its model, layout and batch."

    rows[0] |= {"axis": "dp", "bytes": 2e6, "sent_bytes": 1.5e6}
    heads, shown = volume_table(report, pd.DataFrame(rows)).narrow()
    assert heads == ["axis", "collective", "operations", "bytes", "sent"]
    assert shown == [
        ["dp", "all-reduce", "3", "2 MB", "1.5 MB"],
        [units.DASH, units.DASH, "2.5", units.DASH, units.DASH],
    ]
    text = printed(replace(report, volumes=pd.DataFrame(rows)), 160)
    assert "There is no theory beside it" in text and "difference" not in text
    assert "There is no theory beside it" in to_html(replace(report, volumes=pd.DataFrame(rows)))


def test_with_theory_the_volumes_stand_beside_it(report: Report) -> None:
    columns = {"stage": 0, "axis": "dp", "strategy": "dp", "collective": "all_reduce", "verdict": "2 bytes more"}
    known = {"operations": 4.0, "bytes": 8.0, "sent_bytes": 4.0}
    frame = pd.DataFrame([{**columns, **known, **{f"{name}_theory": value for name, value in known.items()}}])
    table = volume_table(report, frame)
    assert "difference" in table.narrow()[0] and table.note == ""


def test_health_comes_first_and_everything_is_there(report: Report) -> None:
    text = printed(report, 120)
    assert text.startswith("✓ health ok")
    order = ["health", "step ", "Where the step went", "By rank", "Pipeline", "Overlap", "Stragglers", "Findings"]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)
    for term in ("compute", "visible communication", "pipeline bubble", "imbalance", "memory copies", "idle"):
        assert term in text
    for row in ("measured", "theory", "planned"):
        assert re.search(rf"^\s+{row}\s", text, re.MULTILINE)
    assert "rank 1 · pp0 dp1" in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(report: Report, width: int) -> None:
    for line in printed(report, width).splitlines():
        assert len(line) <= width


def test_plain_where_there_is_no_colour_and_coloured_where_there_is(report: Report) -> None:
    assert "\x1b" not in printed(report, 100)
    assert "\x1b" in printed(report, 100, colour=True)
    assert set(STYLES) == set(view.PARTS)


def test_a_touched_report_says_so_before_any_figure() -> None:
    text = printed(evil_report(), 100)
    assert text.startswith("! health touched, 1 thing: touches imbalance_ns")


def test_a_health_item_names_its_rank_once(report: Report) -> None:
    items = [
        HealthItem("cut_file", "the file ends early", rank=2, touches=("ledger",)),
        HealthItem("empty_steps", "rank 3: device data in 2 of 3 steps", rank=3, touches=("summary",)),
    ]
    told = replace(report, health=Health(items))
    lines = printed(told, 120).splitlines()
    assert "  - rank 2: the file ends early [ledger]" in [line.rstrip() for line in lines]
    assert "  - rank 3: device data in 2 of 3 steps [summary]" in [line.rstrip() for line in lines]
    assert "<li>rank 2: the file ends early" in html.to_html(told)


def test_traces_cannot_speak_to_the_terminal() -> None:
    assert "\x1b" not in printed(evil_report(), 100)
    assert "[/bold]" in clean("[/bold]")
    assert clean("a\x1b]0;x\x07b\ud800") == "a\ufffd]0;x\ufffdb\ufffd"
    assert len(clean("x" * 10_000)) == 400


def test_a_run_without_a_whole_step_is_said_to_have_none() -> None:
    text = printed(analyze(Timeline(world=1).run()), 80)
    assert "No whole step was recorded" in text


def test_steps_left_out_are_named() -> None:
    line = Timeline()
    for number, (start, end) in enumerate([(0, 500), (500, 600), (600, 700), (700, 800)]):
        line.step(start, end, number)
        line.compute(0, start, end)
    assert view.scope(analyze(line.run())) == "mean over 1 rank and 3 steps (1–3; left out: step 0, slow first)"


def test_spans() -> None:
    assert view.spans([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert view.spans(["all"]) == "all"


# -- HTML --------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "line", "rect", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_stands_alone(report: Report) -> None:
    page = Page(html.to_html(report))
    kinds = {tag for tag, _ in page.tags}
    assert not kinds & {"script", "link", "img", "iframe", "object", "a", "form", "input"}
    for _, attributes in page.tags:
        assert not {"href", "src", "onclick", "onload"} & set(attributes)
        assert "url(" not in attributes.get("style", "")
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [html.POLICY] and policies[0].startswith("default-src 'none'")
    css = Path(html.__file__).with_name("page.css").read_text()
    assert set(re.findall(r"url\(([^)]*)\)", css)) == {"#hatch-bubble", "#hatch-imbalance"}
    assert "@import" not in css and "prefers-color-scheme: dark" in css


def test_the_page_shows_what_the_report_says(report: Report) -> None:
    words = " ".join(Page(html.to_html(report)).words)
    for text in (
        "health ok",
        "Where the step went",
        "Findings",
        "Decomposition by rank",
        "Pipeline",
        "Stragglers",
        "slower compute",
    ):
        assert text in words
    for finding in report.findings:
        assert finding.text in words


def test_text_from_traces_is_never_markup() -> None:
    text = html.to_html(evil_report())
    assert "<script" not in text and "alert(&quot;x&quot;)" in text
    page = Page(text)
    assert EVIL.replace("\x1b", "") in "".join(page.words).replace("\x1b", "")


def test_every_mark_has_a_title_and_waiting_is_hatched(report: Report) -> None:
    text = html.to_html(report)
    rects = re.findall(r"<rect [^>]*>(.*?)</rect>", text)
    assert len(rects) > 20
    assert all(inside.startswith("<title>") for inside in rects)
    css = Path(html.__file__).with_name("page.css").read_text()
    for part in svg.HATCHED:
        assert f".{part} {{ fill: url(#hatch-{part})" in css
        assert f'id="hatch-{part}"' in text


def test_bars_are_as_long_as_their_times(report: Report) -> None:
    bar = view.mean_bar(report)
    assert bar is not None
    assert sum(bar.parts.values()) == pytest.approx(bar.total_ns)
    drawn = svg.mean_step(bar)
    widths = [float(w) for w in re.findall(r'width="([0-9.]+)"', drawn)]
    assert sum(widths) + sum(part in svg.OVER for part in bar.parts) == pytest.approx(svg.WIDTH, abs=0.1)


def test_a_step_of_any_number_of_events_stays_a_small_picture() -> None:
    line = Timeline()
    line.step(0, 100_000)
    for at in range(0, 100_000, 20):
        line.compute(0, at, at + 10)
    picture = analyze(line.run()).picture
    assert len(picture) == 10_000
    marks = svg.merged(picture, 100_000)
    assert len(marks) <= svg.MOST_MARKS + 1
    assert marks[0][0] == 0 and marks[-1][1] == 100_000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(marks))


def test_more_than_64_ranks_are_grouped() -> None:
    line = Timeline(world=130, mesh={"dp": 130})
    line.step(0, 100)
    for rank in range(130):
        line.compute(rank, 0, 50 + rank % 2)
    report = analyze(line.run())
    bars = view.rank_bars(report)
    assert len(bars) <= view.MOST_BARS
    assert bars[0].label == "ranks 0–2 (mean)"
    assert "ranks 0–2" in html.to_html(report)


def test_round_steps_of_the_axis() -> None:
    assert [svg.round_step(x) for x in (1, 3, 7, 12, 180_000)] == [1, 5, 10, 20, 200_000]


# -- colours -----------------------------------------------------------------------------------------------------------


def palettes() -> list[dict[str, str]]:
    css = Path(html.__file__).with_name("page.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)", 1)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part.split("* {", 1)[0])) for part in (light, dark)]


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_contrast_of_text_and_marks(theme: int) -> None:
    colours = palettes()[theme]
    for ink in ("ink", "soft", "accent"):
        assert contrast(colours[ink], colours["card"]) >= 4.5
        assert contrast(colours[ink], colours["back"]) >= 4.5
    for status in ("good", "warn", "bad"):
        assert contrast(colours[status], colours[f"{status}-back"]) >= 4.5
        assert contrast(colours["ink"], colours[f"{status}-back"]) >= 4.5
    for mark in ("forward", "backward", "optimizer", "visible_comm", "bubble", "imbalance", "memcpy", "other"):
        assert contrast(colours[mark], colours["card"]) >= 3
    for mark in ("forward", "backward", "optimizer", "memcpy", "other"):
        assert contrast(colours["on"], colours[mark]) >= 4.5
    assert contrast(colours["on-comm"], colours["visible_comm"]) >= 4.5
    assert contrast(colours["hatch-ink"], colours["halo"]) >= 4.5


# -- comparison --------------------------------------------------------------------------------------------------------


def test_a_comparison_on_a_terminal_and_as_markdown() -> None:
    from stepscope.analysis.compare import compare_reports

    comparison = compare_reports([analyze(pipeline_run(2, 4, 2)), evil_report()])
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=120))
    text = out.getvalue()
    assert "✓ A" in text and "! B" in text and "\x1b" not in text
    assert re.search(r"^\s+step\s.*(beyond|within)$", text, re.MULTILINE)
    table = markdown(comparison)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows]
    assert cells == [12] * (2 + 2) + [7] * (2 + 7)  # both runs in one table, then step and six terms of the pair
    assert "<script" not in table
