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
    """Measures one microbatch of each chunk once, then counts microbatches: later ones keep as much (shapes are equal).

    With experts shapes follow the routing: then (`varying`) every microbatch is measured.
    """

    def __init__(self, chunks: Sequence[nn.Module], recorder: Recorder | NullRecorder, varying: bool = False) -> None:
        self._recorder, self._varying = recorder, varying
        self._parameters = [list(chunk.parameters()) for chunk in chunks]
        self._bytes: dict[tuple[int, int], int] = {}

    @contextmanager
    def measuring(self, chunk: int, microbatch: int = 0) -> Iterator[None]:
        """Around a forward of `chunk`; values and graph are as without it."""
        key = self._key(chunk, microbatch)
        if key in self._bytes and not self._varying:
            yield
            return
        meter = ActivationMeter(self._parameters[chunk])
        with meter.watching():
            yield
        self._bytes[key] = meter.live

    def sample(self, alive: Iterable[tuple[int, int]], waiting: int = 0) -> None:
        """Record the bytes kept now; `alive`: (chunk, microbatch) of what is between its forward and its backward,
        `waiting`: bytes that wait for their weights' gradients."""
        kept = sum(self._bytes[self._key(*place)] for place in alive)
        self._recorder.counter("activation_bytes", kept + waiting)

    def _key(self, chunk: int, microbatch: int) -> tuple[int, int]:
        return chunk, microbatch if self._varying else 0
