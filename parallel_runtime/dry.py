"""The same program on tensors without data: what one rank would do in a step, without running it anywhere.

Rows follow structure and never time or cost, so these are the rows of a real run (a test compares them with gloo's).
"""

from __future__ import annotations

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, Program, build, streams_of
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.recorder import Recorder
from stepscope.tracer.schema import Operation


def dry_step(configuration: Configuration, rank: int, steps: int = 1) -> tuple[Program, Recorder]:
    """The program of `rank` and its recorder, after `steps` steps in which nothing moved and nothing was computed."""
    model, parallel, train = configuration.model, configuration.parallel, configuration.train
    device, recorder = Device.named("dry"), Recorder(rank)
    comm = device.comm(Mesh.of(parallel), rank, recorder, streams_of(model, parallel, train))
    program = build(configuration, comm, device)
    for step in range(steps):
        train_step(program, step, InjectedCauses(train, rank, device, recorder))
    return program, recorder


def operations_of_step(configuration: Configuration, rank: int, steps: int = 1) -> list[Operation]:
    """Rows of the last of `steps` steps of one rank, in program order; times are those of the capture, costs are zero."""
    return dry_step(configuration, rank, steps)[1].operations()
