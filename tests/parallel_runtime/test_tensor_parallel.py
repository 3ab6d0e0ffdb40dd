"""Tensor and sequence parallelism: against one process, against torch's DTensor, and what they send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from equality import CLASSIC, GROUPED, TOLERANCE, TRAIN, Case, difference, on_rank, reference, relative
from pool import COMM_TIMEOUT_S, GROUPS, gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.clip import EPSILON
from stepscope.parallel_runtime.comm import DryComm
from stepscope.parallel_runtime.comm_gloo import make_process_groups
from stepscope.parallel_runtime.compose import Configuration, build, seams_of, streams_of
from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.data import IGNORED, local_batch
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.grad_sync import synchronise
from stepscope.parallel_runtime.layout import gather, local_sequence, shard, shard_shape
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.attention import attention
from stepscope.parallel_runtime.model.initial import initial_value, initialise, parameter_shapes
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.sp import traffic as sp_traffic
from stepscope.parallel_runtime.tp import traffic as tp_traffic
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.memory import ActivationMeter
from stepscope.tracer.recorder import NullRecorder, Recorder

P = ParallelConfig
SHARED = replace(GROUPED, vocab=32, seq=12)  # two key and value heads: tp 2
WIDE = replace(GROUPED, hidden=32, heads=8, kv_heads=4, ffn=40, vocab=32, seq=12, layers=2)  # grouped, and tp 4
BIASES = replace(CLASSIC, vocab=32, seq=12)  # LayerNorm, GELU, every bias
TIED = replace(BIASES, layers=3, tied=True, kv_heads=2)
DROPPED = replace(BIASES, dropout=0.25)
FEW = replace(TRAIN, microbatches=2)

CASES = [
    Case("tp2", P(tp=2), SHARED),
    Case("tp2, biases", P(tp=2), BIASES, FEW),
    Case("tp4", P(tp=4), WIDE, FEW),
    Case("tp2, dropout", P(tp=2), DROPPED, FEW),
    Case("sp2", P(tp=2, sp=True), SHARED),
    Case("sp2, biases", P(tp=2, sp=True), BIASES, FEW),
    Case("sp4, dropout", P(tp=4, sp=True), replace(WIDE, dropout=0.25), FEW),
    Case("sp2, tied", P(tp=2, sp=True), TIED, FEW),
    Case("dp2 tp2", P(dp=2, tp=2, bucket_mb=0.01), SHARED, FEW),
    Case("dp2 tp2 sp", P(dp=2, tp=2, sp=True, bucket_mb=0.01), DROPPED, FEW),
    Case("pp2 tp2, tied", P(pp=2, tp=2), TIED),
    Case("pp2 tp2 sp, tied, dropout", P(pp=2, tp=2, sp=True), replace(TIED, dropout=0.1)),
    Case("pp2 tp2 sp gpipe, no padding", P(pp=2, tp=2, sp=True, schedule="gpipe"), WIDE, replace(FEW, padding=0.0)),
    Case("tp2, selective recomputation", P(tp=2, recompute="selective"), DROPPED, FEW),
    Case("tp2, full recomputation", P(tp=2, recompute="full"), DROPPED, FEW),
    Case("sp2, selective recomputation", P(tp=2, sp=True, recompute="selective"), DROPPED, FEW),
    Case("pp2 tp2 sp, full recomputation", P(pp=2, tp=2, sp=True, recompute="full"), DROPPED),
    Case("dp2 pp2, dropout, full recomputation", P(dp=2, pp=2, recompute="full"), DROPPED),
]
EIGHT = [
    Case("dp2 tp2 pp2", P(dp=2, tp=2, pp=2, bucket_mb=0.01), TIED),
    Case("dp2 tp2 sp pp2", P(dp=2, tp=2, sp=True, pp=2, bucket_mb=0.01), replace(TIED, dropout=0.1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    assert difference(pool, case) < TOLERANCE


@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.name)
def test_three_axes_equal_one_process(eight, case):
    assert difference(eight, case) < TOLERANCE


def test_adamw(pool):
    """It divides by roots of squares, so the rounding of small gradients shows more."""
    train = replace(FEW, optimizer="adamw", lr=0.01, weight_decay=0.1)
    assert difference(pool, Case("adamw", P(tp=2, sp=True, pp=2), TIED, train)) < 1e-11


def test_float32(pool):
    worst = difference(pool, Case("float32", P(tp=2, sp=True, dp=2), BIASES, replace(FEW, dtype="float32")))
    assert 1e-8 < worst < 1e-4


@pytest.mark.parametrize("parallel", [P(tp=2, pp=2), P(tp=2, pp=2, sp=True)], ids=["tp", "sp"])
def test_clipping_counts_each_parameter_once(pool, parallel):
    """Norms and biases that both ranks of tp hold, and the tied embedding of both stages, count once."""
    train = replace(FEW, clip=0.5, steps=1)
    (step,) = reference(TIED, replace(train, clip=0.0), 1)
    norm = torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm()
    assert norm > 0.6, "nothing to clip"
    mesh = Mesh.of(parallel)
    for rank, (got,) in enumerate(pool.run(on_rank, Case("clip", parallel, TIED, train))):
        for name, gradient in got.gradients.items():
            wanted = shard(name, step.gradients[name] * (0.5 / (norm + EPSILON)), mesh, rank)
            assert relative(gradient, wanted) < TOLERANCE, name


# -- by hand -----------------------------------------------------------------------------------------------------------


def on_rank_by_hand(rank):
    """Two ranks, a vocabulary of four: what each seam gives."""
    comm = gloo(Mesh(tp=2), rank, NullRecorder(rank), ("tp",))
    if comm is None:
        return None
    seams = seams_of(P(tp=2), comm)
    table = torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2].clone().requires_grad_()
    rows = seams.embed(torch.tensor([[0], [3], [2]]), table)
    rows.sum().backward()
    head = torch.full((2, 2), float(rank), requires_grad=True)  # logits 0 0 1 1 for x = (1, 0)
    x = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], requires_grad=True)
    loss = seams.summed_loss(x, head * torch.tensor([1.0, 0.0]), torch.tensor([[3], [IGNORED]]))
    loss.backward()
    comm.close()
    return rows.detach(), table.grad, loss.item(), x.grad


def test_embedding_and_loss_by_hand(pool):
    """Tokens 0, 3, 2 of the table 0 1 / 2 3 / 4 5 / 6 7. Loss of logits 0 0 1 1 at target 3: log(2 + 2e) - 1."""
    e = torch.tensor(1.0).exp()
    first, second = pool.run(on_rank_by_hand)[:2]
    for rows, _, loss, dx in (first, second):
        assert rows.tolist() == [[[0, 1]], [[6, 7]], [[4, 5]]]
        assert loss == pytest.approx(float((2 + 2 * e).log() - 1))
        # sum over the vocabulary of (p - [target]) w: rank 1's rows are (1, 0)
        assert dx[0, 0].tolist() == pytest.approx([float(2 * e / (2 + 2 * e) - 1), 0.0])
        assert dx[1, 0].tolist() == [0, 0]
    assert first[1].tolist() == [[1, 1], [0, 0]] and second[1].tolist() == [[1, 1], [1, 1]]


def test_every_cut_parameter_has_the_shape_of_its_shard():
    for tp in (2, 4):
        program, _ = dry_program(P(tp=tp), WIDE, FEW)
        mesh, shapes = Mesh(tp=tp), parameter_shapes(WIDE)
        for name, parameter in program.named_parameters():
            assert tuple(parameter.shape) == shard_shape(name, shapes[name], mesh)


# -- torch's DTensor as an independent oracle --------------------------------------------------------------------------

ORACLE = replace(WIDE, layers=1, norm="layernorm", activation="gelu", qkv_bias=True, output_bias=True, ffn_bias=True)
TOKENS_SB = torch.arange(24).view(12, 2) % 32
TARGETS_SB = (TOKENS_SB * 7 + 3) % 32


class Plain(nn.Module):
    """One layer without rotary positions, of torch's own modules under our names, for `parallelize_module`."""

    def __init__(self, c):
        super().__init__()
        width, keys = c.hidden, c.kv_heads * c.head_size
        self.embedding = nn.Embedding(c.vocab, width)
        self.attention_norm, self.feed_forward_norm, self.norm = (nn.LayerNorm(width, c.norm_eps) for _ in range(3))
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, keys), nn.Linear(width, keys)
        self.output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, c.ffn), nn.Linear(c.ffn, width)
        self.head = nn.Linear(width, c.vocab, bias=False)
        self.head_size = c.head_size

    def forward(self, tokens_SB):
        x = self.embedding(tokens_SB)
        y = self.attention_norm(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
            for part in (self.query, self.key, self.value)
        )
        x = x + self.output(attention(q, k, v).permute(2, 0, 1, 3).flatten(2))
        x = x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))
        return self.head(self.norm(x))


