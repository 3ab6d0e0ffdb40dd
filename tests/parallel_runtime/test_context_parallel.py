"""The arithmetic of context parallelism: layouts and blocks by hand and against a mask, online softmax, what is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from equality import GROUPED, TRAIN
from hypothesis import given
from hypothesis import strategies as st
from pool import gloo

from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.comm import DryComm
from stepscope.parallel_runtime.compose import Configuration, build, seams_of, streams_of
from stepscope.parallel_runtime.config import CP_LAYOUTS, CP_MODES, ParallelConfig
from stepscope.parallel_runtime.cp import blocks, traffic
from stepscope.parallel_runtime.cp.layouts import Block, block_of, pieces_of, positions_of, scores_of
from stepscope.parallel_runtime.cp.ring import RingAttention
from stepscope.parallel_runtime.cp.ulysses import to_heads, to_positions
from stepscope.parallel_runtime.data import local_batch, sequences
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.dry import operations_of_step
from stepscope.parallel_runtime.grad_sync import gradient_view
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.messages import sent
from stepscope.parallel_runtime.model.attention import attention
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.train import train_step
from stepscope.tracer.memory import ActivationMeter
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.schema import plan_of

P = ParallelConfig
LAYOUTS = st.sampled_from(list(CP_LAYOUTS))
MODEL = replace(GROUPED, layers=2, seq=16)
WIDE = replace(MODEL, hidden=32, heads=8, kv_heads=4)


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_layouts_by_hand():
    """Two ranks, eight positions: halves, or the first and last quarter and the two in the middle."""
    assert [positions_of("contiguous", 2, rank, 8) for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [positions_of("zigzag", 2, rank, 8) for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [pieces_of("zigzag", 4, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_blocks_by_hand():
    """Of four local positions: earlier ranks are seen whole, later ones never; zigzag sees a half of each."""
    assert block_of("contiguous", 2, 0, 1, 4) is None
    assert block_of("contiguous", 2, 1, 0, 4) == Block((0, 4), (0, 4), False)
    assert block_of("zigzag", 2, 0, 0, 4) == Block((0, 4), (0, 4), True)
    assert block_of("zigzag", 2, 1, 0, 4) == Block((0, 4), (0, 2), False), "all queries see the first quarter"
    assert block_of("zigzag", 2, 0, 1, 4) == Block((2, 4), (0, 4), False), "the last quarter sees both in the middle"


def test_work_by_hand():
    """Eight positions have 36 pairs: contiguous halves do 10 and 26, zigzag 18 each."""
    assert [scores_of("contiguous", 2, rank, 8) for rank in (0, 1)] == [10, 26]
    assert [scores_of("zigzag", 2, rank, 8) for rank in (0, 1)] == [18, 18]


@given(LAYOUTS, st.integers(1, 8), st.integers(1, 3))
def test_every_causal_pair_is_in_exactly_one_block(layout, ranks, piece):
    """Against the mask itself, position by position; a rank's positions ascend and all ranks' tile the sequence."""
    local = piece * CP_LAYOUTS[layout]
    held = [positions_of(layout, ranks, rank, local * ranks) for rank in range(ranks)]
    assert sorted(position for mine in held for position in mine) == list(range(local * ranks))
    assert all(mine == sorted(mine) for mine in held)
    for here in range(ranks):
        pairs = []
        for source in range(ranks):
            block = block_of(layout, ranks, here, source, local)
            if block is not None:
                (first, last), (lowest, highest), causal = block
                pairs += [
                    (held[here][i], held[source][j])
                    for i in range(first, last)
                    for j in range(lowest, highest)
                    if not causal or j <= i
                ]
        assert sorted(pairs) == [(query, key) for query in held[here] for key in range(query + 1)]
        assert scores_of(layout, ranks, here, local * ranks) == len(pairs)


@given(st.integers(1, 16), st.integers(1, 4))
def test_zigzag_gives_every_rank_the_same_work(ranks, piece):
    assert len({scores_of("zigzag", ranks, rank, 2 * piece * ranks) for rank in range(ranks)}) == 1


@given(LAYOUTS, st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.9]))
def test_the_shards_of_a_batch_make_the_batch(layout, ranks, padding):
    """Tokens, targets, positions and numbers travel together; the valid tokens are those of the whole batch."""
    train = replace(TRAIN, padding=padding, microbatches=1)
    whole = local_batch(MODEL, train, 2, 1, 3)
    seen = torch.zeros(MODEL.seq)
    for rank in range(ranks):
        held = positions_of(layout, ranks, rank, MODEL.seq)
        shard = local_batch(MODEL, train, 2, 1, 3, positions=held)
        assert shard.valid_tokens == whole.valid_tokens
        for part, all_of_it in zip(shard.microbatches[0], whole.microbatches[0], strict=True):
            assert torch.equal(part, all_of_it[held])
        seen[held] += 1
    assert (seen == 1).all()
    if padding:
        assert (sequences(MODEL, train, 3, [2, 3])[1] < 0).any()


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fused", "plain"])
def kernel(request, monkeypatch):
    """The fused kernel of the CPU, and plain matrix products, as other devices use them."""
    if request.param == "plain":
        monkeypatch.setattr(blocks, "FUSED", ())
    return request.param


def inputs(ranks, local, dtype, heads=(6, 2)):
    """q, k, v and a gradient of the output, whole."""
    generator = torch.Generator().manual_seed(7)
    queries, keys = heads
    return tuple(
        torch.randn(2, count, ranks * local, 8, generator=generator, dtype=dtype)
        for count in (queries, keys, keys, queries)
    )


@pytest.mark.parametrize("layout", CP_LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(6, 2), (2, 2), (4, 1)], ids=["grouped", "multi-head", "one key head"])
def test_blocks_merge_to_the_attention_of_one_device(kernel, ranks, layout, heads):
    """Forward and all gradients, in float64; huge scores must not overflow."""
    local = 4
    q, k, v, gradient = inputs(ranks, local, torch.float64, heads)
    q = q * 30
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    attention(*wanted).backward(gradient)
    output = attention(q, k, v)
    d_key_value = torch.zeros(2, *k.shape, dtype=k.dtype)
    held = [positions_of(layout, ranks, rank, ranks * local) for rank in range(ranks)]
    key_value = torch.stack((k, v))
    for here in range(ranks):
        mine, order = held[here], [(here - hop) % ranks for hop in range(ranks)]
        plan = [(source, block_of(layout, ranks, here, source, local)) for source in order]
        online = blocks.OnlineAttention(q[:, :, mine])
        for source, block in plan:
            online.add(key_value[..., held[source], :], block)
        part, lse = online.result()
        torch.testing.assert_close(part, output[:, :, mine], rtol=1e-12, atol=1e-12)
        back = blocks.OnlineGradients(gradient[:, :, mine], q[:, :, mine], part, lse)
        for source, block in plan:
            d_part = torch.zeros_like(key_value[..., held[source], :])
            blocks.collect(d_part, back.add(key_value[..., held[source], :], block), block)
            d_key_value[..., held[source], :] += d_part
        torch.testing.assert_close(back.query(), wanted[0].grad[:, :, mine], rtol=1e-11, atol=1e-11)
    for found, x in zip(d_key_value, wanted[1:], strict=True):
        torch.testing.assert_close(found, x.grad, rtol=1e-11, atol=1e-11)


def test_low_precision_is_merged_in_float32(kernel):
    """bfloat16, eight blocks: about as good as one device in bfloat16, both against float64; so is the queries' gradient.

    Measured: 1.0 to 1.3 times its error; merged in bfloat16 it would be 2.5 times.
    """
    ranks, local = 8, 16
    mine = slice(-local, None)
    q, k, v, gradient = (x.bfloat16() for x in inputs(ranks, local, torch.float64))

    def on_one_device(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        output = attention(*leaves)
        output.backward(gradient.to(dtype))
        return output.detach()[:, :, mine].double(), leaves[0].grad[:, :, mine].double()

    plan = [
        (
            torch.stack((k, v))[..., source * local : (source + 1) * local, :],
            block_of("contiguous", 8, 7, source, local),
        )
        for source in reversed(range(ranks))
    ]
    online = blocks.OnlineAttention(q[:, :, mine])
    for key_value, block in plan:
        online.add(key_value, block)
    output, lse = online.result()
    back = blocks.OnlineGradients(gradient[:, :, mine], q[:, :, mine], output, lse)
    for key_value, block in plan:
        back.add(key_value, block)
    assert output.dtype == back.query().dtype == torch.bfloat16 and lse.dtype == torch.float32
    for found, right, alone in zip(
        (output, back.query()), on_one_device(torch.float64), on_one_device(torch.bfloat16), strict=True
    ):
        assert (found.double() - right).norm() < 1.5 * (alone - right).norm()


def test_merging_by_hand():
    """Two keys of scores log 1 and log 3 with values 0 and 4, one at a time: (1 x 0 + 3 x 4) / 4 = 3, lse log 4."""
    output, lse = torch.tensor([[[[0.0]]]]), torch.tensor([[[1.0]]]).log()
    blocks.merge(output, lse, torch.tensor([[[[4.0]]]]), torch.tensor([[[3.0]]]).log())
    assert output.item() == pytest.approx(3.0) and lse.exp().item() == pytest.approx(4.0)


# -- Ulysses -----------------------------------------------------------------------------------------------------------


def exchange_on_rank(rank, layout):
    """A tensor whose entries tell (head, position): there, and back."""
    comm = gloo(Mesh(cp=2), rank, NullRecorder(rank), ("cp",))
    if comm is None:
        return None
    mine = torch.tensor(positions_of(layout, 2, rank, 8))
    x = (10 * torch.arange(4)[:, None] + mine).view(1, 4, 4, 1).double()
    (whole,) = to_heads(comm, layout, x)
    (back,) = to_positions(comm, layout, whole)
    comm.close()
    return whole[0, ..., 0].tolist(), torch.equal(back, x)


@pytest.mark.parametrize("layout", CP_LAYOUTS)
def test_heads_and_positions_by_hand(pool, layout):
    """Four heads on two ranks: rank 0 gets heads 0 and 1 with all eight positions in order, and the way back is exact."""
    for rank, (whole, exact) in enumerate(pool.run(exchange_on_rank, layout)[:2]):
        assert whole == [[10 * head + position for position in range(8)] for head in (2 * rank, 2 * rank + 1)]
        assert exact


# -- what is sent ------------------------------------------------------------------------------------------------------


def rows_of(parallel, model=MODEL, train=TRAIN, rank=0):
    return operations_of_step(Configuration(model, parallel, train), rank)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", CP_MODES)
def test_bytes_sent_are_those_of_the_textbook(mode, ranks):
    """Per layer and microbatch, as formulas on paper; key and value heads have half the width of the query heads."""
    B, S, H, h, b, M, L = 2, 16, 32, 16, 8, TRAIN.microbatches, 2
    n = Fraction(ranks)
    forward, backward = {
        "ring": (2 * (n - 1) / n * B * S * h * b, 2 * (n - 1) / n * B * S * h * b + 2 * B * S * h * b),
        "ulysses": ((n - 1) / n * B * (S / n) * (2 * H + 2 * h) * b,) * 2,
        "allgather": ((n - 1) / n * 2 * B * S * h * b, 2 * (n - 1) / n * 2 * B * S * h * b),
    }[mode]
    found = {"forward": Fraction(0), "backward": Fraction(0)}
    for message, number in traffic.step_traffic(WIDE, P(cp=ranks, cp_mode=mode), TRAIN, 0).items():
        found[message.phase] += number * sent(message.collective, message.bytes, ranks)
    assert found == {"forward": forward * M * L, "backward": backward * M * L}


@pytest.mark.parametrize(
    ("mode", "streams"),
    [("ring", {"cp.kv": 3 + 3, "cp.dkv": 4}), ("ulysses", {"cp": 4 + 4}), ("allgather", {"cp": 1 + 2})],
)
def test_operations_of_a_layer_by_stream(mode, streams):
    """Four ranks, one microbatch: KV n - 1 hops either way, dKV n; 4 all-to-alls either way; 1 gather, 1 again, 1 scatter."""
    model = replace(MODEL, layers=1, hidden=32, heads=4, kv_heads=4)
    rows = rows_of(P(cp=4, cp_mode=mode), model, replace(TRAIN, microbatches=1))
    assert Counter(row.stream for row in rows if row.kind == "comm" and row.strategy == "cp") == streams
    assert {row.axis for row in rows if row.kind == "comm"} == {"cp"}, "dp is 1: gradients and loss are summed over cp"


class Logged:
    """A door that writes down what the ring does, and when."""

    def __init__(self, ranks, log):
        self.ranks, self.log = ranks, log

    def size(self, axis):
        return self.ranks

    def index(self, axis):
        return 1

    def ring_shift(self, tensor, axis, *, strategy, stream):
        self.log.append(f"issue {stream}")
        return LoggedHandle(tensor.clone(), stream, self.log)


class LoggedHandle:
    def __init__(self, output, stream, log):
        self.output, self.stream, self.log = output, stream, log

    def wait(self):
        self.log.append(f"wait {self.stream}")
        return self.output


def test_messages_travel_while_blocks_are_computed(monkeypatch):
    """Three ranks: every hop of KV is issued before the block's computation and waited for behind it; dKV is one late."""
    log = []
    for name in ("attend_block", "attend_block_backward"):
        inner = getattr(blocks, name)
        monkeypatch.setattr(blocks, name, lambda *args, inner=inner: log.append("compute") or inner(*args))
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    output = RingAttention.apply(Logged(3, log), "zigzag", q, k, v)
    assert log == ["issue cp.kv", "compute", "wait cp.kv"] * 2 + ["compute"]
    log.clear()
    output.sum().backward()
    assert log == [
        *("issue cp.kv", "compute", "issue cp.dkv", "wait cp.kv"),
        *("issue cp.kv", "compute", "wait cp.dkv", "issue cp.dkv", "wait cp.kv"),
        *("compute", "wait cp.dkv", "issue cp.dkv", "wait cp.dkv"),
    ]


