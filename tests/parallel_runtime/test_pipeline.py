"""The executor: rows follow the table, memory follows the schedule's promise, and the parts add up on real ranks."""

from __future__ import annotations

import weakref

import pytest
import torch
from pool import gloo

from stepscope.parallel_runtime.comm import PIPELINE_STREAMS, DryComm
from stepscope.parallel_runtime.comm_streams import pipeline_stream, pipeline_streams
from stepscope.parallel_runtime.config import SCHEDULES as SCHEDULE_NAMES
from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.parallel_runtime.model.weight_gradients import WeightGradients
from stepscope.parallel_runtime.pp.executor import BOUNDARY, PipelineExecutor
from stepscope.parallel_runtime.pp.schedules import SCHEDULES, wraps_round
from stepscope.parallel_runtime.pp.validator import activation_peak, plan
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.schema import plan_of

CONFIG = ModelConfig(layers=4, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=20, seq=6)
MICROBATCHES = 8
TRAIN = TrainConfig(microbatches=MICROBATCHES, microbatch_size=1, padding=0.5, dtype="float64")
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", sorted(SCHEDULES))


class Watched(Stage):
    """A stage that counts how many of its outputs are alive."""

    def forward(self, x_SBH, microbatch, valid_tokens):
        y = super().forward(x_SBH, microbatch, valid_tokens)
        self.outputs = [ref for ref in getattr(self, "outputs", []) if ref() is not None] + [weakref.ref(y)]
        self.most = max(getattr(self, "most", 0), len(self.outputs))
        return y


def chunks_of(schedule, stages):
    """Two chunks a stage where the schedule knows chunks and four layers are enough for them."""
    return 2 if schedule == "interleaved" and stages == 2 else 1


STREAMS = pipeline_streams(2)


def build(comm, schedule, microbatches=MICROBATCHES):
    stage, stages = comm.index("pp"), comm.size("pp")
    chunks = chunks_of(schedule, stages)
    per = CONFIG.layers // (stages * chunks)
    tables = plan(schedule, stages, microbatches, chunks)
    later = WeightGradients() if schedule == "zb-h1" else None
    modules = []
    for place in range(stage, stages * chunks, stages):
        layers = range(place * per, (place + 1) * per)
        ends = (place == 0, place == stages * chunks - 1)
        seams = later.seams(Seams()) if later else Seams()
        modules.append(Watched(CONFIG, comm.recorder, layers, *ends, seams, dtype=torch.float64))
        initialise(modules[-1], CONFIG, seed=0)
    boundary = (CONFIG.seq, 1, CONFIG.hidden)
    executor = PipelineExecutor(modules, tables, comm, boundary, torch.float64, "cpu", later=later)
    return modules, executor, tables[stage]


def run_step(comm, schedule):
    """(modules, table, loss, when each last gradient was announced) of one recorded step."""
    modules, executor, table = build(comm, schedule)
    announced = []
    recorder = comm.recorder
    recorder.begin_step(0)
    loss = executor.run(local_batch(CONFIG, TRAIN, 1, 0, 0), announced.append)
    recorder.end_step()
    return modules, table, loss, announced


def on_rank(rank, stages, schedule):
    comm = gloo(Mesh(pp=stages), rank, Recorder(rank), STREAMS)
    if comm is None:
        return None
    modules, _, loss, announced = run_step(comm, schedule)
    comm.close()
    gradients = {name: parameter.grad for module in modules for name, parameter in module.named_parameters()}
    return {
        "loss": None if loss is None else loss.item(),
        "gradients": gradients,
        "rows": comm.recorder.operations(),
        "alive": sum(module.most for module in modules),
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


def most_outputs(schedule, stage, stages):
    """Outputs alive at once, the most of each chunk added up. Where backward is split its first half lets them go, as
    1F1B's does; what waits for the second half is less."""
    if schedule == "zb-h1":
        schedule = "1f1b"
    chunks, alive, most = chunks_of(schedule, stages), {}, {}
    for action in plan(schedule, stages, MICROBATCHES, chunks)[stage]:
        if action.kind == "compute":
            alive[action.chunk] = alive.get(action.chunk, 0) + (1 if action.phase == "forward" else -1)
            most[action.chunk] = max(most.get(action.chunk, 0), alive[action.chunk])
    return sum(most.values())


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
        assert result["alive"] == most_outputs(schedule, stage, stages)
        assert result["announced"] == list(reversed(range(chunks_of(schedule, stages))))
        dry = DryComm(Mesh(pp=stages), stage, Recorder(stage), STREAMS)
        run_step(dry, schedule)
        assert plan_of(result["rows"]) == plan_of(dry.recorder.operations())


@EVERY_SCHEDULE
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_rows_follow_the_table(schedule, stages):
    for stage in range(stages):
        comm = DryComm(Mesh(pp=stages), stage, Recorder(0), STREAMS)
        chunks = chunks_of(schedule, stages)
        _, table, _, _ = run_step(comm, schedule)
        rows = comm.recorder.operations()
        firsts = {(chunk * stages + stage) * (4 // (stages * chunks)) for chunk in range(chunks)}
        blocks = [row for row in rows if row.kind == "compute" and row.layer in firsts]
        assert [(row.phase, row.chunk, row.microbatch) for row in blocks] == [
            action[1:] for action in table if action.kind == "compute"
        ]
        for role in ("send", "receive"):
            messages = [row for row in rows if row.kind == "comm" and row.collective == role]
            planned = [action for action in table if action.kind == role]
            assert [(row.phase, row.chunk, row.microbatch) for row in messages] == [action[1:] for action in planned]
            assert [row.stream for row in messages] == [
                pipeline_stream(action.phase, role, wraps_round(action, stage, stages, chunks)) for action in planned
            ]
            assert all(row.bytes == 6 * 16 * 8 and row.strategy == "pp" for row in messages)
        placed = [row for row in rows if row.phase in ("forward", "backward", "weight_grad")]
        assert {row.stage for row in placed} == {stage} and {row.chunk for row in placed} == set(range(chunks))
        assert {row.name for row in placed if row.kind == "compute"} <= {
            *("forward", "backward", "weight_grad", BOUNDARY, "embedding", "head"),
            *(f"layer.{layer}" for layer in range(4)),
        }


@EVERY_SCHEDULE
@pytest.mark.parametrize("stages", [2, 4])
def test_every_message_is_waited_for_and_none_is_kept_longer_than_needed(schedule, stages):
    tables = plan(schedule, stages, MICROBATCHES, chunks_of(schedule, stages))
    for stage in range(stages):
        comm = DryComm(Mesh(pp=stages), stage, Recorder(0), STREAMS)
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
        assert most["forward"] <= activation_peak(tables[stage])
        assert most["backward"] <= activation_peak(tables[stage - 1]) + 1


def test_a_second_step_starts_afresh():
    comm = DryComm(Mesh(), 0, NullRecorder(), PIPELINE_STREAMS)
    (module,), executor, _ = build(comm, "1f1b")
    batch = local_batch(CONFIG, TRAIN, 1, 0, 0)
    losses = [executor.run(batch) for _ in range(2)]
    assert torch.equal(*losses)
    loss, gradients = one_process()
    assert losses[0].item() == pytest.approx(loss, rel=1e-12)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * gradients[name], rtol=1e-11, atol=1e-13)
