"""The model: its parts by hand, its slices, its block marks, and agreement with the reference written again."""

from __future__ import annotations

import ast
import inspect
import math
import subprocess
import sys

import pytest
import torch

from stepscope.parallel_runtime import reference, reference_mixture
from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import IGNORED, best_loss, local_batch, sequences
from stepscope.parallel_runtime.model.attention import attention, rotate, rotation_of
from stepscope.parallel_runtime.model.initial import (
    initial_value,
    initialise,
    parameter_count,
    parameter_shapes,
    stage_shapes,
)
from stepscope.parallel_runtime.model.layers import FeedForward, Norm
from stepscope.parallel_runtime.model.seams import Seams, summed_loss
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.reference import Reference

DOUBLE = torch.float64
SMALL = ModelConfig(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40, seq=12)
CLASSIC = ModelConfig(
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=48,
    vocab=40,
    seq=12,
    norm="layernorm",
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    ffn_bias=True,
)
TIED = ModelConfig(layers=3, hidden=32, heads=4, kv_heads=1, ffn=48, vocab=40, seq=12, tied=True, ffn_bias=True)
CONFIGS = pytest.mark.parametrize(
    "config", [SMALL, CLASSIC, TIED], ids=["gqa-rms-swiglu", "mha-layer-gelu-bias", "tied"]
)


class Marks:
    """Stands in for the recorder: the block marks in order."""

    def __init__(self):
        self.seen = []

    def block(self, name, phase=None, layer=-1):
        self.seen.append((name, phase, layer))


def whole_model(config, marks=None, seams=None, dtype=DOUBLE):
    stage = Stage(config, marks or Marks(), seams=seams, dtype=dtype)
    initialise(stage, config, seed=0)
    return stage


# -- parts by hand -----------------------------------------------------------------------------------------------------


def test_attention_by_hand():
    """One head, no query: every position averages the values up to itself."""
    q = k = torch.zeros(1, 1, 3, 2, dtype=DOUBLE)
    v = torch.tensor([[[[1.0, 0.0], [3.0, 2.0], [8.0, 4.0]]]], dtype=DOUBLE)
    expected = torch.tensor([[1.0, 0.0], [2.0, 1.0], [4.0, 2.0]], dtype=DOUBLE)
    torch.testing.assert_close(attention(q, k, v)[0, 0], expected)


