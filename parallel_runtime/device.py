"""The three devices that one program runs on: cpu with gloo, cuda with NCCL, and dry, where nothing is computed or moved."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.parallel_runtime.comm import Comm, DryComm
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.recorder import NullRecorder, Recorder

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "dry": "none"}

HARDWARE_QUEUES = "32"
"""Each stream its own queue to the GPU: CUDA has 8 unless told, a rank here has more streams, and of two that share a queue one
can hold up the other for ever (a receive in front of the send that its peer waits for)."""

_BUSY_SIDE = 64  # one product of this side takes some 10 us: the injected work ends within that of its time


def sleep_on_stream(milliseconds: float) -> None:
    """Keep the current CUDA stream busy for about this long."""
    clock: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    torch.cuda._sleep(int(milliseconds * getattr(clock, "clock_rate", 1_500_000)))  # cycles; clock_rate in kHz


@dataclass(frozen=True)
class Device:
    """A kind of device; what differs between them is here and in the doors, nowhere else."""

    kind: str
    index: int = 0  # of the GPU that this rank uses

    @classmethod
    def named(cls, kind: str, index: int = 0, ranks_here: int = 1) -> Device:
        """`cpu`, `cuda`, `dry`, or `auto`: cuda where each of `ranks_here` ranks of this host can have a GPU.

        ValueError for a device that is not there.
        """
        if kind not in (*BACKENDS, "auto"):
            raise ValueError(f"device {kind!r} is unknown: take one of {', '.join(BACKENDS)} or auto")
        if kind in ("cuda", "auto"):  # before CUDA starts; the ranks inherit it
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", HARDWARE_QUEUES)
        gpus = torch.cuda.device_count() if kind in ("cuda", "auto") else 0
        if kind == "auto":
            kind = "cuda" if gpus >= ranks_here else "cpu"
        if kind == "cuda" and gpus == 0:
            raise ValueError("no CUDA device is available here (this torch sees none): take cpu")
        if kind == "cuda" and gpus < ranks_here:
            raise ValueError(f"{ranks_here} ranks need a GPU each, but there are {gpus}: take {gpus} ranks, or cpu")
        return cls(kind, index)

    @property
    def backend(self) -> str:
        """Name of the communication backend."""
        return BACKENDS[self.kind]

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live; dry ones have shapes only."""
        return {"cpu": torch.device("cpu"), "dry": torch.device("meta")}.get(self.kind) or torch.device(
            "cuda", self.index
        )

    def comm(
        self,
        mesh: Mesh,
        rank: int,
        recorder: Recorder | NullRecorder,
        streams: Iterable[str],
        timeout_s: float = 300.0,
    ) -> Comm:
        """This device's door to communication; the default process group must exist (launch.py), except for dry."""
        if self.kind == "dry":
            return DryComm(mesh, rank, recorder, streams)
        if self.kind == "cuda":
            from stepscope.parallel_runtime.comm_nccl import NcclComm

            return NcclComm(mesh, rank, recorder, streams, timeout_s)
        from stepscope.parallel_runtime.comm_gloo import GlooComm

        return GlooComm(mesh, rank, recorder, streams, timeout_s)

    def synchronize(self) -> None:
        """Wait for all work of the device (never within a step)."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.index)

    def busy(self, milliseconds: float) -> None:
        """Real work of about this long on the compute stream, without holding the interpreter: an injected cause.

        On CPU it is time of a core, not of the clock: where ranks share cores, a rank with more work gets no larger share.
        """
        if self.kind == "cuda":
            sleep_on_stream(milliseconds)
        elif self.kind == "cpu":
            end = time.thread_time_ns() + int(milliseconds * 1e6)
            work = torch.ones(_BUSY_SIDE, _BUSY_SIDE)
            while time.thread_time_ns() < end:
                torch.mm(work, work)
