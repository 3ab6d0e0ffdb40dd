"""What tensor parallelism with sequence parallelism sends in a step, from the configuration alone.

Each all-reduce of tp becomes an all-gather and a reduce-scatter of the same message size. Backward gathers the inputs of
the matrices cut by columns once more (they are kept in parts): two all-gathers a layer, one for the head; where the
gradients of weights come later, so do these.
"""

from __future__ import annotations

import math
from collections import Counter

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.layout import is_whole
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message
from stepscope.parallel_runtime.model.initial import stage_shapes
from stepscope.parallel_runtime.tp.traffic import sizes_of
from stepscope.parallel_runtime.zero.traffic import stage_pieces


def step_traffic(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, place: int = 0
) -> Counter[Message]:
    """Operations of one rank of `stage` over tp in one step; `place`: the rank's among those that ZeRO cuts over."""
    at = sizes_of(model, parallel, train, stage)
    found: Counter[Message] = Counter()

    def move(strategy: str, phase: str, gathers: int, scatters: int) -> None:
        for collective, times in (("all_gather", gathers), ("reduce_scatter", scatters)):
            if times:
                found[Message(strategy, collective, phase, at.activation)] += times * at.microbatches

    move("sp", "forward", at.sums, at.sums)
    move("sp", "backward", at.sums, at.sums)
    move("sp", parallel.gradient_phase, at.sums, 0)
    if parallel.recompute == "full":
        move("sp", "recompute", at.sums, at.sums)
    if at.first:
        move("embedding", "forward", 0, 1)
        move("embedding", "backward", 1, 0)
    if at.last:
        move("loss", "forward", 1, 0)
        move("loss", "backward", 0, 1)
        move("loss", parallel.gradient_phase, 1, 0)
        found[Message("loss", "all_reduce", "forward", at.number_a_token)] += 3 * at.microbatches
    summed = whole_bytes(model, parallel, train, stage, place)
    if summed:
        found[Message("sp", "all_reduce", "other", summed)] += 1
    return found


def whole_bytes(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, place: int = 0) -> int:
    """Bytes of the gradients that are summed over tp once a step: of what each rank of tp holds whole."""
    if parallel.zero:
        pieces = stage_pieces(model, parallel, stage, place)
        return ITEM_BYTES[train.dtype] * sum(piece.elements for piece in pieces if is_whole(piece.parameter))
    layers = parallel.layers_of(stage, model.layers)
    shapes = stage_shapes(model, layers, stage == 0, stage == parallel.pp - 1)
    return ITEM_BYTES[train.dtype] * sum(math.prod(shape) for name, shape in shapes.items() if is_whole(name))