def global_name(name):
    """`query.weight` -> `layers.0.attention.query.weight`."""
    module = name.split(".")[0]
    part = {"query": "attention.", "key": "attention.", "value": "attention.", "output": "attention."}
    part |= {"up": "feed_forward.", "down": "feed_forward."}
    inside = module in part or module in ("attention_norm", "feed_forward_norm")
    return f"layers.0.{part.get(module, '')}{name}" if inside else name


def oracle_on_rank(rank, sp):
    """(loss, whole gradients) of the same model cut by torch."""
    group = make_process_groups(Mesh(tp=2), rank, ("tp",), "gloo", COMM_TIMEOUT_S, GROUPS).get("tp")
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Plain(ORACLE).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(global_name(name), tuple(parameter.shape), 0))
    between = Shard(0) if sp else Replicate()
    column = {name: ColwiseParallel(input_layouts=between) for name in ("query", "key", "value", "up")}
    row = {name: RowwiseParallel(output_layouts=between) for name in ("output", "down")}
    norms = ("attention_norm", "feed_forward_norm", "norm")
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        **column,
        **row,
        **({name: SequenceParallel(sequence_dim=0, use_local_output=True) for name in norms} if sp else {}),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    with loss_parallel():
        logits = model(TOKENS_SB)
        loss = F.cross_entropy(logits.flatten(0, 1), TARGETS_SB.flatten(), reduction="sum") / TARGETS_SB.numel()
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[global_name(name)] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item(), gradients


