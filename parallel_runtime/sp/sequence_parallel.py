"""The communication of sequence parallelism (Korthikanti et al. 2022): tensor parallelism whose sums are cut in two.

    x/t ──▶ [all-gather] ──▶ W by columns ──▶ heads, or inner width ──▶ W by rows ──▶ [reduce-scatter] ──▶ + bias ──▶ y/t

An all-reduce is a reduce-scatter followed by an all-gather. Between the two lie norms, dropout and residuals, which work on
each token alone: each rank does them for its part of the sequence only, and keeps only that for backward. So as not to
keep the gathered input of the matrices either, backward gathers it again, while it computes the input's gradient.

A layer and microbatch: forward 2 all-gathers and 2 reduce-scatters; backward 2 and 2, and 2 all-gathers more.

Shapes: S sequence, B batch, H hidden; t ranks of tp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.model.seams import Matrix
from stepscope.parallel_runtime.model.weight_gradients import (
    WeightGradients,
    gradient_of_input,
    gradients_of_parts,
    halves,
    leave_products,
)
from stepscope.parallel_runtime.tp.tensor_parallel import TensorParallel


class SequenceParallel(TensorParallel):
    """The seams of one rank of `tp`, whose activations between the matrices are cut by positions."""

    strategy = "sp"

    def columns(self, x_SBH: Tensor, *matrices: Matrix, strategy: str = "") -> tuple[Tensor, ...]:
        """x W^T + b of each matrix for the whole sequence, from this rank's part of it."""
        weights, biases = zip(*matrices, strict=True)
        return GatherColumnParallel.apply(self.comm, strategy or self.strategy, self.later, x_SBH, *weights, *biases)

    def leave(self, y_SBH: Tensor, strategy: str = "") -> Tensor:
        """This rank's positions of the sum over ranks."""
        return ScatterSequence.apply(self.comm, strategy or self.strategy, y_SBH)

    def own_tokens(self, x_SB: Tensor) -> Tensor:
        """This rank's positions."""
        return x_SB.chunk(self.comm.size("tp"))[self.comm.index("tp")]


class GatherColumnParallel(torch.autograd.Function):
    """The all-gather and the matrices behind it; backward is a reduce-scatter, and a second all-gather of the input."""

    @staticmethod
    def forward(
        ctx: Any, comm: Comm, strategy: str, later: WeightGradients | None, x: Tensor, *parts: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`parts`: the weights, then as many biases, of which each may be None."""
        weights, biases = halves(parts)
        ctx.comm, ctx.strategy, ctx.biased = comm, strategy, [bias is not None for bias in biases]
        ctx.later, ctx.parts = later, None if later is None else parts
        ctx.save_for_backward(x, *weights)
        whole = comm.all_gather(x, "tp", strategy=strategy).wait()
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The input is gathered behind its gradient's computation, that is reduced behind the weights' gradients'.

        Where these come later, so does the gather: what waits for them is this rank's part of the sequence.
        """
        x, *weights = ctx.saved_tensors
        if ctx.later is not None:
            return GatherColumnParallel._split(ctx, gradients, x, weights)
        gathering = ctx.comm.all_gather(x, "tp", strategy=ctx.strategy)
        gradient = gradient_of_input(gradients, weights)
        scattering = ctx.comm.reduce_scatter(gradient, "tp", strategy=ctx.strategy)
        parts = gradients_of_parts(gradients, gathering.wait(), ctx.biased)
        return None, None, None, scattering.wait(), *parts

    @staticmethod
    def _split(
        ctx: Any, gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        comm, strategy = ctx.comm, ctx.strategy
        scattering = comm.reduce_scatter(gradient_of_input(gradients, weights), "tp", strategy=strategy)

        def gather(part: Tensor) -> Callable[[], Tensor]:
            return comm.all_gather(part, "tp", strategy=strategy).wait

        parts = leave_products(ctx.later, ctx.parts, gradients, x, gather)
        return None, None, None, scattering.wait(), *parts


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, strategy: str, y: Tensor) -> Tensor:
        """(S, B, H), parts of a sum -> (S / t, B, H), the sum."""
        ctx.comm, ctx.strategy = comm, strategy
        return comm.reduce_scatter(y, "tp", strategy=strategy).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank's product took part in every position."""
        return None, None, ctx.comm.all_gather(gradients[0], "tp", strategy=ctx.strategy).wait()
