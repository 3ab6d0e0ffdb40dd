"""What is trained, on how many ranks, and how long: three frozen, validated dataclasses and some presets.

Every field is checked when the dataclass is made (model.py, parallel.py, train.py); `check` looks at the three together
(together.py). A message says which value is wrong and names the nearest legal choice. Nothing here imports torch.
"""

from __future__ import annotations

from stepscope.parallel_runtime.config.model import ACTIVATIONS, BALANCE, NORMS, ROUTERS, ModelConfig
from stepscope.parallel_runtime.config.parallel import (
    CP_LAYOUTS,
    CP_MODES,
    OFFLOAD,
    RECOMPUTE,
    SCHEDULES,
    ParallelConfig,
    check_chunks,
    check_microbatches,
)
from stepscope.parallel_runtime.config.presets import PRESETS, Preset, preset
from stepscope.parallel_runtime.config.together import as_dictionaries, check, check_global_batch, global_batch
from stepscope.parallel_runtime.config.train import DTYPES, OPTIMIZERS, TrainConfig

__all__ = [
    "ACTIVATIONS",
    "BALANCE",
    "CP_LAYOUTS",
    "CP_MODES",
    "DTYPES",
    "NORMS",
    "OFFLOAD",
    "OPTIMIZERS",
    "PRESETS",
    "RECOMPUTE",
    "ROUTERS",
    "SCHEDULES",
    "ModelConfig",
    "ParallelConfig",
    "Preset",
    "TrainConfig",
    "as_dictionaries",
    "check",
    "check_chunks",
    "check_global_batch",
    "check_microbatches",
    "global_batch",
    "preset",
]
