"""ndtimeline-style tables of operations (Parquet or CSV): one row an operation of a Megatron job.

Columns: `dp_rank`, `stage`, `step`, `optype`, `start_ts` and `duration` (seconds), and where known `rank`, `seq_id`, `mc`
(model chunk) and `mb_id` (microbatch).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from stepscope.analysis.ingest.build import Entry, Task, broken, written
from stepscope.analysis.ingest.formats import TABLE_COLUMNS as COLUMNS
from stepscope.analysis.ingest.operations import Kind, Rows, begins_of, lay_out, rank_file
from stepscope.analysis.units import counted

OPERATIONS = {
    "forward-compute": Kind("compute", "forward"),
    "backward-compute": Kind("compute", "backward"),
    "optimizer": Kind("compute", "optimizer"),
    "gc": Kind("host"),
    "forward-send": Kind("comm", "forward", "send", "pp", "pp", "forward-send"),
    "forward-recv": Kind("comm", "forward", "receive", "pp", "pp", "forward-recv"),
    "backward-send": Kind("comm", "backward", "send", "pp", "pp", "backward-send"),
    "backward-recv": Kind("comm", "backward", "receive", "pp", "pp", "backward-recv"),
    "params-all-gather": Kind("comm", "optimizer", "all_gather", "dp", "zero1", "dp"),
    "grads-reduce-scatter": Kind("comm", "optimizer", "reduce_scatter", "dp", "zero1", "dp"),
    "grads-all-reduce": Kind("comm", "optimizer", "all_reduce", "dp", "dp", "dp"),
    "embedding-grads-all-reduce": Kind("comm", "optimizer", "all_reduce", "pp", "embedding", "embedding"),
    "layernorm-grads-all-reduce": Kind("comm", "optimizer", "all_reduce", "tp", "sp", "layernorm"),
    "optimizer-clip-main-grad": Kind("comm", "optimizer", "all_reduce", "world", "clip", "clip"),
}
"""What the job's profiler calls its operations. Others are kept as host rows."""


def read_file(task: Task) -> list[Entry]:
    """All ranks of one job's table (or of the parts of it)."""
    try:
        table = pd.concat([read_table(path) for path in (task.path, *task.others)], ignore_index=True)
    except (ValueError, OSError, pa.ArrowInvalid) as error:
        return broken(task, str(error))
    bad = table[list(COLUMNS)].isna().any(axis=1)
    if bad.all():
        return broken(task, "no row has a time")
    table = table[~bad].sort_values(["step", "start_ts"], kind="stable")
    stages, replicas = max(table["stage"].tolist()) + 1, max(table["dp_rank"].tolist()) + 1
    ranks = _rank_numbers(table, replicas)
    rows = {rank: Rows() for rank in sorted(ranks.values())}
    counts: Counter[tuple[Any, ...]] = Counter()
    one: Any
    for one in table.itertuples(index=False):
        place = (int(one.dp_rank), int(one.stage))
        _add(rows[ranks[place]], one, place, stages, ranks, counts)
    kinds = defaultdict(lambda: Kind("host"), OPERATIONS)
    spans, begins = lay_out(rows), begins_of(rows)
    entries = []
    for (replica, stage), rank in sorted(ranks.items(), key=lambda item: item[1]):
        result = rank_file(rows[rank], kinds, spans, begins, stage)
        mesh = {"pp": stages, "dp": replicas}
        result.facts |= {"mesh": mesh, "coords": {"pp": stage, "dp": replica}, "table": _actions(rows[rank], kinds)}
        result.facts["groups"] = _groups(stages, replicas, ranks)
        unknown = sorted(set(rows[rank].name) - set(OPERATIONS))
        if unknown:
            result.note(
                "unknown_operation", f"operations of unknown type count as host work: {', '.join(unknown)[:200]}"
            )
        if bad.any() and rank == min(rows):
            rows_have = counted(int(bad.sum()), "row of the table has", "rows of the table have")
            result.note("no_time", f"{rows_have} no time: left out", touches=("ledger",))
        entries.append(written(task, rank, result))
    return entries


def read_table(path: str) -> pd.DataFrame:
    """The table of one file, CSV or Parquet."""
    return pd.read_csv(path) if path.endswith((".csv", ".csv.gz")) else pd.read_parquet(path)


def exact_ns(seconds: Any) -> int:
    """Seconds as the table stores them (single precision, often) to the nearest ns."""
    return round(float(np.float64(seconds)) * 1e9)


