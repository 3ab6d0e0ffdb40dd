"""The rows of a step are those that the configuration predicts: axis, strategy, collective, phase, bytes, number."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from equality import TRAIN
from pool import gloo

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, build, streams_of
from stepscope.parallel_runtime.config import CP_LAYOUTS, CP_MODES, ModelConfig, ParallelConfig, check
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.dry import operations_of_step
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import sent
from stepscope.parallel_runtime.traffic import Row, step_traffic
from stepscope.parallel_runtime.traffic_table import LAYOUTS, lines, page
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.recorder import Recorder

P = ParallelConfig
MODEL = ModelConfig(layers=3, hidden=32, heads=8, kv_heads=4, ffn=24, vocab=32, seq=16, ffn_bias=True)
TIED = replace(MODEL, tied=True)
SINGLE = replace(TRAIN, dtype="float32", microbatches=3)
CLIPPED = replace(SINGLE, clip=1.0)


def recorded(model, parallel, train, rank):
    """Rows of a step on tensors without data."""
    check(model, parallel, train)
    rows = [row for row in operations_of_step(Configuration(model, parallel, train), rank) if row.kind == "comm"]
    assert all(row.axis == "_".join(axes_that_differ(Mesh.of(parallel), row.ranks)) for row in rows)
    return Counter(Row(row.axis, row.strategy, row.collective, row.phase, row.bytes) for row in rows)


def axes_that_differ(mesh, ranks):
    where = [mesh.coordinates(rank) for rank in ranks]
    return [axis for axis in ("pp", "dp", "cp", "tp") if len({each[axis] for each in where}) > 1]


ZB = {"schedule": "zb-h1"}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
FOUR = replace(MODEL, layers=4)
EVEN = replace(CLIPPED, microbatches=4)

CASES = {
    "pp2 interleaved, dp2": (FOUR, P(pp=2, dp=2, bucket_mb=0.01, **INTERLEAVED), EVEN),
    "pp2 interleaved tied, tp2 sp": (replace(FOUR, tied=True), P(pp=2, tp=2, sp=True, **INTERLEAVED), EVEN),
    "pp2 interleaved, cp2, full recomputation": (FOUR, P(pp=2, cp=2, recompute="full", **INTERLEAVED), EVEN),
    "pp2 interleaved, zero1 dp2": (FOUR, P(pp=2, dp=2, zero=1, **INTERLEAVED), EVEN),
    "pp2 interleaved, zero2 dp2, two copies": (FOUR, P(pp=2, dp=4, zero=2, replicate=2, **INTERLEAVED), EVEN),
    "pp2 interleaved, zero3 dp2": (FOUR, P(pp=2, dp=2, zero=3, **INTERLEAVED), EVEN),
    "pp2 interleaved, zero3 dp2, no reshard": (FOUR, P(pp=2, dp=2, zero=3, reshard=False, **INTERLEAVED), EVEN),
    "pp2 zb-h1, dp2": (TIED, P(pp=2, dp=2, bucket_mb=0.01, **ZB), EVEN),
    "pp3 zb-h1, dp2 without overlap": (TIED, P(pp=3, dp=2, bucket_mb=0.01, overlap=False, **ZB), EVEN),
    "pp2 zb-h1, tp2": (TIED, P(pp=2, tp=2, **ZB), EVEN),
    "pp2 zb-h1, tp2 sp, full recomputation": (TIED, P(pp=2, tp=2, sp=True, recompute="full", **ZB), EVEN),
    "pp2 zb-h1, cp2, selective recomputation": (TIED, P(pp=2, cp=2, recompute="selective", **ZB), EVEN),
    "pp2 zb-h1, zero1 dp2": (TIED, P(pp=2, dp=2, zero=1, **ZB), EVEN),
    "pp2 zb-h1, zero2 dp4, two copies": (TIED, P(pp=2, dp=4, zero=2, replicate=2, **ZB), EVEN),
    "pp2 zb-h1, zero3 dp2": (TIED, P(pp=2, dp=2, zero=3, **ZB), EVEN),
    "pp2 zb-h1, zero3 dp2, no reshard": (TIED, P(pp=2, dp=2, zero=3, reshard=False, **ZB), EVEN),
    "one rank": (MODEL, P(), SINGLE),
    "dp4": (MODEL, P(dp=4, bucket_mb=0.01), CLIPPED),
    "dp2 without overlap": (MODEL, P(dp=2, bucket_mb=0.01, overlap=False), SINGLE),
    "pp3 tied": (TIED, P(pp=3), CLIPPED),
    "dp2 pp2 tied": (TIED, P(dp=2, pp=2, schedule="gpipe", bucket_mb=0.01), replace(CLIPPED, dtype="float64")),
    "tp2 pp2": (TIED, P(tp=2, pp=2), CLIPPED),
    "tp4 sp dp2": (TIED, P(tp=4, sp=True, dp=2), CLIPPED),
    "cp2 dp2 pp2": (TIED, P(cp=2, dp=2, pp=2), CLIPPED),
    "cp2 dp2 tp2 sp": (TIED, P(cp=2, dp=2, tp=2, sp=True), CLIPPED),
    "cp2 dp2 tp2 sp ulysses": (TIED, P(cp=2, dp=2, tp=2, sp=True, cp_mode="ulysses"), CLIPPED),
    "zero1 dp4": (MODEL, P(dp=4, zero=1), CLIPPED),
    "zero1 dp2 without overlap": (TIED, P(dp=2, zero=1, overlap=False), SINGLE),
    "zero2 dp4": (TIED, P(dp=4, zero=2), CLIPPED),
    "zero3 dp4": (MODEL, P(dp=4, zero=3), CLIPPED),
    "zero3 dp2 tied, bfloat16": (TIED, P(dp=2, zero=3), replace(CLIPPED, dtype="bfloat16")),
    "zero3 dp2 tied, no reshard": (TIED, P(dp=2, zero=3, reshard=False), SINGLE),
    "zero3 dp2 pp3 tied, no reshard": (TIED, P(dp=2, pp=3, zero=3, reshard=False), SINGLE),
    "zero3 dp2 pp2 gpipe, no reshard, prefetch 2": (
        MODEL,
        P(dp=2, pp=2, zero=3, schedule="gpipe", reshard=False, prefetch=2),
        SINGLE,
    ),
    "zero3 dp2 tied, prefetch 0, full recomputation": (TIED, P(dp=2, zero=3, prefetch=0, recompute="full"), SINGLE),
    "zero3 dp4, two copies": (TIED, P(dp=4, zero=3, replicate=2), CLIPPED),
    "zero2 dp4, two copies, no overlap": (TIED, P(dp=4, zero=2, replicate=2, overlap=False), SINGLE),
    "zero1 dp4 pp2, two copies": (TIED, P(dp=4, pp=2, zero=1, replicate=2), CLIPPED),
    "zero1 dp2 cp2, a copy each place of dp": (MODEL, P(dp=2, cp=2, zero=1, replicate=2), CLIPPED),
    "zero3 dp2 pp2 tied, offload": (TIED, P(dp=2, pp=2, zero=3, offload="cpu"), CLIPPED),
    "zero3 dp2 cp2 tp2 sp": (TIED, P(dp=2, cp=2, tp=2, sp=True, zero=3), CLIPPED),
    "zero2 dp4 tp2 sp pp2": (TIED, P(dp=4, tp=2, sp=True, pp=2, zero=2), CLIPPED),
    "cp4, full recomputation": (MODEL, P(cp=4, recompute="full", bucket_mb=0.01), SINGLE),
} | {
    f"cp{cp} {mode} {layout} {recompute}": (
        MODEL,
        P(cp=cp, cp_mode=mode, cp_layout=layout, recompute=recompute),
        SINGLE,
    )
    for cp in (2, 4)
    for mode in CP_MODES
    for layout in CP_LAYOUTS
    for recompute in ("none", "selective")
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_predicted_ones(case):
    model, parallel, train = CASES[case]
    mesh = Mesh.of(parallel)
    last_of_each_stage = range(mesh.stage_size - 1, mesh.world_size, mesh.stage_size)
    for rank in sorted({0, *last_of_each_stage}):
        stage, place = mesh.coordinates(rank)["pp"], mesh.index("shard", rank)
        predicted = step_traffic(model, parallel, train, stage, place)
        assert recorded(model, parallel, train, rank) == predicted, rank


REAL = (
    "dp4",
    "dp2 pp2 tied",
    "tp2 pp2",
    "zero1 dp4",
    "zero2 dp4",
    "zero3 dp4",
    "zero3 dp2 tied, no reshard",
    "zero3 dp4, two copies",
    "zero3 dp2 pp2 tied, offload",
    "zero1 dp2 cp2, a copy each place of dp",
    "pp2 interleaved tied, tp2 sp",
    "pp2 zb-h1, zero3 dp2",
    *(f"cp4 {mode} zigzag none" for mode in CP_MODES),
)


def real_rows(rank, case):
    """The same of a step that really happens on this rank."""
    model, parallel, train = CASES[case]
    mesh, recorder, device = Mesh.of(parallel), Recorder(rank), Device.named("cpu")
    comm = gloo(mesh, rank, recorder, streams_of(model, parallel, train))
    if comm is None:
        return None
    program = build(Configuration(model, parallel, train), comm, device)
    train_step(program, 0, InjectedCauses(train, rank, device, recorder))
    comm.close()
    rows = [row for row in recorder.operations() if row.kind == "comm"]
    return Counter(Row(row.axis, row.strategy, row.collective, row.phase, row.bytes) for row in rows)


@pytest.mark.parametrize("case", REAL)
def test_real_rows_are_the_predicted_ones(pool, case):
    model, parallel, train = CASES[case]
    mesh = Mesh.of(parallel)
    for rank, rows in enumerate(pool.run(real_rows, case)[: mesh.world_size]):
        stage, place = mesh.coordinates(rank)["pp"], mesh.index("shard", rank)
        assert rows == step_traffic(model, parallel, train, stage, place), rank


def test_bytes_sent_by_hand():
    """Four ranks, a message of 100 bytes."""
    assert sent("all_reduce", 100, 4) == 150
    assert sent("all_gather", 100, 4) == sent("reduce_scatter", 100, 4) == sent("all_to_all", 100, 4) == 75
    assert sent("send", 100, 4) == sent("ring_shift", 100, 4) == 100 and sent("receive", 100, 4) == 0
    assert sent("all_reduce", 100, 3) == Fraction(400, 3)
    with pytest.raises(ValueError, match="broadcast"):
        sent("broadcast", 100, 4)


def test_the_page_is_what_the_command_writes():
    """`python -m stepscope.parallel_runtime.traffic_table docs/strategies/traffic.md` writes it anew."""
    written = Path(__file__).parents[2] / "docs" / "strategies" / "traffic.md"
    assert written.read_text(encoding="utf-8") == page()


def test_padding_by_hand():
    """Three ranks fill a unit up to a multiple of three: at most two float32 a message. Four divide every unit here."""
    table = list(lines("dp3, zero 3"))
    padding = {line[2:4]: line for line in table if line.strategy == "padding"}
    states = [line for line in table if line.strategy == "zero3"]
    assert {line[2:4] for line in states} == set(padding)
    for line in states:
        assert 0 < padding[line[2:4]].message_bytes <= 8 * line.operations
    assert not [line for name in LAYOUTS if name != "dp3, zero 3" for line in lines(name) if line.strategy == "padding"]
