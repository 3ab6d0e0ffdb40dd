"""The second half of a backward that is split: the gradients of the weights, computed when the schedule says so.

    backward       dx = dy W         at once, for the stage before waits for it
    weight_grad    dW = dy^T x       later, from what backward has left here: x and dy of each matrix

A microbatch runs on *stand-ins*, leaves that share the memory of the parameters. So nothing that backward does reaches a
parameter, or the hooks that reduce its gradient, before `finish`: the gradients of norms are added up in the stand-ins,
the products of the matrices are not computed at all. (Autograd could be asked twice instead, for the inputs and then for
the parameters: it would go through the whole chain of input gradients again, communication included.)

Shapes: S sequence, B batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.parallel_runtime.model.seams import Matrix, Seams, summed_loss
from stepscope.tracer.memory import storage_bytes
from stepscope.tracer.recorder import NullRecorder, Recorder

Gradients = Sequence[Tensor | None]


class Piece(NamedTuple):
    """What is left to do for some parameters, which belong to one block."""

    targets: Sequence[Tensor | None]
    """Their stand-ins; None where there is no such parameter (a bias)."""
    place: int | None
    """Where along dim 0 of the stand-ins the gradients belong; None: they are whole."""
    kept: Sequence[Tensor]
    """What stays in memory for it."""
    start: Callable[[], Callable[[], Gradients]]
    """Starts what must be communicated first; what it returns computes the gradients."""


class Unfinished(NamedTuple):
    """A microbatch whose backward is done, but not its weights' gradients."""

    stand_ins: dict[str, Tensor]
    pieces: list[Piece]

    def kept_bytes(self) -> int:
        """Memory that waits with it."""
        return storage_bytes(tensor for piece in self.pieces for tensor in piece.kept)


class WeightGradients:
    """Collects what backward leaves. One for the whole program of a rank: only one backward runs at a time."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def seams(self, base: Seams) -> Seams:
        """`base` whose matrices and tables leave their gradients for later."""
        return replace(
            base,
            later=self,
            columns=self.columns,
            rows=self.rows,
            embed=self.lookup,
            summed_loss=partial(summed_loss, columns=self.columns),
        )

    # -- called by the model -----------------------------------------------------------------------------------------

    def columns(self, x: Tensor, *matrices: Matrix, place: int | None = None) -> tuple[Tensor, ...]:
        """x W^T + b of each matrix, or with `place` of that slice of stacked ones."""
        weights, biases = zip(*matrices, strict=True)
        return LeavingProducts.apply(self, place, x, *weights, *biases)

    def rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        return self.columns(x, (weight, None))[0]

    def lookup(self, tokens: Tensor, weight_VH: Tensor) -> Tensor:
        """Rows of a table."""
        return LeavingLookup.apply(self, tokens, weight_VH)

    def leave(self, piece: Piece) -> None:
        """What a backward has not done."""
        self._pieces.append(piece)

    # -- called by the executor --------------------------------------------------------------------------------------

    def forward(self, module: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """(output of the module on stand-ins, the stand-ins by name)."""
        assert not self._pieces, "a backward left what nobody took"
        stand_ins = {name: parameter.detach().requires_grad_() for name, parameter in module.named_parameters()}
        return functional_call(module, stand_ins, inputs, tie_weights=False), stand_ins

    def take(self, stand_ins: dict[str, Tensor]) -> Unfinished:
        """What the backward that has just run left."""
        pieces, self._pieces = self._pieces, []
        return Unfinished(stand_ins, pieces)


def finish(module: nn.Module, unfinished: Unfinished, recorder: Recorder | NullRecorder) -> None:
    """Compute the gradients of a microbatch and add them to those of the parameters, block by block, the last one first.

    Each parameter gets its gradient once and whole: hooks on it run as after a backward of its own.
    """
    parameters = dict(module.named_parameters())
    blocks: dict[str, list[str]] = {}
    for name in parameters:
        blocks.setdefault(block_of(name, parameters), []).append(name)
    owner = {id(stand_in): block_of(name, parameters) for name, stand_in in unfinished.stand_ins.items()}
    pieces: dict[str, list[Piece]] = {block: [] for block in blocks}
    for piece in unfinished.pieces:
        pieces[owner[id(piece.targets[0])]].append(piece)
    for block, names in reversed(blocks.items()):
        layer = int(block.removeprefix("layer.")) if block.startswith("layer.") else -1
        recorder.block(block, "weight_grad", layer)
        with torch.no_grad():
            computing = [piece.start() for piece in pieces[block]]
            for piece, compute in zip(pieces[block], computing, strict=True):
                _add(piece, compute())
        gradients = [unfinished.stand_ins[name].grad for name in names]
        assert all(gradient is not None for gradient in gradients), f"a parameter of {block} has no gradient"
        torch.autograd.backward([parameters[name] for name in names], gradients)


def block_of(name: str, parameters: dict[str, nn.Parameter]) -> str:
    """The block of a parameter. A table that comes behind the layers is a tied head."""
    part = name.split(".")
    if part[0] == "layers":
        return f"layer.{part[1]}"
    return "embedding" if part[0] == "embedding" and name == next(iter(parameters)) else "head"


def _add(piece: Piece, gradients: Gradients) -> None:
    for stand_in, gradient in zip(piece.targets, gradients, strict=True):
        if stand_in is None or gradient is None:
            continue
        if piece.place is not None:
            if stand_in.grad is None:
                stand_in.grad = torch.zeros_like(stand_in)
            stand_in.grad[piece.place] += gradient
        elif stand_in.grad is None:
            stand_in.grad = gradient
        else:
            stand_in.grad += gradient


# -- autograd functions ------------------------------------------------------------------------------------------------


class LeavingProducts(torch.autograd.Function):
    """Matrices that share an input: backward gives the input's gradient only."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, place: int | None, x: Tensor, *parts: Tensor | None) -> Any:
        """`parts`: the weights, then as many biases, of which each may be None."""
        ctx.later, ctx.place, ctx.parts = later, place, parts  # stand-ins are leaves: no cycle
        weights, biases = halves(parts if place is None else [None if p is None else p[place] for p in parts])
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """dx = sum over the matrices of dy W."""
        x, *weights = ctx.saved_tensors
        parts = leave_products(ctx.later, ctx.parts, gradients, x, place=ctx.place)
        return None, None, gradient_of_input(gradients, weights), *parts


