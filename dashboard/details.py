"""Everything about one piece of the timeline: its event, and the communication that it is part of on all ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from stepscope.analysis import units
from stepscope.dashboard import text
from stepscope.dashboard.level_of_detail import Track
from stepscope.dashboard.loaded import LoadedRun
from stepscope.dashboard.theme import CATEGORIES
from stepscope.tracer.schema import AXES, COLLECTIVES, FLAG_PARTIAL, KINDS, PHASES, STRATEGIES

MAX_PIECES = 200

_BUS_FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def bus_factor(collective: str, size: int) -> float:
    """Bus over algorithm bandwidth, as nccl-tests defines it: 2 (N-1)/N for all-reduce, (N-1)/N for the other
    ring collectives, 1 for point to point and rooted ones."""
    factor = _BUS_FACTOR.get(collective)
    return 1.0 if factor is None or size < 2 else factor * (size - 1) / size


def _word(vocabulary: tuple[str, ...], code: int) -> str:
    return vocabulary[code] if 0 <= code < len(vocabulary) else ""


def event(loaded: LoadedRun, track_id: int, index: int) -> dict[str, Any]:
    """Everything about one piece; IndexError for a track or piece that the run does not have."""
    track = track_of(loaded, track_id)
    if not 0 <= index < len(track):
        raise IndexError(f"lane {track_id} has no piece {index}")
    category = CATEGORIES[int(track.category[index])]
    start, end = int(track.start[index]), int(track.end[index])
    row = int(track.row[index])
    found: dict[str, Any] = {
        "track": track_id,
        "index": index,
        "rank": track.rank,
        "rank_label": loaded.rank_label(track.rank),
        "name": loaded.labels.text_of(int(track.name[index])),
        "category": int(track.category[index]),
        "definition": category.definition,
        "start": start,
        "end": end,
        "event": row >= 0,
        "facts": [],
        "parts": [],
    }
    if row < 0:
        found["facts"] = [["Rank", rank_text(loaded, track.rank)], *_times(loaded, start, end)]
        found["in_flight"] = in_flight(loaded, track.rank, start, end)
        return found
    _fill_event(loaded, track, row, found)
    return found


def track_of(loaded: LoadedRun, track_id: int) -> Track:
    """One lane by its id; IndexError for one that the run does not have."""
    if not 0 <= track_id < len(loaded.tracks):
        raise IndexError(f"the run has no lane {track_id}")
    return loaded.tracks[track_id]


def rank_text(loaded: LoadedRun, rank: int) -> str:
    """`5 · pp1 dp0`."""
    label = loaded.rank_label(rank)
    return f"{rank} · {label}" if label else str(rank)


def _times(loaded: LoadedRun, start: int, end: int) -> list[list[str]]:
    step = next((s for s in reversed(loaded.steps) if s["start"] <= start), None)
    within = f" · step {step['step']}, {units.duration(start - step['start'])} in" if step else ""
    return [["Start", units.duration(start) + within], ["Duration", units.duration(end - start)]]


def _fill_event(loaded: LoadedRun, track: Track, row: int, found: dict[str, Any]) -> None:
    """The facts of one row of the column store."""
    data = loaded.data(track.rank)
    columns = {name: int(values[row]) for name, values in data.events.items()}
    start, end = _extent(track, found["index"])
    unfinished = _word(KINDS, columns["kind"]) == "comm" and columns["flags"] & FLAG_PARTIAL
    if unfinished:  # it is drawn only up to the next one in its queue
        end = start + columns["dur_ns"]
    lane = next((lane.name for lane in data.lanes if lane.index == columns["lane"]), str(columns["lane"]))
    found |= {"start": start, "end": end, "op_id": columns["op_id"], "kind": _word(KINDS, columns["kind"])}
    facts = [["Rank", rank_text(loaded, track.rank)], *_times(loaded, start, end)]
    where = [
        f"{label} {columns[column]}"
        for column, label in (("stage", "stage"), ("chunk", "chunk"), ("microbatch", "microbatch"), ("layer", "layer"))
        if columns[column] >= 0
    ]
    phase = _word(PHASES, columns["phase"])
    facts.append(["What", " · ".join([p for p in (found["kind"], phase) if p and p != "other"] + where)])
    facts.append(["Stream", text.name(lane, 60)])
    if unfinished:
        facts.append(["Unfinished", "issued, not ended when the recording did: drawn up to the next of its stream"])
    if found["kind"] == "comm":
        _fill_communication(loaded, track.rank, row, columns, data.strings, found, facts)
    found["facts"] = facts


def _extent(track: Track, index: int) -> tuple[int, int]:
    """Start and end of the whole event that a piece is part of."""
    first = last = index
    while first > 0 and track.row[first - 1] == track.row[index]:
        first -= 1
    while last + 1 < len(track) and track.row[last + 1] == track.row[index]:
        last += 1
    return int(track.start[first]), int(track.end[last])


def _fill_communication(
    loaded: LoadedRun,
    rank: int,
    row: int,
    columns: dict[str, int],
    strings: tuple[str, ...],
    found: dict[str, Any],
    facts: list[list[str]],
) -> None:
    """What was sent, to whom, how fast; its parts on all ranks, who came last, who waited."""
    collective = _word(COLLECTIVES, columns["collective"])
    axis, strategy = _word(AXES, columns["axis"]), _word(STRATEGIES, columns["strategy"])
    group = strings[columns["group_id"]] if 0 <= columns["group_id"] < len(strings) else ""
    facts.append(["Operation", " · ".join(p for p in (collective.replace("_", "-"), axis, f"for {strategy}") if p)])
    if group:
        facts.append(["Group", text.name(group, 60) + (f" · seq {columns['seq']}" if columns["seq"] >= 0 else "")])
    if columns["bytes"] >= 0:
        facts.append(["Bytes", units.size(columns["bytes"])])
    parts = loaded.parts.of_event(rank, row)
    if len(parts) < 2:
        facts.append(["Partners", "not matched with other ranks"])
        return
    parts = parts.sort_values("rank")
    leaders = parts["last_rank"][parts["last_rank"] >= 0]
    last_rank = int(leaders.mode().iloc[0]) if len(leaders) else None
    found["last_rank"] = last_rank
    found["parts"] = [_part(loaded, row) for row in parts.to_dict("records")]
    spread = int(parts["arrival_ns"].max() - parts["arrival_ns"].min())
    found["note"] = (
        f"rank {last_rank} arrives last, {units.duration(spread)} after the first"
        if (last_rank is not None and spread)
        else f"{units.counted(len(parts), 'rank')}, no rank is late"
    )
    mine = next(p for p in found["parts"] if p["rank"] == rank)
    facts.append(["This rank", f"waits {mine['wait']}, transfers {mine['transfer']}"])
    if columns["bytes"] > 0:
        facts.append(["Bandwidth", _bandwidth(collective, columns["bytes"], found["parts"], last_rank)])
    method = str(parts["method"].iloc[0]).replace("_", " ")
    partial = " · some ranks are missing: the last arrival is a lower bound" if bool(parts["partial"].any()) else ""
    facts.append(["Matched by", text.name(method, 60) + partial])


def _part(loaded: LoadedRun, row: dict[Hashable, Any]) -> dict[str, Any]:
    """One rank's part of a communication: where it is drawn, when it arrived, turned to transferring, ended."""
    rank, event = int(row["rank"]), int(row["row"])
    arrival, end = int(row["arrival_ns"]), int(row["end_ns"])
    start = arrival - loaded.origin
    at = next(iter(_pieces_of(loaded, rank, event, start)), None)
    return {
        "rank": rank,
        "label": loaded.rank_label(rank),
        "track": at[0] if at else -1,
        "start": start,
        "turn": min(max(int(row["last_arrival_ns"]), arrival), end) - loaded.origin,
        "end": end - loaded.origin,
        "pieces": _pieces(loaded, at, event) if at else [],
        "wait": units.duration(int(row["wait_ns"])),
        "transfer": units.duration(int(row["transfer_ns"])),
        "transfer_ns": int(row["transfer_ns"]),
    }


