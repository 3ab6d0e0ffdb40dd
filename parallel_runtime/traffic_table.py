"""The page that puts recorded traffic beside theory, for one layout of each strategy and the usual compositions.

`python -m stepscope.parallel_runtime.traffic_table docs/strategies/traffic.md` writes it. Recorded are the rows of a step
on tensors without data (dry.py), which tests hold equal to those of gloo; predicted is traffic.py, from the configuration
alone. The command fails where the two differ, so the page cannot show a difference.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stepscope.parallel_runtime.compose import Configuration
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig, check
from stepscope.parallel_runtime.dry import operations_of_step
from stepscope.parallel_runtime.ep.traffic import Routing, planned_routing
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import ITEM_BYTES, sent
from stepscope.parallel_runtime.traffic import Row, step_traffic
from stepscope.parallel_runtime.zero.traffic import stage_units

MODEL = ModelConfig(layers=4, hidden=64, heads=8, kv_heads=4, ffn=128, vocab=256, seq=64, tied=True)
MIXTURE = replace(MODEL, experts=4, routing_skew=0.5)
TRAIN = TrainConfig(microbatch_size=2, microbatches=4, clip=1.0)

LAYOUTS = {
    "dp4": (MODEL, ParallelConfig(dp=4)),
    "dp4, zero 1": (MODEL, ParallelConfig(dp=4, zero=1)),
    "dp4, zero 2": (MODEL, ParallelConfig(dp=4, zero=2)),
    "dp4, zero 3": (MODEL, ParallelConfig(dp=4, zero=3)),
    "dp3, zero 3": (MODEL, ParallelConfig(dp=3, zero=3)),
    "dp4, zero 3, parameters kept": (MODEL, ParallelConfig(dp=4, zero=3, reshard=False)),
    "dp4, zero 3, two copies": (MODEL, ParallelConfig(dp=4, zero=3, replicate=2)),
    "tp4": (MODEL, ParallelConfig(tp=4)),
    "tp4, sp": (MODEL, ParallelConfig(tp=4, sp=True)),
    "tp4, full recomputation": (MODEL, ParallelConfig(tp=4, recompute="full")),
    "cp4, ring": (MODEL, ParallelConfig(cp=4)),
    "cp4, Ulysses": (MODEL, ParallelConfig(cp=4, cp_mode="ulysses")),
    "cp4, all-gather": (MODEL, ParallelConfig(cp=4, cp_mode="allgather")),
    "pp4, 1F1B": (MODEL, ParallelConfig(pp=4)),
    "pp2, interleaved": (MODEL, ParallelConfig(pp=2, schedule="interleaved", chunks=2)),
    "pp4, zb-h1": (MODEL, ParallelConfig(pp=4, schedule="zb-h1")),
    "ep4 over dp4": (MIXTURE, ParallelConfig(dp=4, ep=4)),
    "ep4 over dp4, capacity": (
        replace(MIXTURE, balance="capacity", capacity_factor=1.0),
        ParallelConfig(dp=4, ep=4),
    ),
    "ep2 over tp2, auxiliary loss": (replace(MIXTURE, balance="aux"), ParallelConfig(tp=2, ep=2)),
    "dp2 ep2 pp2": (MIXTURE, ParallelConfig(dp=2, ep=2, pp=2)),
    "dp2 tp2 sp pp2": (MODEL, ParallelConfig(dp=2, tp=2, sp=True, pp=2)),
    "dp2 cp2 tp2": (MODEL, ParallelConfig(dp=2, cp=2, tp=2)),
    "dp2 tp2 pp2, zero 3": (MODEL, ParallelConfig(dp=2, tp=2, pp=2, zero=3)),
}

PADDING = "padding"
OUTSIDE = {
    PADDING: "in ZeRO's messages: fills units up to a multiple of the ranks",
    "loss": "the loss that is printed",
    "clip": "the gradient norm",
    "embedding": "embedding, tied or cut over tp",
}
"""Strategies whose rows are no part of the formulas in theory: listed as rows of their own."""


class Line(NamedTuple):
    """One row of the table: all operations of one kind of a rank in one step. Padding has bytes, but no operations."""

    axis: str
    strategy: str
    collective: str
    phase: str
    operations: int
    message_bytes: int
    sent_bytes: float


def recorded(model: ModelConfig, parallel: ParallelConfig, rank: int) -> Counter[Row]:
    """Communication rows of one step of `rank`, as a run records them."""
    rows = operations_of_step(Configuration(model, parallel, TRAIN), rank)
    return Counter(Row(r.axis, r.strategy, r.collective, r.phase, r.bytes) for r in rows if r.kind == "comm")


def predicted(model: ModelConfig, parallel: ParallelConfig, rank: int) -> Counter[Row]:
    """The same, from the configuration alone (and the planned routing, where there are experts)."""
    mesh = Mesh.of(parallel)
    where = mesh.coordinates(rank)
    routing: Routing | None = planned_routing(model, parallel, TRAIN, where["ep"]) if model.experts else None
    return step_traffic(model, parallel, TRAIN, where["pp"], mesh.index("shard", rank), routing)


def lines(name: str, rank: int = 0) -> Iterator[Line]:
    """The table's rows of one layout; ValueError where recorded and predicted traffic differ."""
    model, parallel = LAYOUTS[name]
    check(model, parallel, TRAIN)
    found = recorded(model, parallel, rank)
    if found != (wanted := predicted(model, parallel, rank)):
        raise ValueError(
            f"{name}: recorded traffic is not the predicted one: {found - wanted} more, {wanted - found} less"
        )
    kinds = dict.fromkeys((row.axis, row.strategy, row.collective, row.phase) for row in sorted(found))
    made: list[Line] = []
    for kind in kinds:
        rows = [(row, number) for row, number in found.items() if row[:4] == kind]
        made += _lines(parallel, rows, _padding(model, parallel, kind[1], kind[2]))
    yield from sorted(made, key=lambda line: (line.strategy in OUTSIDE, line))


