"""ZeRO beside equality: shards by hand, bytes of the model state, when what moves, torch's own as an oracle, mistakes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from equality import GROUPED, TIED, TOLERANCE, TRAIN, Case, difference, on_rank, reference
from hypothesis import given
from hypothesis import strategies as st
from pool import COMM_TIMEOUT_S, GROUPS

from stepscope.parallel_runtime.comm import DryComm
from stepscope.parallel_runtime.comm_gloo import make_process_groups
from stepscope.parallel_runtime.compose import Configuration
from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.dry import dry_step, operations_of_step
from stepscope.parallel_runtime.layout import shard_shape
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import initialise, parameter_shapes
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.optimizer import TO_DEVICE, TO_HOST, Optimizer
from stepscope.parallel_runtime.zero.fully_sharded import Gathered
from stepscope.parallel_runtime.zero.sharded import STREAMS, ShardedData
from stepscope.parallel_runtime.zero.units import FlatUnit, Piece, Use, flat_units, gathers, pieces_of, uses_of
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.rows import CounterRow, Deriver

P = ParallelConfig
MODEL = replace(GROUPED, layers=2)
TIED_SMALL = replace(TIED, layers=2, kv_heads=2)
DOUBLE = replace(TRAIN, microbatches=2, steps=2)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_units_and_pieces_by_hand():
    """A table of 6; a layer of 5 + 2, padded to 8 for two ranks: the first holds 4 of a, the second 1 of a, 2 of b, 1 zero."""
    sizes = {"embedding.weight": 6, "layers.0.a": 5, "layers.0.b": 2, "norm.weight": 1, "head.weight": 2}
    table, layer, head = flat_units(sizes, 2)
    assert table == FlatUnit("embedding", ("embedding.weight",), (0,), 6, 6)
    assert layer == FlatUnit("layer.0", ("layers.0.a", "layers.0.b"), (0, 5), 7, 8)
    assert head == FlatUnit("head", ("norm.weight", "head.weight"), (0, 1), 3, 4)
    assert pieces_of(layer, sizes, 2, 0) == (Piece("layers.0.a", 0, 0, 4),)
    assert pieces_of(layer, sizes, 2, 1) == (Piece("layers.0.a", 0, 4, 1), Piece("layers.0.b", 1, 0, 2))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9))
def test_pieces_hold_every_element_once(sizes, ranks):
    elements = {f"layers.0.{number}": size for number, size in enumerate(sizes)}
    (unit,) = flat_units(elements, ranks)
    assert 0 <= unit.padded - unit.elements < ranks
    found = Counter()
    for rank in range(ranks):
        end = 0
        for piece in pieces_of(unit, elements, ranks, rank):
            assert piece.start >= end and piece.start + piece.elements <= unit.padded // ranks
            end = piece.start + piece.elements
            found.update((piece.parameter, piece.first + place) for place in range(piece.elements))
    assert found == {(name, place): 1 for name, size in elements.items() for place in range(size)}


def test_gathers_by_hand():
    """Two layers between table and head: each pass gathers all with reshard; without, backward finds them there."""
    uses = uses_of(range(2), first=True, last=True, tied=True)
    assert uses[-1] == Use("head", ("head", "embedding"))
    up = ["embedding", "layer.0", "layer.1", "head", "embedding"]
    assert [unit for phase, unit in gathers([uses], [(0, "forward")], True)] == up  # the tied table twice
    down = ["head", "embedding", "layer.1", "layer.0"]
    assert [
        unit for phase, unit in gathers([uses], [(0, "forward"), (0, "backward")], True) if phase == "backward"
    ] == down
    kept = gathers([uses], 2 * [(0, "forward"), (0, "backward")], False)
    assert kept == [("forward", unit) for unit in up[:4]] * 2
    flying = gathers([uses], 2 * [(0, "forward")] + 2 * [(0, "backward")], False)
    assert flying == [("forward", unit) for unit in up[:4]] + [("backward", unit) for unit in down]


def test_a_mesh_in_copies_by_hand():
    """dp 4 as two copies: neighbours cut the state, ranks two apart hold the same part."""
    mesh = Mesh(pp=2, dp=4, replicas=2)
    assert mesh.all_groups("shard") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.all_groups("replica") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.all_groups("holders") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [mesh.axis_of(view) for view in ("shard", "replica", "holders")] == ["dp", "dp", "pp_dp"]
    within = Mesh(dp=2, cp=2, tp=2, replicas=2)
    assert within.all_groups("shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [within.axis_of(view) for view in ("shard", "replica", "holders")] == ["cp", "dp", "cp_tp"]
    with pytest.raises(ValueError, match="3 replicas must divide dp 4: take 2"):
        Mesh(dp=4, replicas=3)


# -- bytes of the model state ------------------------------------------------------------------------------------------


def counters_of(recorder):
    """(name, key) -> values of the last step, in order."""
    found = {}
    for row in Deriver({}, prune=False).rows(recorder._kept[1]):
        if isinstance(row, CounterRow):
            found.setdefault((row.name, row.key), []).append(row.value)
    return found


ADAMW = replace(DOUBLE, optimizer="adamw", dtype="float32")
STATE = {  # bytes of (parameter, gradient, optimizer) for each parameter, and which of them ZeRO cuts
    "float32": (4, 4, 8),
    "bfloat16": (2, 2, 12),
}


@pytest.mark.parametrize("dtype", STATE)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_state_bytes_are_those_of_theory(level, dtype):
    """AdamW: 16 bytes a parameter on one rank; of N ranks each holds 1/N of what the level cuts, padding included."""
    train = replace(ADAMW, dtype=dtype)
    whole = sum(math.prod(shape) for shape in parameter_shapes(MODEL).values())
    for rank in range(4):
        program, recorder = dry_step(Configuration(MODEL, P(dp=4, zero=level), train), rank)
        padded = sum(unit.flat.padded for unit in program.gradients.units) if level else whole
        own = sum(parameter.numel() for parameter in program.gradients.parameters)
        assert (padded - whole < 4 * 4 and padded // 4 - own < 16) or level == 0
        parameter, gradient, optimizer = STATE[dtype]
        counters = counters_of(recorder)
        assert counters["parameter_bytes", ""] == [parameter * (padded // 4 if level == 3 else padded)]
        assert counters["gradient_bytes", ""] == [gradient * (padded // 4 if level >= 2 else padded)]
        steps = 4 * len(program.gradients.parameters)  # AdamW's own step counts, one number a tensor
        assert counters["optimizer_bytes", ""] == [optimizer * own + steps]
        assert level == 0 or own <= padded // 4


def test_offloaded_state_is_no_device_memory():
    program, recorder = dry_step(Configuration(MODEL, P(dp=2, zero=1, offload="cpu"), ADAMW), 0)
    own = sum(parameter.numel() for parameter in program.gradients.parameters)
    counters = counters_of(recorder)
    assert counters["optimizer_bytes", ""] == [0]
    assert counters["optimizer_bytes", "host"] == [12 * own + 4 * len(program.gradients.parameters)]


def test_between_steps_nothing_is_gathered():
    program, _ = dry_step(Configuration(MODEL, P(dp=2, zero=3), ADAMW), 0)
    assert all(unit.whole.untyped_storage().nbytes() == 0 for unit in program.gradients.units)


# -- what moves when ---------------------------------------------------------------------------------------------------


def communications(parallel, model=MODEL, train=DOUBLE):
    """(row number, row) of the communications of a step, and all rows."""
    rows = operations_of_step(Configuration(model, parallel, train), 0)
    return [(number, row) for number, row in enumerate(rows) if row.kind == "comm"], rows


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_parameters_are_gathered_ahead(prefetch):
    """Forward of the first microbatch: how many gathers are under way when the first is waited for."""
    _, rows = communications(P(dp=2, zero=3, prefetch=prefetch))
    moves = [(row.kind, row.op_id) for row in rows if row.kind in ("comm", "wait")]
    first_wait = next(place for place, (kind, _) in enumerate(moves) if kind == "wait")
    assert first_wait == prefetch + 1
    assert moves[first_wait] == ("wait", moves[0][1])


def test_a_gather_is_asked_for_in_the_block_before():
    """Prefetch 1: layer 1 is asked for while layer 0 is entered, and in backward while the head is."""
    comms, rows = communications(P(dp=2, zero=3), train=replace(DOUBLE, microbatches=1))
    places = [(rows[n - 1].name, row.phase) for n, row in comms if row.collective == "all_gather"]
    ahead = ["embedding", "embedding", "layer.0", "layer.1"]
    assert places[:4] == [(name, "forward") for name in ahead]
    behind = ["head", "head", "layer.1", "layer.0"]
    assert places[4:] == [(name, "backward") for name in behind]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_few_units_are_whole_at_a_time(prefetch, recompute, monkeypatch):
    """The one in use and those gathered ahead, in forward and in backward, also where a layer is computed again."""
    whole, most = set(), []
    ask, free = Gathered.ask, Gathered.free

    def asked(self):
        ask(self)
        whole.add(self.unit.name)
        most.append(len(whole))

    def freed(self):
        free(self)
        whole.discard(self.unit.name)

    monkeypatch.setattr(Gathered, "ask", asked)
    monkeypatch.setattr(Gathered, "free", freed)
    dry_step(
        Configuration(replace(MODEL, layers=4), P(dp=2, zero=3, prefetch=prefetch, recompute=recompute), DOUBLE), 0
    )
    assert max(most) == prefetch + 1
    assert not whole


@pytest.mark.parametrize("level", [1, 2, 3])
def test_reductions_overlap_backward(level):
    """A unit is reduced inside its own backward; at most one is under way beside the next (ZeRO-1: all may be)."""
    comms, rows = communications(P(dp=2, zero=level))
    scatters = [(number, row) for number, row in comms if row.collective == "reduce_scatter"]
    assert {row.phase for _, row in scatters} == {"backward"}
    assert len(scatters) == 4 * (1 if level == 1 else 2)
    names = [rows[number - 1].name for number, _ in scatters]
    assert names == ["head", "layer.1", "layer.0", "embedding"] * (len(scatters) // 4)
    waits = {row.op_id: number for number, row in enumerate(rows) if row.kind == "wait"}
    for place, (number, _) in enumerate(scatters):
        under_way = sum(waits[row.op_id] > number for _, row in scatters[:place])
        assert under_way <= (3 if level == 1 else 1)
    if level == 1:
        assert min(waits[row.op_id] for _, row in scatters) > scatters[-1][0]


def test_deferred_gradients_are_counted_apart():
    """A norm whose next gradient comes before a weight's first: the unit is complete once for each microbatch."""
    named = [
        ("layers.0.norm", torch.nn.Parameter(torch.ones(2))),
        ("layers.0.weight", torch.nn.Parameter(torch.ones(3))),
    ]
    comm = DryComm(Mesh(dp=2), 0, Recorder(0), STREAMS)
    sharded = ShardedData(named, comm, 2)
    unit = sharded.units[0]
    sharded.begin_step()
    completed = []
    for index in (0, 0, 1, 1):
        completed.append(unit.came(index))
    assert completed == [False, False, True, True]
    assert not unit.pending
    assert not unit.came(0) and unit.pending


