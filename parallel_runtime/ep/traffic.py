"""What expert parallelism sends in a step: from the configuration where routing is planned, else from recorded counts.

T tokens that a rank routes in a microbatch, K experts of each, H hidden, E experts, b bytes an element, n ranks of ep;
R_i = rows that rank i receives in this microbatch, T K if routing is even (and nothing is dropped). For each layer with
experts and each microbatch, rank i:

    forward     all-to-all of counts 8 E,  dispatch T K H b,  combine R_i H b       sends (n - 1)/n of each, if even
    backward                               T K H b,           R_i H b
    tp, no sp   1 all-gather forward, 1 backward of the whole (S, B, H)
    aux         1 all-reduce of 8 B E over cp x tp, where these hold parts of a sequence
    bias        once a step: 1 all-reduce of 8 E a layer over the ranks of the stage

Full recomputation does the forward again. The busiest rank decides how long an exchange takes: max R_i, not the mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.ep.planned import received_of, sent_of, tokens_of
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message

COUNT_BYTES = 8  # int64


class Rows(NamedTuple):
    """Rows that one rank sends to the experts, and that its own experts receive, in one microbatch of one layer."""

    sent: int
    received: int


Routing = Callable[[int, int], Rows]
"""(layer, microbatch) -> rows."""


def planned_routing(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, index: int) -> Routing:
    """The rows of rank `index` of ep when all tokens follow the plan: the same for every layer and microbatch."""
    sent = sent_of(model, tokens_of(model, parallel, train))
    rows = Rows(sum(sent), sum(received_of(sent, parallel.ep, index)))
    return lambda layer, microbatch: rows


def mixtures_of(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[int]:
    """Layers of a stage that have experts."""
    return [layer for layer in parallel.layers_of(stage, model.layers) if model.has_experts(layer)]


def exchange_traffic(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, routing: Routing
) -> Counter[Message]:
    """Operations of one rank of `stage` over ep in one step."""
    row, found = model.hidden * ITEM_BYTES[train.dtype], Counter[Message]()
    for layer in mixtures_of(model, parallel, stage):
        for microbatch in range(train.microbatches):
            rows = routing(layer, microbatch)
            for phase in (*_forwards(parallel), "backward"):
                if phase != "backward":
                    found[Message("ep", "all_to_all", phase, model.experts * COUNT_BYTES)] += 1
                for number in rows:
                    found[Message("ep", "all_to_all", phase, number * row)] += 1
    return found


def positions_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """The same over tp, whose ranks hold the same tokens unless sp cuts them: results made whole, routers summed."""
    layers, found = len(mixtures_of(model, parallel, stage)), Counter[Message]()
    if parallel.sp or not layers:
        return found
    item = ITEM_BYTES[train.dtype]
    whole = model.seq // parallel.cp * train.microbatch_size * model.hidden * item
    for phase in (*_forwards(parallel), "backward"):
        found[Message("ep", "all_gather", phase, whole)] += layers * train.microbatches
    return found


def sequence_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """The same over cp x tp: choices in whole sequences, for the auxiliary loss."""
    layers, found = len(mixtures_of(model, parallel, stage)), Counter[Message]()
    if model.balance == "aux" and layers:
        for phase in _forwards(parallel):
            size = train.microbatch_size * model.experts * COUNT_BYTES
            found[Message("ep", "all_reduce", phase, size)] += layers * train.microbatches
    return found


def load_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """The same over all ranks of the stage: tokens of each expert, by which offsets move."""
    layers = len(mixtures_of(model, parallel, stage))
    if model.balance != "bias" or not layers:
        return Counter()
    return Counter([Message("ep", "all_reduce", "other", layers * model.experts * COUNT_BYTES)])


def combined_bytes(taken: Mapping[tuple[int, int], int], model: ModelConfig, train: TrainConfig) -> int:
    """Message bytes of a rank's combines in the forward passes of a step, from its counter `tokens_per_expert`.

    `taken`: (layer, expert) -> tokens. Dispatches need no counter: T K H b each, where none is dropped.
    """
    return sum(taken.values()) * model.hidden * ITEM_BYTES[train.dtype]


def _forwards(parallel: ParallelConfig) -> tuple[str, ...]:
    return ("forward", "recompute") if parallel.recompute == "full" else ("forward",)
