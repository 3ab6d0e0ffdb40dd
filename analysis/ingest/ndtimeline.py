"""ndtimeline-style tables of operations (Parquet or CSV): one row an operation of a Megatron job.

Columns: `dp_rank`, `stage`, `step`, `optype`, `start_ts` and `duration` (seconds), and where known `rank`, `seq_id`, `mc`
(model chunk) and `mb_id` (microbatch).
"""

from __future__ import annotations

import io
import warnings
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import Entry, Task, broken, written
from stepscope.analysis.ingest.formats import PARQUET_MAGIC, table_header
from stepscope.analysis.ingest.formats import TABLE_COLUMNS as COLUMNS
from stepscope.analysis.ingest.normalize import RankFile
from stepscope.analysis.ingest.operations import Kind, Rows, begins_of, lay_out, rank_file
from stepscope.analysis.ingest.source import ByteSource
from stepscope.analysis.units import counted
from stepscope.tracer.schema import MAX_RANKS

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


OPTIONAL = ("rank", "seq_id", "mc", "gmc", "mb_id")
"""Columns that a table may have; -1 where a row says nothing."""

_MOST = {"dp_rank": MAX_RANKS - 1, "stage": (1 << 15) - 1, "step": 1 << 53}
"""The largest numbers of a place that are believed."""

_MOST_OPTIONAL = {"rank": MAX_RANKS - 1, "seq_id": 1 << 53, "mc": (1 << 15) - 1, "gmc": 1 << 20, "mb_id": (1 << 31) - 1}
"""The largest optional numbers that are believed."""

_MOST_SECONDS = 4e9
"""So far from 0 may a time be (a stamp since the epoch will be in 2096), so that its nanoseconds fit."""


def read_file(task: Task) -> list[Entry]:
    """All ranks of one job's table (or of the parts of it)."""
    try:
        parts = [read_table(path) for path in (task.path, *task.others)]
    except (StepscopeError, ValueError, OSError, pa.ArrowInvalid) as error:
        return broken(task, str(error).strip())
    table, bad, twice = _joined([part.table for part in parts])
    if not len(table):
        return broken(task, "no row has a place and a time")
    table = table.sort_values(["step", "start_ts"], kind="stable")
    stages, replicas = int(table["stage"].max()) + 1, int(table["dp_rank"].max()) + 1
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
        if bad and rank == min(rows):
            rows_have = counted(bad, "row of the table has", "rows of the table have")
            result.note("no_time", f"{rows_have} no place or no time: left out", touches=("ledger",))
        if rank == min(rows):
            _note_damage(result, parts)
        backwards = int((table["duration"] < 0).sum())
        if backwards and rank == min(rows):
            rows_have = counted(backwards, "row of the table has", "rows of the table have")
            result.note(
                "negative_duration", f"{rows_have} a negative duration: kept with length 0", touches=("ledger",)
            )
        if twice and rank == min(rows):
            rows_stand = counted(twice, "row stands", "rows stand")
            result.note("repeated_rows", f"{rows_stand} in several of the files (is one a copy?): counted once")
        entries.append(written(task, rank, result))
    return entries


def _note_damage(result: RankFile, parts: list[Part]) -> None:
    """Say which lines of which files were lost."""
    if lines := sum(part.long_lines for part in parts):
        lines_have = counted(lines, "line of the table has", "lines of the table have")
        result.note("lost_event", f"{lines_have} more values than it has columns: left out", touches=("ledger",))
    if cut := [part.cut for part in parts if part.cut is not None]:
        text = f"{counted(len(cut), 'file ends', 'files end')} early ({cut[0]}): every complete row before is kept"
        result.note("cut_file", text, touches=("ledger", "summary"))


