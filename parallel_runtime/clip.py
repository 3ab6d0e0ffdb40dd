"""Gradient clipping by the global norm, in which every parameter counts once, wherever its copies are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.layout import counts_once
from stepscope.parallel_runtime.mesh import Mesh

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def owned(parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, rank: int) -> list[nn.Parameter]:
    """The parameters that this rank counts in the norm (layout.counts_once)."""
    return [parameter for name, parameter in parameters if counts_once(name, mesh, rank)]


def clip_gradients(
    parameters: Iterable[nn.Parameter], counted: Iterable[nn.Parameter], largest: float, comm: Comm
) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`; returns the norm before, a scalar tensor.

    Replicas (dp, cp) hold equal gradients; the others' squares are added over pp and tp. Nothing is read by the host.
    """
    squares = [torch.linalg.vector_norm(p.grad).square() for p in counted if p.grad is not None]
    total = torch.stack(squares).sum()
    norm = comm.all_reduce(total, "pp_tp", strategy="clip", stream="clip").wait().sqrt()
    scale = (largest / (norm + EPSILON)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
