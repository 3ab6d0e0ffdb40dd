"""Bytes of parameters, gradients, optimizer state and activations: the counters of schema.COUNTERS (needs torch).

Bytes are those of distinct storages, so a view, a tied weight or a flat buffer counts once, with all that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class _Counts(Protocol):
    """What `sample` needs of a recorder."""

    def counter(self, name: str, value: int | float, key: str = "") -> None: ...


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind the tensors; None is skipped."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of the optimizer's state (moments, master copies, step counts)."""
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else [state]
        yield from (value for value in values if isinstance(value, Tensor))


def sample(recorder: _Counts, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Record the bytes of the model state as they are now (microseconds a parameter: call it between blocks)."""
    tensors = list(parameters)
    recorder.counter("parameter_bytes", storage_bytes(tensors))
    recorder.counter("gradient_bytes", storage_bytes([tensor.grad for tensor in tensors]))
    if optimizer is not None:
        recorder.counter("optimizer_bytes", storage_bytes(optimizer_tensors(optimizer)))


class _Saved:
    """One tensor that autograd keeps; tells its meter when autograd lets go of it."""

    __slots__ = ("key", "meter", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: Tensor, key: int) -> None:
        self.meter, self.tensor, self.key = meter, tensor, key

    def __del__(self) -> None:
        self.meter._released(self.key)


class ActivationMeter:
    """Bytes that autograd keeps for backward, from when they are saved to when they are freed.

        meter = ActivationMeter(model.parameters())
        with meter.watching():
            loss = model(x).sum()
        recorder.counter("activation_bytes", meter.live)

    It costs some microseconds a saved tensor: watch a step or two, not a whole run. What is recomputed by activation
    checkpointing is counted while it lives; tensors that only Python holds are not.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        """`parameters` live anyway and are left out."""
        self.live = 0
        self.peak = 0
        self._held: dict[int, list[int]] = {}  # storage -> bytes, how many saved tensors share it
        self._left_out = {tensor.untyped_storage()._cdata for tensor in parameters}

    def watching(self) -> AbstractContextManager[Any]:
        """Within it, what autograd saves is counted; it is counted down whenever it is freed, inside or not."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._left_out:
            return tensor
        entry = self._held.setdefault(key, [storage.nbytes(), 0])
        if entry[1] == 0:
            self.live += entry[0]
            self.peak = max(self.peak, self.live)
        entry[1] += 1
        return _Saved(self, tensor, key)

    @staticmethod
    def _unpack(saved: Tensor | _Saved) -> Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def _released(self, key: int) -> None:
        entry = self._held[key]
        entry[1] -= 1
        if entry[1] == 0:
            self.live -= entry[0]
            del self._held[key]
