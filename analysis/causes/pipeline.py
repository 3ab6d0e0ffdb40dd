"""The pipeline: which schedule, and its bubble measured, in theory, and as planned.

Definitions: definitions.md (Bubble or imbalance); formulas: theory.md (Pipeline bubble). Two fractions are always named
apart: *of the step* (bubble / step time) and *of the work* (bubble / compute time of the microbatches).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from stepscope.analysis.causes.actions import WORK_PHASES, mean_durations
from stepscope.analysis.causes.plan import Slot, replay
from stepscope.analysis.causes.summary import counted_rows, ratio
from stepscope.tracer.schema import RunMeta


@dataclass(frozen=True)
class Pipeline:
    """The `pipeline` object of the public JSON; everything is None (stages 1) where there is no pipeline."""

    schedule: str | None = None
    stages: int = 1
    microbatches: int | None = None
    bubble_of_step: float | None = None
    bubble_of_work: float | None = None
    theory_of_step: float | None = None
    theory_of_work: float | None = None
    planned_of_step: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Exactly the public fields."""
        return asdict(self)


# -- what ran ----------------------------------------------------------------------------------------------------------


def recognise(orders: Mapping[int, Sequence[Slot]]) -> str | None:
    """Name of the schedule that every stage's order of computations follows, None for one that is not known.

    `orders` maps each stage to what it ran in one step. With one microbatch all schedules are the same: `naive`.
    """
    slots = [slot for order in orders.values() for slot in order]
    if not slots:
        return None
    if any(slot.phase == "weight_grad" for slot in slots):
        return "zb-h1"
    if any(slot.chunk > 0 for slot in slots):
        return "interleaved"
    stages, count = len(orders), len({slot.microbatch for slot in slots})
    for name in ("naive", "gpipe", "1f1b"):
        if all(_letters(orders[s]) == _expected(name, place, stages, count) for place, s in enumerate(sorted(orders))):
            return name
    return None


def _letters(order: Sequence[Slot]) -> str:
    return "".join("F" if slot.phase == "forward" else "B" for slot in order)


def _expected(schedule: str, stage: int, stages: int, microbatches: int) -> str:
    """The order of forwards and backwards on one stage."""
    if schedule == "naive":
        return "FB" * microbatches
    if schedule == "gpipe":
        return "F" * microbatches + "B" * microbatches
    warm = min(stages - 1 - stage, microbatches)
    return "F" * warm + "FB" * (microbatches - warm) + "B" * warm


# -- theory ------------------------------------------------------------------------------------------------------------


def theory(
    schedule: str | None, stages: int, microbatches: int, chunks: int, durations: Mapping[str, Fraction]
) -> tuple[Fraction | None, Fraction | None]:
    """(bubble of the step, bubble of the ideal work) by the textbook; (None, None) for an unknown schedule.

    `durations` (mean time of one action a phase) is used by zero-bubble only: (P-1)(T_F + T_B - T_W), and T_W more for
    each microbatch that is missing to P.
    """
    p, m, v = Fraction(stages), Fraction(microbatches), Fraction(chunks)
    if microbatches < 1 or stages < 1:
        return None, None
    if schedule == "naive":
        return 1 - 1 / p, p - 1
    if schedule in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1), (p - 1) / m
    if schedule == "interleaved":
        return (p - 1) / (v * m + p - 1), (p - 1) / (v * m)
    if schedule == "zb-h1" and set(WORK_PHASES) <= set(durations):
        forward, backward, weight = (durations[name] for name in WORK_PHASES)
        bubble = (p - 1) * (forward + backward) - (min(m, p) - 1) * weight
        work = m * (forward + backward + weight)
        return (bubble / (bubble + work), bubble / work) if work else (None, None)
    return None, None


# -- one run -----------------------------------------------------------------------------------------------------------


def stage_of(meta: RunMeta, rank: int) -> int:
    """Pipeline stage of a rank, -1 where run.json has no coordinates."""
    return int(meta.coords[rank].get("pp", 0)) if rank < len(meta.coords) else -1


def replica_of(meta: RunMeta, rank: int) -> Hashable:
    """What the ranks of one pipeline share: their coordinates on all other axes."""
    if rank >= len(meta.coords):
        return ()
    return tuple(sorted((axis, place) for axis, place in meta.coords[rank].items() if axis != "pp"))