def test_attention_shares_key_value_heads():
    """Four query heads on two key and value heads: heads 0 and 1 see the first, heads 2 and 3 the second."""
    q = torch.randn(2, 4, 5, 6, dtype=DOUBLE)
    k, v = torch.randn(2, 2, 2, 5, 6, dtype=DOUBLE)
    shared = attention(q, k, v)
    for head in range(4):
        one = attention(q[:, head : head + 1], k[:, head // 2 : head // 2 + 1], v[:, head // 2 : head // 2 + 1])
        torch.testing.assert_close(shared[:, head : head + 1], one)


def test_rotation_by_hand():
    """Two features, position 3: the pair (1, 0) is turned by 3 rad."""
    rotation = rotation_of(torch.tensor([3]), 2, 10000.0, DOUBLE)
    turned = rotate(torch.tensor([[[[1.0, 0.0]]]], dtype=DOUBLE), rotation)
    torch.testing.assert_close(turned.flatten(), torch.tensor([math.cos(3), math.sin(3)], dtype=DOUBLE))


def test_rotation_sees_only_distances():
    """Scores of rotated queries and keys do not change when all positions move on."""
    q, k = torch.randn(2, 1, 2, 7, 8, dtype=DOUBLE)
    scores = []
    for offset in (0, 100):
        rotation = rotation_of(torch.arange(7) + offset, 8, 10000.0, DOUBLE)
        scores.append(rotate(q, rotation) @ rotate(k, rotation).transpose(-1, -2))
    torch.testing.assert_close(scores[0], scores[1])


def test_norms_by_hand():
    x = torch.tensor([[[3.0, -3.0, 5.0, -5.0]]], dtype=DOUBLE)
    for norm in ("rmsnorm", "layernorm"):
        config = ModelConfig(hidden=4, heads=1, kv_heads=1, norm=norm, norm_eps=1e-12)
        module = Norm(config, dtype=DOUBLE)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([1.0, 2.0, 1.0, 1.0]))
            if module.bias is not None:
                module.bias.fill_(1.0)
        root = math.sqrt(17)  # mean 0, mean square (9 + 9 + 25 + 25) / 4
        shift = 1.0 if norm == "layernorm" else 0.0
        expected = torch.tensor(
            [3 / root + shift, -6 / root + shift, 5 / root + shift, -5 / root + shift], dtype=DOUBLE
        )
        torch.testing.assert_close(module(x).flatten(), expected)


def test_loss_counts_only_valid_tokens():
    """Uniform logits: each valid token costs log V, an ignored one nothing, also where all are ignored."""
    x, weight = torch.randn(3, 2, 4, dtype=DOUBLE), torch.zeros(5, 4, dtype=DOUBLE)
    targets = torch.tensor([[0, IGNORED], [4, IGNORED], [1, 2]])
    torch.testing.assert_close(summed_loss(x, weight, targets), torch.tensor(4 * math.log(5), dtype=DOUBLE))
    assert summed_loss(x, weight, torch.full((3, 2), IGNORED)) == 0


def test_bias_is_added_after_the_seam():
    """A cut by rows sums products over ranks: the bias must not be in the sum."""
    seams = Seams(leave=lambda y: y * 0)
    module = FeedForward(CLASSIC, seams, dtype=DOUBLE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    out = module(torch.randn(2, 1, CLASSIC.hidden, dtype=DOUBLE))
    torch.testing.assert_close(out, module.down.bias.expand_as(out))


# -- names, values, slices ---------------------------------------------------------------------------------------------


@CONFIGS
def test_names_and_shapes(config):
    """A module's own names are the global ones, in order of use."""
    stage = whole_model(config)
    assert {name: tuple(p.shape) for name, p in stage.named_parameters()} == parameter_shapes(config)
    assert list(dict(stage.named_parameters())) == list(parameter_shapes(config))
    assert sum(p.numel() for p in stage.parameters()) == parameter_count(config)


def test_parameter_count_by_hand():
    """H 32, two K/V heads of 8, F 48, V 40: 2 V H + 3 (2 H H + 2 16 H + 3 F H + 2 H) + H."""
    assert parameter_count(SMALL) == 2 * 40 * 32 + 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32


def test_initial_values_depend_on_name_and_seed_only():
    first = initial_value("layers.1.attention.query.weight", (4, 16), 0)
    assert torch.equal(first, initial_value("layers.1.attention.query.weight", (4, 16), 0))
    assert not torch.equal(first, initial_value("layers.2.attention.query.weight", (4, 16), 0))
    assert not torch.equal(first, initial_value("layers.1.attention.query.weight", (4, 16), 1))
    assert (initial_value("norm.weight", (1000,), 0).mean() - 1).abs() < 0.02
    assert initial_value("norm.bias", (1000,), 0).std() > 0.04


@CONFIGS
def test_slices_together_are_the_model(config):
    """Three stages, one layer each, chained by hand: the loss of the whole; tied copies start equal."""
    batch = local_batch(config, TrainConfig(microbatches=1), 1, 0, 0).microbatches[0]
    whole = whole_model(config)
    parts = [Stage(config, Marks(), [i], i == 0, i == 2, dtype=DOUBLE) for i in range(3)]
    x = None
    for part in parts:
        initialise(part, config, seed=0)
        x = part(x, batch, 24)
    torch.testing.assert_close(x, whole(None, batch, 24), rtol=0, atol=0)
    for i, part in enumerate(parts):
        shapes = {name: tuple(p.shape) for name, p in part.named_parameters()}
        assert shapes == stage_shapes(config, [i], i == 0, i == 2)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert set(names) == set(parameter_shapes(config))
    assert len(names) - len(set(names)) == config.tied
    if config.tied:
        assert torch.equal(parts[0].embedding.weight, parts[2].embedding.weight)
        assert list(dict(parts[2].named_parameters()))[-1] == "embedding.weight", (
            "its gradient is the first to be ready"
        )


def test_positions_travel_with_the_tokens():
    """Moved positions give the same loss, stretched ones another, also after a step with the usual ones."""
    stage = whole_model(SMALL)
    batch = local_batch(SMALL, TrainConfig(microbatches=1), 1, 0, 0).microbatches[0]
    usual, moved, stretched = (
        stage(None, batch._replace(positions_S=positions), 24).item()
        for positions in (torch.arange(12), torch.arange(12) + 5, torch.arange(12) * 3)
    )
    assert math.isclose(usual, moved, rel_tol=1e-12)
    assert abs(usual - stretched) > 1e-4


def test_block_marks():
    """Every block in order, and backward in the opposite one; a slice without ends has only its layers."""
    marks = Marks()
    batch = local_batch(SMALL, TrainConfig(microbatches=1), 1, 0, 0).microbatches[0]
    loss = whole_model(SMALL, marks)(None, batch, 1)
    blocks = [("embedding", -1), ("layer.0", 0), ("layer.1", 1), ("layer.2", 2), ("head", -1)]
    assert marks.seen == [(name, "forward", layer) for name, layer in blocks]
    marks.seen.clear()
    loss.backward()
    assert marks.seen == [(name, "backward", layer) for name, layer in reversed(blocks)]

    marks.seen.clear()
    middle = Stage(SMALL, marks, [1], first=False, last=False, dtype=DOUBLE)
    initialise(middle, SMALL, seed=0)
    x = torch.randn(12, 2, 32, dtype=DOUBLE, requires_grad=True)
    middle(x, batch, 1).sum().backward()
    assert marks.seen == [("layer.1", "forward", 1), ("layer.1", "backward", 1)]
    with torch.no_grad():
        middle(x, batch, 1)
    assert len(marks.seen) == 3, "without gradients there is no backward to mark"


# -- the reference -----------------------------------------------------------------------------------------------------


@CONFIGS
def test_gradients_agree_with_the_reference(config):
    """Two implementations of everything, float64: agreement to rounding, with padding; no gradient is zero."""
    train = TrainConfig(padding=0.6, microbatches=3, dtype="float64")
    stage, again = whole_model(config), Reference(config, train)
    batch = local_batch(config, train, 1, 0, 0)
    loss = sum(stage(None, microbatch, batch.valid_tokens) for microbatch in batch.microbatches)
    loss.backward()
    expected_loss, expected = again.step(*sequences(config, train, 0, range(6)))
    assert math.isclose(loss.item(), expected_loss, rel_tol=1e-12)
    for name, parameter in stage.named_parameters():
        scale = expected[name].abs().max()
        assert scale > 1e-5, f"the gradient of {name} is next to nothing: it could not show a mistake"
        assert (parameter.grad - expected[name]).abs().max() < 1e-11 * scale, name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_reference_optimizers_agree_with_torch(optimizer):
    train = TrainConfig(dtype="float64", optimizer=optimizer, lr=0.01, weight_decay=0.1)
    again = Reference(SMALL, train)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    copies = {name: p.detach().clone().requires_grad_() for name, p in again.parameters.items()}
    oracle = kind(copies.values(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        _, gradients = again.step(*sequences(SMALL, train, step, range(2)))
        for name, copy in copies.items():
            copy.grad = gradients[name]
        oracle.step()
    for name, copy in copies.items():
        torch.testing.assert_close(again.parameters[name].detach(), copy.detach(), rtol=1e-12, atol=1e-14)


def test_reference_shares_only_configuration_initial_values_and_what_is_drawn_or_planned():
    """It may judge the runtime only because it does not use it."""
    imported = {
        node.module
        for part in (reference, reference_mixture)
        for node in ast.walk(ast.parse(inspect.getsource(part)))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("stepscope")
    }
    shared = ("config", "model.dropout", "model.initial", "model.planned_routing")
    assert imported == {f"stepscope.parallel_runtime.{name}" for name in (*shared, "reference_mixture")}


def test_reference_loads_neither_communication_nor_a_strategy():
    """Also not through what it imports: in a fresh interpreter, by the modules that are there afterwards."""
    code = (
        "import sys, stepscope.parallel_runtime.reference\n"
        "print(*(name for name in sys.modules if name.startswith('stepscope')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.removeprefix("stepscope.parallel_runtime.") for name in done.stdout.split()}
    assert "reference" in loaded
    parts = {name.split(".")[0] for name in loaded}
    forbidden = {"comm", "comm_gloo", "comm_nccl", "comm_streams", "compose", "grad_sync", "launch", "mesh", "train"}
    assert not parts & (forbidden | {"dp", "zero", "tp", "sp", "cp", "ep", "pp"})
    assert {name for name in loaded if name.startswith("model.")} == {
        f"model.{name}" for name in ("dropout", "initial", "planned_routing")
    }


def test_tiny_learns_in_fifty_steps():
    """From about log(V) to well below half of it: most of the way to what a perfect model reaches."""
    config = ModelConfig()
    stage = whole_model(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    losses = []
    for step in range(50):
        batch = local_batch(config, TrainConfig(microbatches=2), 1, 0, step)
        optimizer.zero_grad()
        loss = sum(stage(None, m, batch.valid_tokens) for m in batch.microbatches)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.9 * math.log(256)
    assert losses[-1] < 0.4 * math.log(256)
    assert min(losses) > best_loss(256) * 0.8