def test_offload_copies_are_rows():
    program, recorder = dry_step(
        Configuration(MODEL, P(dp=2, zero=2, offload="cpu"), replace(ADAMW, dtype="bfloat16")), 0
    )
    own = sum(parameter.numel() for parameter in program.gradients.parameters)
    copies = [row for row in recorder.operations() if row.kind == "memcpy"]
    assert [(row.name, row.bytes, row.phase) for row in copies] == [
        (TO_HOST, 2 * own, "optimizer"),
        (TO_DEVICE, 2 * own, "optimizer"),
    ]


# -- precision ---------------------------------------------------------------------------------------------------------


def test_small_updates_survive_in_the_copy():
    """bfloat16 has 8 bits: 1 - 0.001 rounds to 1, but a hundred such steps do not."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    train = replace(TRAIN, dtype="bfloat16", lr=0.001, weight_decay=0.0)
    optimizer = Optimizer([parameter], train, NullRecorder())
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.full((3,), 0.9), rtol=1e-4, atol=0)
    assert parameter.detach().float().tolist() == [torch.tensor(0.9).bfloat16().float().item()] * 3


def test_float16_gradients_are_scaled_and_scaled_back():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = Optimizer([parameter], replace(TRAIN, dtype="float16", lr=0.5, weight_decay=0.0), NullRecorder())
    parameter.grad = torch.full_like(parameter, 1024.0)
    optimizer.step()
    assert parameter.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(("dtype", "resolution"), [("bfloat16", 2**-8), ("float16", 2**-11)])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_mixed_precision_is_near_one_process_in_full(pool, level, dtype, resolution):
    """Loss and parameters stay within units of the last place of the model in float32 (measured: 0.5 and 1.6)."""
    train = replace(DOUBLE, dtype=dtype)
    ranks = pool.run(on_rank, Case(dtype, P(dp=2, zero=level), MODEL, train))[:2]
    for number, wanted in enumerate(reference(MODEL, replace(train, dtype="float32"), 2)):
        for rank in ranks:
            step = rank[number]
            assert step.loss == pytest.approx(wanted.loss, rel=2 * resolution)
            for name, value in step.parameters.items():
                off = (value.float() - wanted.parameters[name]).abs().max() / wanted.parameters[name].abs().max()
                assert off < 4 * resolution, name
                assert value.dtype == getattr(torch, dtype)


# -- torch's own -------------------------------------------------------------------------------------------------------

TWO = Mesh(dp=2)


def oracle_step(rank):
    """Gradients of torch's fully sharded data parallelism; told not to average, since the loss is divided already."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group = make_process_groups(TWO, rank, ("dp",), "gloo", COMM_TIMEOUT_S, GROUPS).get("dp")
    if group is None:
        return None
    stage = Stage(MODEL, NullRecorder(), dtype=torch.float64)
    initialise(stage, MODEL, seed=0)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh)
    for module in (stage, *stage.layers.values()):
        module.set_gradient_divide_factor(1.0)
    batch = local_batch(MODEL, DOUBLE, 2, rank, 0)
    for microbatch in batch.microbatches:
        stage(None, microbatch, batch.valid_tokens).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradients_agree_with_torch(pool, level):
    oracle = pool.run(oracle_step)[0]
    ours = pool.run(on_rank, Case("ours", P(dp=2, zero=level), MODEL, replace(DOUBLE, steps=1)))[:2]
    for rank in ours:
        for name, gradient in oracle.items():
            torch.testing.assert_close(rank[0].gradients[name], gradient, rtol=1e-11, atol=1e-13, msg=name)


