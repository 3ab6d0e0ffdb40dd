"""A split backward: which half does which products, that hooks run in the second, what is kept between the two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.model.weight_gradients import WeightGradients, block_of, finish
from stepscope.tracer.recorder import NullRecorder, Recorder

MODEL = ModelConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=20, seq=6)
CLASSIC = replace(
    MODEL, kv_heads=2, norm="layernorm", activation="gelu", qkv_bias=True, output_bias=True, ffn_bias=True
)
MIXTURE = replace(MODEL, experts=4, balance="none")
MODELS = pytest.mark.parametrize(
    "model",
    [MODEL, CLASSIC, replace(MODEL, tied=True), MIXTURE, replace(MIXTURE, ffn_bias=True, activation="gelu")],
    ids=["grouped", "classic", "tied", "mixture", "mixture with biases"],
)
TRAIN = TrainConfig(microbatches=1, microbatch_size=2, dtype="float64")


class Split:
    """A whole model, its microbatch, and a recorder."""

    def __init__(self, model, recompute="none"):
        self.recorder = Recorder(0)
        self.later = WeightGradients()
        seams = self.later.seams(Seams())
        self.module = Stage(model, self.recorder, seams=seams, dtype=torch.float64, recompute=recompute)
        initialise(self.module, model, seed=0)
        batch = local_batch(model, TRAIN, 1, 0, 0)
        self.inputs = (None, batch.microbatches[0], batch.valid_tokens)

    def backward(self):
        loss, stand_ins = self.later.forward(self.module, *self.inputs)
        loss.backward()
        return self.later.take(stand_ins)


def plain(model):
    """(gradients by name, operations of forward, of backward) in one piece."""
    stage = Stage(model, NullRecorder(), dtype=torch.float64)
    initialise(stage, model, seed=0)
    batch = local_batch(model, TRAIN, 1, 0, 0)
    with counting() as forward:
        loss = stage(None, batch.microbatches[0], batch.valid_tokens)
    with counting() as backward:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return gradients, products(forward), products(backward)


def addmm_operations(total, left, right, **how):
    """torch counts addmm, but not addmm_."""
    return 2 * left[0] * left[1] * right[1]


def counting():
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_operations})


def products(counter):
    """Operations in products with weights: attention has none of them."""
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if str(name).split(".")[-1] in ("mm", "addmm", "addmm_"))


@MODELS
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_both_halves_together_are_a_backward(model, recompute):
    split = Split(model, recompute)
    expected, _, _ = plain(model)
    for times in (1, 2):  # a second microbatch adds to the first
        finish(split.module, split.backward(), split.recorder)
        for name, parameter in split.module.named_parameters():
            torch.testing.assert_close(parameter.grad, times * expected[name], rtol=1e-12, atol=1e-15, msg=name)


@MODELS
def test_each_half_has_its_products(model):
    """One product of a matrix in forward, one for its input's gradient, one for its own."""
    split = Split(model)
    _, forward, backward = plain(model)
    with counting() as both:
        unfinished = split.backward()
    with counting() as second:
        finish(split.module, unfinished, split.recorder)
    assert products(second) == forward > 0
    assert products(both) - forward == backward - forward


def test_parameters_and_their_hooks_hear_of_it_in_the_second_half():
    split = Split(CLASSIC)
    heard = []
    for name, parameter in split.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    unfinished = split.backward()
    assert heard == [] and all(parameter.grad is None for parameter in split.module.parameters())
    finish(split.module, unfinished, split.recorder)
    names = [name for name, _ in split.module.named_parameters()]
    assert sorted(heard) == sorted(names)
    parameters = dict(split.module.named_parameters())
    blocks = list(dict.fromkeys(block_of(name, parameters) for name in heard))
    assert blocks == ["head", "layer.1", "layer.0", "embedding"]


def test_rows_of_the_second_half():
    split = Split(MODEL)
    split.recorder.begin_step(0)
    unfinished = split.backward()
    split.recorder.place("weight_grad", 0, 0, 3)
    finish(split.module, unfinished, split.recorder)
    split.recorder.end_step()
    rows = [row for row in split.recorder.operations() if row.phase == "weight_grad"]
    assert [(row.name, row.layer, row.microbatch) for row in rows if row.layer >= 0 or row.name != "weight_grad"] == [
        ("head", -1, 3),
        ("layer.1", 1, 3),
        ("layer.0", 0, 3),
        ("embedding", -1, 3),
    ]


def test_what_waits_is_the_input_and_the_gradient_of_each_matrix():
    """Of a layer of GELU: input of query, key, value; of output; of up; of down; and the gradients of their outputs."""
    split = Split(replace(CLASSIC, layers=1))
    unfinished = split.backward()
    tokens, hidden, width, vocabulary = 2 * 6, 16, 24, 20
    layer = (hidden + 3 * hidden) + (hidden + hidden) + (hidden + width) + (width + hidden)
    ends = (hidden + vocabulary) + (hidden + 1)  # head; gradient of the embedding, and the tokens
    assert unfinished.kept_bytes() == 8 * tokens * (layer + ends)
