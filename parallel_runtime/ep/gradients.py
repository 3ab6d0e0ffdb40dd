"""Data parallelism of a model with experts: one strategy over the replicas of everything else, one over those of experts.

Experts of one rank are held by the ranks of `edp` too, everything else by the ranks of dp x cp. The two have gradients,
streams and buckets (or shards) of their own, and a step drives them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from stepscope.parallel_runtime.dp.data_parallel import DataParallel
from stepscope.parallel_runtime.zero.sharded import ShardedData


class DenseAndExperts:
    """The strategies `parts`, one after the other."""

    def __init__(self, parts: Sequence[DataParallel | ShardedData]) -> None:
        self.parts = list(parts)
        self.parameters: list[nn.Parameter] = [parameter for part in self.parts for parameter in part.parameters]

    def begin_step(self) -> None:
        """Gradients become zero."""
        for part in self.parts:
            part.begin_step()

    def arm(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The next gradients of these (None: of all) are the last of the step."""
        concerned = None if parameters is None else list(parameters)
        for part in self.parts:
            part.arm(concerned)

    def finish(self) -> None:
        """After the last backward: everything is summed when it returns."""
        for part in self.parts:
            part.finish()

    def after_update(self) -> None:
        """After the optimizer."""
        for part in self.parts:
            part.after_update()

    def held(self) -> tuple[list[Tensor], list[Tensor]]:
        """(parameters, gradients) in memory between two steps."""
        held = [part.held() for part in self.parts]
        return [tensor for part in held for tensor in part[0]], [tensor for part in held for tensor in part[1]]
