"""Every gradient reduction that is not data parallelism, in one list.

A parameter that several ranks hold, each of them having seen a part of what it does, needs the sum of their gradients.
Data parallelism (dp/) does that for ranks that saw other tokens; this list holds the rest:

    embedding   a tied embedding lives on the first and the last stage: once as table, once as head

They run after DP has finished: sums commute, and each replica has the same two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.layout import EMBEDDING


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


RULES = (Rule("embedding", "embedding", lambda model, parallel: model.tied and parallel.pp > 1, EMBEDDING.__eq__),)


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
    """Run them all; the gradients are sums when it returns."""
    handles = []
    for reduction in reductions:
        for parameter in reduction.parameters:
            assert parameter.grad is not None, "reduced before it was made"
            handles.append(comm.all_reduce(parameter.grad, reduction.axis, strategy=reduction.strategy))
    for handle in handles:
        handle.wait()
