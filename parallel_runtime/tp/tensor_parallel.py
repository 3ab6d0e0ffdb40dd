"""The communication of tensor parallelism (Shoeybi et al. 2019): what the model's seams do where its matrices are cut.

    x ──▶ [f] ──▶ W by columns ──▶ heads, or inner width ──▶ W by rows ──▶ [g] ──▶ + bias ──▶ y

f is the identity in forward and sums the gradient of its input in backward; g sums in forward and is the identity in
backward. Each layer has two such pairs, attention and feed-forward: 2 all-reduces forward, 2 backward a microbatch.

f and the matrices that share its input are one autograd function, so that the gradients of the weights are computed while
the sum of the input's gradient is under way.

Shapes: S sequence, B batch, H hidden, V vocabulary; parts of a cut dimension have the same letter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.data import IGNORED
from stepscope.parallel_runtime.model.seams import Matrix, Seams
from stepscope.parallel_runtime.model.weight_gradients import (
    WeightGradients,
    gradient_of_input,
    gradients_of_parts,
    halves,
    leave_products,
)


class TensorParallel:
    """The seams of one rank of `tp`. `strategy` names why an operation happens; the default is that of the layers."""

    strategy = "tp"

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.later: WeightGradients | None = None
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def seams(self, base: Seams) -> Seams:
        """`base` with this rank's part of every cut matrix."""
        self.later = base.later
        if base.later is not None:
            self.lookup = base.later.lookup
        return replace(
            base,
            tensor_parallel=self.comm.size("tp"),
            columns=self.columns,
            leave=self.leave,
            own_tokens=self.own_tokens,
            embed=self.embed,
            summed_loss=self.summed_loss,
        )

    def columns(self, x_SBH: Tensor, *matrices: Matrix, strategy: str = "") -> tuple[Tensor, ...]:
        """x W^T + b of each matrix, all cut by columns: each rank has its columns of the result."""
        weights, biases = zip(*matrices, strict=True)
        return ColumnParallel.apply(self.comm, strategy or self.strategy, self.later, x_SBH, *weights, *biases)

    def leave(self, y_SBH: Tensor, strategy: str = "") -> Tensor:
        """The sum over ranks of their parts of a product; `y_SBH` is overwritten."""
        return ReduceFromTensorParallel.apply(self.comm, strategy or self.strategy, y_SBH)

    def own_tokens(self, x_SB: Tensor) -> Tensor:
        """All: every rank has the whole sequence between the matrices."""
        return x_SB

    def embed(self, tokens_SB: Tensor, weight_VH: Tensor) -> Tensor:
        """Each rank looks up the tokens of its part of the vocabulary, the others give 0: the sum is the embedding."""
        place, elsewhere = self._in_vocabulary(tokens_SB, weight_VH.shape[0])
        rows = self.lookup(place, weight_VH).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self.leave(rows, "embedding")

    def summed_loss(self, x_SBH: Tensor, weight_VH: Tensor, targets_SB: Tensor) -> Tensor:
        """Cross entropy of logits that no rank ever holds whole; at least in float32."""
        (logits,) = self.columns(x_SBH, (weight_VH, None), strategy="loss")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        place, elsewhere = self._in_vocabulary(targets_SB, logits.shape[-1])
        return VocabularyCrossEntropy.apply(self.comm, logits, place, elsewhere, targets_SB != IGNORED)

    def _in_vocabulary(self, tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(row of each token in this rank's part of the vocabulary, or 0; whether it lies in another part)."""
        place = tokens - self.comm.index("tp") * rows
        elsewhere = (place < 0) | (place >= rows)
        return place.masked_fill(elsewhere, 0), elsewhere


# -- autograd functions, named after their role in the paper -----------------------------------------------------------


class ColumnParallel(torch.autograd.Function):
    """f and the matrices behind it: forward without communication, an all-reduce of the input's gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, comm: Comm, strategy: str, later: WeightGradients | None, x: Tensor, *parts: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`parts`: the weights, then as many biases, of which each may be None."""
        weights, biases = halves(parts)
        ctx.comm, ctx.strategy, ctx.biased = comm, strategy, [bias is not None for bias in biases]
        ctx.later, ctx.parts = later, None if later is None else parts
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The sum is under way while the weights' gradients are computed."""
        x, *weights = ctx.saved_tensors
        summing = ctx.comm.all_reduce(gradient_of_input(gradients, weights), "tp", strategy=ctx.strategy)
        parts: tuple[Tensor | None, ...]
        if ctx.later is not None:
            parts = leave_products(ctx.later, ctx.parts, gradients, x)
        else:
            parts = gradients_of_parts(gradients, x, ctx.biased)
        return None, None, None, summing.wait(), *parts


class ReduceFromTensorParallel(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, strategy: str, y: Tensor) -> Tensor:
        """In place."""
        ctx.mark_dirty(y)
        comm.all_reduce(y, "tp", strategy=strategy).wait()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank has the whole gradient already."""
        return None, None, gradients[0]


class VocabularyCrossEntropy(torch.autograd.Function):
    """Sum over the counted tokens of log(sum exp(logits)) - logit of the target: three all-reduces of one number a token.

    Backward needs none: each rank knows the probabilities of its own part.
    """

    @staticmethod
    def forward(
        ctx: Any, comm: Comm, logits_SBV: Tensor, place_SB: Tensor, elsewhere_SB: Tensor, counted_SB: Tensor
    ) -> Tensor:
        """`place_SB`: row of each target in this rank's part, where it is not `elsewhere_SB`."""
        largest = comm.all_reduce(logits_SBV.amax(-1), "tp", strategy="loss", reduction="max").wait()
        shifted = logits_SBV - largest.unsqueeze(-1)
        chosen = shifted.gather(-1, place_SB.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere_SB, 0.0)
        exponentials = shifted.exp_()
        total = exponentials.sum(-1)
        summing = [comm.all_reduce(part, "tp", strategy="loss") for part in (total, chosen)]
        for handle in summing:
            handle.wait()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), place_SB, elsewhere_SB, counted_SB)
        return (total.log() - chosen).masked_fill(~counted_SB, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Probability minus one at the target, for the tokens that count."""
        probabilities_SBV, place_SB, elsewhere_SB, counted_SB = ctx.saved_tensors
        scale_SB = gradients[0] * counted_SB.to(probabilities_SBV.dtype)
        gradient_SBV = probabilities_SBV * scale_SB.unsqueeze(-1)
        at_target = -scale_SB.masked_fill(elsewhere_SB, 0.0)
        gradient_SBV.scatter_add_(-1, place_SB.unsqueeze(-1), at_target.unsqueeze(-1))
        return None, gradient_SBV, None, None, None
