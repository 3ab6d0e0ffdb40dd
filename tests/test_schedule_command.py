"""`stepscope schedule`: the picture, the figures beside it, the SVG file, and what it refuses."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.commands import load
from stepscope.parallel_runtime.config import SCHEDULES
from stepscope.parallel_runtime.pp.picture import columns_per_time, folded, label_of, segments, svg
from stepscope.parallel_runtime.pp.schedules import Action
from stepscope.parallel_runtime.pp.validator import plan, simulate

Shown = Callable[..., list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The lines that the command prints, on a terminal of so many columns."""

    def run(*arguments: str, width: int = 140) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        load("schedule").main(["-q", *arguments], standalone_mode=False)
        return capsys.readouterr().out.splitlines()

    return run


def test_1f1b_by_hand(shown: Shown) -> None:
    lines = shown("--pp", "2", "--microbatches", "2")
    assert lines[0] == "1f1b: 2 stages, 2 microbatches"
    assert lines[2:5] == [
        "time 0 to 9",
        "stage 0   F0F1....B0--..B1--",
        "stage 1   ..F0B0--F1B1--....",
    ]
    assert lines[6:9] == [
        "stage  work  bubble  of the step  most microbatches kept",
        "0         6       3       33.3 %                       2",
        "1         6       3       33.3 %                       1",
    ]
    assert (
        lines[-1]
        == "step 9: bubble 33.3 % of the step, 50.0 % of the work (theory, with free messages: 33.3 %, 50.0 %)"
    )


def test_zero_bubble_splits_backward_in_half_unless_told(shown: Shown) -> None:
    lines = shown("--pp", "2", "--microbatches", "2", "--schedule", "zb-h1")
    assert lines[3:5] == ["stage 0   F0F1..B0W0B1W1", "stage 1   ..F0B0F1B1W0W1"]
    assert "step 7: bubble 14.3 % of the step, 16.7 % of the work" in lines[-1]
    uneven = shown("--pp", "2", "--microbatches", "2", "--schedule", "zb-h1", "--weight", "0.5")
    assert "step 8: bubble 25.0 %" in uneven[-1] and "25.0 %, 33.3 %)" in uneven[-1]


def test_interleaved_has_two_chunks_and_half_the_bubble(shown: Shown) -> None:
    lines = shown("--schedule", "interleaved")
    assert lines[0] == "interleaved: 4 stages, 8 microbatches, 2 chunks"
    assert (
        "step 28.5: bubble 15.8 % of the step, 18.8 % of the work (theory, with free messages: 15.8 %, 18.8 %)" in lines
    )
    assert any(line.startswith("stage 0   F0aF1aF2aF3aF0bF1bF2bF3b") for line in lines)
    assert [line.split()[-1] for line in lines if line[:1].isdigit()] == ["5.5", "4.5", "3.5", "2.5"]


def test_messages_take_their_time(shown: Shown) -> None:
    free, slow = (shown("--pp", "2", "--microbatches", "1", "--transfer", text)[-1] for text in ("0", "0.5"))
    assert free.startswith("step 6:") and slow.startswith("step 7:")
    assert free.split("(")[1] == slow.split("(")[1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(shown: Shown, width: int) -> None:
    lines = shown("--pp", "3", "--microbatches", "12", width=width)
    drawn = [line for line in lines if line.startswith("stage ") and "work" not in line]
    assert max(map(len, drawn)) <= width
    for stage in range(3):
        row = "".join(line[10:] for line in drawn if line.startswith(f"stage {stage} "))
        assert row.count("F") == row.count("B") == 12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_svg_has_every_action_inside_its_picture(shown: Shown, tmp_path: Path, schedule: str) -> None:
    path = tmp_path / "picture.svg"
    shown("--schedule", schedule, "--svg", str(path))
    root = ElementTree.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    groups = root.findall(f"{space}g")
    per = {"interleaved": 4, "zb-h1": 3}.get(schedule, 2)  # actions of a microbatch on a stage
    assert len(groups) == 4 * 8 * per
    for group in groups:
        (box,) = group.findall(f"{space}rect")
        x, y, wide, high = (float(box.get(name, "")) for name in ("x", "y", "width", "height"))
        assert x >= 64 and x + wide <= width + 0.1 and y >= 30 and y + high <= height and wide > 0


def test_a_title_is_text() -> None:
    assert "&lt;b&gt;" in svg(simulate(plan("naive", 1, 1)), 1, "<b>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "interleaved", "--microbatches", "6"], "6 is no multiple: take microbatches 8"),
        (["--schedule", "1f1b", "--chunks", "2"], "take schedule interleaved, or chunks 1"),
        (["--schedule", "dual"], "choose one of naive, gpipe, 1f1b, interleaved, zb-h1"),
        (["--forward", "0"], "--forward 0 is a time: take a positive number"),
        (["--transfer", "-1"], "--transfer -1 is a time"),
        (["--schedule", "zb-h1", "--weight", "3"], "--weight 3 is a part of --backward 2: take less"),
    ],
)
def test_refusals(shown: Shown, arguments: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        shown(*arguments)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "zb-h1", "interleaved"]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(20, 90),
)
def test_rows_are_whole_at_every_width(schedule: str, stages: int, groups: int, forward: int, width: int) -> None:
    """Every stage's row ends with the step, every action has its whole label, and lines are cut at the width."""
    chunks = 2 if schedule == "interleaved" else 1
    timed = simulate(plan(schedule, stages, groups * stages, chunks), {"forward": forward}, chunks=chunks)
    end, scale = Fraction(max(stage[-1].end for stage in timed)), columns_per_time(timed, chunks)
    for stage in timed:
        row = list(segments(stage, end, scale, chunks))
        text = "".join(part.text for part in row)
        assert len(text) == round(end * scale)
        for part in row:
            if isinstance(part.action, Action):
                assert part.text.startswith(label_of(part.action, chunks))
        lines = folded(row, width)
        assert "".join(part.text for line in lines for part in line) == text
        assert all(sum(len(part.text) for part in line) == width for line in lines[:-1])
