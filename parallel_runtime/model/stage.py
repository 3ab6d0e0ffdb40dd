"""One slice of the model: some layers, the embedding in front of the first, head and loss behind the last.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.config import ModelConfig
from stepscope.parallel_runtime.data import Microbatch
from stepscope.parallel_runtime.model.attention import Rotation, rotation_of
from stepscope.parallel_runtime.model.blocks import begin_block, end_block
from stepscope.parallel_runtime.model.dropout import dropout, token_keys
from stepscope.parallel_runtime.model.layers import Layer, Norm, Table
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.tracer.recorder import NullRecorder, Recorder


class Stage(nn.Module):
    """`layers` (their global numbers) of the model; `named_parameters` gives global names, in order of use.

    A tied embedding that is used on two stages exists on both, under one name: whoever composes the stages must sum the
    two gradients, and equal initial values and updates keep the copies equal.
    """

    def __init__(
        self,
        config: ModelConfig,
        recorder: Recorder | NullRecorder,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        seams: Seams | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        recompute: str = "none",
        seed: int = 0,
        loss_scale: float = 1.0,
    ) -> None:
        """`layers` None: all of them. Parameters are left uninitialised: see `initial.initialise`. `seed`: of dropout;
        `loss_scale`: of auxiliary losses (mixture.Mixture)."""
        super().__init__()
        seams = seams or Seams()
        self.config, self.recorder, self.seams = config, recorder, seams
        self.first, self.last, self.dtype, self.seed = first, last, dtype, seed
        self._rotated: tuple[Tensor, Rotation] | None = None
        numbers = range(config.layers) if layers is None else layers
        rows = config.vocab // seams.tensor_parallel
        if first:
            self.embedding = Table(rows, config.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(config, recorder, i, seams, recompute, loss_scale, dtype=dtype, device=device)
                for i in numbers
            }
        )
        if last:
            self.norm = Norm(config, dtype=dtype, device=device)
            if not config.tied:
                self.head = Table(rows, config.hidden, dtype=dtype, device=device)
            elif not first:
                self.embedding = Table(rows, config.hidden, dtype=dtype, device=device)

    def forward(self, x_SBH: Tensor | None, microbatch: Microbatch, valid_tokens: int | Tensor) -> Tensor:
        """Boundary activation (S, B, H), or on the last slice the microbatch's part of the loss.

        The loss is the sum over this microbatch's valid tokens divided by `valid_tokens`, the number in the whole
        global batch: so parts of all microbatches and ranks only ever add up, however unequal their token counts are.
        """
        rotation = self._rotation(microbatch.positions_S)
        keys = token_keys(self.seams.own_tokens(microbatch.numbers_SB), self.seed) if self.config.dropout else None
        x = self._embed(microbatch.tokens_SB, keys) if self.first else x_SBH
        assert x is not None, "only the first slice makes its own input"
        for layer in self.layers.values():
            x = layer(x, rotation, keys)
        return self._loss(x, microbatch.targets_SB, valid_tokens) if self.last else x

    def _rotation(self, positions_S: Tensor) -> Rotation:
        """Rotary angles, computed once for the microbatches of a step, which share one tensor of positions."""
        if self._rotated is None or self._rotated[0] is not positions_S:
            angles = rotation_of(positions_S, self.config.head_size, self.config.rope_theta, self.dtype)
            self._rotated = (positions_S, angles)
        return self._rotated[1]

    def _embed(self, tokens_SB: Tensor, keys_SB: Tensor | None) -> Tensor:
        begin_block(self.recorder, self.seams, "embedding")
        x = self.seams.embed(tokens_SB, self.embedding.weight)
        x = dropout(x, keys_SB, "embedding", self.config.dropout)
        return end_block(x, self.recorder, self.seams, "embedding")

    def _loss(self, x_SBH: Tensor, targets_SB: Tensor, valid_tokens: int | Tensor) -> Tensor:
        begin_block(self.recorder, self.seams, "head")
        weight = self.embedding.weight if self.config.tied else self.head.weight
        loss = self.seams.summed_loss(self.norm(x_SBH), weight, targets_SB) / valid_tokens
        return end_block(loss, self.recorder, self.seams, "head")
