"""What a pipeline ran: one row an action (a microbatch's forward, backward or weight gradient on a rank), and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pandas as pd

from stepscope.analysis.causes.summary import step_key
from stepscope.analysis.ledger.decompose import step_column
from stepscope.analysis.ledger.keys import code_columns
from stepscope.analysis.ledger.steps import Windows
from stepscope.analysis.run import Columns, Run
from stepscope.tracer.schema import KINDS, PHASES, code_of

WORK_PHASES = ("forward", "backward", "weight_grad")
"""What a schedule orders; recomputation is part of the backward that asks for it."""

ACTION_COLUMNS = ("rank", "step", "phase", "chunk", "microbatch", "stage", "start_ns", "end_ns", "compute_ns")


def actions(run: Run, steps: Mapping[int, Windows]) -> pd.DataFrame:
    """One row a (rank, step, phase, chunk, microbatch) that computed: first start, last end, summed compute in ns.

    `steps`: the windows of each rank. Rows come in the order in which each rank ran them, in its own clock. Empty where
    rows carry no phase and microbatch.
    """
    labels = list(dict.fromkeys(step for one in steps.values() for step in one.steps))
    found = [one for rank in run.ranks if (one := _rank_actions(run, rank, steps[rank], labels)) is not None]
    if not found:
        return pd.DataFrame({name: pd.Series(dtype="object") for name in ACTION_COLUMNS})
    columns = {name: np.concatenate([one[name] for one in found]) for name in ACTION_COLUMNS}
    columns["step"] = step_column(labels)[columns["step"]]
    columns["phase"] = step_column(PHASES)[columns["phase"]]
    objects = {name: pd.Series(columns[name], dtype="object") for name in ("step", "phase")}
    return pd.DataFrame({**columns, **objects})[list(ACTION_COLUMNS)]


def _rank_actions(run: Run, rank: int, steps: Windows, labels: list[int | str]) -> Columns | None:
    """ACTION_COLUMNS of one rank, by start; steps as places in `labels`, phases as codes. None where rows name nothing."""
    rows = _work_rows(run, rank, steps, labels)
    if rows is None:
        return None
    code = code_columns([rows[name] for name in ("step", "phase", "chunk", "microbatch", "stage")])
    order = np.argsort(code, kind="stable")
    edges = np.flatnonzero(np.concatenate(([True], code[order][1:] != code[order][:-1])))
    first = np.minimum.reduceat(order, edges)  # the row that came first of each action
    start = np.minimum.reduceat(rows["start_ns"][order], edges)
    found = {name: rows[name][first] for name in ("step", "phase", "chunk", "microbatch", "stage")}
    found |= {
        "rank": np.full(len(edges), rank, np.int64),
        "start_ns": start,
        "end_ns": np.maximum.reduceat(rows["end_ns"][order], edges),
        "compute_ns": np.add.reduceat(rows["dur_ns"][order], edges),
    }
    by_start = np.lexsort((first, start))
    return {name: values[by_start] for name, values in found.items()}


def _work_rows(run: Run, rank: int, steps: Windows, labels: list[int | str]) -> Columns | None:
    """Computations of microbatches inside the windows of one rank; steps as places in `labels`, phases as codes."""
    names = ("start_ns", "dur_ns", "kind", "phase", "stage", "chunk", "microbatch")
    columns = run.columns(rank, *names)
    wanted = np.zeros(len(PHASES) + 1, bool)
    wanted[[code_of(PHASES, name) for name in (*WORK_PHASES, "recompute")]] = True
    chosen = np.flatnonzero(
        (columns["kind"] == code_of(KINDS, "compute")) & (columns["microbatch"] >= 0) & wanted[columns["phase"]]
    )
    start = columns["start_ns"][chosen]
    index = np.searchsorted(steps.start_ns, start, side="right") - 1
    inside = (index >= 0) & (start < np.append(steps.end_ns, 0)[index])
    chosen, index = chosen[inside], index[inside]
    if len(chosen) == 0:
        return None
    rows = {name: columns[name][chosen] for name in names}
    rows["phase"] = np.where(rows["phase"] == code_of(PHASES, "recompute"), code_of(PHASES, "backward"), rows["phase"])
    place = {step: number for number, step in enumerate(labels)}
    rows["step"] = np.array([place[step] for step in steps.steps], np.int64)[index]
    rows["end_ns"] = rows["start_ns"] + rows["dur_ns"]
    rows["chunk"] = np.maximum(rows["chunk"], 0)
    return rows


def mean_durations(rows: pd.DataFrame) -> dict[str, Fraction]:
    """Mean compute time in ns of one action of each phase, over ranks, stages, chunks and microbatches."""
    code, phases = pd.factorize(rows["phase"], sort=True)
    total, number = np.zeros(len(phases), np.int64), np.bincount(code, minlength=len(phases))
    np.add.at(total, code, rows["compute_ns"].to_numpy(np.int64))
    return {str(phase): Fraction(int(total[at]), int(number[at])) for at, phase in enumerate(phases)}


def step_durations(rows: pd.DataFrame) -> tuple[list[int | str], dict[str, np.ndarray]]:
    """Steps in the order in which they come, and `mean_durations` in each of them: phase -> whole ns, 0 where it has none."""
    step, steps = pd.factorize(rows["step"])
    phase, phases = pd.factorize(rows["phase"], sort=True)
    total, number = (np.zeros((len(phases), len(steps)), np.int64) for _ in range(2))
    np.add.at(total, (phase, step), rows["compute_ns"].to_numpy(np.int64))
    np.add.at(number, (phase, step), 1)
    whole, rest = np.divmod(total, np.maximum(number, 1))
    up = (2 * rest > number) | ((2 * rest == number) & (number > 0) & (whole % 2 == 1))  # halves go to even numbers
    means = whole + up
    return [step_key(label) for label in steps], {str(name): means[at] for at, name in enumerate(phases)}
