"""What each strategy sends in a step, as theory predicts it from the configuration alone.

    bytes sent by a rank of N:   all-reduce 2 (N-1)/N S;  all-gather, reduce-scatter, all-to-all (N-1)/N S;  send S

with S the message size (trace_format.md). Formulas: definitions.md, Volumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from stepscope.analysis.causes.setup import HEAD, TABLE, Setup, blocks, padded, replicated
from stepscope.tracer.schema import ActionMeta

COUNT_BYTES = 8  # a number of tokens


class Flow(NamedTuple):
    """What one rank does in a step for one reason: operations (None: not predicted) and their message bytes in all.

    `each` is False where ranks differ, so that only the mean over all ranks of the stage is predicted.
    """

    strategy: str
    collective: str
    ranks: int
    operations: int | None
    bytes: Fraction | int | None
    each: bool = True


def sent_share(collective: str, ranks: int) -> Fraction | None:
    """Bytes that a rank sends / message size; None for operations whose share depends on the root."""
    if ranks < 1:
        return None
    if collective == "all_reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return Fraction(ranks - 1, ranks)
    return {"send": Fraction(1), "ring_shift": Fraction(1), "receive": Fraction(0)}.get(collective)


def predicted(setup: Setup, stage: int, table: Iterable[ActionMeta] = (), taken: Fraction | None = None) -> list[Flow]:
    """All communication of one rank of `stage` in one step. `table`: the rank's planned pipeline actions (ZeRO-3).

    `taken`: tokens that all experts of the stage took in a step, as recorded: needed where experts may drop some.
    """
    found = [
        *(_zero(setup, stage, table) if setup.zero else _data(setup, stage)),
        *_tensor(setup, stage),
        *_pipeline(setup, stage),
        *_context(setup, stage),
        *_experts(setup, stage, taken),
        *_small(setup, stage),
    ]
    return [flow for flow in found if flow.ranks > 1 and (flow.operations is None or flow.operations > 0)]


def _data(setup: Setup, stage: int) -> list[Flow]:
    """DP: P b in all, in buckets whose number is the program's business. Gradients of experts go over edp."""
    parts = [(ranks, sum(elements.values())) for ranks, elements in replicated(setup, stage)]
    return [Flow("dp", "all_reduce", ranks, None, elements * setup.item) for ranks, elements in parts if elements]


