"""What theory predicts of a configuration: by hand from the formulas, then beside the training program's own tables."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import pytest

from stepscope.analysis.causes.setup import Setup, blocks
from stepscope.analysis.causes.traffic import Flow, predicted, sent_share
from stepscope.analysis.causes.volumes import summed
from stepscope.tracer.schema import ActionMeta, RunMeta

MODEL = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 64, "seq": 8}
TRAIN = {"microbatch_size": 3, "microbatches": 5, "dtype": "float32"}
# one layer: attention 2 H^2 + 2 H (H / heads x kv heads), SwiGLU 3 H F, two norms
LAYER = 2 * 256 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16
P = 64 * 16 + 4 * LAYER + 16 + 64 * 16
BSHb = 3 * 8 * 16 * 4


def setup(model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **parallel: Any) -> Setup:
    found = Setup.of(RunMeta("r", "r", model=MODEL | (model or {}), train=TRAIN | (train or {}), parallel=parallel))
    assert found is not None
    return found


def volumes(flows: list[Flow]) -> dict[tuple[str, str], tuple[Fraction | None, Fraction | None, Fraction | None]]:
    return {key: tuple(volume) for key, volume in summed(flows, True).items()}


def test_parameters_of_a_model():
    assert sum(one.elements for one in blocks(setup(), 0).values()) == P
    halves = [sum(one.elements for one in blocks(setup(pp=2), stage).values()) for stage in (0, 1)]
    assert sum(halves) == P
    assert halves[0] == 64 * 16 + 2 * LAYER


def test_data_parallel_and_zero():
    """2 (N-1)/N P b for DP, ZeRO-1 the same in two parts, ZeRO-3 one and a half times that."""
    sent = {
        (zero, micro): sum(
            volume[2] or 0
            for (strategy, _), volume in volumes(
                predicted(setup(train={"microbatches": micro}, dp=4, zero=zero), 0, table(micro))
            ).items()
            if strategy != "loss"
        )
        for zero in (0, 1, 2, 3)
        for micro in (1, 5)
    }
    assert P % 4 == 0  # no padding here
    assert sent[0, 1] == sent[1, 1] == sent[2, 1] == sent[0, 5] == sent[1, 5] == Fraction(2 * 3, 4) * P * 4
    assert sent[2, 5] == Fraction(3, 4) * (5 + 1) * P * 4
    assert sent[3, 1] == Fraction(3, 4) * 3 * P * 4
    assert sent[3, 5] == 5 * sent[3, 1]


def table(microbatches: int) -> list[ActionMeta]:
    return [ActionMeta(phase, 0, m) for m in range(microbatches) for phase in ("forward", "backward")]


def test_tensor_and_sequence_parallel():
    plain = volumes(predicted(setup(tp=2), 0))
    assert plain["tp", "all_reduce"] == (4 * 4 * 5, 4 * 4 * 5 * BSHb, 4 * 4 * 5 * BSHb)
    cut = volumes(predicted(setup(tp=2, sp=True), 0))
    assert cut["sp", "all_gather"][0] == 6 * 4 * 5 and cut["sp", "reduce_scatter"][0] == 4 * 4 * 5
    assert volumes(predicted(setup(tp=2, recompute="full"), 0))["tp", "all_reduce"][0] == 6 * 4 * 5


def test_pipeline_sends_two_activations_a_microbatch_inside_and_one_at_the_ends():
    sent = [volumes(predicted(setup(pp=4), stage))["pp", "send"] for stage in range(4)]
    assert [one[0] for one in sent] == [5, 10, 10, 5]
    assert sent[1][2] == 2 * 5 * BSHb
    chunked = [volumes(predicted(setup(pp=2, chunks=2, schedule="interleaved"), s))["pp", "send"][0] for s in (0, 1)]
    assert chunked == [15, 15]


def test_context_parallel():
    """N = 4, B S h_kv b = 3 8 8 4; forward 2 (N-1)/N of it, dK and dV N hops."""
    kv = 3 * 8 * 8 * 4
    ring = volumes(predicted(setup(cp=4), 0))["cp", "ring_shift"]
    assert ring == (4 * 5 * (3 + 7), 4 * 5 * 10 * Fraction(2, 4) * kv, 4 * 5 * 10 * Fraction(2, 4) * kv)
    ulysses = volumes(predicted(setup(cp=4, cp_mode="ulysses"), 0))["cp", "all_to_all"]
    assert ulysses[0] == 4 * 5 * 8
    assert ulysses[2] == 4 * 5 * 2 * Fraction(3, 4) * 3 * 2 * (2 * 16 + 2 * 8) * 4


def test_experts_exchange_k_tokens_each_way():
    moe = setup({"experts": 8, "experts_per_token": 2, "expert_ffn": 8}, dp=4, ep=4)
    number, size, _ = volumes(predicted(moe, 0))["ep", "all_to_all"]
    assert number == 4 * 5 * 5  # counts, dispatch, combine; dispatch and combine backward
    assert size == 4 * 5 * (4 * 2 * BSHb + 8 * 8)


def test_what_experts_drop_is_not_exchanged():
    """4 ranks route 4 layers x 5 microbatches x 24 tokens x 2 = 960 rows each; of all 3840 the experts took 3000."""
    dropping = setup({"experts": 8, "experts_per_token": 2, "balance": "capacity"}, dp=4, ep=4)
    assert volumes(predicted(dropping, 0))["ep", "all_to_all"][1:] == (None, None)
    number, size, sent = volumes(predicted(dropping, 0, taken=Fraction(3000)))["ep", "all_to_all"]
    assert number == 4 * 5 * 5
    assert size == 4 * (3000 // 4) * 16 * 4 + 4 * 5 * 8 * 8  # dispatch, combine, both backward; counts
    assert sent == size * Fraction(3, 4)


def test_what_an_operation_sends():
    assert [sent_share(name, 4) for name in ("all_reduce", "all_gather", "send", "receive")] == [
        *(Fraction(3, 2), Fraction(3, 4), 1, 0)
    ]
    assert sent_share("broadcast", 4) is None


def test_a_run_that_does_not_say_enough_has_no_setup():
    assert Setup.of(RunMeta("r", "r")) is None
    assert Setup.of(RunMeta("r", "r", model=MODEL, train={"microbatches": 4})) is None
    assert Setup.of(RunMeta("r", "r", model=MODEL, train=TRAIN, parallel={"schedule": "of tomorrow"})) is None


# -- beside the training program's own prediction, which its recorded rows equal ------------------------------------------

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
MOE = {"experts": 8, "experts_per_token": 2, "expert_ffn": 8}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"dp": 4, "bucket_mb": 0.01}, {"clip": 1.0}),
    ({"tied": True}, {"pp": 2, "dp": 2}, {"clip": 1.0, "microbatches": 4}),
    ({"ffn_bias": True, "qkv_bias": True, "output_bias": True}, {"tp": 2, "dp": 2}, {}),
    ({"norm": "layernorm", "activation": "gelu", "tied": True}, {"tp": 2, "sp": True, "pp": 2}, {"dtype": "bfloat16"}),
    ({}, {"tp": 2, "recompute": "full", "pp": 4}, {}),
    ({}, {"pp": 2, "dp": 2, **INTERLEAVED}, {"microbatches": 4}),
    ({}, {"pp": 2, "split": (1, 3)}, {}),
    *[({}, {"cp": 2, "cp_mode": mode}, {}) for mode in ("ring", "ulysses", "allgather")],
    *[({}, {"cp": 4, "cp_mode": mode, "recompute": "selective"}, {}) for mode in ("ring", "allgather")],
    *[({"tied": tied}, {"dp": 4, "zero": zero}, {"clip": 1.0}) for zero in (1, 2, 3) for tied in (False, True)],
    ({"tied": True}, {"dp": 2, "pp": 2, "zero": 3}, {}),
    ({}, {"dp": 2, "pp": 2, "zero": 3, "reshard": False, "schedule": "gpipe"}, {}),
    ({}, {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb-h1"}, {}),
    ({}, {"dp": 2, "pp": 2, "zero": 3, **INTERLEAVED}, {"microbatches": 4}),
    ({"tied": True}, {"dp": 4, "zero": 2, "replicate": 2, "pp": 2, "tp": 2, "sp": True}, {"clip": 1.0}),
    (MOE, {"dp": 4, "ep": 4}, {"clip": 1.0}),
    *[(MOE, {"dp": 2, "ep": 2, "pp": 2, "zero": zero}, {"clip": 1.0}) for zero in (1, 2, 3)],
    *[(MOE, {"dp": 4, "ep": 2, "zero": zero}, {}) for zero in (1, 2, 3)],
    *[({**MOE, "dense_layers": 1}, {"dp": 2, "tp": 2, "ep": 2, "zero": zero}, {}) for zero in (1, 3)],
    ({**MOE, "dense_layers": 1}, {"dp": 2, "tp": 2, "sp": True, "ep": 1, "zero": 3}, {}),
    (MOE, {"dp": 2, "zero": 1}, {}),
    *[(MOE, {"dp": 4, "ep": 2, "zero": zero, "replicate": 2, "tp": 2}, {"clip": 1.0}) for zero in (1, 2, 3)],
    ({**MOE, "balance": "aux", "dense_layers": 1}, {"dp": 2, "cp": 2, "ep": 2}, {}),
    ({**MOE, "balance": "bias"}, {"dp": 2, "tp": 2, "ep": 2}, {}),
    *[({**MOE, "balance": "capacity", "routing_skew": skew}, {"dp": 2, "ep": 2, "pp": 2}, {}) for skew in (0.0, 2.0)],
    ({**MOE, "balance": "capacity", "routing_skew": 2.0}, {"dp": 2, "tp": 2, "ep": 4, "recompute": "full"}, {}),
    ({**MOE, "balance": "none", "dense_layers": 2}, {"dp": 2, "tp": 2, "sp": True, "ep": 4, "recompute": "full"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "parallel", "train"), LAYOUTS)
def test_it_is_what_the_training_program_predicts_of_itself(
    model: dict[str, Any], parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    """Two derivations of one thing: closed formulas here, tables of the program there (sums over phases, mean of ranks)."""
    pytest.importorskip("torch")
    from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig, check
    from stepscope.parallel_runtime.ep.traffic import mixtures_of, planned_routing
    from stepscope.parallel_runtime.mesh import Mesh
    from stepscope.parallel_runtime.messages import sent
    from stepscope.parallel_runtime.pp.validator import plan
    from stepscope.parallel_runtime.traffic import predictions

    m, p, t = ModelConfig(**MODEL | model), ParallelConfig(**parallel), TrainConfig(**TRAIN | train)
    check(m, p, t)
    mesh = Mesh.of(p)
    said = Setup.of(RunMeta("r", "r", model=asdict(m), parallel=asdict(p), train=asdict(t)))
    assert said is not None
    for stage in range(p.pp):
        theirs: dict[tuple[str, str], list[Fraction]] = defaultdict(lambda: [Fraction(0)] * 3)
        taken = 0
        ranks = range(stage * mesh.stage_size, (stage + 1) * mesh.stage_size)
        for rank in ranks:
            routing = planned_routing(m, p, t, mesh.index("ep", rank)) if m.experts else None
            if routing is not None:
                taken += sum(routing(layer, 0).received for layer in mixtures_of(m, p, stage)) * t.microbatches
            for view, predict in predictions(m, p, mesh.index("shard", rank), routing):
                if mesh.size(view) > 1:
                    for message, number in predict(m, p, t, stage).items():
                        key = (message.strategy, message.collective)
                        moved = sent(message.collective, message.bytes, mesh.size(view)) * number
                        added = (number, number * message.bytes, moved)
                        theirs[key] = [a + Fraction(b) / len(ranks) for a, b in zip(theirs[key], added, strict=True)]
        actions = plan(p.schedule, p.pp, t.microbatches, p.chunks)[stage]
        table = [ActionMeta(a.phase, a.chunk, a.microbatch) for a in actions if a.kind == "compute"]
        ours = volumes(predicted(said, stage, table, Fraction(taken)))
        assert set(ours) == set(theirs)
        for key, volume in ours.items():
            for mine, other in zip(volume, theirs[key], strict=True):
                assert mine is None or mine == other, key
            assert volume[1] is not None, key


def test_only_the_whole_stage_gives_what_differs_between_ranks():
    moe = setup({"experts": 8, "experts_per_token": 2}, dp=4, ep=4)
    flows = predicted(moe, 0)
    assert summed(flows, False)["ep", "all_to_all"].bytes is None
    assert summed([flow for flow in flows if flow.each], False)["dp", "all_reduce"].bytes is not None
    assert replace(moe, experts=0).layers_of(0) == [0, 1, 2, 3]
