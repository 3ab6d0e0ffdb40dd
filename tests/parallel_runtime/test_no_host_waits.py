"""Nothing in a step makes the host wait for the device: every operator of a step is looked at, on tensors without data.

On a GPU the host waits wherever it wants to know a value (`.item()`, `bool(tensor)`, boolean indexing, `nonzero`) or copies
from memory that is not pinned. Dry tensors have the operators of the real ones and no value, so the dry program is watched
in place of the device's. What may wait stands in docs/gpu.md: the first anchor, the loss that is printed, the counts of a
mixture (none of which is an operator of a dry step), and offloaded optimizer state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matrix
import pytest
import test_pairs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.parallel_runtime import data
from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, build, streams_of
from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.cp import blocks
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.recorder import NullRecorder

P = ParallelConfig
READS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "unique",
    "masked_select",
    "item",
    "repeat_interleave",
)
COPIES = ("_to_copy", "copy_")


class HostWaits(TorchDispatchMode):
    """Raises where an operator would make the host wait; counts the copies to the device, for which it need not."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        result = function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors if tensor.dim() > 0}
        if "meta" in kinds:
            if any(name.startswith(read) for read in READS) or self.masks(name, args):
                raise AssertionError(f"{function}: the host reads a value of the device")
            if "cpu" in kinds:
                self.between(name, args, kwargs, function)
        return result

    def masks(self, name: str, args: Any) -> bool:
        """Indexing by a mask asks how much of it is set."""
        return name.startswith("index") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2])
        )

    def between(self, name: str, args: Any, kwargs: Any, function: Any) -> None:
        """Only a copy may join host and device, and only one that the host does not wait for."""
        asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        assert name in COPIES, f"{function} has tensors of the host and of the device"
        assert asynchronous, f"{function}: the host waits for this copy"
        self.copies += 1


def watched_step(case: Any, **train: Any) -> int:
    """Two steps of the last rank under watch (the second finds every cache filled); copies to the device in the second."""
    trained = replace(case.train, optimizer="sgd", clip=0.5, **train)
    device = Device.named("dry")
    rank = case.parallel.world_size - 1
    comm = device.comm(Mesh.of(case.parallel), rank, NullRecorder(rank), streams_of(case.model, case.parallel, trained))
    program = build(Configuration(case.model, case.parallel, trained), comm, device)
    causes = InjectedCauses(trained, rank, device, comm.recorder)
    train_step(program, 0, causes)
    with HostWaits() as watch:
        train_step(program, 1, causes)
    return watch.copies


CASES = [
    *(matrix.case_of(pair) for pair in matrix.pairs()[::5]),  # operators come from ways, of which each is among these
    test_pairs.Case("mixture with a plan", P(dp=2, ep=2), replace(test_pairs.MIXED, routing_skew=1.0), test_pairs.FEW),
    test_pairs.Case("dropout, recomputation", P(tp=2, recompute="full"), replace(test_pairs.BIASES, dropout=0.2)),
    test_pairs.Case("selective recomputation, float16", P(dp=2, recompute="selective"), test_pairs.TABLE),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_host_waits_for_nothing_in_a_step(case, monkeypatch):
    """And all data of a step come in one copy."""
    monkeypatch.setattr(blocks, "FUSED", ())  # the attention that GPUs run
    dtype = "float16" if "float16" in case.name else "float32"
    assert watched_step(case, dtype=dtype, padding=0.5) == 1


def test_each_way_is_watched():
    """What the choice of pairs rests on."""
    assert {way for case in CASES for way in matrix.ways_of(case.parallel)} == set(matrix.AXIS_OF)


def by_reading(data_of: Any) -> Any:
    def reading(*arguments: Any) -> Any:
        batch = data_of(*arguments)
        batch.microbatches[0].tokens_SB.max().item()
        return batch

    return reading


def by_mask(data_of: Any) -> Any:
    def masking(*arguments: Any) -> Any:
        batch = data_of(*arguments)
        tokens = batch.microbatches[0].tokens_SB
        tokens[tokens == 0] = 1
        return batch

    return masking


def by_copy(data_of: Any) -> Any:
    def copying(*arguments: Any) -> Any:
        torch.zeros(4).to("meta")
        return data_of(*arguments)

    return copying


@pytest.mark.parametrize(
    ("way", "words"), [(by_reading, "meta"), (by_mask, "host reads|meta"), (by_copy, "host waits for this copy")]
)
def test_the_watch_notices(way, words, monkeypatch):
    """A step that reads, masks or copies in its data is refused: dry tensors raise where they are read themselves."""
    from stepscope.parallel_runtime import compose

    monkeypatch.setattr(compose, "local_batch", quietly_first(way(data.local_batch)))
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError), match=words):
        watched_step(test_pairs.Case("dp", P(dp=2), test_pairs.SHORT, test_pairs.FEW))


def quietly_first(changed: Any) -> Any:
    """The first step is not watched: it has its data as they are."""
    calls: list[int] = []

    def data_of(*arguments: Any) -> Any:
        calls.append(1)
        return data.local_batch(*arguments) if len(calls) == 1 else changed(*arguments)

    return data_of