# -- the other equalities ----------------------------------------------------------------------------------------------


def test_adamw(pool):
    """Element by element, so its cut state is that of one process (see test_equality.test_adamw for the tolerance)."""
    train = replace(TRAIN, optimizer="adamw", lr=0.01, weight_decay=0.1)
    assert difference(pool, Case("adamw", P(dp=2, zero=3), TIED_SMALL, train)) < 1e-11


def test_float32(pool):
    worst = difference(pool, Case("float32", P(dp=2, zero=2), MODEL, replace(TRAIN, dtype="float32")))
    assert 1e-8 < worst < 1e-4


@pytest.mark.parametrize(
    "parallel",
    [P(dp=2, zero=1), P(dp=4, zero=3, replicate=2), P(dp=2, pp=2, zero=3), P(dp=2, tp=2, sp=True, zero=2)],
    ids=["zero1 dp2", "zero3 two copies", "zero3 pp2 tied", "zero2 tp2 sp"],
)
def test_clipping(pool, parallel):
    """Every element counts once in the norm, on whichever rank it is: as if one process had clipped."""
    train = replace(TRAIN, clip=0.5, steps=1)
    (step,) = reference(TIED_SMALL, replace(train, clip=0.0), parallel.dp)
    norm = torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm()
    assert norm > 0.6, "nothing to clip"
    mesh = Mesh.of(parallel)
    for rank in pool.run(on_rank, Case("clip", parallel, TIED_SMALL, train))[: parallel.world_size]:
        for name, gradient in rank[0].gradients.items():
            wanted = step.gradients[name] * (0.5 / (norm + 1e-6))
            if gradient.shape == wanted.shape:
                torch.testing.assert_close(
                    gradient, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()), msg=name
                )
            else:
                assert tuple(gradient.shape) == shard_shape(name, tuple(wanted.shape), mesh)


