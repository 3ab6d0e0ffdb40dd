"""The executor: rows follow the table, memory follows the schedule's promise, and the parts add up on real ranks."""

from __future__ import annotations

import weakref

import pytest
import torch
from pool import gloo

from stepscope.parallel_runtime.comm import PIPELINE_STREAMS, DryComm
from stepscope.parallel_runtime.config import SCHEDULES as SCHEDULE_NAMES
from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.pp.executor import BOUNDARY, PipelineExecutor
from stepscope.parallel_runtime.pp.schedules import SCHEDULES
from stepscope.parallel_runtime.pp.validator import plan
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.schema import plan_of

CONFIG = ModelConfig(layers=4, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=20, seq=6)
MICROBATCHES = 6
TRAIN = TrainConfig(microbatches=MICROBATCHES, microbatch_size=1, padding=0.5, dtype="float64")
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", sorted(SCHEDULES))


class Watched(Stage):
    """A stage that counts how many of its outputs are alive."""

    def forward(self, x_SBH, microbatch, valid_tokens):
        y = super().forward(x_SBH, microbatch, valid_tokens)
        self.outputs = [ref for ref in getattr(self, "outputs", []) if ref() is not None] + [weakref.ref(y)]
        self.most = max(getattr(self, "most", 0), len(self.outputs))
        return y


def build(comm, schedule, microbatches=MICROBATCHES):
    stage, stages = comm.index("pp"), comm.size("pp")
    per = CONFIG.layers // stages
    layers = range(stage * per, (stage + 1) * per)
    module = Watched(CONFIG, comm.recorder, layers, stage == 0, stage == stages - 1, dtype=torch.float64)
    initialise(module, CONFIG, seed=0)
    table = plan(schedule, stages, microbatches)[stage]
    return module, PipelineExecutor([module], table, comm, (CONFIG.seq, 1, CONFIG.hidden), torch.float64, "cpu"), table


def run_step(comm, schedule):
    """(module, table, loss, when the last gradient was announced) of one recorded step."""
    module, executor, table = build(comm, schedule)
    announced = []
    recorder = comm.recorder
    recorder.begin_step(0)
    loss = executor.run(local_batch(CONFIG, TRAIN, 1, 0, 0), announced.append)
    recorder.end_step()
    return module, table, loss, announced


def on_rank(rank, stages, schedule):
    comm = gloo(Mesh(pp=stages), rank, Recorder(rank), PIPELINE_STREAMS)
    if comm is None:
        return None
    module, _, loss, announced = run_step(comm, schedule)
    comm.close()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        "loss": None if loss is None else loss.item(),
        "gradients": gradients,
        "rows": comm.recorder.operations(),
        "alive": module.most,
        "announced": announced,
    }


def one_process():
    """(loss, gradients) of the same stages in one piece, without executor or pipeline."""
    stage = Stage(CONFIG, NullRecorder(), dtype=torch.float64)
    initialise(stage, CONFIG, seed=0)
    batch = local_batch(CONFIG, TRAIN, 1, 0, 0)
    loss = sum(stage(None, microbatch, batch.valid_tokens) for microbatch in batch.microbatches)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in stage.named_parameters()}


def test_configuration_offers_what_is_built():
    assert sorted(SCHEDULE_NAMES) == sorted(SCHEDULES)


@EVERY_SCHEDULE
@pytest.mark.parametrize("stages", [2, 4])
def test_real_ranks(pool, schedule, stages):
    """Loss and gradients of the whole; as many outputs alive as promised; real rows are dry rows."""
    results = pool.run(on_rank, stages, schedule)[:stages]
    loss, expected = one_process()
    assert [result["loss"] is None for result in results] == [True] * (stages - 1) + [False]
    assert results[-1]["loss"] == pytest.approx(loss, rel=1e-12)
    for stage, result in enumerate(results):
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-13, msg=name)
        assert result["alive"] == SCHEDULES[schedule].activation_peak(stage, stages, MICROBATCHES)
        assert result["announced"] == [0]
        dry = DryComm(Mesh(pp=stages), stage, Recorder(stage), PIPELINE_STREAMS)
        run_step(dry, schedule)
        assert plan_of(result["rows"]) == plan_of(dry.recorder.operations())


@EVERY_SCHEDULE
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_rows_follow_the_table(schedule, stages):
    for stage in range(stages):
        comm = DryComm(Mesh(pp=stages), stage, Recorder(0), PIPELINE_STREAMS)
        _, table, _, _ = run_step(comm, schedule)
        rows = comm.recorder.operations()
        blocks = [row for row in rows if row.kind == "compute" and row.layer == stage * (4 // stages)]
        assert [(row.phase, row.microbatch) for row in blocks] == [
            (action.phase, action.microbatch) for action in table if action.kind == "compute"
        ]
        for role in ("send", "receive"):
            messages = [row for row in rows if row.kind == "comm" and row.collective == role]
            planned = [action for action in table if action.kind == role]
            assert [(row.phase, row.microbatch) for row in messages] == [(a.phase, a.microbatch) for a in planned]
            assert {row.stream for row in messages} <= {f"pp.forward.{role}", f"pp.backward.{role}"}
            assert all(row.bytes == 6 * 16 * 8 and row.strategy == "pp" for row in messages)
        placed = [row for row in rows if row.phase in ("forward", "backward")]
        assert {row.stage for row in placed} == {stage} and {row.chunk for row in placed} == {0}
        assert {row.name for row in placed if row.kind == "compute"} <= {
            *("forward", "backward", BOUNDARY, "embedding", "head"),
            *(f"layer.{layer}" for layer in range(4)),
        }


@EVERY_SCHEDULE
def test_every_message_is_waited_for_and_none_is_kept_longer_than_needed(schedule):
    for stage in range(4):
        comm = DryComm(Mesh(pp=4), stage, Recorder(0), PIPELINE_STREAMS)
        run_step(comm, schedule)
        rows = comm.recorder.operations()
        issued = [row.op_id for row in rows if row.kind == "comm"]
        assert sorted(issued) == sorted(row.op_id for row in rows if row.kind == "wait")
        phase_of = {row.op_id: row.phase for row in rows if row.kind == "comm" and row.collective == "send"}
        under_way = {"forward": 0, "backward": 0}
        most = dict(under_way)
        for row in rows:
            if row.op_id in phase_of:
                phase = phase_of[row.op_id]
                under_way[phase] += 1 if row.kind == "comm" else -1
                most[phase] = max(most[phase], under_way[phase])
        peak = SCHEDULES[schedule].activation_peak(stage, 4, MICROBATCHES)
        assert most["forward"] <= peak and most["backward"] <= peak + 2


def test_a_second_step_starts_afresh():
    comm = DryComm(Mesh(), 0, NullRecorder(), PIPELINE_STREAMS)
    module, executor, _ = build(comm, "1f1b")
    batch = local_batch(CONFIG, TRAIN, 1, 0, 0)
    losses = [executor.run(batch) for _ in range(2)]
    assert torch.equal(*losses)
    loss, gradients = one_process()
    assert losses[0].item() == pytest.approx(loss, rel=1e-12)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * gradients[name], rtol=1e-11, atol=1e-13)