def ours_on_rank(rank, sp):
    """(loss, gradients of this rank's parts), through the composed program; all positions 0, so nothing is rotated."""
    train = replace(FEW, microbatches=1, steps=1)
    parallel = P(tp=2, sp=sp)
    comm = gloo(Mesh(tp=2), rank, NullRecorder(rank), streams_of(ORACLE, parallel, train))
    if comm is None:
        return None
    program = build(Configuration(ORACLE, parallel, train), comm, Device.named("cpu"))
    batch = program.batch(0)
    microbatch = batch.microbatches[0]._replace(
        tokens_SB=TOKENS_SB, targets_SB=TARGETS_SB, positions_S=torch.zeros(12, dtype=torch.long)
    )
    program.gradients.begin_step()
    loss = program.executor.run(batch._replace(microbatches=(microbatch,), valid_tokens=TARGETS_SB.numel()))
    synchronise(program.reductions, comm)
    comm.close()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in program.named_parameters()}


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_agrees_with_dtensor(pool, sp):
    ours, oracle = pool.run(ours_on_rank, sp)[:2], pool.run(oracle_on_rank, sp)[:2]
    mesh = Mesh(tp=2)
    assert ours[0][0] == pytest.approx(oracle[0][0], rel=1e-12)
    for name, wanted in oracle[0][1].items():
        whole = gather(name, {rank: gradients[name] for rank, (_, gradients) in enumerate(ours)}, mesh, 0)
        if name.endswith("key.bias"):  # without rotation it adds the same to all scores of a query: softmax ignores it
            assert max(whole.abs().max(), wanted.abs().max()) < 1e-15
        else:
            assert relative(whole, wanted) < TOLERANCE, name


# -- what is sent ------------------------------------------------------------------------------------------------------


def dry_program(parallel, model, train, rank=0):
    """(composed program of one rank, its recorder): nothing moves, all rows are there."""
    recorder = Recorder(rank)
    comm = DryComm(Mesh.of(parallel), rank, recorder, streams_of(model, parallel, train))
    return build(Configuration(model, parallel, train), comm, Device.named("cpu")), recorder


def rows_of(program, recorder):
    train = program.configuration.train
    train_step(program, 0, InjectedCauses(train, recorder.rank, Device.named("cpu"), recorder))
    return recorder.operations()


