"""Whether a run can fit: the memory of its model state against what this machine has left.

Model state is what each rank holds all the time: parameters, gradients, optimizer state. Activations come on top, so what
does not fit by this estimate does not fit.
"""

from __future__ import annotations

import math
from pathlib import Path

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.model.initial import stage_shapes

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def state_bytes(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> int:
    """Bytes of model state of a rank of the fullest stage.

    An element takes w bytes as parameter and as gradient (w of `dtype`), and in the optimizer twice max(w, 4) for AdamW and
    max(w, 4) for the copy of a 16-bit one, or of one that is updated in the host's memory (`offload`). tp cuts matrices, ep
    the experts; zero cuts optimizer state (1), gradients too (2), parameters too (3) over the ranks that hold the same.
    """
    width = BYTES[train.dtype]
    copied = width < 4 or parallel.offload != "none"
    optimizer = max(width, 4) * ((2 if train.optimizer == "adamw" else 0) + copied)

    def element(shards: int) -> float:
        parts = ((width, 3), (width, 2), (optimizer, 1))
        return sum(size / (shards if parallel.zero >= level else 1) for size, level in parts)

    dense = element(parallel.dp * parallel.cp // parallel.replicate)
    expert = element(parallel.expert_data_parallel // parallel.replicate)
    fullest = 0.0
    for stage in range(parallel.pp):
        layers = parallel.layers_of(stage, model.layers)
        held = 0.0
        for name, shape in stage_shapes(model, layers, stage == 0, stage == parallel.pp - 1).items():
            elements = math.prod(shape)
            if ".experts." in name:
                held += elements / parallel.ep * expert
            else:
                whole = len(shape) == 1 or ".router." in name
                held += elements / (1 if whole else parallel.tp) * dense
        fullest = max(fullest, held)
    return math.ceil(fullest)


def available_bytes(device: str) -> int | None:
    """Memory that is free on this host, or all of the first GPU; None where the system does not say.

    What is free of a GPU cannot be asked without a context on it, of some hundred MB, that the asking process would keep.
    """
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def too_large(state: int, ranks: int, available: int | None, device: str) -> str | None:
    """Why `ranks` ranks of this host with `state` bytes each cannot run, None where they may fit.

    A GPU holds one rank; the host's memory holds them all.
    """
    needed = state if device == "cuda" else state * ranks
    if available is None or needed <= available:
        return None
    has = f"this GPU has {words(available)}"
    if device != "cuda":
        has = f"{ranks} ranks on this host that is {words(needed)}, and it has {words(available)} free"
    return (
        f"the model state alone takes {words(state)} a rank; {has}: plan with this layout, or take"
        " fewer --layers, a smaller --preset, or --force to try all the same"
    )


def words(size: int) -> str:
    """Bytes as a person reads them: 80.0 GB (10^9)."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} bytes"
