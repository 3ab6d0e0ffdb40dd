"""What context parallelism sends in a step, from the configuration alone: the runtime's rows must be exactly these.

N ranks of cp, B sequences of S tokens in a microbatch, b bytes an element; H and h the widths of the query heads and of
the key and value heads that one rank of tp holds. For each layer and microbatch:

    mode       forward                                backward                                bytes sent by a rank
    ring       N - 1 hops of 2 B (S/N) h b            N - 1 of KV, N of dKV, of the same      2 (3N - 2)/N B S h b
    ulysses    all-to-alls of q, k, v, and the output the same                                2 (N - 1)/N B (S/N) (2 H + 2 h) b
    allgather  1 all-gather of 2 B S h b              1 again, 1 reduce-scatter of the same   3 (N - 1)/N 2 B S h b

Recomputation, selective or full, does the forward again within backward. Gradients are summed over cp by data parallelism.
"""

from __future__ import annotations

from collections import Counter

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message


def step_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """Operations of one rank of `stage` over cp in one step, for attention."""
    found: Counter[Message] = Counter()
    if parallel.cp == 1:
        return found
    times = len(parallel.layers_of(stage, model.layers)) * train.microbatches
    phases = ("forward", "recompute", "backward") if parallel.recompute != "none" else ("forward", "backward")
    for phase in phases:
        for collective, size, number in _of_attention(model, parallel, train, phase == "backward"):
            found[Message("cp", collective, phase, size)] += number * times
    return found


def _of_attention(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, backward: bool
) -> list[tuple[str, int, int]]:
    """(collective, message bytes, number) of one layer and microbatch."""
    ranks = parallel.cp
    tokens = train.microbatch_size * model.seq // ranks * ITEM_BYTES[train.dtype]  # bytes of one feature of a shard
    queries, keys = (heads // parallel.tp * model.head_size * tokens for heads in (model.heads, model.kv_heads))
    if parallel.cp_mode == "ring":
        return [("ring_shift", 2 * keys, (ranks - 1) + (ranks if backward else 0))]
    if parallel.cp_mode == "ulysses":
        return [("all_to_all", queries, 2), ("all_to_all", keys, 2)]  # q and the output; k and v
    gather = [("all_gather", 2 * keys * ranks, 1)]
    return [*gather, ("reduce_scatter", 2 * keys * ranks, 1)] if backward else gather
