"""The training run of one rank: the step loop, and what is written around it."""

from __future__ import annotations

import json
import logging
import platform
import socket
import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stepscope
from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.comm import group_metas
from stepscope.parallel_runtime.compose import REPLICAS, Configuration, Program, build, streams_of, tables_of
from stepscope.parallel_runtime.config import as_dictionaries, global_batch
from stepscope.parallel_runtime.grad_sync import synchronise
from stepscope.parallel_runtime.launch import World
from stepscope.parallel_runtime.memory import sample_state
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.recording import describe_here
from stepscope.parallel_runtime.slow_link import SlowLink
from stepscope.tracer.clock import Clock, anchor, clock_of_ranks, host_offsets
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.schema import ActionMeta, RunMeta
from stepscope.tracer.writer import RankWriter, write_meta

_log = logging.getLogger(__name__)

HOUR_NS = 3_600_000_000_000


def train_step(program: Program, step: int, causes: InjectedCauses) -> Tensor | None:
    """One training step; returns the loss over the global batch on the ranks that end the model, unread.

    The loss of each microbatch is the sum over its valid tokens divided by those of the whole global batch, so losses and
    gradients of microbatches and replicas only ever add up.
    """
    recorder = program.comm.recorder
    recorder.begin_step(step)
    causes.begin_step()
    recorder.block("data")
    batch = program.batch(step)
    recorder.block("zero gradients")
    program.gradients.begin_step()

    loss = program.executor.run(batch, before_last_gradient=program.arm)

    recorder.block("gradients")
    program.gradients.finish()
    if program.balance is not None:
        program.balance.begin()
    synchronise(program.reductions, program.comm)
    program.clip()
    reported = None
    if loss is not None:
        reported = program.comm.all_reduce(loss, REPLICAS, strategy="loss", stream="loss")

    recorder.block("optimizer", "optimizer")
    program.optimizer.step()
    program.gradients.after_update()
    if program.balance is not None:
        program.balance.finish()

    recorder.block("end of step", "other")
    sample_state(recorder, *program.gradients.held(), program.optimizer.state())
    if program.experts is not None:
        program.experts.end_step()
    total = None if reported is None else reported.wait()
    recorder.end_step()
    return total


# -- a whole run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSpec:
    """What `stepscope run` was asked for."""

    name: str
    configuration: Configuration
    record: bool = True
    quiet: bool = False
    record_ranks: tuple[int, ...] | None = None  # only these record; None: all

    def records(self, rank: int) -> bool:
        """Whether `rank` writes a file."""
        return self.record and (self.record_ranks is None or rank in self.record_ranks)


@dataclass(frozen=True)
class Outcome:
    """What one rank reports: the losses and times of its steps; empty losses where it does not end the model."""

    rank: int
    losses: tuple[float, ...]
    step_ns: tuple[int, ...]
    recorder: dict[str, Any] = field(default_factory=dict)


def run_rank(world: World, directory: str, spec: RunSpec) -> Outcome:
    """The whole life of one rank, from its process group to its last word. Runs under launch.launch."""
    c = spec.configuration
    mesh = Mesh.of(c.parallel)
    meta, clock, base_ns = introduce(world, mesh, spec)
    messages = world.messages()
    offsets = [host_offsets(world.rank, meta.hosts, *messages, clock)]
    path = Path(directory)
    recorder: Recorder | NullRecorder = NullRecorder(world.rank)
    if spec.record:
        if world.rank == 0:
            write_meta(path, meta)
        world.exchange("described", "")  # run.json is there before any rank file ...
        if world.local_rank == 0:
            describe_here(path, meta)
        world.exchange("described here", "")  # ... on every host, also where each has a disk of its own
        if spec.records(world.rank):
            recorder = Recorder(world.rank, RankWriter(path, world.rank, meta, base_ns), clock, keep_last=False)
    with recorder:  # closed also when a step fails: its file keeps the whole steps and what there is of the last one
        streams = streams_of(c.model, c.parallel, c.train)
        comm = world.device.comm(mesh, world.rank, recorder, streams, c.train.timeout_s)
        comm.slow_link = SlowLink.of(c.train)
        program = build(c, comm, world.device)
        world.meet("first step")  # whoever was built later would keep the others waiting in it
        losses, step_ns = train(program, InjectedCauses(c.train, world.rank, world.device, recorder), spec)
        comm.close()
    offsets.append(host_offsets(world.rank, meta.hosts, *messages, clock))
    outcome = Outcome(world.rank, losses, step_ns, recorder.summary())
    summaries = [json.loads(text) for text in world.exchange("done", json.dumps(outcome.recorder))]
    if spec.record and world.rank == 0:
        clocks = clock_of_ranks(meta.hosts, offsets)
        finish(path, replace(meta, complete=True, recorder=meta.recorder | overall(summaries), clock=clocks))
    return outcome