def recorded(rows):
    return Counter(
        tp_traffic.Message(row.strategy, row.collective, row.phase, row.bytes)
        for row in rows
        if row.kind == "comm" and row.axis == "tp"
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_traffic_is_what_theory_says(sp, pp, recompute):
    """Every operation over tp, by strategy, collective, phase and bytes, on the first rank of each stage."""
    parallel, train = P(tp=2, sp=sp, pp=pp, recompute=recompute), replace(TRAIN, dtype="float32")
    theory = sp_traffic if sp else tp_traffic
    for stage in range(pp):
        rows = rows_of(*dry_program(parallel, TIED, train, rank=2 * stage))
        assert recorded(rows) == theory.step_traffic(TIED, parallel, train, stage)


def test_traffic_of_a_layer_by_hand():
    """One layer, one microbatch of 12 x 2 tokens of 24 features, float64: 4608 bytes an operation."""
    model, train = replace(SHARED, layers=1), replace(TRAIN, microbatches=1)
    size = 12 * 2 * 24 * 8
    tp = recorded(rows_of(*dry_program(P(tp=2), model, train)))
    assert {m: n for m, n in tp.items() if m.strategy == "tp"} == {
        ("tp", "all_reduce", "forward", size): 2,
        ("tp", "all_reduce", "backward", size): 2,
    }
    sp = recorded(rows_of(*dry_program(P(tp=2, sp=True), model, train)))
    assert {m: n for m, n in sp.items() if m.strategy == "sp"} == {
        ("sp", "all_gather", "forward", size): 2,
        ("sp", "reduce_scatter", "forward", size): 2,
        ("sp", "all_gather", "backward", size): 4,
        ("sp", "reduce_scatter", "backward", size): 2,
        ("sp", "all_reduce", "other", (2 + 1) * 24 * 8): 1,  # three norms
    }
    for found in (tp, sp):
        assert found["loss", "all_reduce", "forward", 12 * 2 * 8] == 3
    assert tp["embedding", "all_reduce", "forward", size] == tp["loss", "all_reduce", "backward", size] == 1


def test_a_boundary_is_cut_with_the_sequence():
    """Between stages every rank of tp sends its positions under sp, else all of them."""
    for sp, positions in ((False, 12), (True, 6)):
        rows = rows_of(*dry_program(P(tp=2, sp=sp, pp=2), SHARED, TRAIN))
        assert {row.bytes for row in rows if row.collective == "send"} == {positions * 2 * 24 * 8}


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_weights_are_computed_while_the_gradient_of_the_input_travels(sp):
    """In each layer's backward something is computed between the issue of the reduction and its wait."""
    rows = [
        row
        for row in rows_of(*dry_program(P(tp=2, sp=sp), SHARED, replace(TRAIN, microbatches=1)))
        if row.phase == "backward" and row.layer == 1
    ]
    waits = {row.op_id: number for number, row in enumerate(rows) if row.kind == "wait"}
    collective = "reduce_scatter" if sp else "all_reduce"
    reductions = [(number, row) for number, row in enumerate(rows) if row.collective == collective]
    assert len(reductions) == 2
    for number, row in reductions:
        between = rows[number + 1 : waits[row.op_id]]
        assert any(other.kind == "compute" for other in between)


def kept_bytes(parallel, model):
    """Bytes that two layers keep for backward on the first rank."""
    comm = DryComm(Mesh.of(parallel), 0, NullRecorder(0), ("tp",))
    stage = Stage(model, comm.recorder, [0, 1], False, False, seams_of(parallel, comm), torch.float64)
    initialise(stage, model, 0, lambda name, whole: shard(name, whole, comm.mesh, 0))
    x = torch.randn(local_sequence(model, parallel), 2, model.hidden, dtype=torch.float64, requires_grad=True)
    meter = ActivationMeter(stage.parameters())
    with meter.watching():
        stage(x, local_batch(model, FEW, 1, 0, 0).microbatches[0], 1)
        return meter.live


@pytest.mark.parametrize("model", [WIDE, DROPPED], ids=["wide", "dropped"])
def test_sequence_parallelism_cuts_every_activation(model):
    """What is kept is that of one rank divided by tp, to the byte, but for the rotary angles; TP alone keeps more."""
    angles = 2 * model.seq * model.head_size * 8  # cosines and sines of all positions
    alone = kept_bytes(P(), model) - angles
    for tp in (2, 4):
        assert kept_bytes(P(tp=tp, sp=True), model) - angles == alone / tp
        assert alone / tp < kept_bytes(P(tp=tp), model) - angles < alone


def rows_on_rank(rank, parallel):
    recorder = Recorder(rank)
    comm = gloo(Mesh.of(parallel), rank, recorder, streams_of(TIED, parallel, FEW))
    program = build(Configuration(TIED, parallel, FEW), comm, Device.named("cpu"))
    rows = rows_of(program, recorder)
    comm.close()
    return [(row.collective, row.axis, row.group, row.seq, row.bytes) for row in rows if row.kind == "comm"]


def test_real_rows_are_the_dry_ones(pool):
    parallel = P(tp=2, sp=True, pp=2)
    for rank, rows in enumerate(pool.run(rows_on_rank, parallel)):
        dry = rows_of(*dry_program(parallel, TIED, FEW, rank))
        assert rows == [(r.collective, r.axis, r.group, r.seq, r.bytes) for r in dry if r.kind == "comm"]


# -- the comparison bites ------------------------------------------------------------------------------------------------


def without_nth(program, collective, strategy, number):
    """The `number`-th reduction of this kind leaves every rank with its own part."""
    operation, seen = getattr(program.comm, collective), []

    def forgetful(tensor, axis, **how):
        if how["strategy"] == strategy:
            seen.append(axis)
            if len(seen) == number:
                operation(tensor.clone(), axis, **how).wait()
                return _Kept(tensor)
        return operation(tensor, axis, **how)

    setattr(program.comm, collective, forgetful)


class _Kept:
    """A handle whose output is what it was made of."""

    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor


def forget_a_sum_of_a_layer(program):
    without_nth(program, "all_reduce", "tp", 1)


def forget_a_sum_in_backward(program):
    without_nth(program, "all_reduce", "tp", 6)  # two layers: 4 in forward


def forget_the_embedding(program):
    without_nth(program, "all_reduce", "embedding", 1)


def forget_a_sum_of_the_loss(program):
    without_nth(program, "all_reduce", "loss", 2)


def add_the_bias_before_the_sum(program):
    """Each rank adds it: it counts tp times."""
    output = program.chunks[0].layers["0"].attention.output
    output.product = lambda y: F.linear(y, output.weight, output.bias)
    output.add_bias = lambda y: y


def double_a_norm(program):
    program.chunks[0].norm.weight.register_hook(lambda gradient: 2 * gradient)


def forget_the_norms(program):
    """What each rank of tp holds whole keeps the gradient of its own positions."""
    program.reductions.clear()


def drop_by_local_position(program):
    """Each rank of tp counts its tokens from 0."""
    stage = program.chunks[0]
    own = stage.seams.own_tokens
    object.__setattr__(stage.seams, "own_tokens", lambda numbers: own(numbers) - own(numbers).min())


def gather_at_the_wrong_place(program):
    """The parts of the sequence are exchanged."""
    gather_all, here = program.comm.all_gather, program.comm.index("tp")

    def exchanged(tensor, axis, **how):
        whole = gather_all(tensor, axis, **how).wait()
        return _Kept(whole.roll(whole.shape[0] // 2, 0) if here == 1 else whole)

    program.comm.all_gather = exchanged


@pytest.mark.parametrize(
    ("mistake", "sp"),
    [
        (forget_a_sum_of_a_layer, False),
        (forget_a_sum_in_backward, False),
        (forget_the_embedding, False),
        (forget_a_sum_of_the_loss, False),
        (add_the_bias_before_the_sum, False),
        (double_a_norm, False),
        (add_the_bias_before_the_sum, True),
        (forget_the_norms, True),
        (drop_by_local_position, True),
        (gather_at_the_wrong_place, True),
    ],
    ids=lambda value: getattr(value, "__name__", "sp" if value else "tp"),
)
def test_a_mistake_is_noticed(pool, mistake, sp):
    model, train = replace(DROPPED, layers=2), replace(TRAIN, microbatches=1, steps=1)
    assert difference(pool, Case("right", P(tp=2, sp=sp), model, train)) < TOLERANCE
    assert difference(pool, Case("wrong", P(tp=2, sp=sp), model, train), mistake) > 1e-3