class LeavingLookup(torch.autograd.Function):
    """A table of rows: backward gives nothing, its input are numbers."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, tokens: Tensor, weight_VH: Tensor) -> Tensor:
        """(S, B), (V, H) -> (S, B, H)."""
        ctx.later, ctx.weight = later, weight_VH
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight_VH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """The gradient of each row is the sum over the tokens that looked it up."""
        (tokens,), (gradient_SBH,), weight = ctx.saved_tensors, gradients, ctx.weight

        def compute() -> Gradients:
            rows = torch.zeros_like(weight)
            return (rows.index_add_(0, tokens.flatten(), gradient_SBH.flatten(0, 1)),)

        ctx.later.leave(Piece([weight], None, [tokens, gradient_SBH], lambda: compute))
        return None, None, None


# -- the matrices' gradients -------------------------------------------------------------------------------------------


def halves(parts: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases, which autograd functions take in one row."""
    middle = len(parts) // 2
    return tuple(weight for weight in parts[:middle] if weight is not None), tuple(parts[middle:])


def gradient_of_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum over the matrices of dy W, in the shape of the input: this rank's part."""
    first, *rest = gradients
    total = first.flatten(0, -2) @ weights[0]
    for gradient, weight in zip(rest, weights[1:], strict=True):
        total.addmm_(gradient.flatten(0, -2), weight)
    return total.unflatten(0, first.shape[:-1])


def gradients_of_parts(gradients: Sequence[Tensor], x: Tensor, biased: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """dy^T x of each weight, then the sum of dy over the tokens for each bias."""
    rows = [gradient.flatten(0, -2) for gradient in gradients]
    inputs = x.flatten(0, -2)
    return (
        *(row.t() @ inputs for row in rows),
        *(row.sum(0) if has else None for row, has in zip(rows, biased, strict=True)),
    )


def leave_products(
    later: WeightGradients,
    parts: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    x: Tensor,
    gather: Callable[[Tensor], Callable[[], Tensor]] | None = None,
    place: int | None = None,
) -> tuple[None, ...]:
    """Leave the gradients of `parts` (weights, then biases), and return what autograd gets of them: nothing.

    `gather` starts to bring the input together from `x`, where this rank has kept a part of it, and returns what waits.
    """
    biased = [bias is not None for bias in parts[len(parts) // 2 :]]

    def start() -> Callable[[], Gradients]:
        whole = gather(x) if gather is not None else lambda: x
        return lambda: gradients_of_parts(gradients, whole(), biased)

    later.leave(Piece(parts, place, [x, *gradients], start))
    return (None,) * len(parts)
