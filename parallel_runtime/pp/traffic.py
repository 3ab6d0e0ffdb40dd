"""What the pipeline sends in a step, from the configuration alone: the boundary activation and its gradient.

Each microbatch crosses each boundary once in either direction, whatever the schedule: an interior stage sends 2 M B S H b,
the first and the last half of that (S: the positions that one rank holds between layers).
"""

from __future__ import annotations

from collections import Counter

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.layout import local_sequence
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message
from stepscope.parallel_runtime.pp.schedules import Place, destination_of, source_of


def step_traffic(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """Operations of one rank of `stage` over pp in one step."""
    tokens = local_sequence(model, parallel) * train.microbatch_size
    size = tokens * model.hidden * ITEM_BYTES[train.dtype]
    found: Counter[Message] = Counter()
    for chunk in range(parallel.chunks):
        for phase in ("forward", "backward"):
            for collective, end_of in (("send", destination_of), ("receive", source_of)):
                other = end_of(phase, Place(stage, chunk), parallel.pp, parallel.chunks)
                if other is not None and other.stage != stage:
                    found[Message("pp", collective, phase, size)] += train.microbatches
    return found
