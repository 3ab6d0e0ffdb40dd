"""Rows of simulated runs: those that the runtime itself writes for the same pipeline, and times that can be."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.parallel_runtime.compose import Configuration
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.dry import operations_of_step
from stepscope.parallel_runtime.pp.schedules import Action
from stepscope.parallel_runtime.pp.simulated_run import Pace, SimulatedRun
from stepscope.parallel_runtime.pp.validator import SENDS_OUT, plan, play, simulate
from stepscope.tracer.rows import BeginRow, CommRow, ComputeRow, StepRow, WaitRow, operation_of
from stepscope.tracer.schema import RUN_FILE, Operation, RunMeta, plan_of, rank_file

EVENT = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "trace_event.schema.json").read_text())
)
MODEL = ModelConfig(layers=8, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=32, seq=8)
CHUNKS = {"interleaved": 2}
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"]


def paced(schedule: str, stages: int, forward: int = 2, backward: int = 4, **uneven: object) -> Pace:
    durations = {"forward": forward, "backward": backward}
    if schedule == "zb-h1":
        durations["weight_grad"] = backward
    return Pace.of(durations, stages, **uneven)  # type: ignore[arg-type]


def simulated(schedule: str, stages: int, microbatches: int, pace: Pace, steps: int = 2) -> SimulatedRun:
    return SimulatedRun(schedule, microbatches, CHUNKS.get(schedule, 1), steps, pace, 4 * 2 * MODEL.seq * MODEL.hidden)


def messages_and_waits(operations: list[Operation]) -> list[Operation]:
    """As a plan: what a simulated run has in common with a program that computes something."""
    return [one for one in plan_of(operations) if one.kind in ("comm", "wait")]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 4), (4, 4)])
def test_messages_and_waits_are_those_of_the_runtime(schedule: str, stages: int, microbatches: int) -> None:
    """Names, streams, groups, numbers, ids, sizes, places, and who waits for what, in program order: of the second step."""
    chunks = CHUNKS.get(schedule, 1)
    parallel = ParallelConfig(pp=stages, schedule=schedule, chunks=chunks)
    train = TrainConfig(microbatch_size=2, microbatches=microbatches, steps=2, clip=0.0)
    configuration = Configuration(MODEL, parallel, train)
    rows = list(simulated(schedule, stages, microbatches, paced(schedule, stages)).rows())
    for rank in range(stages):
        ours = [found for row in rows[rank][1] if (found := operation_of(row)) is not None]
        theirs = messages_and_waits(operations_of_step(configuration, rank, steps=2))
        assert messages_and_waits(ours) == theirs and theirs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_computations_are_those_of_the_table(schedule: str) -> None:
    run = simulated(schedule, 4, 8, paced(schedule, 4))
    for table, meta, steps in zip(
        plan(schedule, 4, 8, run.chunks), run.meta("a").pipeline_table, run.rows(), strict=True
    ):
        planned = [(a.phase, a.chunk, a.microbatch) for a in table if a.kind == "compute"]
        assert [(a.phase, a.chunk, a.microbatch) for a in meta] == planned
        for rows in steps:
            computed = [row.context for row in rows if isinstance(row, ComputeRow)]
            assert [(phase, chunk, microbatch) for _, _, phase, _, chunk, microbatch in computed] == planned


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([(), (0, 1), (1, 0)]),
)
def test_times_can_be(
    schedule: str,
    stages: int,
    groups: int,
    forward: int,
    backward: int,
    transfer: int,
    slow: int | None,
    factor: int,
    link: tuple[int, ...],
) -> None:
    """A thread does one thing at a time and never nothing, a stream one message at a time, steps tile; no receive is over
    before its send has begun, and one that takes time ends with it."""
    uneven = {"transfer": transfer, "slow_stage": slow, "slow_factor": factor, "slow_link": link, "slow_link_time": 3}
    run = simulated(schedule, stages, groups * stages, paced(schedule, stages, forward, backward, **uneven), steps=3)
    ends: dict[tuple[str, int, int, int], dict[str, CommRow]] = {}
    for steps in run.rows():
        _check_thread(steps)
        messages = [row for rows in steps for row in rows if isinstance(row, CommRow)]
        for stream in {row.site.stream for row in messages}:
            lane = [row for row in messages if row.site.stream == stream]
            assert all(one.end_ns <= next_one.start_ns for one, next_one in pairwise(lane))
        for row in messages:
            assert row.issue_ns <= row.start_ns <= row.end_ns
            own = row.context[3]
            source, target = (own, row.site.peer) if row.site.collective == "send" else (row.site.peer, own)
            ends.setdefault((row.site.group, source, target, row.seq), {})[row.site.collective] = row
    for (_, source, target, _), both in ends.items():
        send, receive = both["send"], both["receive"]
        took = transfer + (3 if (source, target) == link else 0)
        last = max(send.start_ns, receive.start_ns)
        assert receive.end_ns == last + took
        assert send.end_ns == (receive.end_ns if took else send.start_ns)


def _check_thread(steps: list[list[object]]) -> None:
    for rows in steps:
        begin, step = rows[0], rows[-1]
        assert isinstance(begin, BeginRow) and isinstance(step, StepRow) and begin.time_ns == step.start_ns
        now = step.start_ns
        for row in rows:
            if isinstance(row, ComputeRow | WaitRow):
                assert row.start_ns == now <= row.end_ns
                now = row.end_ns
        assert now == step.end_ns
    bounds = [(rows[-1].start_ns, rows[-1].end_ns) for rows in steps]  # type: ignore[attr-defined]
    assert all(one[1] == next_one[0] for one, next_one in pairwise(bounds))


def test_without_a_slow_stage_the_player_is_the_simulator() -> None:
    tables = plan("1f1b", 3, 4)
    times = {"forward": Fraction(1, 3), "backward": Fraction(2, 3)}
    played = play(tables, lambda stage, action: times[action.phase], lambda source, target: Fraction(1, 10))
    assert [stage.computing for stage in played] == simulate(tables, times, Fraction(1, 10))


def test_sends_out_waits_for_the_last_send() -> None:
    """Stage 1 computes nothing but what comes: its thread is done when stage 0 has taken the gradient."""
    tables = [(*table, SENDS_OUT, Action("compute", "weight_grad", 0, 0)) for table in plan("naive", 2, 1)]
    played = play(tables, lambda stage, action: 1, lambda source, target: 5)
    # forward 0-1, message 1-6, forward 6-7, backward 7-8, gradient 8-13
    assert played[1].computing[-1].start == 13 and played[1].messages[-1].end == 13


def test_a_pace_is_whole_in_a_small_unit() -> None:
    pace = paced("1f1b", 2, 1, 2, transfer=Fraction(1, 3), slow_stage=1, slow_factor=Fraction(3, 2))
    assert pace.durations == ({"forward": 1, "backward": 2}, {"forward": Fraction(3, 2), "backward": 3})
    whole = pace.whole(1000)
    assert whole.durations == ({"forward": 1000, "backward": 2000}, {"forward": 1500, "backward": 3000})
    assert whole.transfer == 333 and all(isinstance(time, int) for stage in whole.durations for time in stage.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_files_are_of_the_documented_format(tmp_path: Path, schedule: str) -> None:
    """Each event as docs/schemas has it; run.json reads back as it was; times count from 0."""
    run = simulated(schedule, 2, 2, paced(schedule, 2, transfer=1))
    run.write(tmp_path)
    meta = RunMeta.from_json((tmp_path / RUN_FILE).read_text())
    said = run.meta(tmp_path.name)
    assert meta == replace(said, complete=True, run_id=meta.run_id, created=meta.created)
    assert meta.source == "simulated" and meta.complete and meta.world_size == 2
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / rank_file(rank)).read_bytes()))
        assert trace["baseTimeNanoseconds"] == 0 and trace["distributedInfo"]["world_size"] == 2
        for event in trace["traceEvents"]:
            EVENT.validate(event)
        steps = [event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")]
        assert steps == ["ProfilerStep#0", "ProfilerStep#1"]