def _lines(parallel: ParallelConfig, rows: list[tuple[Row, int]], padding: dict[int, int]) -> Iterator[Line]:
    """The operations of one kind without their padding, then the padding."""
    axis, strategy, collective, phase, _ = rows[0][0]
    ranks = _ranks_of(parallel, rows[0][0])
    filled = sum(padding.get(row.bytes, 0) * number for row, number in rows)
    size = sum(row.bytes * number for row, number in rows) - filled
    operations = sum(number for _, number in rows)
    yield Line(axis, strategy, collective, phase, operations, size, float(sent(collective, size, ranks)))
    if filled:
        yield Line(axis, PADDING, collective, phase, 0, filled, float(sent(collective, filled, ranks)))


def _ranks_of(parallel: ParallelConfig, row: Row) -> int:
    """Ranks of the row's group; ZeRO cuts dp into shards and copies, both of which the trace calls by its axis."""
    mesh = Mesh.of(parallel)
    if row.strategy.startswith("zero"):
        return mesh.size("replica" if row.collective == "all_reduce" else "shard")
    return mesh.size(row.axis)


def _padding(model: ModelConfig, parallel: ParallelConfig, strategy: str, collective: str) -> dict[int, int]:
    """Message size -> padding in it: ZeRO fills a unit up to a multiple of the ranks."""
    if not strategy.startswith("zero") or collective == "all_reduce":
        return {}
    item = ITEM_BYTES[TRAIN.dtype]
    units = stage_units(model, parallel, 0)
    return {unit.padded * item: (unit.padded - unit.elements) * item for unit in units}


def page() -> str:
    """The whole page in Markdown."""
    out = [
        "# Traffic: recorded and predicted",
        "",
        "<!-- made by `python -m stepscope.parallel_runtime.traffic_table docs/strategies/traffic.md` -->",
        "",
        f"One step of rank 0: a model of {MODEL.layers} layers, hidden {MODEL.hidden}, {MODEL.heads} heads,"
        f" {MODEL.kv_heads} key and value heads, feed-forward {MODEL.ffn}, vocabulary {MODEL.vocab}, tied embedding;"
        f" {TRAIN.microbatches} microbatches of {TRAIN.microbatch_size} sequences of {MODEL.seq} tokens, {TRAIN.dtype},"
        " gradients clipped.",
        "",
        "Every line was recorded and predicted from the configuration alone, and is equal in number, size and phase;"
        " the command that writes this page fails otherwise. *message* adds up message sizes as nccl-tests counts them,"
        " *sent* is what the rank sends. Padding, loss, clipping and embedding stand after the strategies: they are no part"
        " of the usual formulas. Padding travels inside the messages above it, and is not counted there.",
        "",
        f"Layouts with experts have {MIXTURE.experts} of them, {MIXTURE.experts_per_token} a token, and follow a planned, uneven"
        f" routing (`--routing-skew {MIXTURE.routing_skew:g}`), from which their sizes follow. Where the router decides, they"
        " follow from the recorded routing: `stepscope analyze` predicts the exchange of a run from its configuration, since"
        " every token goes to all its experts; with `--balance capacity`, which drops some, from the counter"
        " `tokens_per_expert`. Recorded bytes and operations are equal to it for every balance"
        " (`tests/parallel_runtime/test_ep_runs.py`), on each rank to the counts that it exchanged.",
        "",
        "| layout | axis | strategy | collective | phase | operations | message, bytes | sent, bytes |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    for name in LAYOUTS:
        for number, line in enumerate(lines(name)):
            shown = f"{line.strategy} ({OUTSIDE[line.strategy]})" if line.strategy in OUTSIDE else line.strategy
            out.append(
                f"| {'' if number else name} | {line.axis} | {shown} | {line.collective} | {line.phase} |"
                f" {line.operations or '–'} | {line.message_bytes:,} | {line.sent_bytes:,.0f} |"
            )
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
