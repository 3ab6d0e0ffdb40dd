"""Balance without an auxiliary loss (Wang et al. 2024): an offset of each expert's score moves against its load.

    offset_e += rate x sign(mean load - load of e)        once a step, over all tokens of the global batch

The offset decides who is chosen and not with which weight, so no gradient is bent. Loads are sums of integers over all
ranks of the stage (each token is routed on one of them), so every rank moves its copy alike, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm, Handle, Ready
from stepscope.parallel_runtime.ep.expert_parallel import LOAD
from stepscope.parallel_runtime.model.router import Router


def moved(offset_LE: Tensor, load_LE: Tensor, rate: float) -> Tensor:
    """The offsets after a step; load and mean are compared as integers."""
    mean = load_LE.sum(-1, keepdim=True) - load_LE * load_LE.shape[-1]
    return offset_LE + rate * mean.sign()


class LoadBalance:
    """Moves the offsets of a stage's routers after each step."""

    def __init__(self, routers: Sequence[Router], comm: Comm, rate: float) -> None:
        self.routers, self.comm, self.rate = list(routers), comm, rate
        self._summing: Handle | Ready | None = None

    def begin(self) -> None:
        """All tokens of the step have been routed: sum the loads."""
        if self.routers:
            loads = torch.stack([router.load_E for router in self.routers])
            self._summing = self.comm.all_reduce(loads, "dp_cp_tp", strategy="ep", stream=LOAD)

    def finish(self) -> None:
        """Move the offsets, start to count anew."""
        if self._summing is None:
            return
        loads, self._summing = self._summing.wait(), None
        for router, load in zip(self.routers, loads, strict=True):
            router.offset_E.copy_(moved(router.offset_E, load, self.rate))
            router.load_E.zero_()