def planned_tables(meta: RunMeta) -> dict[int, list[Slot]]:
    """Stage -> planned table of the first pipeline of run.json; empty where none was recorded."""
    tables: dict[int, list[Slot]] = {}
    for rank, table in enumerate(meta.pipeline_table):
        slots = [Slot(a.phase, max(a.chunk, 0), a.microbatch) for a in table if a.phase in WORK_PHASES]
        if slots:
            tables.setdefault(stage_of(meta, rank) if meta.coords else rank, slots)
    return tables


def observed_tables(rows: pd.DataFrame, step: int | str) -> dict[int, list[Slot]]:
    """Stage -> what its lowest rank computed in `step`, in the order in which it ran."""
    found = alike(rows[rows["step"] == step])
    return found[0][0] if found else {}


def alike(rows: pd.DataFrame) -> list[tuple[dict[int, list[Slot]], np.ndarray]]:
    """What the stages computed, and the steps in which they did (places in the order in which steps come).

    Stage -> what its lowest rank computed, in the order in which it ran; steps that ran alike are together.
    """
    step, rank = pd.factorize(rows["step"])[0], rows["rank"].to_numpy(np.int64)
    order = np.lexsort((rank, step))
    step, rank, stage = step[order], rank[order], rows["stage"].to_numpy(np.int64)[order].tolist()
    slots = list(map(Slot, *(rows[name].to_numpy()[order].tolist() for name in ("phase", "chunk", "microbatch"))))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(step) != 0) | (np.diff(rank) != 0)
    tables: list[dict[int, list[Slot]]] = [{} for _ in range(int(step.max(initial=-1)) + 1)]
    for low, high in pairwise([*np.flatnonzero(first).tolist(), len(order)]):
        tables[step[low]].setdefault(stage[low], slots[low:high])
    places: dict[tuple[tuple[int, tuple[Slot, ...]], ...], list[int]] = {}
    for place, table in enumerate(tables):
        places.setdefault(tuple((one, tuple(line)) for one, line in table.items()), []).append(place)
    return [(tables[same[0]], np.array(same, np.int64)) for same in places.values()]


def pipeline(meta: RunMeta, ledger: pd.DataFrame, rows: pd.DataFrame) -> Pipeline:
    """The pipeline of a run: schedule (given, else recognised), and its bubble measured, in theory and as planned.

    `rows`: its `actions`. Measured: totals over the counted rows of the ledger.
    """
    stages = _stages(meta, rows)
    if stages < 2:
        return Pipeline()
    counted = counted_rows(ledger)
    rows = rows[rows["step"].isin(counted["step"].unique())]
    durations = mean_durations(rows)
    observed = observed_tables(rows, rows["step"].iloc[0]) if len(rows) else {}
    schedule = str(meta.parallel.get("schedule") or "") or recognise(observed)
    microbatches = int(meta.train.get("microbatches") or 0) or int(rows["microbatch"].nunique())
    chunks = int(meta.parallel.get("chunks") or 0) or int(rows["chunk"].max() if len(rows) else 0) + 1
    of_step, of_work = theory(schedule, stages, microbatches, chunks, durations)
    exact = {phase: np.array([one], object) for phase, one in durations.items()}
    plan = replay(planned_tables(meta), exact) if durations else None
    bubble, work = int(counted["bubble_ns"].sum()), _work(counted, rows)
    return Pipeline(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches or None,
        bubble_of_step=ratio(bubble, int(counted["step_ns"].sum())),
        bubble_of_work=ratio(bubble, work),
        theory_of_step=None if of_step is None else float(of_step),
        theory_of_work=None if of_work is None else float(of_work),
        planned_of_step=plan.bubble_of_step(0) if plan else None,
    )


def _stages(meta: RunMeta, rows: pd.DataFrame) -> int:
    return int(meta.mesh.get("pp") or 0) or int(rows["stage"].max() if len(rows) else 0) + 1


def _work(counted: pd.DataFrame, rows: pd.DataFrame) -> int:
    """Compute time of the microbatches in ns, all compute where rows name no phase."""
    known = rows[rows["rank"].isin(counted["rank"].unique())]
    return int(known["compute_ns"].sum()) if len(known) else int(counted["compute_ns"].sum())
