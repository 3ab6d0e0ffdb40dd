"""The activation counter of a pipeline stage: what autograd keeps for the backward passes still to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from stepscope.tracer.memory import ActivationMeter
from stepscope.tracer.recorder import NullRecorder, Recorder


class ActivationCounter:
    """Measures one microbatch of each chunk once, then counts microbatches: later ones keep as much (shapes are equal)."""

    def __init__(self, chunks: Sequence[nn.Module], recorder: Recorder | NullRecorder) -> None:
        self._recorder = recorder
        self._parameters = [list(chunk.parameters()) for chunk in chunks]
        self._bytes: dict[int, int] = {}

    @contextmanager
    def measuring(self, chunk: int) -> Iterator[None]:
        """Around a forward of `chunk`; values and graph are as without it."""
        if chunk in self._bytes:
            yield
            return
        meter = ActivationMeter(self._parameters[chunk])
        with meter.watching():
            yield
        self._bytes[chunk] = meter.live

    def sample(self, alive: Iterable[int]) -> None:
        """Record the bytes kept now; `alive`: the chunk of each microbatch between its forward and its backward."""
        self._recorder.counter("activation_bytes", sum(self._bytes[chunk] for chunk in alive))
