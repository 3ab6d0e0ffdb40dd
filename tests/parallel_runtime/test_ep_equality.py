"""Expert parallelism computes what a dense mixture on one process computes: alone and with the other axes.

The offsets of balance `bias` move fast enough here that a wrong load changes who is chosen in the next step. The last tests
make mistakes on purpose.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality import CLASSIC, GROUPED, TIED, TOLERANCE, TRAIN, Case, difference, gathered, on_rank, reference, relative

from stepscope.parallel_runtime.clip import EPSILON
from stepscope.parallel_runtime.comm import Ready
from stepscope.parallel_runtime.config import BALANCE, ParallelConfig
from stepscope.parallel_runtime.data import sequences
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.reference import Reference

P = ParallelConfig
MIXED = {"experts": 8, "experts_per_token": 2, "expert_ffn": 20, "balance_rate": 0.05, "aux_weight": 0.5}
SHORT = replace(GROUPED, layers=2, seq=8, vocab=32, **MIXED)
BIASES = replace(CLASSIC, layers=2, seq=8, vocab=32, router="sigmoid", **MIXED)
TABLE = replace(TIED, kv_heads=2, layers=2, seq=8, vocab=32, **MIXED)
TIGHT = {"balance": "capacity", "capacity_factor": 0.8}
DENSE_FIRST = replace(SHORT, layers=3, dense_layers=1)
FEW = replace(TRAIN, microbatches=2)
EMPTY = {"routing_skew": 30.0}  # two experts get every token

CASES = [
    Case("one rank", P(), SHORT, FEW),
    Case("one rank, one expert a token", P(), replace(SHORT, experts_per_token=1), FEW),
    Case("dp2, every rank has every expert", P(dp=2), SHORT, FEW),
    Case("ep2", P(dp=2, ep=2), SHORT),
    Case("ep4", P(dp=4, ep=4), BIASES, FEW),
    Case("ep2 of dp4", P(dp=4, ep=2, bucket_mb=0.01), TABLE, FEW),
    Case("ep2, first layer dense", P(dp=2, ep=2), DENSE_FIRST, FEW),
    *(Case(f"ep2, {mode}", P(dp=2, ep=2), replace(BIASES, balance=mode), FEW) for mode in BALANCE),
    *(Case(f"ep2, {mode}, softmax", P(dp=2, ep=2), replace(SHORT, balance=mode), FEW) for mode in ("aux", "none")),
    Case("ep2, tokens are dropped", P(dp=2, ep=2), replace(SHORT, **TIGHT), FEW),
    Case("ep2, experts without a token", P(dp=2, ep=2), replace(SHORT, **EMPTY), FEW),
    Case("ep4, ranks without a token", P(dp=4, ep=4), replace(BIASES, **EMPTY), FEW),
    Case("ep2, uneven on purpose", P(dp=2, ep=2), replace(SHORT, routing_skew=1.0, **TIGHT), FEW),
    Case("ep2, one microbatch, no padding", P(dp=2, ep=2), SHORT, replace(TRAIN, microbatches=1, padding=0.0)),
    Case("ep2 without overlap", P(dp=2, ep=2, overlap=False, bucket_mb=0.01), SHORT, FEW),
    Case("ep2, dropout, full recomputation", P(dp=2, ep=2, recompute="full"), replace(BIASES, dropout=0.25), FEW),
    Case("ep2, aux, full recomputation", P(dp=2, ep=2, recompute="full"), replace(SHORT, balance="aux"), FEW),
    Case("ep2 pp2, first stage dense", P(dp=2, ep=2, pp=2), replace(TABLE, dense_layers=1)),
    Case("ep2 pp2, gpipe, aux", P(dp=2, ep=2, pp=2, schedule="gpipe"), replace(SHORT, balance="aux"), FEW),
    *(
        Case(
            f"ep{ep} {'sp' if sp else 'tp2'}{' dp2' if dp > 1 else ''}, {mode}",
            P(dp=dp, tp=2, sp=sp, ep=ep),
            model,
            FEW,
        )
        for sp in (False, True)
        for dp, ep, mode, model in (
            (1, 1, "bias", SHORT),
            (1, 2, "bias", replace(BIASES, dropout=0.25)),
            (1, 2, "aux", replace(SHORT, balance="aux")),
            (1, 2, "capacity", replace(SHORT, **TIGHT)),
            (2, 2, "bias", TABLE),
            (2, 4, "aux", replace(BIASES, balance="aux")),
        )
    ),
    Case("ep2 tp2, uneven on purpose", P(tp=2, ep=2), replace(SHORT, routing_skew=1.0), FEW),
    Case("ep2 cp2", P(cp=2, ep=2), SHORT, FEW),
    Case("ep2 cp2, aux", P(cp=2, ep=2), replace(BIASES, balance="aux"), FEW),
    Case("ep2 cp2, tokens are dropped", P(cp=2, ep=2), replace(SHORT, **TIGHT), FEW),
    *(Case(f"zero{level} ep2 of dp4", P(dp=4, ep=2, zero=level), BIASES, FEW) for level in (1, 2, 3)),
    *(Case(f"zero{level} ep2, as many as dp", P(dp=2, ep=2, zero=level), SHORT, FEW) for level in (1, 2, 3)),
    Case("zero3 ep2 tp2 dp2", P(dp=2, tp=2, ep=2, zero=3), TABLE, FEW),
    Case("zero3 ep2 tp2 sp dp2, first layer dense", P(dp=2, tp=2, sp=True, ep=2, zero=3), DENSE_FIRST, FEW),
    Case("zero3 ep2, full recomputation", P(dp=4, ep=2, zero=3, recompute="full"), SHORT, FEW),
    Case("zero2, every rank has every expert", P(dp=2, zero=2), SHORT, FEW),
    *(
        Case(f"zero{level} ep2 of dp4, two copies", P(dp=4, ep=2, zero=level, replicate=2), TABLE, FEW)
        for level in (1, 2, 3)
    ),
    Case("ep4 cp2 tp2 sp, aux", P(cp=2, tp=2, sp=True, ep=4), replace(TABLE, balance="aux"), FEW),
]
EIGHT = [
    Case("dp2 ep2 pp2", P(dp=2, ep=2, pp=2), SHORT),
    Case("dp4 ep2 pp2, tied", P(dp=4, ep=2, pp=2, bucket_mb=0.01), TABLE, FEW),
    Case("zero1 dp2 ep2 pp2 tp2", P(dp=2, tp=2, ep=2, pp=2, zero=1), SHORT, FEW),
    Case("zero1 dp4 ep2 pp2", P(dp=4, ep=2, pp=2, zero=1), TABLE),
    Case("zero3 dp4 ep2 pp2", P(dp=4, ep=2, pp=2, zero=3), TABLE, FEW),
    *(
        Case(f"zero{level} dp4 tp2 ep2, two copies", P(dp=4, tp=2, ep=2, zero=level, replicate=2), TABLE, FEW)
        for level in (1, 2, 3)
    ),
    Case("zero1 dp2 cp2 tp2 ep4, two copies", P(dp=2, cp=2, tp=2, ep=4, zero=1, replicate=2), SHORT, FEW),
    Case(
        "zero2 dp4 tp2 sp, every rank has every expert, two copies",
        P(dp=4, tp=2, sp=True, zero=2, replicate=2),
        SHORT,
        FEW,
    ),
    Case("dp2 cp2 tp2 ep4, aux", P(dp=2, cp=2, tp=2, ep=4), replace(BIASES, balance="aux"), FEW),
    Case("dp2 tp2 sp pp2 ep4", P(dp=2, tp=2, sp=True, pp=2, ep=4), BIASES, FEW),
]


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.name)
def test_three_axes_equal_one_process(eight, case):
    assert difference(eight, case) < TOLERANCE


EVERYTHING = [
    Case(
        "cp2 tp2 sp pp2 ep4, interleaved, zero1 over cp",
        P(cp=2, tp=2, sp=True, pp=2, ep=4, zero=1, schedule="interleaved", chunks=2, recompute="selective"),
        replace(TABLE, layers=4, balance="aux", dropout=0.25),
        replace(FEW, microbatches=4, padding=0.3),
    ),
    Case(
        "dp2 tp2 sp pp2 ep2, zb-h1, zero3",
        P(dp=2, tp=2, sp=True, pp=2, ep=2, zero=3, schedule="zb-h1", recompute="full"),
        replace(BIASES, layers=4, dropout=0.25),
        replace(FEW, microbatches=4, padding=0.3),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYTHING, ids=lambda case: case.name)
def test_everything_at_once_equals_one_process(eight, case):
    assert difference(eight, case) < TOLERANCE


def test_what_the_cases_rest_on():
    """Loads are uneven, offsets change who is chosen, tokens are dropped, experts go without a token."""

    def after(model, steps=TRAIN.steps):
        plain = Reference(model, FEW)
        for step in range(steps):
            plain.step(*sequences(model, FEW, step, range(8)))
        return plain.mixture

    moved, still = after(SHORT), after(replace(SHORT, balance="none"))
    assert moved.loads != still.loads and len(set(still.loads[0])) > 3
    assert after(replace(SHORT, **TIGHT), 1).dropped > 20
    assert min(after(replace(SHORT, **EMPTY), 1).loads[0]) == 0
    assert after(SHORT, 1).dropped == 0


def test_adamw(pool):
    train = replace(FEW, optimizer="adamw", lr=0.01, weight_decay=0.1)
    assert difference(pool, Case("adamw", P(dp=2, pp=2, ep=2), TABLE, train)) < 1e-11


def test_float32(pool):
    worst = difference(pool, Case("float32", P(dp=2, ep=2), SHORT, replace(FEW, dtype="float32")))
    assert 1e-8 < worst < 1e-4


CLIPPED = [
    P(dp=2, ep=2, pp=2),
    P(dp=2, tp=2, ep=2),
    P(dp=2, tp=2, ep=4),
    P(tp=2, sp=True),
    P(dp=4, ep=2, zero=1),
    P(dp=2, tp=2, ep=2, zero=3),
    P(dp=4, zero=2, replicate=2),
    P(dp=4, ep=2, zero=1, replicate=2),
    P(dp=4, ep=2, zero=3, replicate=2),
]


@pytest.mark.parametrize("parallel", CLIPPED)
def test_clipping(pool, parallel):
    """Each expert counts once, wherever it is, and everything else once, however many ranks hold it."""
    train = replace(FEW, clip=0.5, steps=1)
    (step,) = reference(TABLE, replace(train, clip=0.0), parallel.dp)
    norm = torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm()
    assert norm > 0.6, "nothing to clip"
    ranks = pool.run(on_rank, Case("clip", parallel, TABLE, train))[: parallel.world_size]
    for name, whole in gathered([rank[0].gradients for rank in ranks], Mesh.of(parallel)):
        assert relative(whole, step.gradients[name] * (0.5 / (norm + EPSILON))) < TOLERANCE, name


# -- the comparison bites ------------------------------------------------------------------------------------------------


def forget_the_sum_over_edp(program):
    """Every rank keeps the gradients of its experts to itself."""
    reduce = program.comm.all_reduce

    def forgetful(tensor, axis, **how):
        return Ready(tensor) if axis == "edp" else reduce(tensor, axis, **how)

    program.comm.all_reduce = forgetful


def forget_to_scatter_over_edp(program):
    """Every rank keeps its own part of the gradients of its piece of the experts."""
    scatter = program.comm.reduce_scatter

    def forgetful(tensor, axis, output, **how):
        if axis != "edp_shard":
            return scatter(tensor, axis, output=output, **how)
        return Ready(output.copy_(tensor.chunk(program.comm.size("edp_shard"))[program.comm.index("edp_shard")]))

    program.comm.reduce_scatter = forgetful


def sum_experts_over_dp(program):
    """Ranks that hold different experts add up their gradients."""
    for part in program.gradients.parts:
        part.axis = "dp"


def double_the_sum_over_edp(program):
    reduce = program.comm.all_reduce

    def twice(tensor, axis, **how):
        handle = reduce(tensor, axis, **how)
        return Ready(handle.wait().mul_(2.0)) if axis == "edp" else handle

    program.comm.all_reduce = twice


def forget_the_other_copy(program):
    """Each copy of the experts' state keeps the sums of its own ranks."""
    reduce = program.comm.all_reduce

    def forgetful(tensor, axis, **how):
        return Ready(tensor) if axis == "edp_replica" else reduce(tensor, axis, **how)

    program.comm.all_reduce = forgetful


