"""The seam of context parallelism: attention over a sequence of which each rank of cp holds some positions.

Everything else in the model works on each token alone. Rotary positions and dropout go by a token's place in the whole
sequence, which comes with the data (`data.local_batch`); gradients are summed by data parallelism, whose replicas are the
ranks of dp x cp (`grad_sync.gradient_view`).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.cp.gathered import GatheredAttention
from stepscope.parallel_runtime.cp.ring import RingAttention
from stepscope.parallel_runtime.cp.ulysses import GatherHeads, ScatterHeads
from stepscope.parallel_runtime.model.seams import Seams

STREAMS = {"ring": ("cp.kv", "cp.dkv"), "ulysses": ("cp",), "allgather": ("cp",)}
"""Mode -> the streams that it uses."""


def streams_of(parallel: ParallelConfig) -> tuple[str, ...]:
    """Streams that attention uses."""
    return STREAMS[parallel.cp_mode] if parallel.cp > 1 else ()


def seams(parallel: ParallelConfig, comm: Comm, base: Seams) -> Seams:
    """`base` with attention over the whole sequence; Ulysses calls the attention of `base` in the middle."""
    mode, layout = parallel.cp_mode, parallel.cp_layout

    def ring(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        return RingAttention.apply(comm, layout, q_BNSD, k_BKSD, v_BKSD)

    def allgather(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        return GatheredAttention.apply(comm, layout, q_BNSD, k_BKSD, v_BKSD)

    def ulysses(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        return GatherHeads.apply(comm, layout, base.attend(*ScatterHeads.apply(comm, layout, q_BNSD, k_BKSD, v_BKSD)))

    return replace(base, attend={"ring": ring, "ulysses": ulysses, "allgather": allgather}[mode])
