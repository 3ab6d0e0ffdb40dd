"""Every gradient reduction that is not data parallelism, in one list.

A parameter that several ranks hold, each of them having seen a part of what it does, needs the sum of their gradients.
Data parallelism (dp/) does that for ranks that saw other tokens; this list holds the rest:

    embedding   a tied embedding lives on the first and the last stage: once as table, once as head
    sp          what every rank of tp holds whole (norms, biases after a sum) saw its own part of the sequence only
    ep          without sp, a router under tp scored its own part of the sequence only

They run after DP has finished: sums commute, and each replica has the same two parts.

Ranks of cp saw other tokens as those of dp did, so data parallelism sums over both in one operation (`gradient_view`):
two sums, one after the other, would give the same and send more, (n - 1) / n of every gradient for each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.layout import EMBEDDING, is_whole


def gradient_view(parallel: ParallelConfig) -> str:
    """The mesh view whose ranks hold the same parameters and saw other tokens: gradients are summed over it.

    With cp its groups are those of dp x cp, also where dp is 1; its stream is not the one that attention uses.
    """
    return "dp_cp" if parallel.cp > 1 else "dp"


def experts_apart(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether the gradients of experts are summed over other ranks (`edp`) than those of everything else."""
    return model.experts > 0 and parallel.ep * parallel.tp > 1


class Reduction(NamedTuple):
    """Sum the gradients of these parameters over the group of `axis`."""

    axis: str
    strategy: str
    parameters: tuple[nn.Parameter, ...]


class Rule(NamedTuple):
    """A reduction and when it is needed."""

    axis: str
    strategy: str
    needed: Callable[[ModelConfig, ParallelConfig], bool]
    concerns: Callable[[str], bool]
    """Whether a parameter, by its global name, takes part."""


def is_router(name: str) -> bool:
    """Whether a parameter scores experts."""
    return ".router." in name


RULES = (
    Rule("embedding", "embedding", lambda model, parallel: model.tied and parallel.pp > 1, EMBEDDING.__eq__),
    Rule("tp", "sp", lambda model, parallel: parallel.sp, is_whole),
    Rule("tp", "ep", lambda model, parallel: model.experts > 0 and parallel.tp > 1 and not parallel.sp, is_router),
)


def streams_of(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Streams that the reductions use."""
    return [rule.axis for rule in RULES if rule.needed(model, parallel)]


def reductions_of(
    parameters: Iterable[tuple[str, nn.Parameter]], model: ModelConfig, parallel: ParallelConfig
) -> list[Reduction]:
    """What one rank has to reduce; `parameters`: its own, by global name."""
    named = list(parameters)
    found = [
        Reduction(rule.axis, rule.strategy, tuple(p for name, p in named if rule.concerns(name)))
        for rule in RULES
        if rule.needed(model, parallel)
    ]
    return [reduction for reduction in found if reduction.parameters]


def synchronise(reductions: Iterable[Reduction], comm: Comm) -> None:
    """Run them all, one operation each; the gradients are sums when it returns."""
    under_way = []
    for reduction in reductions:
        gradients = []
        for parameter in reduction.parameters:
            assert parameter.grad is not None, "reduced before it was made"
            gradients.append(parameter.grad)
        flat = gradients[0] if len(gradients) == 1 else torch.cat([gradient.flatten() for gradient in gradients])
        under_way.append((comm.all_reduce(flat, reduction.axis, strategy=reduction.strategy), gradients))
    for handle, gradients in under_way:
        summed = handle.wait()
        if len(gradients) > 1:
            for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
