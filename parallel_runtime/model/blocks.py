"""Block marks: what the training thread does from here on belongs to this block.

Forward needs a plain call. For backward one hook on the block's output does: it fires when the output's gradient is
complete, just before the block's own backward runs; the next mark (the block below, or the executor's) ends it. No node
is added to the graph, no input needs a gradient, and shared or residual inputs do no harm.
"""

from __future__ import annotations

from torch import Tensor

from stepscope.parallel_runtime.model.seams import Seams
from stepscope.tracer.recorder import NullRecorder, Recorder


def begin_block(recorder: Recorder | NullRecorder, seams: Seams, name: str, layer: int = -1) -> None:
    """The block's forward starts here and ends at the next mark."""
    recorder.block(name, "forward", layer)
    seams.enter(name)


def end_block(output: Tensor, recorder: Recorder | NullRecorder, seams: Seams, name: str, layer: int = -1) -> Tensor:
    """`output`, whose gradient starts the block's backward: first its mark, then what the seam registers."""
    if output.requires_grad:
        output.register_hook(lambda gradient: recorder.block(name, "backward", layer))
    return seams.leave_block(name, output)
