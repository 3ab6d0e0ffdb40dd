"""The optimizer's step over what this rank updates, where its state lives, and in which precision.

Parameters of 16 bits have a float32 copy, to which the step is applied: an update smaller than their resolution would be
lost in them. `offload` keeps that copy and the moments in the host's memory (Ren et al. 2021): gradients go there, updated
parameters come back, and the copies are rows of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.config import TrainConfig
from stepscope.tracer.memory import optimizer_tensors
from stepscope.tracer.recorder import NullRecorder, Recorder

TO_HOST, TO_DEVICE = "Memcpy DtoH", "Memcpy HtoD"

HALF_SCALE = 1024.0
"""Gradients of float16 below 6e-8 vanish: the loss is multiplied by this before backward, the gradients divided after.
float32 and bfloat16 have the same range of exponents and need nothing."""


def loss_scale_of(dtype: str) -> float:
    """What the loss is multiplied by before backward."""
    return HALF_SCALE if dtype == "float16" else 1.0


class Optimizer:
    """SGD or AdamW over `parameters` and their `grad`."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        train: TrainConfig,
        recorder: Recorder | NullRecorder,
        offload: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self._recorder, self._offload, self._scale = recorder, offload, loss_scale_of(train.dtype)
        dtype = self.parameters[0].dtype
        self._precision = torch.promote_types(dtype, torch.float32)
        self.masters = self.parameters
        if offload or dtype != self._precision:
            self.masters = [nn.Parameter(self._copied(parameter)) for parameter in self.parameters]
        self.optimizer = _optimizer(self.masters, train)

    def step(self) -> None:
        """Update every parameter from its gradient."""
        if self.masters is self.parameters:
            self.optimizer.step()
            return
        gradients = [_gradient(parameter) for parameter in self.parameters]
        self._take(gradients)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        self._give()

    def state(self) -> tuple[list[Tensor], list[Tensor]]:
        """(tensors on the device, tensors in the host's memory): moments, step counts, copies of parameters."""
        tensors = list(optimizer_tensors(self.optimizer))
        if self.masters is not self.parameters:
            tensors += self.masters
        return ([], tensors) if self._offload else (tensors, [])

    def _copied(self, tensor: Tensor) -> Tensor:
        """A copy in the optimizer's precision, where its state lives; dry tensors have no other place to go."""
        where = torch.device("cpu") if self._offload and tensor.device.type != "meta" else tensor.device
        return torch.empty_like(tensor, device=where, dtype=self._precision).copy_(tensor.detach())

    def _take(self, gradients: Sequence[Tensor]) -> None:
        """Gradients for the copies; to the host they travel in their own precision."""
        if self._offload:
            with self._recorder.memcpy(TO_HOST, _bytes(gradients)):
                gradients = [self._buffer(gradient) for gradient in gradients]
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(self._precision)
            if self._scale != 1.0:
                master.grad /= self._scale

    def _give(self) -> None:
        """Updated values for the parameters; from the host they travel in the parameters' precision."""
        if not self._offload:
            _copy(self.parameters, self.masters)
            return
        values = [
            master.detach().to(parameter.dtype) for master, parameter in zip(self.masters, self.parameters, strict=True)
        ]
        with self._recorder.memcpy(TO_DEVICE, _bytes(values)):
            _copy(self.parameters, values)

    def _buffer(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, on every device a real one."""
        where = tensor.device if tensor.device.type == "meta" else torch.device("cpu")
        return torch.empty_like(tensor, device=where).copy_(tensor)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "updated before its gradient was made"
    return parameter.grad


@torch.no_grad()
def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer(parameters: Sequence[nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """One loop in C++ over all parameters (`foreach`); `fused` does not run on dry tensors."""
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, train.lr, weight_decay=train.weight_decay, foreach=True)
    return torch.optim.AdamW(parameters, train.lr, weight_decay=train.weight_decay, foreach=True)
