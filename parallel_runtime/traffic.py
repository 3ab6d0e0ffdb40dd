"""All that a configuration sends in a step, from the configuration alone: the strategies' predictions, joined.

The rows that a run records must be exactly these, by axis, strategy, collective, phase and message size; a test compares
them, and an audit can put measured bytes beside them. What is not predicted here is no part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.cp import traffic as cp
from stepscope.parallel_runtime.dp import traffic as dp
from stepscope.parallel_runtime.ep import traffic as ep
from stepscope.parallel_runtime.grad_sync import experts_apart, gradient_view, is_router
from stepscope.parallel_runtime.layout import EMBEDDING, shard_shape
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import ITEM_BYTES, Message
from stepscope.parallel_runtime.model.initial import parameter_shapes
from stepscope.parallel_runtime.pp import traffic as pp
from stepscope.parallel_runtime.sp import traffic as sp
from stepscope.parallel_runtime.tp import traffic as tp
from stepscope.parallel_runtime.zero import traffic as zero

Prediction = Callable[[ModelConfig, ParallelConfig, TrainConfig, int], Counter[Message]]
"""(model, parallel, train, stage) -> operations of one rank of that stage in one step."""


class Row(NamedTuple):
    """One kind of operation of a step: the axis as the trace has it, then the message."""

    axis: str
    strategy: str
    collective: str
    phase: str
    bytes: int


def predictions(
    model: ModelConfig, parallel: ParallelConfig, place: int = 0, routing: ep.Routing | None = None
) -> Iterator[tuple[str, Prediction]]:
    """(mesh view, prediction) of each strategy that the layout uses: where a new one enters.

    `place`: that of the rank among those over which ZeRO cuts the model state, on which the size of its pieces depends.
    `routing`: rows that the rank exchanges with the experts (ep/traffic.py).
    """
    if parallel.zero:
        yield "shard", zero.step_traffic
        yield "replica", zero.copies_traffic
        if experts_apart(model, parallel):
            yield "edp_shard", partial(zero.step_traffic, experts=True)
            yield "edp_replica", partial(zero.copies_traffic, experts=True)
    elif experts_apart(model, parallel):
        yield gradient_view(parallel), partial(dp.step_traffic, experts=False)
        yield "edp", partial(dp.step_traffic, experts=True)
    else:
        yield gradient_view(parallel), dp.step_traffic
    if model.experts:
        assert routing is not None, "what experts exchange depends on the routing"
        yield "ep", partial(ep.exchange_traffic, routing=routing)
        yield "tp", ep.positions_traffic
        yield "tp", partial(_routers, place=place)
        yield "cp_tp", ep.sequence_traffic
        yield "dp_cp_tp", ep.load_traffic
    yield "cp", cp.step_traffic
    if parallel.tp > 1:
        yield "tp", partial(sp.step_traffic, place=place) if parallel.sp else tp.step_traffic
    yield "pp", pp.step_traffic
    yield "embedding", partial(_tied_embedding, place=place)
    yield "world" if model.experts else "holders" if parallel.zero else "pp_tp", _norm
    yield "dp_cp", _reported_loss


def step_traffic(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    stage: int,
    place: int = 0,
    routing: ep.Routing | None = None,
) -> Counter[Row]:
    """All operations of one rank of `stage` in one step; axes of one rank have none. `place`, `routing`: see
    `predictions`; a model with experts needs the latter."""
    mesh = Mesh.of(parallel)
    found: Counter[Row] = Counter()
    for view, predict in predictions(model, parallel, place, routing):
        for message, number in predict(model, parallel, train, stage).items():
            if mesh.size(view) > 1:
                found[Row(mesh.axis_of(view), *message)] += number
    return found


def _tied_embedding(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, place: int = 0
) -> Counter[Message]:
    """The sum of both stages' gradients of a tied embedding."""
    if not model.tied or parallel.pp == 1 or stage not in (0, parallel.pp - 1):
        return Counter()
    if parallel.zero:
        pieces = zero.stage_pieces(model, parallel, stage, place)
        held = sum(piece.elements for piece in pieces if piece.parameter == EMBEDDING)
        return Counter([Message("embedding", "all_reduce", "other", held * ITEM_BYTES[train.dtype])] if held else [])
    rows, columns = shard_shape(EMBEDDING, parameter_shapes(model)[EMBEDDING], Mesh.of(parallel))
    return Counter([Message("embedding", "all_reduce", "other", rows * columns * ITEM_BYTES[train.dtype])])


def _routers(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int, place: int = 0
) -> Counter[Message]:
    """Under tp without sp: the sum of the routers' gradients, each rank having scored its own positions."""
    if parallel.sp:
        return Counter()
    layers = len(ep.mixtures_of(model, parallel, stage))
    held = layers * model.experts * model.hidden
    if parallel.zero:
        held = sum(p.elements for p in zero.stage_pieces(model, parallel, stage, place) if is_router(p.parameter))
    return Counter([Message("ep", "all_reduce", "other", held * ITEM_BYTES[train.dtype])] if held else [])


def _norm(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """The global gradient norm: one number, at least in float32."""
    if train.clip == 0.0:
        return Counter()
    return Counter([Message("clip", "all_reduce", "other", max(4, ITEM_BYTES[train.dtype]))])


def _reported_loss(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, stage: int) -> Counter[Message]:
    """The loss that is printed: one number, at least in float32, on the ranks that end the model."""
    if stage != parallel.pp - 1:
        return Counter()
    return Counter([Message("loss", "all_reduce", "other", max(4, ITEM_BYTES[train.dtype]))])
