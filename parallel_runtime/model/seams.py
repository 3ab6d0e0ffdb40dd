"""Where strategies enter the model. The model knows no communication: it calls these functions at its seams.

The defaults are one device holding everything. A strategy folder offers functions with the same signatures, and
`compose.py` puts them in; the model's own code and its parameter names stay the same under every layout.

Shapes: S sequence, B batch, H hidden, V vocabulary; parts of a cut dimension have the same letter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.parallel_runtime.data import IGNORED
from stepscope.parallel_runtime.model.attention import attention

if TYPE_CHECKING:
    from stepscope.parallel_runtime.model.weight_gradients import WeightGradients

Matrix = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias of a linear map."""


def unchanged(x: Tensor) -> Tensor:
    """One device holds the whole: nothing to move."""
    return x


def nothing(block: str) -> None:
    """Parameters are there all the time."""


def same_output(block: str, output: Tensor) -> Tensor:
    """A block's output as it is."""
    return output


def columns(x_SBH: Tensor, *matrices: Matrix) -> tuple[Tensor, ...]:
    """x W^T + b of each matrix."""
    return tuple(F.linear(x_SBH, weight, bias) for weight, bias in matrices)


def embed(tokens_SB: Tensor, weight_VH: Tensor) -> Tensor:
    """Rows of the embedding table, (S, B, H)."""
    return F.embedding(tokens_SB, weight_VH)


def summed_loss(
    x_SBH: Tensor, weight_VH: Tensor, targets_SB: Tensor, columns: Callable[..., tuple[Tensor, ...]] = columns
) -> Tensor:
    """Cross entropy summed over the tokens whose target is not IGNORED; at least in float32."""
    (logits,) = columns(x_SBH, (weight_VH, None))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets_SB.flatten(), ignore_index=IGNORED, reduction="sum")


def every_expert(tokens_TH: Tensor, routed: Any, experts: Any, layer: int, counting: bool) -> Tensor:
    """The weighted sum of what each token's experts make of it; every expert computes every token, and most of it is
    multiplied by 0. `routed` is a router.Routed, `experts` a mixture.Experts."""
    y_TH = torch.zeros_like(tokens_TH)
    for number, expert in enumerate(experts.each()):
        weight_T = (routed.weights_TK * (routed.experts_TK == number)).sum(-1).to(tokens_TH.dtype)
        y_TH = y_TH + weight_T.unsqueeze(-1) * expert(tokens_TH)
    return y_TH


@dataclass(frozen=True)
class Seams:
    """The functions that the model calls where a layout may cut it."""

    tensor_parallel: int = 1
    """Heads, key and value heads, feed-forward width and vocabulary are cut by this."""
    columns: Callable[..., tuple[Tensor, ...]] = columns
    """x (S, B, H) and the matrices (weight, bias) that it meets together -> x W^T + b of each; these are cut by columns,
    and what is made of their outputs by rows."""
    rows: Callable[[Tensor, Tensor], Tensor] = F.linear
    """x and the weight of a matrix that is cut by rows -> x W^T, this rank's part of it."""
    leave: Callable[[Tensor], Tensor] = unchanged
    """Product with a matrix that is cut by rows, before its bias is added."""
    own_tokens: Callable[[Tensor], Tensor] = unchanged
    """(S, B) of all tokens that attention sees on this rank -> those of the activations between the matrices."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attention
    """q (B, N, S, D), k and v (B, K, S, D) -> (B, N, S, D)."""
    embed: Callable[[Tensor, Tensor], Tensor] = embed
    """tokens (S, B), table (V, H) -> (S, B, H)."""
    summed_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = summed_loss
    """x (S, B, H), head (V, H), targets (S, B) -> summed cross entropy, a scalar."""
    expert_parallel: int = 1
    """The experts of a layer are cut by this."""
    through_experts: Callable[..., Tensor] = every_expert
    """tokens (T, H), what the router says of them, this rank's experts, layer, whether to count -> (T, H)."""
    routed_positions: Callable[[Tensor], Tensor] = unchanged
    """x (S, B, H) -> the positions whose tokens this rank routes, (s, B, H)."""
    all_positions: Callable[[Tensor], Tensor] = unchanged
    """The inverse."""
    over_sequence: Callable[[Tensor], Tensor] = unchanged
    """Counts of this rank's part of each sequence -> those of the whole sequences."""
    enter: Callable[[str], None] = nothing
    """Called with a block's name (model/blocks.py) before its forward reads its parameters."""
    leave_block: Callable[[str, Tensor], Tensor] = same_output
    """Called with a block's name and its output after its forward."""
    later: WeightGradients | None = None
    """Where backward leaves the gradients of weights when it is split (weight_gradients.py)."""