@pytest.mark.parametrize(
    "parallel",
    [P(dp=2, tp=2, pp=2, zero=3), P(dp=2, cp=2, tp=2, sp=True, zero=3), P(dp=4, pp=2, zero=3, replicate=2)],
    ids=["zero3 tp2 pp2", "zero3 cp2 tp2 sp", "zero3 dp4 two copies pp2"],
)
def test_three_axes(eight, parallel):
    case = Case("three axes", parallel, replace(TIED_SMALL, seq=16), replace(TRAIN, microbatches=2))
    assert difference(eight, case) < TOLERANCE


# -- the comparison bites ------------------------------------------------------------------------------------------------


class Waited:
    """A handle that is done."""

    def __init__(self, output):
        self.output = output

    def wait(self):
        return self.output


def skip_one_reduction(program):
    """The gradients of the last unit are never summed: each rank keeps its part of its own."""
    reduce, padded = program.comm.reduce_scatter, program.gradients.units[-1].flat.padded

    def forgetful(tensor, axis, **how):
        own = tensor.chunk(2)[program.comm.index("shard")].clone()
        handle = reduce(tensor, axis, **how)
        if tensor.numel() != padded:
            return handle
        return Waited(handle.wait().copy_(own))

    program.comm.reduce_scatter = forgetful


