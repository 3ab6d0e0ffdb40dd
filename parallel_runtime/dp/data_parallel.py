"""Sums gradients over dp, bucket by bucket, while backward still makes the next ones.

Gradients live in flat buffers, one a bucket: a parameter's `grad` is a view, so nothing is copied before or after the
reduction. Sums need no division: the loss of each rank is already divided by the valid tokens of the global batch.

    a step:  begin_step()  ...  arm()  last backward (of each chunk)  finish()
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.comm import Comm, Handle, Ready
from stepscope.parallel_runtime.dp.buckets import assign_buckets

GRADIENTS = "gradients"
"""Block of what the training thread does between the last backward and the optimizer."""


class DataParallel:
    """Gradient buckets of `parameters` (in order of use) over the group of `axis`."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        comm: Comm,
        bucket_bytes: int,
        overlap: bool = True,
        axis: str = "dp",
    ) -> None:
        """`overlap` off: the same buckets, all of them reduced in `finish`."""
        self.parameters = list(parameters)
        self.comm, self.overlap, self.axis = comm, overlap, axis
        first = self.parameters[0]
        assert all(p.dtype == first.dtype for p in self.parameters), "one flat buffer holds one dtype"
        sizes = [p.numel() for p in self.parameters]
        self.buckets = assign_buckets(sizes, first.element_size(), bucket_bytes)
        self.buffers = [torch.zeros(b.elements, dtype=first.dtype, device=first.device) for b in self.buckets]
        self._views: list[Tensor] = [first] * len(self.parameters)
        self._bucket_of = [-1] * len(self.parameters)
        for number, (bucket, buffer) in enumerate(zip(self.buckets, self.buffers, strict=True)):
            for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                parameter = self.parameters[index]
                self._views[index] = buffer[offset : offset + parameter.numel()].view_as(parameter)
                self._bucket_of[index] = number
        self._place = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._armed: set[int] = set()  # parameters whose next gradient is the last one
        self._missing: list[int] = []  # gradients that each bucket still waits for
        self._handles: list[Handle | Ready] = []  # of the buckets under way: always the first ones, in order
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._ready(index))

    def begin_step(self) -> None:
        """Gradients become zero, in their buckets."""
        for buffer in self.buffers:
            buffer.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        self._armed, self._handles = set(), []
        self._missing = [len(bucket.parameters) for bucket in self.buckets]

    def arm(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The next gradients of these (None: of all) are the last of the step: a bucket that they fill is reduced at once.
        Parameters of others may be among them."""
        if self.overlap:
            concerned = self.parameters if parameters is None else parameters
            self._armed |= {self._place[key] for p in concerned if (key := id(p)) in self._place}

    def finish(self) -> None:
        """After the last backward: reduce what is left, and wait for all buckets."""
        self._armed = set()
        self.comm.recorder.block(GRADIENTS)
        while len(self._handles) < len(self.buckets):
            self._reduce_next()
        for handle in self._handles:
            handle.wait()
        self._handles = []

    def after_update(self) -> None:
        """Every rank has updated the same parameters in the same way."""

    def held(self) -> tuple[list[Tensor], list[Tensor]]:
        """(parameters, gradients) in memory between two steps."""
        return list(self.parameters), list(self.buffers)

    def _ready(self, index: int) -> None:
        """The hook of one parameter: its gradient of this backward has been added."""
        if index not in self._armed:
            return
        self._missing[self._bucket_of[index]] -= 1
        # Strictly in order, whatever order gradients come in: all ranks must submit the same sequence.
        while len(self._handles) < len(self.buckets) and self._missing[len(self._handles)] == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        buffer = self.buffers[len(self._handles)]
        self._handles.append(self.comm.all_reduce(buffer, self.axis, strategy="dp"))