def _bandwidth(collective: str, size: int, parts: list[dict[str, Any]], last_rank: int | None) -> str:
    """Algorithm and bus bandwidth on the last arriver's own duration, which holds no wait."""
    last = next((p for p in parts if p["rank"] == last_rank), None)
    shortest = (
        last["transfer_ns"] if last else min((p["transfer_ns"] for p in parts if p["transfer_ns"] > 0), default=0)
    )
    if shortest <= 0:
        return units.DASH
    algorithm = size / (shortest * 1e-9)
    bus = algorithm * bus_factor(collective, len(parts))
    return f"{text.bandwidth(algorithm)} algorithm · {text.bandwidth(bus)} bus"


def _pieces(loaded: LoadedRun, at: tuple[int, int], row: int) -> list[list[int]]:
    """The pieces of one part, [category, start, end] each: what every moment of it cost its rank."""
    track, index = loaded.tracks[at[0]], at[1]
    pieces: list[list[int]] = []
    while index < len(track) and track.row[index] == row and len(pieces) < MAX_PIECES:
        pieces.append([int(track.category[index]), int(track.start[index]), int(track.end[index])])
        index += 1
    return pieces


def _pieces_of(loaded: LoadedRun, rank: int, row: int, start: int) -> Iterable[tuple[int, int]]:
    for track_id in loaded.of_rank.get(rank, ()):
        track = loaded.tracks[track_id]
        low, high = np.searchsorted(track.start, [start, start + 1])
        for index in range(int(low), int(high)):
            if int(track.row[index]) == row:
                yield track_id, index


def in_flight(loaded: LoadedRun, rank: int, start: int, end: int) -> list[dict[str, Any]]:
    """Communications of the rank that are in flight in `[start, end)`: what a wait or an exposed transfer is about."""
    found: dict[int, dict[str, Any]] = {}
    for track_id in loaded.of_rank[rank]:
        track = loaded.tracks[track_id]
        if track.role != "comm":
            continue
        low, high = track.window(start, end)
        for index in range(low, min(high, low + 20)):
            if int(track.end[index]) > start:
                row = int(track.row[index])
                found.setdefault(
                    row,
                    {"track": track_id, "index": index, "name": loaded.labels.text_of(int(track.name[index]))},
                )
    return list(found.values())[:6]
