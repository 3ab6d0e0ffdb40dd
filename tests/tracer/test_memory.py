"""Bytes of model state and activations, counted by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.tracer.memory import ActivationMeter, optimizer_tensors, sample, storage_bytes  # noqa: E402
from stepscope.tracer.recorder import Recorder  # noqa: E402
from stepscope.tracer.rows import COUNTER  # noqa: E402


def test_a_storage_counts_once_and_whole() -> None:
    flat = torch.zeros(100)
    assert storage_bytes([flat]) == 400
    assert storage_bytes([flat[:10], flat[10:20], None, torch.zeros(2, dtype=torch.float64)]) == 416


def test_model_state_of_adam() -> None:
    layer = torch.nn.Linear(4, 3, bias=False)  # 12 parameters, 48 bytes
    optimizer = torch.optim.Adam(layer.parameters())
    recorder = Recorder(0)
    recorder.begin_step(0)
    sample(recorder, layer.parameters(), optimizer)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sample(recorder, layer.parameters(), optimizer)
    counters = [(mark[2], mark[4]) for mark in recorder._marks if mark[1] == COUNTER]
    assert counters == [
        ("parameter_bytes", 48),
        ("gradient_bytes", 0),
        ("optimizer_bytes", 0),
        ("parameter_bytes", 48),
        ("gradient_bytes", 48),
        ("optimizer_bytes", 2 * 48 + 4),  # two moments and a step count
    ]
    assert len(list(optimizer_tensors(optimizer))) == 3


def test_activations_from_save_to_free() -> None:
    layer = torch.nn.Linear(4, 4)
    x = torch.ones(8, 4)
    meter = ActivationMeter(layer.parameters())
    with meter.watching():
        loss = torch.exp(layer(x)).sum()
    # the linear keeps its input (8 x 4), exp its result (8 x 4); the weight is left out, the sum keeps nothing
    assert meter.live == 2 * 8 * 4 * 4
    loss.backward()
    assert meter.live == 0
    assert meter.peak == 256


def test_a_tensor_saved_twice_counts_once() -> None:
    x = torch.ones(10, requires_grad=True)
    meter = ActivationMeter()
    with meter.watching():
        y = x * x  # both factors are kept
    assert meter.live == 40
    del y
    assert meter.live == 0


def test_watching_changes_no_gradient() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 4)
    layer(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    with ActivationMeter(layer.parameters()).watching():
        loss = layer(x).sum()
    loss.backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, layer.parameters(), strict=True))
