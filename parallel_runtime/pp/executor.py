"""Runs a pipeline table: one executor for all schedules, and for one stage without a pipeline.

A boundary activation is a leaf that wants a gradient; backward starts from the output with the gradient that came from
the next stage. Where the schedule splits backward, its second half is what model/weight_gradients.py has left to do. Which
action waits for which message, and when memory is let go, follows from the table alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.comm import Comm, Handle, Ready
from stepscope.parallel_runtime.comm_streams import pipeline_stream
from stepscope.parallel_runtime.data import Batch
from stepscope.parallel_runtime.memory import ActivationCounter
from stepscope.parallel_runtime.model.weight_gradients import Unfinished, WeightGradients, finish
from stepscope.parallel_runtime.pp.schedules import Action, Place, Table, destination_of, source_of, wraps_round
from stepscope.parallel_runtime.pp.validator import activation_peak
from stepscope.tracer.recorder import NullRecorder

BOUNDARY = "boundary"
"""Block of what the training thread does between a stage's own blocks: handing tensors over."""


class PipelineExecutor:
    """The actions of one rank's table on its chunks of the model."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        tables: Sequence[Table],
        comm: Comm,
        boundary_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        activations: ActivationCounter | None = None,
        loss_scale: float = 1.0,
        later: WeightGradients | None = None,
    ) -> None:
        """`tables`: of all stages. `boundary_shape`: of an activation between stages, normally (S, B, H). `loss_scale`: all
        gradients are multiplied by it. `later`: where the chunks leave the weights' gradients, if the tables split backward.
        """
        self._loss_scale = loss_scale
        self._activations = activations or ActivationCounter(chunks, NullRecorder())
        self.stage, self.stages = comm.index("pp"), comm.size("pp")
        self.chunks, self.table, self.comm, self.later = chunks, tables[self.stage], comm, later
        self.boundary = (tuple(boundary_shape), dtype, device)
        self._last_gradient = {
            action.chunk: action for action in self.table if action.kind == "compute" and action.phase != "forward"
        }
        split = any(action.phase == "weight_grad" for action in self.table)
        assert split == (later is not None), "whether backward is split is the table's business"
        # The stage that gets the gradients can lag behind by what it holds: waiting for older ones lets their memory go
        # and never holds up a schedule that keeps its promise.
        self._most_sent = activation_peak(tables[(self.stage - 1) % self.stages])
        self._begin(None)

    def run(self, batch: Batch, before_last_gradient: Callable[[int], None] | None = None) -> Tensor | None:
        """Forward and backward of all microbatches: this rank's part of the loss, or None where no chunk ends the model.

        `before_last_gradient(chunk)` is called just before the last action that adds to the chunk's gradients.
        """
        self._begin(batch)
        runners = {
            ("compute", "forward"): self._forward,
            ("compute", "backward"): self._backward,
            ("compute", "weight_grad"): self._weight_gradients,
            ("send", "forward"): self._send,
            ("send", "backward"): self._send,
            ("receive", "forward"): self._receive,
            ("receive", "backward"): self._receive,
        }
        for action in self.table:
            self.comm.recorder.place(action.phase, self.stage, action.chunk, action.microbatch)
            if before_last_gradient is not None and action == self._last_gradient[action.chunk]:
                before_last_gradient(action.chunk)
            runners[action.kind, action.phase](action)
        self.comm.recorder.place("other", self.stage, -1, -1)
        for handle in (*self._sent_forward.values(), *self._sent_backward):
            handle.wait()
        loss = self._loss
        self._begin(None)
        return loss

    def _begin(self, batch: Batch | None) -> None:
        """Forget everything of the step before."""
        self._batch = batch
        self._loss: Tensor | None = None
        self._alive: dict[
            tuple[int, int], tuple[Tensor | None, Tensor]
        ] = {}  # boundary input and output, until backward
        self._stand_ins: dict[tuple[int, int], dict[str, Tensor]] = {}  # until backward, where it is split ...
        self._unfinished: dict[
            tuple[int, int], tuple[Unfinished, int]
        ] = {}  # ... and then until the weights' gradients
        self._outgoing: dict[Action, Tensor] = {}
        self._arriving: dict[Action, Handle | Ready] = {}
        self._sent_forward: dict[tuple[int, int], Handle | Ready] = {}
        self._sent_backward: deque[Handle | Ready] = deque()

    # -- compute -----------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        assert self._batch is not None
        x = self._arrived(action)
        if x is not None:
            x.requires_grad_()
        with self._activations.measuring(action.chunk, action.microbatch):
            y = self._run(action, x)
        self.comm.recorder.block(BOUNDARY)
        self._alive[action.chunk, action.microbatch] = (x, y)
        self._sample()
        if self._destination(action) is not None:
            self._outgoing[action._replace(kind="send")] = y.detach()
        else:
            self._loss = y.detach() if self._loss is None else self._loss + y.detach()

    def _run(self, action: Action, x: Tensor | None) -> Tensor:
        assert self._batch is not None
        module, inputs = (
            self.chunks[action.chunk],
            (x, self._batch.microbatches[action.microbatch], self._batch.valid_tokens),
        )
        if self.later is None:
            return module(*inputs)
        y, self._stand_ins[action.chunk, action.microbatch] = self.later.forward(module, *inputs)
        return y

    def _sample(self) -> None:
        self._activations.sample(self._alive, sum(kept for _, kept in self._unfinished.values()))

    def _backward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x, y = self._alive.pop(key)
        gradient = self._arrived(action)
        if key in self._sent_forward:  # the answer has come, so the message is out: this wait lets its memory go
            self._sent_forward.pop(key).wait()
        if gradient is None and self._loss_scale != 1.0:
            gradient = torch.full_like(y, self._loss_scale)
        torch.autograd.backward(y, gradient)
        self.comm.recorder.block(BOUNDARY)
        if self.later is not None:
            unfinished = self.later.take(self._stand_ins.pop(key))
            self._unfinished[key] = (unfinished, unfinished.kept_bytes())
        self._sample()
        if x is not None:
            assert x.grad is not None, "a boundary activation without gradient: the stage does not use its input"
            self._outgoing[action._replace(kind="send")] = x.grad

    def _weight_gradients(self, action: Action) -> None:
        unfinished, _ = self._unfinished.pop((action.chunk, action.microbatch))
        finish(self.chunks[action.chunk], unfinished, self.comm.recorder)
        self.comm.recorder.block(BOUNDARY)
        del unfinished
        self._sample()

    def _arrived(self, action: Action) -> Tensor | None:
        """The message that the action needs; None where it needs none."""
        handle = self._arriving.pop(action._replace(kind="receive"), None)
        return None if handle is None else handle.wait()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        source = source_of(action.phase, Place(self.stage, action.chunk), self.stages, len(self.chunks))
        assert source is not None, f"nothing to receive for {action}"
        shape, dtype, device = self.boundary
        self._arriving[action] = self.comm.receive(
            torch.empty(shape, dtype=dtype, device=device),
            "pp",
            source.stage,
            strategy="pp",
            stream=self._stream(action),
        )

    def _send(self, action: Action) -> None:
        destination = self._destination(action)
        assert destination is not None, f"nowhere to send {action}"
        handle = self.comm.send(
            self._outgoing.pop(action), "pp", destination.stage, strategy="pp", stream=self._stream(action)
        )
        if action.phase == "forward":
            self._sent_forward[action.chunk, action.microbatch] = handle
            return
        self._sent_backward.append(handle)
        if len(self._sent_backward) > self._most_sent:
            self._sent_backward.popleft().wait()

    def _destination(self, action: Action) -> Place | None:
        return destination_of(action.phase, Place(self.stage, action.chunk), self.stages, len(self.chunks))

    def _stream(self, action: Action) -> str:
        wraps = wraps_round(action, self.stage, self.stages, len(self.chunks))
        return pipeline_stream(action.phase, action.kind, wraps)