def _joined(tables: list[pd.DataFrame]) -> tuple[pd.DataFrame, int, int]:
    """The rows of all parts; how many had no place or no time, and how many an earlier part had already: left out."""
    parts, bad, twice = [], 0, 0
    seen = np.empty(0, np.uint64)
    for table in tables:
        part = _readable(table)
        bad += len(table) - len(part)
        hashes = pd.util.hash_pandas_object(part, index=False).to_numpy()
        again = np.isin(hashes, seen)
        twice += int(again.sum())
        seen = np.concatenate([seen, hashes])
        parts.append(part[~again])
    return pd.concat(parts, ignore_index=True), bad, twice


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with a place and a time, numbers as numbers."""
    known = [column for column in (*COLUMNS, *OPTIONAL) if column in table]
    table = table.loc[table["optype"].notna(), known].astype({"optype": "str"})
    for column in known:
        if column != "optype":
            table[column] = pd.to_numeric(_seconds(table[column]), errors="coerce").astype("float64")
            table[column] = table[column].replace([np.inf, -np.inf], np.nan)
    optional = [column for column in OPTIONAL if column in table]
    for column in optional:
        table[column] = table[column].where((table[column] >= 0) & (table[column] <= _MOST_OPTIONAL[column]), -1)
    good = table[list(COLUMNS)].notna().all(axis=1)
    for column in ("dp_rank", "stage", "step"):
        good &= (table[column] >= 0) & (table[column] <= _MOST[column])
    for column in ("start_ts", "duration"):
        good &= table[column].abs() <= _MOST_SECONDS
    return table[good]


class Part(NamedTuple):
    """One file of a job: its table, lines that have more values than it has columns, and why its end is missing."""

    table: pd.DataFrame
    long_lines: int = 0
    cut: str | None = None


def read_table(path: str) -> Part:
    """The table of one file, CSV or Parquet, compressed or not.

    StepscopeError, ValueError or ArrowInvalid says what is wrong with it.
    """
    with ByteSource(path) as source:
        data = source.read()
    if data.startswith(PARQUET_MAGIC):
        return Part(pq.read_table(io.BytesIO(data)).to_pandas(ignore_metadata=True))
    cut = source.cut
    if cut is not None:
        data = data[: data.rfind(b"\n") + 1]
    _, separator = table_header(data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", pd.errors.ParserWarning)
        table = pd.read_csv(
            io.BytesIO(data), sep=separator, skipinitialspace=True, encoding_errors="replace", on_bad_lines="warn"
        )
    return Part(table, sum(str(one.message).count("Skipping line") for one in said), cut)


def _seconds(column: pd.Series) -> pd.Series:
    """Numbers as they are; times and durations of a type of their own in seconds."""
    if pd.api.types.is_datetime64_any_dtype(column):
        column = column - pd.Timestamp(0, tz=column.dt.tz)
    if pd.api.types.is_timedelta64_dtype(column):
        return column.dt.total_seconds()
    return column


def exact_ns(seconds: Any) -> int:
    """Seconds as the table stores them (single precision, often) to the nearest ns."""
    return round(float(np.float64(seconds)) * 1e9)


def _rank_numbers(table: pd.DataFrame, replicas: int) -> dict[tuple[int, int], int]:
    """(dp rank, stage) -> rank: the table's own, where each has one of its own, else stages outermost (of those that are
    there, where no run has so many)."""
    places = sorted({(int(d), int(s)) for d, s in zip(table["dp_rank"], table["stage"], strict=True)})
    if "rank" in table:
        named = zip(table["dp_rank"].tolist(), table["stage"].tolist(), table["rank"].tolist(), strict=True)
        given = {(int(d), int(s)): int(rank) for d, s, rank in named}
        distinct = len(table[["dp_rank", "stage", "rank"]].drop_duplicates())
        if distinct == len(given) == len(set(given.values())) and min(given.values()) >= 0:
            return given
    if max(s * replicas + d for d, s in places) >= MAX_RANKS:
        return {place: rank for rank, place in enumerate(sorted(places, key=lambda place: place[::-1]))}
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
    """The order of computations in the first step: phase, chunk, microbatch; nothing where a microbatch is not known."""
    first = rows.step[0] if rows.step else -1
    chosen: list[tuple[int, list[Any]]] = [
        (start, [kinds[name].phase, max(chunk, 0), microbatch])
        for step, start, name, chunk, microbatch in zip(
            rows.step, rows.start, rows.name, rows.chunk, rows.microbatch, strict=True
        )
        if step == first and kinds[name].kind == "compute" and kinds[name].phase in ("forward", "backward")
    ]
    if any(action[2] < 0 for _, action in chosen):
        return []
    return [action for _, action in sorted(chosen, key=lambda pair: pair[0])]


def _groups(stages: int, replicas: int, ranks: dict[tuple[int, int], int]) -> list[dict[str, Any]]:
    """All groups of the job, by the names that the rows carry."""
    groups = []
    for replica in sorted({replica for replica, _ in ranks}):
        pipeline = [ranks[replica, stage] for stage in range(stages) if (replica, stage) in ranks]
        groups += [
            {"name": f"pp dp{replica} {way}", "axis": "pp", "ranks": pipeline} for way in ("forward", "backward")
        ]
        ends = list(dict.fromkeys((pipeline[0], pipeline[-1])))
        groups.append({"name": f"embedding dp{replica} embedding-grads-all-reduce", "axis": "pp", "ranks": ends})
    for stage in sorted({stage for _, stage in ranks}):
        members = [ranks[replica, stage] for replica in range(replicas) if (replica, stage) in ranks]
        for name in ("params-all-gather", "grads-reduce-scatter", "grads-all-reduce"):
            groups.append({"name": f"dp stage{stage} {name}", "axis": "dp", "ranks": members})
    everyone = sorted(ranks.values())
    return [*groups, {"name": "world optimizer-clip-main-grad", "axis": "world", "ranks": everyone}]
