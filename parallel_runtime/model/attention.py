"""Causal attention and rotary positions, as functions.

Shapes: B batch, N query heads, K key and value heads (K divides N), S sequence, D features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position and pair of features, (S, D) each."""


def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Causal softmax(q k / sqrt(D)) v, (B, N, S, D): the one place that names the operation.

    Padding needs no mask: it stands at the end of a sequence, where no earlier token looks.
    """
    return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=True)


def rotation_of(positions_S: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Rotary angles (Su et al. 2021): position times theta^(-2i/D), for pairs (i, i + D/2); at least in float32."""
    dtype = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, head_size, 2, dtype=dtype, device=positions_S.device)
    angle_SD = torch.outer(positions_S.to(dtype), theta ** (-pair / head_size)).repeat(1, 2)
    return angle_SD.cos(), angle_SD.sin()


def rotate(x_BNSD: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of features by its position's angle."""
    cosine, sine = rotation
    x = x_BNSD.to(cosine.dtype)
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x_BNSD.dtype)
