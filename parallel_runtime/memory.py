"""What a rank keeps in memory, as counters of the trace: model state, and activations for backward passes to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from stepscope.tracer.memory import ActivationMeter, storage_bytes
from stepscope.tracer.recorder import NullRecorder, Recorder


def sample_state(
    recorder: Recorder | NullRecorder,
    parameters: Iterable[Tensor],
    gradients: Iterable[Tensor],
    optimizer: tuple[Iterable[Tensor], Iterable[Tensor]],
) -> None:
    """Record the bytes of the model state; `optimizer`: its tensors on the device, and those in the host's memory."""
    on_device, on_host = (storage_bytes(tensors) for tensors in optimizer)
    recorder.counter("parameter_bytes", storage_bytes(parameters))
    recorder.counter("gradient_bytes", storage_bytes(gradients))
    recorder.counter("optimizer_bytes", on_device)
    if on_host:
        recorder.counter("optimizer_bytes", on_host, key="host")


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
