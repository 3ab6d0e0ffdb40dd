"""The arithmetic of a mixture of experts: routing, capacity, permutation, balance, by hand and by properties."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from equality import TRAIN
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.comm import READ_COUNTS
from stepscope.parallel_runtime.compose import Configuration
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.dry import dry_step, operations_of_step
from stepscope.parallel_runtime.ep.balance import moved
from stepscope.parallel_runtime.ep.permutation import by_expert, by_source, combine, order_of, permute, splits_of
from stepscope.parallel_runtime.ep.planned import received_of, sent_of, tokens_of
from stepscope.parallel_runtime.ep.traffic import planned_routing
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.mixture import Mixture
from stepscope.parallel_runtime.model.planned_routing import capacity, planned_choices, planned_counts
from stepscope.parallel_runtime.model.router import (
    AddLoss,
    Router,
    balance_loss,
    counts_of,
    counts_of_sequences,
    within_capacity,
)
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.traffic import Row, step_traffic

P = ParallelConfig
MODEL = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=32, seq=8, experts=8, expert_ffn=12)


# -- planned routing ---------------------------------------------------------------------------------------------------


def test_planned_counts_by_hand():
    assert planned_counts(6, 2, 4, 0.0) == (3, 3, 3, 3)
    assert planned_counts(6, 1, 3, 1.0) == (3, 2, 1)  # 1 : 1/2 : 1/3 of 6 is 3.27, 1.64, 1.09
    assert planned_counts(6, 2, 3, 1.0) == (6, 4, 2)  # 6.5 is more than there are tokens: all 6, then 6 as 1/2 : 1/3
    assert planned_counts(6, 2, 4, 50.0) == (6, 6, 0, 0)
    assert planned_choices(6, 2, 3, 1.0) == [[0, 1], [0, 1], [0, 1], [0, 1], [0, 2], [0, 2]]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 6), st.floats(0, 40))
def test_a_plan_is_a_routing(tokens, per_token, more, skew):
    """Each token has so many different experts, which are chosen as often as planned, earlier ones no less often."""
    experts = per_token + more
    counts, choices = (
        planned_counts(tokens, per_token, experts, skew),
        planned_choices(tokens, per_token, experts, skew),
    )
    assert sum(counts) == tokens * per_token and max(counts) <= tokens
    assert list(counts) == sorted(counts, reverse=True)
    assert all(len(set(choice)) == per_token for choice in choices) and len(choices) == tokens
    chosen = Counter(expert for choice in choices for expert in choice)
    assert [chosen[expert] for expert in range(experts)] == list(counts)


def test_what_ranks_of_a_plan_exchange():
    """8 tokens, 2 experts each, 4 experts of which rank 0 has the first two; capacity 1.0 leaves 4 to each."""
    model = replace(MODEL, experts=4, routing_skew=1.0, seq=4)
    assert tokens_of(model, P(), replace(TRAIN, microbatch_size=2)) == 8
    assert sent_of(model, 8) == [8, 4, 2, 2] and received_of([8, 4, 2, 2], 2, 1) == [2, 2, 2, 2]
    assert sent_of(replace(model, balance="capacity", capacity_factor=1.0), 8) == [4, 4, 2, 2]
    assert planned_routing(model, P(dp=2, ep=2), replace(TRAIN, microbatch_size=2), 0)(0, 0) == (16, 24)


# -- the router --------------------------------------------------------------------------------------------------------


def router(**changes):
    """Three experts that score the features of a token: scores are what the token says."""
    made = Router(replace(MODEL, experts=3, hidden=8, heads=4, **changes), dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3, 8))
    return made


def tokens(*scores):
    return torch.tensor([[*score, *[0.0] * 5] for score in scores], dtype=torch.float64)


def test_weights_by_hand():
    half, third = torch.log(torch.tensor([2.0, 3.0], dtype=torch.float64)).tolist()
    routed = router()(tokens((half, 0.0, third)))  # softmax 2 : 1 : 3
    assert routed.experts_TK.tolist() == [[2, 0]]
    assert routed.weights_TK.tolist() == [pytest.approx([0.6, 0.4])]
    assert routed.shares_TE.tolist() == [pytest.approx([1 / 3, 1 / 6, 1 / 2])]
    assert routed.counts_E.tolist() == [1, 0, 1]
    one = router(experts_per_token=1)(tokens((half, 0.0, third)))
    assert one.weights_TK.tolist() == [[pytest.approx(0.5)]], "not 1: the router would have no gradient"
    sigmoid = router(router="sigmoid")(tokens((half, 0.0, third)))  # 2/3, 1/2, 3/4
    assert sigmoid.weights_TK.tolist() == [pytest.approx([9 / 17, 8 / 17])]


def test_an_offset_changes_who_is_chosen_and_no_weight():
    made = router()
    made.offset_E.copy_(torch.tensor([0.0, 0.0, -1.0]))
    routed = made(tokens((2.0, 1.0, 3.0)))
    assert routed.experts_TK.tolist() == [[0, 1]]
    e = torch.tensor(1.0, dtype=torch.float64).exp().item()
    assert routed.weights_TK.tolist() == [pytest.approx([e / (e + 1), 1 / (e + 1)])]


def test_capacity_by_hand():
    """Four tokens ask for expert 0, which has room for two: those with the largest weights stay."""
    assert capacity(4, 2, 3, 1.0) == 3 and capacity(6, 2, 3, 1.25) == 5 and capacity(4, 2, 8, 0.1) == 1
    weights = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.5, 0.5]])
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])
    assert within_capacity(weights, chosen, 3, 2).tolist() == [[False, True], [True, True], [True, True], [False, True]]
    routed = router(balance="capacity", capacity_factor=0.3)(tokens((3.0, 1.0, 0.0), (3.0, 2.0, 0.0)))
    assert routed.experts_TK.tolist() == [[0, 3], [3, 1]] and routed.counts_E.tolist() == [1, 1, 0]
    assert (routed.weights_TK == 0).tolist() == [[False, True], [True, False]]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 4), st.integers(1, 20), st.integers(0, 9))
def test_capacity_keeps_the_largest(tokens, per_token, more, most, seed):
    """As many as there is room for, and none that is dropped weighs more than one that is kept."""
    torch.manual_seed(seed)
    experts = per_token + more
    scores = torch.rand(tokens, experts, dtype=torch.float64)
    weights, chosen = scores.topk(per_token, -1)
    kept = within_capacity(weights, chosen, experts, most)
    for expert in range(experts):
        asking = chosen == expert
        stay, go = weights[asking & kept], weights[asking & ~kept]
        assert len(stay) == min(int(asking.sum()), most)
        assert not len(go) or stay.min() >= go.max()


# -- permutation -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_rows_come_to_their_experts_and_back(ranks, each, count, per_token, seed):
    """All ranks at once: the experts only copy, so a token gets itself back times its weights, dropped choices missing."""
    torch.manual_seed(seed)
    experts = ranks * each
    sent, orders, rows, choices, weights = [], [], [], [], []
    held = [torch.rand(count, 5, dtype=torch.float64) for _ in range(ranks)]
    for tokens in held:
        chosen = torch.randint(experts + 1, (count, per_token))  # `experts` is dropped
        choices.append(chosen)
        weights.append(torch.rand(count, per_token, dtype=torch.float64) * (chosen < experts))
        sent.append(counts_of(chosen, experts).tolist())
        orders.append(order_of(chosen)[: sum(sent[-1])])
        rows.append(permute(tokens, orders[-1], per_token))
    back = [[] for _ in range(ranks)]
    for rank in range(ranks):
        received = [number for source in sent for number in source[rank * each : (rank + 1) * each]]
        splits = splits_of(sent[rank], received, ranks)
        assert splits.send == [sum(sent[rank][i * each : (i + 1) * each]) for i in range(ranks)]
        parts = [rows[source].split(splits_of(sent[source], sent[source], ranks).send)[rank] for source in range(ranks)]
        groups = by_expert(torch.cat(parts), splits.pieces, ranks)
        assert [len(group) for group in groups] == [sum(received[i::each]) for i in range(each)]
        for source, part in enumerate(by_source(groups, splits.pieces, ranks).split(splits.receive)):
            back[source].append(part)
    for rank, tokens in enumerate(held):
        got = combine(torch.cat(back[rank]), orders[rank], weights[rank])
        torch.testing.assert_close(got, tokens * weights[rank].sum(-1, keepdim=True))


def test_a_mixture_without_a_layout_computes_every_expert():
    """One device: each token's two experts, weighted; an expert that nobody chooses has a gradient of zeros."""
    mixture = Mixture(replace(MODEL, routing_skew=50.0), Seams(), 0, dtype=torch.float64)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    y = mixture(x)
    routed, experts = mixture.router(x.flatten(0, 1)), mixture.experts.each()
    wanted = sum(routed.weights_TK[:, i, None] * experts[i](x.flatten(0, 1)) for i in (0, 1))
    torch.testing.assert_close(y.flatten(0, 1), wanted)
    y.sum().backward()
    gradient = mixture.experts.up.weight.grad
    assert gradient[:2].abs().sum() > 0 and gradient[2:].abs().sum() == 0


