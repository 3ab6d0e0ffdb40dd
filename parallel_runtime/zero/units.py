"""Which parameters travel together, and which part of them a rank keeps: pure arithmetic.

A *unit* is one block of the model: the embedding, a layer, the head. Its parameters lie one after the other in a flat
buffer, filled up with zeros to a multiple of the ranks, so that each rank's *shard* is one slice of equal size:

    | query.weight | key.weight | ... | down.weight |000|       n = 4
    |   shard 0   |   shard 1   |   shard 2   |   shard 3   |

A *piece* is what a shard holds of one parameter. Optimizer, gradient norm and reductions over other axes work on pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.layout import EMBEDDING

TABLE_BLOCK = "embedding"
HEAD_BLOCK = "head"


class FlatUnit(NamedTuple):
    """Parameters of one unit, by global name, and the first element of each in the flat buffer."""

    name: str
    parameters: tuple[str, ...]
    offsets: tuple[int, ...]
    elements: int  # without padding
    padded: int


class Piece(NamedTuple):
    """Elements [start, start + elements) of a shard are [first, first + elements) of the flattened parameter."""

    parameter: str
    start: int
    first: int
    elements: int


def unit_of(name: str) -> str:
    """The unit of a parameter, named as the block of the trace that uses it. The embedding table stands alone, so that a
    tied one is cut alike on both stages that hold it."""
    if name == EMBEDDING:
        return TABLE_BLOCK
    part = name.split(".")
    return f"layer.{part[1]}" if part[0] == "layers" else HEAD_BLOCK


def flat_units(elements: Mapping[str, int], ranks: int) -> tuple[FlatUnit, ...]:
    """Units of a stage's parameters (global name -> size, in order of use), padded for `ranks`."""
    names: dict[str, list[str]] = {}
    for name in elements:
        names.setdefault(unit_of(name), []).append(name)
    units = []
    for unit, parameters in names.items():
        offsets, total = [], 0
        for name in parameters:
            offsets.append(total)
            total += elements[name]
        units.append(FlatUnit(unit, tuple(parameters), tuple(offsets), total, -(-total // ranks) * ranks))
    return tuple(units)


def shard_range(padded: int, ranks: int, index: int) -> tuple[int, int]:
    """First element of a rank's shard and the one after its last."""
    assert padded % ranks == 0, f"{padded} elements were not padded for {ranks} ranks"
    size = padded // ranks
    return index * size, (index + 1) * size


def pieces_of(unit: FlatUnit, elements: Mapping[str, int], ranks: int, index: int) -> tuple[Piece, ...]:
    """What the shard of rank `index` holds of each parameter; a parameter outside it has no piece, padding neither."""
    begin, end = shard_range(unit.padded, ranks, index)
    pieces = []
    for name, offset in zip(unit.parameters, unit.offsets, strict=True):
        first, last = max(begin, offset), min(end, offset + elements[name])
        if first < last:
            pieces.append(Piece(name, first - begin, first - offset, last - first))
    return tuple(pieces)


# -- which block uses which unit ---------------------------------------------------------------------------------------


class Use(NamedTuple):
    """A block of the model and the units that it reads, in order."""

    block: str
    units: tuple[str, ...]


def uses_of(layers: Iterable[int], first: bool, last: bool, tied: bool) -> tuple[Use, ...]:
    """Blocks of a stage in the order of forward. A tied head reads the table, which a stage of its own may use twice."""
    uses = [Use(TABLE_BLOCK, (TABLE_BLOCK,))] if first else []
    uses += [Use(f"layer.{layer}", (f"layer.{layer}",)) for layer in layers]
    if last:
        uses.append(Use(HEAD_BLOCK, (HEAD_BLOCK, *((TABLE_BLOCK,) if tied else ()))))
    return tuple(uses)


def stage_uses(model: ModelConfig, parallel: ParallelConfig, stage: int) -> tuple[tuple[Use, ...], ...]:
    """The same for each chunk of pipeline stage `stage`."""
    last = (parallel.pp - 1, parallel.chunks - 1)
    return tuple(
        uses_of(
            parallel.chunk_layers(stage, chunk, model.layers),
            (stage, chunk) == (0, 0),
            (stage, chunk) == last,
            model.tied,
        )
        for chunk in range(parallel.chunks)
    )


def gathers(chunks: Sequence[Sequence[Use]], passes: Iterable[tuple[int, str]], reshard: bool) -> list[tuple[str, str]]:
    """(phase, unit) of every gather of a stage that runs these passes, one after the other: (chunk, phase) of each.

    A unit is gathered when a block needs it and it is not there; forward lets it go after its block (`reshard`), what comes
    last (backward, or the weights' gradients where they come later) once its gradients are complete, which is when its
    first user has run.
    """
    passes = list(passes)
    split = any(phase == "weight_grad" for _, phase in passes)
    present: set[str] = set()
    found = []
    for chunk, phase in passes:
        uses = chunks[chunk]
        if phase == "weight_grad":
            present -= {unit for use in uses for unit in use.units}
            continue
        order = uses if phase == "forward" else uses[::-1]
        for number, (_, units) in enumerate(order):
            for unit in units:
                if unit not in present:
                    present.add(unit)
                    found.append((phase, unit))
            still = {unit for use in order[number + 1 :] for unit in use.units}
            if phase == "backward" and not split:
                present -= {unit for unit in units if unit not in still}
            elif phase == "forward" and reshard:
                present -= set(units)
    return found