def finish(path: Path, meta: RunMeta) -> None:
    """Rewrite run.json at the end of training, which a full disk must not turn into a failure: one warning instead."""
    try:
        write_meta(path, meta)
    except OSError as error:
        _log.warning("run.json of %s keeps what it said at the start: %s", path, error)


def train(program: Program, causes: InjectedCauses, spec: RunSpec) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The step loop: losses (of a rank that ends the model) and step times. The only place where a loss is read."""
    config = spec.configuration.train
    causes.into(program.chunks[0])
    speaks = program.ends_model and all(program.comm.index(axis) == 0 for axis in ("dp", "cp", "tp"))
    tokens = global_batch(spec.configuration.parallel, config) * spec.configuration.model.seq
    losses: list[float] = []
    times: list[int] = []
    begun = time.perf_counter_ns()
    for step in range(config.steps):
        loss = train_step(program, step, causes)
        if loss is not None:
            losses.append(loss.item())
        program.comm.end_step()
        now = time.perf_counter_ns()
        times.append(now - begun)
        begun = now
        if speaks and not spec.quiet:
            rate = tokens / (times[-1] / 1e9)
            print(f"step {step:>4}  loss {losses[-1]:.4f}  {rate:>9,.0f} tokens/s", flush=True)
    return tuple(losses), tuple(times)


# -- run.json ----------------------------------------------------------------------------------------------------------


def introduce(world: World, mesh: Mesh, spec: RunSpec) -> tuple[RunMeta, Clock, int]:
    """What all ranks must agree on: (run.json, this host's clock, the time that the rank files count from).

    The ranks of one host share the clock that the first of them anchored, so that nothing sets them apart.
    """
    here = socket.gethostname()
    mine = {
        "host": here,
        "anchor_ns": anchor().offset_ns,
        "run_id": uuid.uuid4().hex,
        "now_ns": time.time_ns(),
    }
    everyone = [json.loads(text) for text in world.exchange("introduce", json.dumps(mine))]
    first = everyone[0]
    shared = next(other for other in everyone if other["host"] == here)
    base_ns = first["now_ns"] // HOUR_NS * HOUR_NS
    meta = describe(world, mesh, spec, first["run_id"], first["now_ns"], tuple(o["host"] for o in everyone))
    return meta, Clock(shared["anchor_ns"]), base_ns


def describe(world: World, mesh: Mesh, spec: RunSpec, run_id: str, now_ns: int, hosts: tuple[str, ...]) -> RunMeta:
    """run.json as it is before the first step."""
    c = spec.configuration
    model, parallel, train = as_dictionaries(c.model, c.parallel, c.train)
    coordinates = tuple(mesh.coordinates(rank) for rank in range(world.size))
    tables = [
        tuple(ActionMeta(a.phase, a.chunk, a.microbatch) for a in table if a.kind == "compute")
        for table in tables_of(c.parallel, c.train)
    ]
    return RunMeta(
        run_id=run_id,
        name=spec.name,
        created=datetime.fromtimestamp(now_ns / 1e9, timezone.utc).isoformat(timespec="seconds"),
        hosts=hosts,
        world_size=world.size,
        mesh=mesh.sizes(),
        coords=coordinates,
        groups=group_metas(mesh, streams_of(c.model, c.parallel, c.train)),
        backend=world.device.backend,
        device=device_name(world),
        model=model,
        parallel=parallel,
        train=train,
        pipeline_table=tuple(tables[where["pp"]] for where in coordinates),
        recorder={"level": Recorder.level if spec.record else NullRecorder.level}
        | ({} if spec.record_ranks is None else {"ranks": list(spec.record_ranks)}),
        versions={
            "stepscope": stepscope.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    )


def device_name(world: World) -> str:
    """`cpu`, or the GPU's name."""
    return torch.cuda.get_device_name(world.device.index) if world.device.kind == "cuda" else world.device.kind


def overall(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The recorder object of run.json: the worst rank's overhead, all steps that were not written."""
    summaries = [s for s in summaries if s["level"] != NullRecorder.level] or summaries  # of the ranks that recorded
    overheads = [s["overhead"] for s in summaries if s.get("overhead") is not None]
    shares = [s["writer_share"] for s in summaries if s.get("writer_share") is not None]
    return {
        "level": summaries[0]["level"],
        "overhead": max(overheads, default=None),
        "writer_share": max(shares, default=None),
        "dropped": sum(s["dropped"] for s in summaries),
    }
