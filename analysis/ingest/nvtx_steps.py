"""Steps out of the ranges of a program that no profiler annotated: NVTX ranges `step 12`, `iter_12`, `train_step`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from stepscope.analysis.ingest.rules import Rules
from stepscope.tracer.schema import STEP_ANNOTATION


class Range(NamedTuple):
    """One range (or mark, whose end is its start) of one thread, ns; `end` is -1 where the recording ended before."""

    name: str
    thread: int
    start: int
    end: int
    mark: bool = False


class Step(NamedTuple):
    """One step annotation: its number, extent (ns), thread, and whether the recording ended within it."""

    number: int
    start: int
    end: int
    thread: int
    partial: bool


@dataclass(frozen=True)
class Found:
    """The steps of one process, in order of time, and what they were taken from (`train_step <n>`)."""

    steps: tuple[Step, ...] = ()
    source: str = ""


def steps_of(ranges: list[Range], rules: Rules, last_ns: int) -> Found:
    """The family of ranges (one name, one thread) that covers the most time; ranges come before marks.

    `last_ns`: where the recording ends, which closes what is open. PyTorch's own `ProfilerStep#<n>` comes before any.
    """
    families: dict[tuple[str, bool, int, bool], list[tuple[int, Range]]] = defaultdict(list)
    for one in ranges:
        named = rules.step(one.name)
        if named is not None:
            words, number = named
            families[words, number >= 0, one.thread, one.mark].append((number, one))
    best: tuple[tuple[bool, bool, int], Found] | None = None
    for (words, numbered, _, mark), members in families.items():
        steps = _steps(members, numbered, last_ns)
        covered = sum(step.end - step.start for step in steps)
        rank = (words == STEP_ANNOTATION.rstrip("#").lower(), not mark, covered)
        if best is None or rank > best[0]:
            shown = members[0][1].name.rstrip("0123456789") if numbered else members[0][1].name
            best = (rank, Found(steps, f"{shown}<n>" if numbered else shown))
    return best[1] if best is not None else Found()


def _steps(members: list[tuple[int, Range]], numbered: bool, last_ns: int) -> tuple[Step, ...]:
    """One family as steps, in order; numbers that are missing or come twice (a loop in a loop) are counted instead."""
    members = sorted(members, key=lambda member: (member[1].start, -member[1].end))
    kept: list[tuple[int, Range, int]] = []
    for index, (number, one) in enumerate(members):
        end = one.end
        if one.mark or end < 0:
            end = members[index + 1][1].start if index + 1 < len(members) else max(last_ns, one.start)
        if kept and end <= kept[-1][2] and one.start < kept[-1][2]:
            continue  # within the one before
        if kept and one.start < kept[-1][2]:
            kept[-1] = (*kept[-1][:2], one.start)  # begun before the one before ended
        kept.append((number, one, end))
    numbers = [number for number, *_ in kept]
    if not numbered or len(set(numbers)) < len(numbers):
        numbers = list(range(len(kept)))
    last = len(kept) - 1
    return tuple(
        Step(number, one.start, end, one.thread, one.end < 0 or (one.mark and index == last))
        for index, (number, (_, one, end)) in enumerate(zip(numbers, kept, strict=True))
    )
