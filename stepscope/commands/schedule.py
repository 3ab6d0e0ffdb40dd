"""`stepscope schedule`: a pipeline schedule drawn before anything runs, with its bubble beside theory, or as a simulated run."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.commands.console import Quiet, console, say_next, wrong_usage
from stepscope.parallel_runtime.config import SCHEDULES
from stepscope.parallel_runtime.slow_link import parse_link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from stepscope.parallel_runtime.pp.picture import Segment
    from stepscope.parallel_runtime.pp.schedules import Table
    from stepscope.parallel_runtime.pp.validator import Timed

STYLES = {"forward": "black on bright_blue", "backward": "black on cyan", "weight_grad": "black on green"}
MARGIN = len("stage 00  ")
UNEVEN, SIMULATED = "Uneven stages", "Simulated run"
NS_PER_MS = 10**6


def exact(value: float) -> Fraction:
    """What was typed: 0.1 is a tenth."""
    if not isfinite(value):
        raise ValueError(f"{value} is no time: take a finite number")
    return Fraction(str(value))


def percent(value: Fraction | None) -> str:
    """`27.3 %`, or a dash where it is not defined."""
    return "-" if value is None else f"{100 * float(value):.1f} %"


def schedule(
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    schedule: Annotated[str, typer.Option(help=f"Pipeline schedule: {', '.join(SCHEDULES)}.")] = "1f1b",
    chunks: Annotated[
        int | None, typer.Option(help="Chunks of layers a stage, with interleaved (2 unless given).")
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of a stage's forward, all its chunks, in any unit.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of its backward, weight gradients included.")] = 2.0,
    weight: Annotated[
        float | None,
        typer.Option(help="The part of backward that are weight gradients, with zb-h1 (half unless given)."),
    ] = None,
    transfer: Annotated[float, typer.Option(help="Time of a message between stages.")] = 0.0,
    slow_stage: Annotated[
        int | None, typer.Option(help="This stage computes longer ...", rich_help_panel=UNEVEN)
    ] = None,
    slow_factor: Annotated[
        float, typer.Option(help="... so many times as long as the others.", rich_help_panel=UNEVEN)
    ] = 2.0,
    slow_link: Annotated[
        str | None,
        typer.Option(
            help="What the first of two stages sends to the second, such as 0-1, takes longer ...",
            rich_help_panel=UNEVEN,
        ),
    ] = None,
    slow_link_time: Annotated[float, typer.Option(help="... by so much a message.", rich_help_panel=UNEVEN)] = 1.0,
    svg_file: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture as SVG.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Write a simulated run to this directory.", rich_help_panel=SIMULATED),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the simulated run.", rich_help_panel=SIMULATED)] = 4,
    unit_ms: Annotated[float, typer.Option(help="Milliseconds in its unit of time.", rich_help_panel=SIMULATED)] = 1.0,
    message_bytes: Annotated[
        int, typer.Option(help="Bytes of a message between its stages.", rich_help_panel=SIMULATED)
    ] = 1 << 20,
    quiet: Quiet = False,
) -> None:
    """Draw a pipeline schedule before anything runs, with its bubble beside theory and what each stage keeps in memory.

    The table is the one that `stepscope run` would follow, played in virtual time: every stage takes the same time (one may
    be slow), every message `--transfer`. F is a forward, B a backward (with zb-h1 the gradient of the input only), W the
    gradients of the weights; the number is the microbatch, a letter behind it the chunk. `-` goes on, `.` waits.

    With `--out` some steps of it become a run directory, as if it had been recorded, that every other command takes.

    Examples:

        stepscope schedule --pp 4 --microbatches 8 --schedule 1f1b

        stepscope schedule --pp 4 --microbatches 8 --schedule interleaved --chunks 2

        stepscope schedule --schedule zb-h1 --forward 1 --backward 2 --svg zb-h1.svg

        stepscope schedule --pp 4 --slow-stage 2 --slow-factor 1.5 --out runs/slow-stage
    """
    from stepscope.analysis.units import counted
    from stepscope.parallel_runtime.naming import claim
    from stepscope.parallel_runtime.pp.picture import svg
    from stepscope.parallel_runtime.pp.simulated_run import Pace, SimulatedRun
    from stepscope.parallel_runtime.pp.validator import plan, play

    with wrong_usage():
        times = _times(forward, backward, weight, transfer)
        chunks = (2 if schedule == "interleaved" and pp > 1 else 1) if chunks is None else chunks
        tables = plan(schedule, pp, microbatches, chunks)
        durations = _durations(times, chunks, split=schedule == "zb-h1")
        link = parse_link(slow_link)
        pace = Pace.of(durations, pp, times["transfer"], slow_stage, exact(slow_factor), link, exact(slow_link_time))
        _check_link(link, tables, chunks)
        run = None
        if out is not None:
            whole = pace.whole(exact(unit_ms) * NS_PER_MS)
            run = SimulatedRun(schedule, microbatches, chunks, steps, whole, message_bytes)
            out = claim(out)
    timed = [stage.computing for stage in play(tables, pace.duration_of, pace.transfer_of, chunks)]
    title = f"{schedule}: {pp} stages, {microbatches} microbatches" + (f", {chunks} chunks" if chunks > 1 else "")
    if svg_file is not None:
        svg_file.write_text(svg(timed, chunks, title), encoding="utf-8")
    shown = console()
    shown.print(title, markup=False)
    _draw(timed, chunks, shown)
    _tell(schedule, timed, tables, chunks, durations, shown)
    if run is not None and out is not None:
        run.write(out)
        shown.print(f"\nsimulated run of {counted(steps, 'step')} in {out}", markup=False)
        say_next(f"stepscope analyze {out}", quiet=quiet)
        return
    extra = f" --chunks {chunks}" if chunks > 1 else ""
    say_next(f"stepscope run --pp {pp} --microbatches {microbatches} --schedule {schedule}{extra}", quiet=quiet)


def _times(forward: float, backward: float, weight: float | None, transfer: float) -> dict[str, Fraction]:
    """What was typed, exact; ValueError for what is no time."""
    times = {"forward": exact(forward), "backward": exact(backward), "transfer": exact(transfer)}
    times["weight"] = times["backward"] / 2 if weight is None else exact(weight)
    for name, time in times.items():
        if time < 0 or (time == 0 and name in ("forward", "backward")):
            raise ValueError(f"--{name} {float(time):g} is a time: take a positive number")
    if times["weight"] > times["backward"]:
        raise ValueError(f"--weight {float(times['weight']):g} is a part of --backward {backward:g}: take less")
    return times


def _durations(times: Mapping[str, Fraction], chunks: int, split: bool) -> dict[str, Fraction]:
    """Phase -> time of one computation of one chunk; `split`: weight gradients are one of their own."""
    if not split:
        return {phase: times[phase] / chunks for phase in ("forward", "backward")}
    return {
        "forward": times["forward"] / chunks,
        "backward": (times["backward"] - times["weight"]) / chunks,
        "weight_grad": times["weight"] / chunks,
    }


def _check_link(link: Sequence[int], tables: Sequence[Table], chunks: int) -> None:
    """ValueError where no message crosses the link."""
    from stepscope.parallel_runtime.pp.schedules import Place, destination_of

    if not link:
        return
    source, target = link
    sends = (action for action in tables[source] if action.kind == "send")
    ends = (destination_of(a.phase, Place(source, a.chunk), len(tables), chunks) for a in sends)
    if not any(end is not None and end.stage == target for end in ends):
        raise ValueError(f"slow-link {source}-{target}: stage {source} sends nothing to stage {target}")


def _draw(timed: Sequence[Sequence[Timed]], chunks: int, out: Any) -> None:
    """The rows of all stages, in as many pieces as the terminal's width asks for."""
    from rich.text import Text

    from stepscope.parallel_runtime.pp.picture import columns_per_time, folded, segments

    end = max(Fraction(stage[-1].end) for stage in timed)
    scale, width = columns_per_time(timed, chunks), max(out.width - MARGIN, 20)
    rows = [folded(list(segments(stage, end, scale, chunks)), width) for stage in timed]
    for piece in range(max(len(row) for row in rows)):
        begin, close = Fraction(piece * width) / scale, min(Fraction((piece + 1) * width) / scale, end)
        out.print(Text(f"\ntime {float(begin):g} to {float(close):g}"))
        for stage, row in enumerate(rows):
            if piece < len(row):
                out.print(Text(f"stage {stage}".ljust(MARGIN)) + _line(row[piece], out.color_system is not None))


