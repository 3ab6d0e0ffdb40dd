"""What data parallelism sends in a step, from the configuration alone: one all-reduce a bucket.

Sums have the message size of the gradients themselves, P b in all; padding there is none.
"""

from __future__ import annotations

import math
from collections import Counter

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.dp.buckets import assign_buckets
from stepscope.parallel_runtime.layout import EMBEDDING, of_experts, shard_shape
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message
from stepscope.parallel_runtime.model.initial import stage_shapes


def step_traffic(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, experts: bool | None = None
) -> Counter[Message]:
    """Operations of one rank of `stage` over its replicas (grad_sync.gradient_view) in one step.

    `experts`: those for the gradients of experts only (over edp), or of everything else; None: of all parameters.
    """
    if parallel.zero or (parallel.dp * parallel.cp == 1 and not experts):
        return Counter()
    item = ITEM_BYTES[train.dtype]
    elements = held_elements(model, parallel, stage, experts)
    buckets = assign_buckets(elements, item, round(parallel.bucket_mb * 1e6)) if elements else []
    phase = parallel.gradient_phase if parallel.overlap else "other"
    return Counter(Message("dp", "all_reduce", phase, bucket.elements * item) for bucket in buckets)


def held_elements(model: ModelConfig, parallel: ParallelConfig, stage: int, experts: bool | None = None) -> list[int]:
    """Sizes of the parameters that one rank of `stage` holds, in order of use; `experts`: see `step_traffic`."""
    shapes = stage_shapes(model, parallel.layers_of(stage, model.layers), stage == 0, stage == parallel.pp - 1)
    if stage > 0 and EMBEDDING in shapes:
        shapes[EMBEDDING] = shapes.pop(EMBEDDING)  # the head's copy of a tied table comes last
    mesh = Mesh.of(parallel)
    chosen = [name for name in shapes if experts is None or of_experts(name) == experts]
    return [math.prod(shard_shape(name, shapes[name], mesh)) for name in chosen]
