"""What data parallelism sends in a step, from the configuration alone: one all-reduce a bucket.

Sums have the message size of the gradients themselves, P b in all; padding there is none.
"""

from __future__ import annotations

import math
from collections import Counter

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.dp.buckets import assign_buckets
from stepscope.parallel_runtime.layout import EMBEDDING, shard_shape
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message
from stepscope.parallel_runtime.model.initial import stage_shapes


def step_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """Operations of one rank of `stage` over its replicas (grad_sync.gradient_view) in one step."""
    if parallel.dp * parallel.cp == 1 or parallel.zero:
        return Counter()
    item = ITEM_BYTES[train.dtype]
    buckets = assign_buckets(held_elements(model, parallel, stage), item, round(parallel.bucket_mb * 1e6))
    phase = "backward" if parallel.overlap else "other"
    return Counter(Message("dp", "all_reduce", phase, bucket.elements * item) for bucket in buckets)


def held_elements(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[int]:
    """Sizes of the parameters that one rank of `stage` holds, in order of use."""
    shapes = stage_shapes(model, parallel.layers_of(stage, model.layers), stage == 0, stage == parallel.pp - 1)
    if stage > 0 and EMBEDDING in shapes:
        shapes[EMBEDDING] = shapes.pop(EMBEDDING)  # the head's copy of a tied table comes last
    mesh = Mesh.of(parallel)
    return [math.prod(shard_shape(name, shape, mesh)) for name, shape in shapes.items()]
