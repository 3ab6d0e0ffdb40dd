"""Gradient clipping by the global norm, in which every parameter counts once, wherever its copies are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.comm import Comm, stream_of
from stepscope.parallel_runtime.layout import counts_once, replicas
from stepscope.parallel_runtime.mesh import Mesh

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def owned(parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, rank: int) -> list[nn.Parameter]:
    """The parameters, or pieces of some, that this rank counts in the norm (layout.counts_once)."""
    return [parameter for name, parameter in parameters if counts_once(name, mesh, rank)]


def owned_in_the_world(
    parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, rank: int, cut: bool
) -> list[nn.Parameter]:
    """The same where experts lie across replicas, and the norm is summed over all ranks at once: of the ranks that hold
    equal gradients the first counts, and where each holds a piece of its own (`cut`) those of the first copy."""
    counts = mesh.index("replica", rank) == 0
    return [
        parameter
        for name, parameter in parameters
        if counts_once(name, mesh, rank) and (counts if cut else mesh.index(replicas(name), rank) == 0)
    ]


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    counted: Iterable[nn.Parameter],
    largest: float,
    comm: Comm,
    stream: str = "clip",
    loss_scale: float = 1.0,
) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`; returns the norm before, a scalar tensor.

    Replicas (dp, cp) hold equal gradients; the others' squares are added over pp and tp, or where replicas hold parts of
    the gradients over these too (`stream` clip.sharded), with experts over all ranks (clip.world): at least in float32.
    Nothing is read by the host.
    `loss_scale`: what all gradients were multiplied by, and stay so.
    """
    first = parameters[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=first.device)
    for parameter in counted:
        assert parameter.grad is not None, "clipped before it was made"
        total += torch.linalg.vector_norm(parameter.grad, dtype=dtype).square()
    norm = comm.all_reduce(total, stream_of(stream).view, strategy="clip", stream=stream).wait().sqrt() / loss_scale
    scale = (largest / (norm + EPSILON)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
