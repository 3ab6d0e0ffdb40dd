"""What only the three configurations together show: layouts that do not fit the model, sizes that follow from both."""

from __future__ import annotations

from dataclasses import asdict
from math import gcd
from typing import Any

from stepscope.parallel_runtime.config.model import ModelConfig
from stepscope.parallel_runtime.config.parallel import CP_LAYOUTS, ParallelConfig, check_microbatches
from stepscope.parallel_runtime.config.train import TrainConfig


def global_batch(parallel: ParallelConfig, train: TrainConfig) -> int:
    """Sequences of one step over all ranks: microbatch size x microbatches x dp."""
    return train.microbatch_size * train.microbatches * parallel.dp


def check_global_batch(wanted: int | None, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Refuse a global batch that the layout does not give; None asks for nothing."""
    found = global_batch(parallel, train)
    if wanted is None or wanted == found:
        return
    each = train.microbatch_size * parallel.dp
    microbatches = max(1, round(wanted / each))
    raise ValueError(
        f"global batch {wanted} is not microbatch size {train.microbatch_size} x microbatches {train.microbatches}"
        f" x dp {parallel.dp} = {found}: take microbatches {microbatches}, which gives {microbatches * each}"
    )


def check(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Refuse what only the three together show to be illegal."""
    _check_pipeline(model, parallel, train)
    _check_tensor_parallel(model, parallel)
    _check_context_parallel(model, parallel)
    _check_expert_parallel(model, parallel)
    for name in ("slow_rank", "late_rank"):
        rank = getattr(train, name)
        if rank >= parallel.world_size:
            last = parallel.world_size - 1
            raise ValueError(f"{name} {rank} is not among the {parallel.world_size} ranks: take 0 to {last}")
    if any(not 0 <= rank < parallel.world_size for rank in train.slow_link):
        ends = "-".join(map(str, train.slow_link))
        raise ValueError(
            f"slow_link {ends} does not lie among the {parallel.world_size} ranks: take 0 to {parallel.world_size - 1}"
        )


def _check_pipeline(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Every chunk has a layer, and the schedule can group the microbatches."""
    check_microbatches(parallel.schedule, parallel.pp, train.microbatches)
    if parallel.pp > model.layers:
        raise ValueError(
            f"pp {parallel.pp} stages need a layer each, the model has {model.layers}: take pp {model.layers}"
        )
    places = parallel.pp * parallel.chunks
    if places > model.layers:
        raise ValueError(
            f"pp {parallel.pp} x chunks {parallel.chunks} = {places} parts need a layer each, the model has"
            f" {model.layers}: take chunks {model.layers // parallel.pp}, or layers {places}"
        )
    if parallel.split and sum(parallel.split) != model.layers:
        others = parallel.split[:-1]
        left = max(1, model.layers - sum(others))
        nearest = f"take split {(*others, left)}" if sum(others) + left == model.layers else "leave split out"
        raise ValueError(
            f"split {parallel.split} has {sum(parallel.split)} layers, the model has {model.layers}: {nearest}"
        )


def _check_tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """tp cuts the heads (query, key and value), the feed-forward width and the vocabulary; sp the sequence."""
    cut = {name: getattr(model, name) for name in ("kv_heads", "ffn", "vocab")}  # heads is a multiple of kv_heads
    for name, size in cut.items():
        if size % parallel.tp:
            common = gcd(*cut.values())
            legal = [n for n in range(1, common + 1) if common % n == 0]
            nearest = min(legal, key=lambda n: (abs(n - parallel.tp), n))
            raise ValueError(f"tp {parallel.tp} must divide {name} {size}: take tp {nearest}")
    pieces = parallel.cp * (parallel.tp if parallel.sp else 1)
    if parallel.sp and model.seq % pieces:
        longer = -(-model.seq // pieces) * pieces
        raise ValueError(f"sp cuts sequences of {model.seq} tokens into {pieces} equal parts: take seq {longer}")


def _check_context_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """cp cuts the sequence into equal pieces; ulysses cuts the heads as well, in the middle of attention."""
    if parallel.cp == 1:
        return
    each = CP_LAYOUTS[parallel.cp_layout]
    pieces = each * parallel.cp
    if model.seq % pieces:
        longer = -(-model.seq // pieces) * pieces
        fewer = [n for n in range(2, parallel.cp) if model.seq % (each * n) == 0]
        other = "contiguous" if each > 1 and model.seq % parallel.cp == 0 else ""
        ways = [f"seq {longer}", *(f"cp {n}" for n in fewer[-1:]), *(f"cp_layout {name}" for name in [other] if name)]
        raise ValueError(
            f"cp {parallel.cp} with the {parallel.cp_layout} layout cuts a sequence into {pieces} equal pieces, and seq"
            f" is {model.seq}: take {' or '.join(ways)}"
        )
    heads = model.kv_heads // parallel.tp  # query heads are a multiple
    if parallel.cp_mode == "ulysses" and heads % parallel.cp:
        legal = [n for n in range(1, heads + 1) if heads % n == 0 and model.seq % (each * n) == 0]
        nearest = min(legal, key=lambda n: (abs(n - parallel.cp), n))
        held = f"kv_heads {model.kv_heads}" + (f" / tp {parallel.tp} = {heads}" if parallel.tp > 1 else "")
        raise ValueError(f"cp {parallel.cp} in mode ulysses must divide {held}: take cp {nearest}, or cp_mode ring")


def _check_expert_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """ep cuts the experts over the ranks of a stage; each rank routes equal parts of the positions."""
    if not model.experts:
        if parallel.ep > 1:
            raise ValueError(
                f"ep {parallel.ep} cuts the experts, and the model has none: take ep 1, or experts {4 * parallel.ep}"
            )
        return
    if parallel.replicate > 1 and parallel.ep * parallel.tp > 1:
        raise ValueError(
            f"replicate {parallel.replicate} copies the state over dp, but that of experts lies across dp x cp x tp: take"
            " replicate 1"
        )
    ranks = parallel.dp * parallel.cp * parallel.tp
    legal = [n for n in range(1, ranks + 1) if ranks % n == 0 and model.experts % n == 0]
    if parallel.ep not in legal:
        nearest = min(legal, key=lambda n: (abs(n - parallel.ep), n))
        raise ValueError(
            f"ep {parallel.ep} must divide experts {model.experts} and dp x cp x tp = {ranks}, the ranks of one stage:"
            f" take ep {nearest}"
        )
    pieces = parallel.cp * parallel.tp
    if model.seq % pieces:
        longer = -(-model.seq // pieces) * pieces
        raise ValueError(
            f"each of {pieces} ranks of cp x tp routes an equal part of the {model.seq} tokens of a sequence: take seq"
            f" {longer}"
        )


def as_dictionaries(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The three as plain dictionaries, as run.json holds them (global batch and world size included)."""
    return (
        asdict(model),
        {**asdict(parallel), "world_size": parallel.world_size},
        {**asdict(train), "global_batch": global_batch(parallel, train)},
    )