def _zero(setup: Setup, stage: int, table: Iterable[ActionMeta]) -> list[Flow]:
    """ZeRO: a reduce-scatter a unit (ZeRO-2, 3: in each microbatch), an all-gather a unit, or by use under ZeRO-3.
    Experts apart have units of their own, over edp."""
    strategy = f"zero{setup.zero}"
    times = setup.microbatches if setup.zero > 1 else 1
    gathered = _gathers(setup, stage, list(table)) if setup.zero == 3 else None
    found: list[Flow] = []
    for ranks, elements in replicated(setup, stage):
        sizes = {name: padded(number, ranks) * setup.item for name, number in elements.items()}
        whole = sum(sizes.values())
        found.append(Flow(strategy, "reduce_scatter", ranks, len(sizes) * times, whole * times))
        if setup.zero < 3:
            found.append(Flow(strategy, "all_gather", ranks, len(sizes), whole))
        elif gathered is None:
            found.append(Flow(strategy, "all_gather", ranks, None, None))
        else:
            used = [sizes[name] for name in gathered if name in sizes]
            found.append(Flow(strategy, "all_gather", ranks, len(used), sum(used)))
        copies = sum(size // ranks for size in sizes.values())
        found.append(Flow(strategy, "all_reduce", setup.replicate, len(sizes), copies))
    return found


def _gathers(setup: Setup, stage: int, table: list[ActionMeta]) -> list[str] | None:
    """Units that ZeRO-3 gathers in a step: when a block needs one that is not there. None without a planned table.

    With reshard forward lets a unit go; what comes last (backward, or the weights' gradients) does so in any case.
    """
    if not table:
        return None
    last = "weight_grad" if any(action.phase == "weight_grad" for action in table) else "backward"
    present: set[str] = set()
    found: list[str] = []
    for action in table:
        uses = _uses(setup, stage, max(action.chunk, 0))
        order = uses if action.phase == "forward" else uses[::-1]
        for number, units in enumerate(order):
            if action.phase != "weight_grad":
                found += [unit for unit in units if unit not in present]
                present |= set(units)
            later = {unit for others in order[number + 1 :] for unit in others}
            if action.phase == "forward" and setup.reshard:
                present -= set(units)
            elif action.phase == last:
                present -= set(units) - later
    return found


def _uses(setup: Setup, stage: int, chunk: int) -> list[tuple[str, ...]]:
    """Units that each block of a chunk reads, in forward's order; a tied head reads the table."""
    uses: list[tuple[str, ...]] = [(TABLE,)] if (stage, chunk) == (0, 0) else []
    uses += [(f"layer.{layer}",) for layer in setup.chunk_layers(stage, chunk)]
    if (stage, chunk) == (setup.pp - 1, setup.chunks - 1):
        uses.append((HEAD, TABLE) if setup.tied else (HEAD,))
    return uses


def _tensor(setup: Setup, stage: int) -> list[Flow]:
    """TP: 2 all-reduces forward and 2 backward a layer and microbatch (1 where experts follow); SP: each becomes an
    all-gather and a reduce-scatter, and backward gathers once more. Embedding and loss come on top."""
    layers = setup.layers_of(stage)
    sums = sum(1 if setup.has_experts(layer) else 2 for layer in layers) * setup.microbatches
    micro, tokens = setup.microbatches, setup.seq // setup.cp * setup.microbatch_size
    size = tokens * setup.hidden * setup.item
    first, last = int(stage == 0) * micro, int(stage == setup.pp - 1) * micro
    logits = Flow("loss", "all_reduce", setup.tp, 3 * last, 3 * last * tokens * max(setup.item, 4))

    def move(strategy: str, collective: str, times: int) -> Flow:
        return Flow(strategy, collective, setup.tp, times, times * size)

    if not setup.sp:
        more = [move("embedding", "all_reduce", first), move("loss", "all_reduce", last)]
        return [move("tp", "all_reduce", sums * (setup.passes + 1)), *more, logits]
    found = [
        move("sp", "all_gather", sums * (setup.passes + 2)),
        move("sp", "reduce_scatter", sums * (setup.passes + 1)),
    ]
    found += [move("embedding", "reduce_scatter", first), move("embedding", "all_gather", first)]
    found += [move("loss", "all_gather", 2 * last), move("loss", "reduce_scatter", last), logits]
    whole = sum(one.whole for one in blocks(setup, stage).values())
    return [*found, _of_pieces(setup, "sp", setup.tp, whole)]


def _of_pieces(setup: Setup, strategy: str, ranks: int, elements: int) -> Flow:
    """One sum of some parameters' gradients after backward; under ZeRO each rank sums the pieces that it keeps."""
    size = Fraction(elements * setup.item)
    if not elements:
        return Flow(strategy, "all_reduce", ranks, 0, 0)
    return (
        Flow(strategy, "all_reduce", ranks, None, size / setup.shard, False)
        if setup.zero
        else (Flow(strategy, "all_reduce", ranks, 1, size))
    )


def _pipeline(setup: Setup, stage: int) -> list[Flow]:
    """PP: each microbatch crosses each boundary once either way: 2 M B S H b sent by an interior stage, a chunk."""
    places = [chunk * setup.pp + stage for chunk in range(setup.chunks)]
    sides = sum((place > 0) + (place < setup.pp * setup.chunks - 1) for place in places)
    tokens = setup.seq // setup.cp // (setup.tp if setup.sp else 1) * setup.microbatch_size
    number = sides * setup.microbatches
    size = number * tokens * setup.hidden * setup.item
    return [Flow("pp", collective, setup.pp, number, size) for collective in ("send", "receive")]


def _context(setup: Setup, stage: int) -> list[Flow]:
    """CP: ring N-1 hops of K and V forward, 2N-1 backward (dK and dV take N); Ulysses 4 all-to-alls each way; all-gather
    one each way and a reduce-scatter. Recomputation, selective too, does forward again."""
    ranks, times = setup.cp, len(setup.layers_of(stage)) * setup.microbatches
    forwards = 1 if setup.recompute == "none" else 2
    tokens = setup.microbatch_size * setup.seq // ranks * setup.item
    queries, keys = (width // setup.tp * tokens for width in (setup.hidden, setup.key_value))
    if setup.cp_mode == "ring":
        number = times * (forwards * (ranks - 1) + 2 * ranks - 1)
        return [Flow("cp", "ring_shift", ranks, number, number * 2 * keys)]
    if setup.cp_mode == "ulysses":
        number = times * (forwards + 1)
        return [Flow("cp", "all_to_all", ranks, 4 * number, number * 2 * (queries + keys))]
    whole = 2 * keys * ranks
    gathers = times * (forwards + 1)
    return [
        Flow("cp", "all_gather", ranks, gathers, gathers * whole),
        Flow("cp", "reduce_scatter", ranks, times, times * whole),
    ]


def _experts(setup: Setup, stage: int, taken: Fraction | None) -> list[Flow]:
    """EP: dispatch and combine either way, T K H b each in the mean over ranks (the busiest one decides), and the counts.
    Where experts drop tokens, R H b with R = `taken` / ranks of the stage, or bytes are not predicted."""
    layers = sum(setup.has_experts(layer) for layer in setup.layers_of(stage))
    if not layers:
        return []
    times, forwards = layers * setup.microbatches, setup.passes
    tokens = setup.microbatch_size * setup.seq // setup.cp
    rows: Fraction | None = Fraction(times * (tokens // setup.tp) * setup.experts_per_token)
    if setup.balance == "capacity":
        rows = None if taken is None else taken / (setup.dp * setup.cp * setup.tp)
    counts = forwards * times * setup.experts * COUNT_BYTES
    exchanged = None if rows is None else rows * setup.hidden * setup.item * (forwards + 1) * 2 + counts
    found = [Flow("ep", "all_to_all", setup.ep, times * (3 * forwards + 2), exchanged, False)]
    if not setup.sp:
        gathers = times * (forwards + 1)
        found.append(Flow("ep", "all_gather", setup.tp, gathers, gathers * tokens * setup.hidden * setup.item))
        found.append(_of_pieces(setup, "ep", setup.tp, layers * setup.experts * setup.hidden))
    if setup.balance == "aux":
        size = setup.microbatch_size * setup.experts * COUNT_BYTES
        found.append(Flow("ep", "all_reduce", setup.cp * setup.tp, forwards * times, forwards * times * size))
    if setup.balance == "bias":
        size = layers * setup.experts * COUNT_BYTES
        found.append(Flow("ep", "all_reduce", setup.dp * setup.cp * setup.tp, 1, size))
    return found


def _small(setup: Setup, stage: int) -> list[Flow]:
    """The tied embedding's gradients of both ends, the global norm and the printed loss: one number each, float32 at least."""
    number, found = max(4, setup.item), []
    if setup.tied and setup.pp > 1 and stage in (0, setup.pp - 1):
        found.append(_of_pieces(setup, "embedding", 2, setup.vocab * setup.hidden // setup.tp))
    if setup.clip:
        world = setup.pp * setup.dp * setup.cp * setup.tp
        one_copy = setup.pp * setup.tp * (setup.shard if setup.zero else 1)
        found.append(Flow("clip", "all_reduce", world if setup.experts else one_copy, 1, number))
    if stage == setup.pp - 1:
        found.append(Flow("loss", "all_reduce", setup.dp * setup.cp, 1, number))
    return found
