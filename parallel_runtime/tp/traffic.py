"""What tensor parallelism sends in a step, from the configuration alone: the runtime's rows must be exactly these.

The sums of a layer are those of the paper (2 forward and 2 backward a microbatch); the vocabulary-parallel embedding and
cross-entropy come on top and have their own strategies.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message


class Sizes(NamedTuple):
    """What one rank of a stage works on."""

    layers: int
    sums: int  # cut pairs of matrices, each of which ends in a sum over tp: attention, and a feed-forward part that is one
    microbatches: int
    activation: int  # bytes of one (S, B, H), whole over tp
    number_a_token: int  # bytes of (S, B) in the precision of the loss
    first: bool
    last: bool


def sizes_of(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Sizes:
    """The sizes of pipeline stage `stage`."""
    tokens = model.seq // parallel.cp * train.microbatch_size
    item = ITEM_BYTES[train.dtype]
    layers = parallel.layers_of(stage, model.layers)
    return Sizes(
        layers=len(layers),
        sums=sum(1 if model.has_experts(layer) else 2 for layer in layers),
        microbatches=train.microbatches,
        activation=tokens * model.hidden * item,
        number_a_token=tokens * max(item, 4),
        first=stage == 0,
        last=stage == parallel.pp - 1,
    )


def step_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """Operations of one rank of `stage` over tp in one step, without sp (sp/traffic.py)."""
    at = sizes_of(model, parallel, train, stage)
    found: Counter[Message] = Counter()

    def all_reduce(strategy: str, phase: str, times: int, size: int = at.activation) -> None:
        found[Message(strategy, "all_reduce", phase, size)] += times * at.microbatches

    for phase in ("forward", "backward", *(("recompute",) if parallel.recompute == "full" else ())):
        all_reduce("tp", phase, at.sums)
    if at.first:
        all_reduce("embedding", "forward", 1)
    if at.last:
        all_reduce("loss", "forward", 3, at.number_a_token)  # largest logit, sum of exponentials, logit of the target
        all_reduce("loss", "backward", 1)  # gradient of the head's input
    return found
