"""Causes of lost time, injected on purpose, so that what an analysis says can be compared with the truth."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from stepscope.parallel_runtime.config import TrainConfig
from stepscope.parallel_runtime.device import Device
from stepscope.tracer.recorder import NullRecorder, Recorder

BLOCK = "injected work"


class InjectedCauses:
    """A slow rank computes longer in the first forward of each step; a late one's host sleeps before its first work."""

    def __init__(self, train: TrainConfig, rank: int, device: Device, recorder: Recorder | NullRecorder) -> None:
        self._slow_ms = train.slow_ms if rank == train.slow_rank else 0.0
        self._late_ms = train.late_ms if rank == train.late_rank else 0.0
        self._device, self._recorder = device, recorder
        self._pending = False

    def into(self, module: nn.Module) -> None:
        """Slow down the first forward of `module` in every step: real work, recorded as compute."""
        if self._slow_ms > 0.0:
            module.register_forward_pre_hook(self._slow)

    def begin_step(self) -> None:
        """At the head of a step: host time outside any row."""
        self._pending = True
        if self._late_ms > 0.0:
            self._recorder.pause()
            time.sleep(self._late_ms / 1e3)
            self._recorder.resume()

    def _slow(self, module: nn.Module, inputs: Any) -> None:
        if self._pending:
            self._pending = False
            self._recorder.block(BLOCK, "forward")
            self._device.busy(self._slow_ms)
