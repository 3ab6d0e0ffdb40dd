"""Activation recomputation: what a function would keep for backward is computed again when backward needs it.

The work has a phase of its own in the trace. Three settings are easily forgotten: without `use_reentrant=False` hooks and
gradients of inputs behave differently; torch's early stop would leave the recomputation in the middle (the rest of the
block's backward would carry the wrong phase, and the last communication of a layer would be left out on all ranks); and
the state of a random number generator need not be kept, since dropout uses none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from stepscope.tracer.recorder import NullRecorder, Recorder


class _Recomputation:
    """Marks a recomputation inside the backward of a block."""

    def __init__(self, owner: Recompute, recorder: Recorder | NullRecorder, name: str, layer: int) -> None:
        self._owner, self._recorder, self._block = owner, recorder, (name, layer)

    def __enter__(self) -> None:
        name, layer = self._block
        self._owner.running = True
        self._recorder.block(name, "recompute", layer)

    def __exit__(self, *exception: object) -> None:
        name, layer = self._block
        self._owner.running = False
        self._recorder.block(name, "backward", layer)


class Recompute:
    """Calls functions of one block so that backward computes them again; holds no tensors itself."""

    def __init__(self, recorder: Recorder | NullRecorder, name: str, layer: int) -> None:
        self._recorder, self._block = recorder, (name, layer)
        self.running = False  # whether what is called now has been called before

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """`function(*inputs)`, of which only the inputs are kept."""
        with set_checkpoint_early_stop(False):
            return checkpoint(
                function,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), _Recomputation(self, self._recorder, *self._block)),
            )


def keep(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, its activations kept: no recomputation."""
    return function(*inputs)