def kept_bytes(parallel):
    """Bytes that two layers keep for backward on the first rank."""
    comm = DryComm(Mesh.of(parallel), 0, NullRecorder(0), streams_of(WIDE, parallel, TRAIN))
    stage = Stage(WIDE, comm.recorder, [0, 1], False, False, seams_of(parallel, comm), torch.float64)
    initialise(stage, WIDE, 0)
    held = positions_of(parallel.cp_layout, parallel.cp, 0, WIDE.seq)
    x = torch.randn(len(held), 2, WIDE.hidden, dtype=torch.float64, requires_grad=True)
    meter = ActivationMeter(stage.parameters())
    with meter.watching():
        stage(x, local_batch(WIDE, TRAIN, 1, 0, 0, positions=held).microbatches[0], 1)
        return meter.live


@pytest.mark.parametrize("mode", CP_MODES)
def test_every_activation_is_cut(mode):
    """What is kept is that of one rank divided by cp, to the byte: no mode keeps the keys of the whole sequence.

    Ulysses keeps the output of attention twice, as it left attention and as it came back to its positions.
    """
    alone = kept_bytes(P())
    if mode == "ulysses":
        alone += 2 * WIDE.seq * 2 * WIDE.hidden * 8  # of two layers, two sequences
    assert {cp: kept_bytes(P(cp=cp, cp_mode=mode)) for cp in (2, 4)} == {2: alone / 2, 4: alone / 4}