def _rank_numbers(table: pd.DataFrame, replicas: int) -> dict[tuple[int, int], int]:
    """(dp rank, stage) -> rank: the table's own, where each has one of its own, else stages outermost."""
    places = sorted({(int(d), int(s)) for d, s in zip(table["dp_rank"], table["stage"], strict=True)})
    if "rank" in table:
        named = zip(table["dp_rank"].tolist(), table["stage"].tolist(), table["rank"].tolist(), strict=True)
        given = {(int(d), int(s)): int(rank) for d, s, rank in named}
        distinct = len(table[["dp_rank", "stage", "rank"]].drop_duplicates())
        if distinct == len(given) == len(set(given.values())):
            return given
    return {(d, s): s * replicas + d for d, s in places}


def _add(
    rows: Rows,
    one: Any,
    place: tuple[int, int],
    stages: int,
    ranks: dict[tuple[int, int], int],
    counts: Counter[tuple[Any, ...]],
) -> None:
    """Append one operation, with its group, its peer, and its number in them."""
    replica, stage = place
    kind = OPERATIONS.get(one.optype, Kind("host"))
    group, peer, seq = "", -1, -1
    if kind.collective in ("send", "receive"):
        step = 1 if (kind.collective == "send") == (kind.phase == "forward") else -1
        other = (replica, (stage + step) % stages)
        many_chunks = getattr(one, "gmc", -1) >= stages  # with several chunks the ends are joined
        if 0 <= stage + step < stages or many_chunks:
            group, peer = f"pp dp{replica} {kind.phase}", ranks.get(other, -1)
            ends = (stage, other[1]) if kind.collective == "send" else (other[1], stage)
            seq = _next(counts, (replica, place, kind.collective, kind.phase, ends))
    elif kind.kind == "comm":
        group = {"dp": f"dp stage{stage}", "pp": f"embedding dp{replica}", "world": "world"}.get(kind.axis, "")
        seq = _next(counts, (place, one.optype, group)) if group else -1
        group = f"{group} {one.optype}" if group else ""
    start = exact_ns(one.start_ts)
    rows.step.append(int(one.step))
    rows.start.append(start)
    rows.end.append(max(start, exact_ns(np.float64(one.start_ts) + np.float64(one.duration))))
    rows.name.append(str(one.optype))
    rows.microbatch.append(int(getattr(one, "mb_id", -1)))
    rows.chunk.append(int(getattr(one, "mc", -1)))
    rows.group.append(group)
    rows.peer.append(peer)
    rows.seq.append(seq)


def _next(counts: Counter[tuple[Any, ...]], key: tuple[Any, ...]) -> int:
    counts[key] += 1
    return counts[key] - 1


def _actions(rows: Rows, kinds: dict[str, Kind]) -> list[list[Any]]:
    """The order of computations in the first step: phase, chunk, microbatch."""
    first = rows.step[0] if rows.step else -1
    chosen = [
        (start, [kinds[name].phase, max(chunk, 0), microbatch])
        for step, start, name, chunk, microbatch in zip(
            rows.step, rows.start, rows.name, rows.chunk, rows.microbatch, strict=True
        )
        if step == first and kinds[name].kind == "compute" and kinds[name].phase in ("forward", "backward")
    ]
    return [action for _, action in sorted(chosen, key=lambda pair: pair[0])]


def _groups(stages: int, replicas: int, ranks: dict[tuple[int, int], int]) -> list[dict[str, Any]]:
    """All groups of the job, by the names that the rows carry."""
    groups = []
    for replica in range(replicas):
        pipeline = [ranks[replica, stage] for stage in range(stages) if (replica, stage) in ranks]
        groups += [
            {"name": f"pp dp{replica} {way}", "axis": "pp", "ranks": pipeline} for way in ("forward", "backward")
        ]
        ends = list(dict.fromkeys((pipeline[0], pipeline[-1])))
        groups.append({"name": f"embedding dp{replica} embedding-grads-all-reduce", "axis": "pp", "ranks": ends})
    for stage in range(stages):
        members = [ranks[replica, stage] for replica in range(replicas) if (replica, stage) in ranks]
        for name in ("params-all-gather", "grads-reduce-scatter", "grads-all-reduce"):
            groups.append({"name": f"dp stage{stage} {name}", "axis": "dp", "ranks": members})
    everyone = sorted(ranks.values())
    return [*groups, {"name": "world optimizer-clip-main-grad", "axis": "world", "ranks": everyone}]