def reduce_the_last_microbatch_only(program):
    """What earlier microbatches gave is lost."""
    settle = program.gradients._settle

    def forgetting():
        unit, _, _ = program.gradients._under_way[0]
        unit.gradient.zero_()
        settle()

    program.gradients._settle = forgetting


def keep_stale_parameters(program):
    """The gathered parameters outlive the optimizer's step."""
    for gathered in program.gradients._gathered.values():
        gathered.free = lambda: None


def forget_to_gather_after_the_update(program):
    program.gradients.after_update = lambda: None


def forget_the_other_copy(program):
    reduce = program.comm.all_reduce
    program.comm.all_reduce = lambda tensor, axis, **how: (
        Waited(tensor) if axis == "replica" else reduce(tensor, axis, **how)
    )


MISTAKES = {
    skip_one_reduction: P(dp=2, zero=3),
    reduce_the_last_microbatch_only: P(dp=2, zero=3),
    keep_stale_parameters: P(dp=2, zero=3),
    forget_to_gather_after_the_update: P(dp=2, zero=1),
    forget_the_other_copy: P(dp=4, zero=2, replicate=2),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_noticed(pool, mistake):
    case = Case(mistake.__name__, MISTAKES[mistake], MODEL)
    assert difference(pool, case, mistake) > 0.01