def _line(row: Sequence[Segment], coloured: bool) -> Text:
    """One line; colours make the marks of going on and waiting needless."""
    from rich.text import Text

    from stepscope.parallel_runtime.pp.picture import PAD, WAIT

    line = Text()
    for action, text in row:
        shown = text.replace(PAD, " ").replace(WAIT, " ") if coloured else text
        style = "" if action is None else STYLES[action.phase] + (" bold" if action.chunk % 2 else "")
        line.append(shown, style if coloured else "")
    return line


def _tell(
    schedule: str,
    timed: Sequence[Sequence[Timed]],
    tables: Sequence[Any],
    chunks: int,
    durations: dict[str, Fraction],
    out: Any,
) -> None:
    """A row a stage, then the bubble beside theory."""
    from rich.table import Table

    from stepscope.analysis.causes.pipeline import theory
    from stepscope.parallel_runtime.pp.validator import activation_peak

    end = max(Fraction(stage[-1].end) for stage in timed)
    work = [sum((Fraction(row.end) - Fraction(row.start) for row in stage), Fraction(0)) for stage in timed]
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("stage", "work", "bubble", "of the step", "most microbatches kept"):
        rows.add_column(name, justify="right" if name != "stage" else "left")
    for stage, (own, table) in enumerate(zip(work, tables, strict=True)):
        kept = Fraction(activation_peak(table), chunks)
        rows.add_row(
            str(stage), f"{float(own):g}", f"{float(end - own):g}", percent((end - own) / end), f"{float(kept):g}"
        )
    out.print()
    out.print(rows)
    microbatches = len({action.microbatch for action in tables[0]})
    of_step, of_work = theory(schedule, len(timed), microbatches, chunks, durations)
    bubble = 1 - sum(work) / (end * len(timed))
    free = "free messages" if len(set(work)) == 1 else "equal stages and free messages"
    out.print(
        f"\nstep {float(end):g}: bubble {percent(bubble)} of the step, {percent(bubble / (1 - bubble))} of the work"
        f" (theory, with {free}: {percent(of_step)}, {percent(of_work)})"
    )
