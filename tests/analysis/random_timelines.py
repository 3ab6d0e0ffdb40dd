"""Random tiny timelines: several ranks, a pipeline axis, streams, messages, rooted and ring operations, gaps in the record."""

from __future__ import annotations

import itertools
import random

from timelines import Timeline

MESHES = ({"pp": 2}, {"pp": 3}, {"dp": 3}, {"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2})
SPAN = 60


def random_timeline(seed: int) -> Timeline:
    """One timeline; nothing about it need make sense, for the definitions decide every case."""
    dice = random.Random(seed)
    mesh = dice.choice(MESHES)
    world = 1
    for size in mesh.values():
        world *= size
    t = Timeline(world=world, mesh=mesh, hosts=("one",) * world, origin=0)
    if dice.random() < 0.3:
        t.present = sorted(dice.sample(range(world), dice.randint(1, world)))
    for number in range(dice.randint(1, 3)):
        t.step(number * 20, SPAN - dice.randint(0, 8) if number == 2 else number * 20 + 18, number)
    _add_groups(t)
    free = {(rank, stream): 0 for rank in range(world) for stream in ("a", "b", "c")}
    with_ids = dice.random() < 0.6
    ids = itertools.count()
    close = 0
    for seq in range(dice.randint(1, 7)):
        if seq == 0 or dice.random() < 0.5:  # equal ends must occur
            close = dice.randint(10, SPAN)
        _communicate(t, dice, seq, free, ids if with_ids else None, close)
    for rank in range(world):
        _local_rows(t, dice, rank)
    return t


def _add_groups(t: Timeline) -> None:
    """Every axis's groups, and the world."""
    coords = t.coords()
    for axis, size in t.mesh.items():
        if size > 1:
            rests = sorted({tuple((a, i) for a, i in one.items() if a != axis) for one in coords})
            for number, rest in enumerate(rests):
                t.group(f"{axis}_{number}", axis, *(r for r, one in enumerate(coords) if set(rest) <= set(one.items())))
    if len(t.mesh) > 1:
        t.group("world", "world", *range(t.world))


def _communicate(
    t: Timeline,
    dice: random.Random,
    seq: int,
    free: dict[tuple[int, str], int],
    ids: itertools.count[int] | None,
    close: int,
) -> None:
    group = dice.choice(t.groups)
    kinds = ["all_reduce", "all_gather", "broadcast", "reduce", "ring_shift", "send"]
    kind = dice.choice(kinds)
    stream = dice.choice("abc")
    ranks = list(group.ranks)
    if kind == "send":
        source, destination = dice.sample(ranks, 2)
        members = [(source, "send", {"peer": destination}), (destination, "receive", {"peer": source})]
    else:
        root = dice.choice(ranks)
        members = []
        for place, rank in enumerate(ranks):
            extra: dict[str, int] = {}
            if kind in ("broadcast", "reduce"):
                extra = {"peer": root}
            elif kind == "ring_shift":
                extra = {"peer": ranks[(place + 1) % len(ranks)], "peer_from": ranks[place - 1]}
            members.append((rank, kind, extra))
    for rank, name, extra in members:
        if dice.random() < 0.12:
            continue  # not recorded
        start = free[rank, stream] if dice.random() < 0.3 else max(free[rank, stream], close - dice.randint(2, 25))
        end = max(start, close + dice.choice((0, 0, 0, dice.randint(-3, 12))))
        if dice.random() < 0.2:
            end = start + dice.randint(0, 6)
        free[rank, stream] = end
        extra |= {"op_id": next(ids)} if ids is not None else {}
        t.comm(rank, start, end, name, group=group.name, seq=seq, stream=stream, axis=group.axis, **extra)


def _local_rows(t: Timeline, dice: random.Random, rank: int) -> None:
    now = 0
    while now < SPAN and dice.random() < 0.85:
        now += dice.randint(0, 12)
        length = dice.choice((0, 3, 6, 10))
        t.compute(rank, now, now + length)
        now += length
    for _ in range(dice.randint(0, 2)):
        start = dice.randint(0, SPAN)
        t.memcpy(rank, start, start + dice.randint(0, 9), stream="copies")
    named = [row for row in t.rows if row["rank"] == rank and row.get("op_id", -1) >= 0]
    now = 0
    for row in sorted(named, key=lambda row: (row["start"], row["op_id"])):
        if dice.random() < 0.6:
            start = max(now, row["start"] + dice.randint(0, 8))
            now = max(start, row["end"] + dice.choice((0, 0, -5, 4)))
            t.wait(rank, start, now, row["op_id"] if dice.random() < 0.8 else dice.choice(named)["op_id"])


def number_rows(t: Timeline) -> None:
    """Give every row its `order`: the recorded id, else its place among its rank's rows in the store's order."""
    for rank in range(t.world):
        rows = [row for row in t.rows if row["rank"] == rank]
        lanes: dict[tuple[str, bool], int] = {}
        for row in rows:
            lanes.setdefault((row["stream"], row["kind"] == "host"), len(lanes))
        rows.sort(
            key=lambda row: (lanes[row["stream"], row["kind"] == "host"], row["start"], row["start"] - row["end"])
        )
        for place, row in enumerate(rows):
            row["order"] = row["op_id"] if row.get("op_id", -1) >= 0 and row["kind"] == "comm" else place
