"""The rows of a step are those that the configuration predicts: axis, strategy, collective, phase, bytes, number."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from equality import TRAIN

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, build, streams_of
from stepscope.parallel_runtime.config import CP_LAYOUTS, CP_MODES, ModelConfig, ParallelConfig, check
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import sent
from stepscope.parallel_runtime.traffic import Row, step_traffic
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
    device, recorder = Device.named("dry"), Recorder(rank)
    comm = device.comm(Mesh.of(parallel), rank, recorder, streams_of(model, parallel, train))
    program = build(Configuration(model, parallel, train), comm, device)
    train_step(program, 0, InjectedCauses(train, rank, device, recorder))
    rows = [row for row in recorder.operations() if row.kind == "comm"]
    assert all(row.axis == "_".join(axes_that_differ(Mesh.of(parallel), row.ranks)) for row in rows)
    return Counter(Row(row.axis, row.strategy, row.collective, row.phase, row.bytes) for row in rows)


def axes_that_differ(mesh, ranks):
    where = [mesh.coordinates(rank) for rank in ranks]
    return [axis for axis in ("pp", "dp", "cp", "tp") if len({each[axis] for each in where}) > 1]


CASES = {
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


def test_bytes_sent_by_hand():
    """Four ranks, a message of 100 bytes."""
    assert sent("all_reduce", 100, 4) == 150
    assert sent("all_gather", 100, 4) == sent("reduce_scatter", 100, 4) == sent("all_to_all", 100, 4) == 75
    assert sent("send", 100, 4) == sent("ring_shift", 100, 4) == 100 and sent("receive", 100, 4) == 0
    assert sent("all_reduce", 100, 3) == Fraction(400, 3)
    with pytest.raises(ValueError, match="broadcast"):
        sent("broadcast", 100, 4)
