"""What ZeRO sends in a step, from the configuration alone: the runtime's rows must be exactly these.

N ranks over which the state is cut, P parameters of the rank's stage with padding, b bytes each, M microbatches:

    zero 1              P b reduce-scattered once, P b all-gathered once                    2 (N - 1)/N P b sent by a rank
    zero 2              P b reduce-scattered in each microbatch, P b all-gathered once      (M + 1) (N - 1)/N P b
    zero 3              in each microbatch P b all-gathered twice and reduce-scattered      3 M (N - 1)/N P b
    zero 3, no reshard  gathered once a microbatch, or less: while a later microbatch is in flight, it is there

With R copies of the cut state, each shard of P/N elements is all-reduced over them once a step.
"""

from __future__ import annotations

import math
from collections import Counter

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.grad_sync import experts_apart
from stepscope.parallel_runtime.layout import of_experts, shard_shape
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message
from stepscope.parallel_runtime.model.initial import parameter_shapes, stage_shapes
from stepscope.parallel_runtime.pp.validator import plan
from stepscope.parallel_runtime.zero.units import FlatUnit, Piece, flat_units, gathers, pieces_of, stage_uses


def step_traffic(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, experts: bool = False
) -> Counter[Message]:
    """Operations of one rank of `stage` over the ranks that its state is cut over, in one step; `experts`: the state of
    experts, where it is cut over other ranks than all else."""
    strategy, item = f"zero{parallel.zero}", ITEM_BYTES[train.dtype]
    sizes = {unit.name: unit.padded * item for unit in stage_units(model, parallel, stage, experts)}
    found: Counter[Message] = Counter()
    times = train.microbatches if parallel.zero > 1 else 1
    phase = "other" if parallel.zero == 1 and not parallel.overlap else parallel.gradient_phase
    for size in sizes.values():
        found[Message(strategy, "reduce_scatter", phase, size)] += times
        if parallel.zero < 3:
            found[Message(strategy, "all_gather", "optimizer", size)] += 1
    if parallel.zero == 3:
        table = plan(parallel.schedule, parallel.pp, train.microbatches, parallel.chunks)[stage]
        passes = [(action.chunk, action.phase) for action in table if action.kind == "compute"]
        for gathered_in, unit in gathers(stage_uses(model, parallel, stage), passes, parallel.reshard):
            if unit in sizes:
                found[Message(strategy, "all_gather", gathered_in, sizes[unit])] += 1
    return found


def copies_traffic(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, experts: bool = False
) -> Counter[Message]:
    """Operations of one rank of `stage` over the copies of its shards, in one step; `experts`: see `step_traffic`.

    A shard follows its own reduction; the last one (all of them under ZeRO-1) is waited for when backward is over.
    """
    if parallel.replicate == 1:
        return Counter()
    found: Counter[Message] = Counter()
    units = stage_units(model, parallel, stage, experts)
    names = {unit.name for unit in units}
    used = (name for chunk in stage_uses(model, parallel, stage) for use in chunk for name in use.units)
    first = next((name for name in used if name in names), "")  # forward's first is backward's last
    for unit in units:
        size = unit.padded // Mesh.of(parallel).size("edp_shard" if experts else "shard") * ITEM_BYTES[train.dtype]
        late = parallel.zero == 1 or (parallel.overlap and unit.name == first)
        found[Message(f"zero{parallel.zero}", "all_reduce", "other" if late else parallel.gradient_phase, size)] += 1
    return found


def stage_elements(model: ModelConfig, parallel: ParallelConfig, stage: int, experts: bool = False) -> dict[str, int]:
    """Global name -> size of the parameters that one rank of `stage` cuts together, in order of use: those of experts, or
    all else (where nothing sets experts apart, all of them)."""
    apart = experts_apart(model, parallel)
    mesh = Mesh.of(parallel)
    here = stage_shapes(model, parallel.layers_of(stage, model.layers), stage == 0, stage == parallel.pp - 1)
    return {
        name: math.prod(shard_shape(name, shape, mesh))
        for name, shape in parameter_shapes(model).items()
        if name in here and (of_experts(name) == experts or not apart)
    }


def stage_units(
    model: ModelConfig, parallel: ParallelConfig, stage: int, experts: bool = False
) -> tuple[FlatUnit, ...]:
    """Units of one rank of `stage`; `experts`: see `stage_elements`."""
    ranks = Mesh.of(parallel).size("edp_shard" if experts else "shard")
    return flat_units(stage_elements(model, parallel, stage, experts), ranks)


def stage_pieces(model: ModelConfig, parallel: ParallelConfig, stage: int, place: int) -> list[Piece]:
    """What a rank of `stage` keeps that is at `place` among the ranks that its state is cut over; experts apart are not
    among it."""
    elements, ranks = stage_elements(model, parallel, stage), Mesh.of(parallel).size("shard")
    return [piece for unit in flat_units(elements, ranks) for piece in pieces_of(unit, elements, ranks, place)]