# -- balance -----------------------------------------------------------------------------------------------------------


def test_offsets_by_hand():
    """Loads 5, 1, 3 have mean 3; the second layer is balanced."""
    offsets = moved(torch.zeros(2, 3), torch.tensor([[5, 1, 3], [2, 2, 2]]), 0.5)
    assert offsets.tolist() == [[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_the_auxiliary_loss_by_hand():
    """Two sequences of two tokens, one expert each of two; tokens stand by position, then sequence."""
    chosen = torch.tensor([[0], [0], [0], [1]])  # sequence 0: 0, 0; sequence 1: 0, 1
    shares = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    counts = counts_of_sequences(chosen, 2, 2)
    assert counts.tolist() == [[2, 0], [1, 1]]
    # f = (2, 0) and (1, 1), P = (0.8, 0.2) and (0.4, 0.6): 1.6 + 1.0
    assert balance_loss(shares, counts, 2, 1).item() == pytest.approx(2.6)


def test_a_loss_added_in_the_middle():
    """As if 0.25 times it had been added to the loss at the end."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    AddLoss.apply(3 * x, (x * x).sum(), 0.25).sum().backward()
    assert x.grad.tolist() == [3.5, 4.0]


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("float16", 1024.0)])
def test_the_auxiliary_loss_is_scaled_as_the_models(dtype, scale):
    """A mean over the 12 sequences of a step; float16 multiplies every gradient."""
    program, _ = dry_step(Configuration(AUX, P(dp=2, ep=2), replace(SINGLE, dtype=dtype)), 0)
    assert program.chunks[0].layers["1"].feed_forward.loss_scale == pytest.approx(scale / 12)


# -- rows --------------------------------------------------------------------------------------------------------------


SINGLE = replace(TRAIN, dtype="float32", microbatches=3, clip=1.0)
AUX = replace(MODEL, balance="aux")
ROWS = {
    "ep2": (MODEL, P(dp=2, ep=2)),
    "ep2, small buckets": (MODEL, P(dp=4, ep=2, bucket_mb=0.001)),
    "ep4 without overlap": (MODEL, P(dp=4, ep=4, overlap=False)),
    "ep2 pp2, first stage dense": (replace(AUX, dense_layers=1, tied=True), P(dp=2, ep=2, pp=2)),
    "ep2 tp2": (MODEL, P(tp=2, ep=2)),
    "ep2 tp2 cp2, aux, full recomputation": (AUX, P(tp=2, cp=2, ep=2, recompute="full")),
    "ep4 tp2 sp dp2": (AUX, P(tp=2, sp=True, dp=2, ep=4)),
    "ep2 tp2 sp": (MODEL, P(tp=2, sp=True, ep=2, recompute="full")),
    "ep1 tp2": (MODEL, P(tp=2)),
    "zero1 ep2": (MODEL, P(dp=4, ep=2, zero=1)),
    "zero1 ep2 pp2 tp2": (replace(MODEL, tied=True), P(dp=2, tp=2, ep=2, pp=2, zero=1, overlap=False)),
    "zero2 ep2 tp2 sp": (MODEL, P(dp=2, tp=2, sp=True, ep=2, zero=2)),
    "zero3 ep2": (MODEL, P(dp=4, ep=2, zero=3)),
    "zero3 ep2, first layer dense": (replace(MODEL, dense_layers=1), P(dp=4, ep=2, zero=3, reshard=False)),
    "zero3, experts not apart": (MODEL, P(dp=2, zero=3)),
    "ep1 dp2": (MODEL, P(dp=2)),
    "skewed": (replace(MODEL, routing_skew=1.0), P(dp=2, ep=2)),
    "skewed, capacity": (replace(MODEL, routing_skew=2.0, balance="capacity"), P(dp=2, ep=2, pp=2)),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_the_predicted_ones(case):
    model, parallel = ROWS[case]
    mesh = Mesh.of(parallel)
    for rank in range(mesh.world_size):
        where = mesh.coordinates(rank)
        rows = [row for row in operations_of_step(Configuration(model, parallel, SINGLE), rank) if row.kind == "comm"]
        found = Counter(Row(row.axis, row.strategy, row.collective, row.phase, row.bytes) for row in rows)
        routing = planned_routing(model, parallel, SINGLE, where["ep"])
        assert found == step_traffic(model, parallel, SINGLE, where["pp"], mesh.index("shard", rank), routing), rank
        assert {row.ranks for row in rows if row.axis == "ep"} <= {mesh.group("ep", rank)}
        assert {row.ranks for row in rows if row.axis == "edp"} <= {mesh.group("edp", rank)}


def test_each_read_of_counts_is_a_row_behind_the_exchange_that_it_waits_for():
    rows = [
        row
        for row in operations_of_step(Configuration(MODEL, P(dp=2, ep=2), SINGLE), 0)
        if row.kind in ("comm", "wait", "host")
    ]
    reads = [place for place, row in enumerate(rows) if row.name == READ_COUNTS]
    assert len(reads) == MODEL.layers * SINGLE.microbatches
    for place in reads:
        exchange, waited = rows[place - 2 : place]
        assert (exchange.stream, exchange.dtype, exchange.bytes) == ("ep.counts", "int64", 8 * MODEL.experts)
        assert waited.op_id == exchange.op_id
        assert rows[place + 1].stream == "ep"