def through(program, change):
    """Every mixture sends what the router says through `change` first."""
    for chunk in program.chunks:
        for layer in chunk.layers.values():
            part = layer.feed_forward
            part.seams = replace(part.seams, **change(part.seams))


def swap_the_weights(program):
    """The result of each of a token's experts counts with the weight of the other."""

    def change(seams):
        def swapped(tokens, routed, *rest):
            return seams.through_experts(tokens, routed._replace(weights_TK=routed.weights_TK.flip(-1)), *rest)

        return {"through_experts": swapped}

    through(program, change)


def lose_a_token(program):
    """The last row of every exchange is lost on the way."""
    exchange = program.comm.all_to_all

    def lossy(tensor, axis, send, receive, **how):
        if tensor.dim() == 2:
            tensor = tensor.clone()
            tensor[-1:] = 0.0
        return exchange(tensor, axis, send, receive, **how)

    program.comm.all_to_all = lossy


def mix_up_the_sources(program):
    """What comes back is in the order of the other rank's tokens."""
    exchange = program.comm.all_to_all

    def rolled(tensor, axis, send, receive, **how):
        rows = exchange(tensor, axis, send, receive, **how).wait()
        return Ready(rows.roll(receive[0], 0) if tensor.dim() == 2 else rows)

    program.comm.all_to_all = rolled


