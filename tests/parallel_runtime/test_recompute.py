"""Activation recomputation: the same numbers, less memory, marks of its own."""

from __future__ import annotations

import pytest
import torch

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.tracer.memory import ActivationMeter
from stepscope.tracer.recorder import Recorder

CONFIG = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40, seq=12, dropout=0.2)


def step(recompute):
    """(loss, gradients, bytes kept between forward and backward, rows) of one microbatch."""
    recorder = Recorder(0)
    stage = Stage(CONFIG, recorder, dtype=torch.float64, recompute=recompute)
    initialise(stage, CONFIG, seed=0)
    batch = local_batch(CONFIG, TrainConfig(microbatches=1), 1, 0, 0).microbatches[0]
    meter = ActivationMeter(stage.parameters())
    recorder.begin_step(0)
    recorder.place("forward", 0, 0, 0)
    with meter.watching():
        loss = stage(None, batch, 24)
    kept = meter.live
    recorder.place("backward", 0, 0, 0)
    loss.backward()
    recorder.end_step()
    assert meter.live == 0
    return loss.item(), {name: p.grad for name, p in stage.named_parameters()}, kept, recorder.operations()


def test_numbers_are_the_same_to_the_last_bit():
    loss, gradients, _, _ = step("none")
    for recompute in ("selective", "full"):
        again, others, _, _ = step(recompute)
        assert again == loss
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items()), recompute


def test_less_is_kept():
    none, selective, full = (step(recompute)[2] for recompute in ("none", "selective", "full"))
    assert full < selective < none
    activation = 12 * 2 * 32 * 8
    assert full < none / 3 and full > 2 * activation, "the two layers' inputs stay"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_rows_have_a_phase_of_their_own(recompute):
    """Within each layer's backward: backward, recompute, backward; then the layer below."""
    rows = step(recompute)[3]
    marks = [(row.name, row.phase) for row in rows if row.kind == "compute" and row.layer >= 0]
    each = ["backward", "recompute", "backward"]
    assert marks == [("layer.0", "forward"), ("layer.1", "forward")] + [
        (f"layer.{layer}", phase) for layer in (1, 0) for phase in each
    ]
    assert all(row.phase != "recompute" for row in step("none")[3])
    ends = [row for row in rows if row.name in ("embedding", "head")]
    assert {row.phase for row in ends} == {"forward", "backward"}
