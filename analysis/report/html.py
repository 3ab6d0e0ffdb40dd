"""The report as one self-contained HTML page: no script, no request, light and dark, every text from a trace escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from stepscope.analysis import units
from stepscope.analysis.causes.summary import counted_rows
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import svg, view
from stepscope.analysis.report.details import details
from stepscope.analysis.report.model import Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Nothing is loaded, nothing runs: only the page's own style counts."""

MOST_LEDGER_ROWS = 400
LONGEST_CELL = 120
LONGEST_TEXT = 600


def to_html(report: Report) -> str:
    """The whole page as text (UTF-8)."""
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    body = "".join(
        (
            svg.PATTERNS,
            "<main>",
            _header(report),
            _health(report),
            _mean(report),
            _findings(report),
            _picture(report),
            _ranks(report),
            _pipeline(report),
            _stragglers(report),
            _overlap(report),
            *_details(report),
            _ledger(report),
            _definitions(),
            _footer(report),
            "</main>",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{text(report.name)} · stepscope</title><style>{css}</style></head><body>{body}</body></html>\n"
    )


def text(value: object) -> str:
    """Any text, escaped, cut, and writable as UTF-8."""
    whole = str(value).encode("utf-8", "replace").decode("utf-8")
    return escape(whole if len(whole) <= LONGEST_TEXT else whole[: LONGEST_TEXT - 1] + "…")


def _section(title: str, of: str, body: str) -> str:
    note = f'<p class="of">{text(of)}</p>' if of else ""
    return f"<section><h2>{text(title)}</h2>{note}{body}</section>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1, style: str = "") -> str:
    """A table of plain texts; columns from `numbers_from` on are right-aligned. `name|definition` heads get a tooltip."""
    cells = []
    for place, head in enumerate(heads):
        name, _, meaning = head.partition("|")
        tip = f' title="{text(meaning)}"' if meaning else ""
        cells.append(f'<th scope="col"{_aligned(place, numbers_from)}{tip}>{text(name)}</th>')
    body = "".join(
        "<tr>" + "".join(_cell(cell, _aligned(i, numbers_from)) for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    kind = f' class="{style}"' if style else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{"".join(cells)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(cell: str, aligned: str) -> str:
    """A name of hundreds of characters (C++ kernels) would make its row as high as the page: the rest is in its tooltip."""
    if len(cell) <= LONGEST_CELL:
        return f"<td{aligned}>{text(cell)}</td>"
    return f'<td{aligned} title="{text(cell)}">{text(cell[: LONGEST_CELL - 1] + "…")}</td>'


def _aligned(place: int, numbers_from: int) -> str:
    return ' class="n"' if place >= numbers_from else ""


def _header(report: Report) -> str:
    meta = report.meta
    where = "+".join(word for word in (meta.device, meta.backend) if word)
    chips = [view.mesh_text(report), meta.source, where, view.scope(report), meta.created]
    drawn = "".join(f'<span class="chip">{text(chip)}</span>' for chip in chips if chip)
    return f'<header><div class="product">stepscope report</div><h1>{text(report.name)}</h1><div class="chips">{drawn}</div></header>'


def _health(report: Report) -> str:
    status, line = report.health.status, text(view.health_line(report))
    mark = "✓" if status == "ok" else "!"
    if not report.health.items:
        return f'<div class="health {status}" role="status">{mark} {line}</div>'
    items = []
    for item in sorted(report.health.items, key=lambda one: (not one.broken, not one.touches)):
        touches = f" <code>touches {text(', '.join(item.touches))}</code>" if item.touches else ""
        place = (
            f" <code>{text(item.file)}{f' at byte {item.offset}' if item.offset is not None else ''}</code>"
            if item.file
            else ""
        )
        whose = f"rank {item.rank}"
        who = "" if item.rank is None or whose in item.text else f"{whose}: "
        items.append(f"<li>{who}{text(item.text)}{touches}{place}</li>")
    opened = "" if status == "ok" else " open"
    return (
        f'<div class="health {status}" role="status"><details{opened}><summary>{mark} {line}</summary>'
        f"<ul>{''.join(items)}</ul></details></div>"
    )


def _mean(report: Report) -> str:
    bar = view.mean_bar(report)
    if bar is None:
        return _section("Where the step went", "", "<p>No whole step was recorded, so there are no means.</p>")
    figures = [
        _figure("mean step", units.duration(bar.total_ns), "From the start of a step to the start of the next.", True)
    ]
    figures += [_figure(*row) for row in view.headline(report)]
    body = f'<div class="figures">{"".join(figures)}</div>{svg.mean_step(bar)}{_legend(bar)}'
    return _section("Where the step went", view.scope(report), body)


def _figure(label: str, value: str, meaning: str, main: bool = False) -> str:
    return (
        f'<div class="figure{" main" if main else ""}" title="{text(meaning)}"><div class="value">{text(value)}</div>'
        f'<div class="label">{text(label)}</div></div>'
    )


def _legend(bar: view.Bar) -> str:
    rows = []
    parts = {part: ns for part, ns in bar.parts.items() if part in view.COMPUTE_PARTS}
    parts |= dict(zip(TERMS[1:], bar.terms[1:], strict=True))
    for part, ns in parts.items():
        share = units.share(ns / bar.total_ns if bar.total_ns else None)
        rows.append(
            f'<div title="{text(view.DEFINITIONS[part])}">{svg.swatch(part)}<span>{text(view.LABELS[part])}</span>'
            f'<b>{text(units.duration(ns))}</b><span class="share">{text(share)}</span></div>'
        )
    return f'<div class="legend">{"".join(rows)}</div>'


def _findings(report: Report) -> str:
    if not report.findings:
        none = f"<p>None: nothing costs enough to name. {text(view.findings_note(report))}</p>"
        return _section("Findings", "", none)
    items = []
    for index, finding in enumerate(report.findings):
        where = view.evidence(report, index)
        facts = f"confidence {finding.confidence}" + (f" · see {where}" if where else "")
        advice = f'<div class="advice"><b>Try:</b> {text(finding.advice)}</div>' if finding.advice else ""
        items.append(
            f'<li><div class="cost">{text(units.duration(finding.cost_ns_per_step))}<small>a step</small></div>'
            f'<div><div>{text(finding.text)}</div><div class="meta">{text(facts)}</div>{advice}</div></li>'
        )
    return _section(
        "Findings",
        f"Dearest first; at most five. {view.findings_note(report)}".strip(),
        f'<ol class="findings">{"".join(items)}</ol>',
    )


def _picture(report: Report) -> str:
    picture = report.picture
    if picture.empty:
        return ""
    ranks = sorted({int(rank) for rank in picture["rank"]})
    labels = {rank: view.rank_label(report, rank) for rank in ranks}
    of = f"Step {report.picture_step}, the one closest to the median step time; what each rank did, instant by instant."
    return _section("One step on every rank", of, svg.step_picture(picture, labels))


def _ranks(report: Report) -> str:
    bars = view.rank_bars(report)
    if not bars:
        return ""
    scale = units.time_scale([bar.total_ns for bar in bars])
    heads = ["", f"step, {scale.unit}", *(f"{view.LABELS[term]}|{view.DEFINITIONS[term]}" for term in TERMS)]
    rows = []
    for bar in bars:
        rows.append([bar.label, *(scale(n) for n in (bar.total_ns, *bar.terms))])
    grouped = len(report.means.ranks) > view.MOST_BARS
    of = f"Mean over steps of each {'group of ranks' if grouped else 'rank'}; numbers inside the bars are shares of that step."
    return _section("Decomposition by rank", of, f"{svg.rank_stacks(bars)}{table(heads, rows)}")


def _pipeline(report: Report) -> str:
    p = report.pipeline
    if p.stages < 2:
        return ""
    batches = (
        units.counted(p.microbatches, "microbatch", "microbatches") if p.microbatches else f"{units.DASH} microbatches"
    )
    of = f"Schedule {p.schedule or 'not recognised'}, {units.counted(p.stages, 'stage')}, {batches}."
    heads = [
        "bubble",
        f"of the step|{view.DEFINITIONS['of_step']}",
        f"of the microbatches' compute|{view.DEFINITIONS['of_work']}",
    ]
    notes = "Theory: equal stages, free communication. Planned: the recorded schedule with the measured mean durations, communication free."
    return _section(
        "Pipeline", of, f'{table(heads, view.pipeline_rows(report), style="narrow")}<p class="meta">{text(notes)}</p>'
    )


def _stragglers(report: Report) -> str:
    if not report.stragglers:
        return ""
    heads = [
        "rank",
        "cause",
        f"pattern|{view.DEFINITIONS['pattern']}",
        f"others waited a step, summed|{view.DEFINITIONS['cost']}",
        "last to arrive",
    ]
    rows = [
        [
            view.rank_label(report, s.rank),
            s.cause or units.DASH,
            s.pattern or units.DASH,
            units.duration(s.cost_ns_per_step),
            units.counted(s.last_arrivals, "time"),
        ]
        for s in view.notable(report)[: view.MOST_BARS]
    ]
    rest = len(report.stragglers) - len(rows)
    note = f'<p class="meta">{rest} more, each of them nearly free, are in the JSON report.</p>' if rest else ""
    drawn = table(heads, rows, numbers_from=3, style="narrow") if rows else ""
    drawn += (
        "".join(f'<p class="meta">{text(line)}</p>' for line in view.group_lines(report)[: view.MOST_BARS])
        if rows
        else ""
    )
    return _section("Stragglers", "Dearest first; exposed waits only.", drawn + note)


def _overlap(report: Report) -> str:
    rows = view.overlap_rows(report)
    if not rows:
        return ""
    shares = [f"{name.replace('_', ' ')}|{view.DEFINITIONS[name]}" for name in ("overlap_efficiency", "comm_overlap")]
    body = table(["axis", "collective", "stream", *shares], rows, numbers_from=3, style="narrow")
    return _section("Overlap of communication with compute", view.scope(report), body)


def _details(report: Report) -> list[str]:
    return [
        _section(
            one.title,
            one.of,
            table(one.heads, one.rows[:MOST_LEDGER_ROWS], numbers_from=one.numbers_from, style="narrow")
            + (f'<p class="meta">{text(one.note)}</p>' if one.note else ""),
        )
        for one in details(report)
    ]


def _ledger(report: Report) -> str:
    names = ("step_ns", *(f"{term}_ns" for term in TERMS), "hidden_comm_ns", "hidden_wait_ns", "unsplit_ns")
    scale = units.time_scale(counted_rows(report.ledger)["step_ns"].tolist())
    heads = ["rank", "step", *(name.removesuffix("_ns").replace("_", " ") for name in names), "flags"]
    shown = report.ledger.head(MOST_LEDGER_ROWS)
    rows = [
        [str(row["rank"]), str(row["step"]), *(scale(row[name]) for name in names), ", ".join(row["flags"])]
        for row in shown.to_dict("records")
    ]
    more = len(report.ledger) - len(shown)
    note = f'<p class="meta">{more} more rows: the JSON report has them all.</p>' if more > 0 else ""
    title = f"Ledger: every rank and step, in {scale.unit}"
    return f"<section><details><summary>{text(title)}</summary>{table(heads, rows)}{note}</details></section>"


def _definitions() -> str:
    order = (
        *TERMS,
        "hidden_comm",
        "hidden_wait",
        "unsplit",
        "overlap_efficiency",
        "comm_overlap",
        "of_step",
        "of_work",
        "cost",
    )
    names = {"of_step": "bubble of the step", "of_work": "bubble of the work", "cost": "cost of a straggler"}
    rows = "".join(
        f"<dt>{text(names.get(name, view.LABELS.get(name, name.replace('_', ' '))))}</dt><dd>{text(view.DEFINITIONS[name])}</dd>"
        for name in order
    )
    note = "Each instant belongs to the first of these six terms that applies, so they sum to the step exactly."
    return f'<section><details><summary>What the words mean</summary><p class="meta">{text(note)}</p><dl>{rows}</dl></details></section>'


def _footer(report: Report) -> str:
    path = text(report.path or "RUN")
    return (
        f"<footer>Made by stepscope. Compare with another run: <code>stepscope compare {path} OTHER</code> · "
        f"look at every operation: <code>stepscope dashboard {path}</code></footer>"
    )