def forget_the_router(program):
    """Under tp without sp each rank's router has seen its own positions only."""
    program.reductions.clear()


def count_own_loads(program):
    """Offsets move against the load of this rank's tokens."""
    program.balance.comm = Alone()


def never_move(program):
    program.balance.rate = 0.0


def count_own_positions(program):
    """The auxiliary loss looks at the choices of this rank's part of each sequence."""
    through(program, lambda seams: {"over_sequence": lambda counts: counts})


def forget_the_auxiliary_loss(program):
    for chunk in program.chunks:
        for layer in chunk.layers.values():
            layer.feed_forward.loss_scale = 0.0


def average_over_own_sequences(program):
    """The auxiliary loss is a mean over the sequences of each rank, and ranks are added."""
    for chunk in program.chunks:
        for layer in chunk.layers.values():
            layer.feed_forward.loss_scale *= program.configuration.parallel.dp


def route_all_positions(program):
    """Under tp without sp every rank routes all tokens, and its experts see them as often."""
    through(program, lambda seams: {"routed_positions": lambda x: x, "all_positions": lambda y: y})


class Alone:
    """A door with nobody behind it."""

    def all_reduce(self, tensor, axis, **how):
        return Ready(tensor)


AUX = replace(BIASES, balance="aux")
TWO, SLICED = P(dp=4, ep=2), P(dp=2, tp=2, ep=2)
MISTAKES = [
    (forget_the_sum_over_edp, TWO, SHORT),
    (double_the_sum_over_edp, TWO, SHORT),
    (sum_experts_over_dp, TWO, SHORT),
    (forget_to_scatter_over_edp, replace(TWO, zero=2), SHORT),
    (forget_the_other_copy, replace(TWO, zero=2, replicate=2), SHORT),
    (swap_the_weights, TWO, SHORT),
    (lose_a_token, TWO, SHORT),
    (mix_up_the_sources, TWO, SHORT),
    (count_own_loads, TWO, SHORT),
    (never_move, TWO, SHORT),
    (forget_the_auxiliary_loss, TWO, AUX),
    (average_over_own_sequences, TWO, AUX),
    (forget_the_router, SLICED, SHORT),
    (count_own_positions, SLICED, AUX),
    (route_all_positions, SLICED, SHORT),
]


@pytest.mark.parametrize(("mistake", "parallel", "model"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_noticed(pool, mistake, parallel, model):
    case = Case("four ranks", parallel, model, FEW)
    assert difference(pool, case) < TOLERANCE
    assert difference(pool, case, mistake) > 1e-3