def rows_on_rank(rank, parallel):
    recorder = Recorder(rank)
    comm = gloo(Mesh.of(parallel), rank, recorder, streams_of(MODEL, parallel, TRAIN))
    program = build(Configuration(MODEL, parallel, TRAIN), comm, Device.named("cpu"))
    train_step(program, 0, InjectedCauses(TRAIN, rank, Device.named("cpu"), recorder))
    comm.close()
    return recorder.operations()


@pytest.mark.parametrize("mode", CP_MODES)
def test_real_rows_are_the_dry_ones(pool, mode):
    parallel = P(cp=2, dp=2, cp_mode=mode)
    for rank, rows in enumerate(pool.run(rows_on_rank, parallel)):
        assert plan_of(rows) == plan_of(rows_of(parallel, rank=rank))


def test_gradients_are_summed_over_dp_and_cp_at_once():
    """The axis of the rows is the true one: cp alone, or both; without cp nothing changes."""
    for parallel, axis in ((P(cp=2), "cp"), (P(cp=2, dp=2), "dp_cp"), (P(dp=2), "dp")):
        sums = [row for row in rows_of(parallel) if row.strategy == "dp"]
        assert {row.axis for row in sums} == {axis}
        assert {row.stream for row in sums} == {gradient_view(parallel)}, "never the stream of attention"
