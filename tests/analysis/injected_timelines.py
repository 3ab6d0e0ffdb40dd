"""One exact timeline without and one with each cause that the analysis must find: every term is known beforehand.

A cause of `injected_ns` a step changes the mean of each term by a known share of it; all other terms stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from pipeline_runs import MS, PipelineRun
from timelines import Timeline

from stepscope.analysis.run import Run
from stepscope.tracer.schema import COUNTER_COLUMNS

STEPS = 5
QUARTER = Fraction(1, 4)


@dataclass(frozen=True)
class Injected:
    """One row of the matrix. `grows`: term -> its share of `injected_ns` in the mean step; all others stay."""

    cause: str
    setup: str
    base: Run
    run: Run
    injected_ns: int
    rank: int | None  # that is named first
    stage: int | None
    straggler_cause: str | None
    axis: str | None  # whose operation class changes most, with its collective
    finding: str  # what the first finding says
    grows: Mapping[str, Fraction]


def pipeline(stages: int, dp: int, slow: dict[int, int] | None = None, late: dict[int, int] | None = None) -> Run:
    """Eight microbatches of 1 ms forward and 2 ms backward a stage, 1F1B."""
    made = PipelineRun(stages, 8, dp)
    for number in range(STEPS):
        made.step(number, slow, late)
    return made.run()


def slow_rank() -> Injected:
    """Four replicas; rank 2 computes 6 ms longer, the three others wait for it at the reduction."""
    return Injected(
        "slow rank",
        "dp 4; rank 2 computes 6 ms longer",
        pipeline(1, 4),
        pipeline(1, 4, slow={2: 6}),
        6 * MS,
        rank=2,
        stage=None,
        straggler_cause="slower compute",
        axis="dp all_reduce",
        finding="Rank 2 (dp2) keeps others waiting for 6 ms a step: slower compute",
        grows={"compute": QUARTER, "imbalance": 3 * QUARTER},
    )


def slow_stage() -> Injected:
    """Four stages of two replicas; both ranks of stage 1 compute 12 ms longer, and the six others wait in the pipeline."""
    return Injected(
        "slow stage",
        "pp 4 x dp 2, 1F1B; both ranks of stage 1 compute 12 ms longer",
        pipeline(4, 2),
        pipeline(4, 2, slow={2: 12, 3: 12}),
        12 * MS,
        rank=None,
        stage=1,
        straggler_cause="slower compute",
        axis="pp receive",
        finding="Stage 1 (ranks 2, 3) keeps the others waiting for 11.62 ms a step: slower compute",
        grows={"compute": QUARTER, "bubble": 3 * QUARTER},
    )


def late_host() -> Injected:
    """Four replicas; rank 2's host comes 6 ms late to every step."""
    return Injected(
        "late host",
        "dp 4; rank 2's host comes 6 ms late",
        pipeline(1, 4),
        pipeline(1, 4, late={2: 6}),
        6 * MS,
        rank=2,
        stage=None,
        straggler_cause="late host",
        axis="dp all_reduce",
        finding="Rank 2 (dp2) keeps others waiting for 6 ms a step: late host",
        grows={"idle": QUARTER, "imbalance": 3 * QUARTER},
    )


def link_run(transfer: int) -> Run:
    """Two stages, four microbatches one at a time; each forward message takes `transfer` ms, backward ones 1 ms."""
    line = Timeline(world=2, mesh={"pp": 2})
    line.group("pp", "pp", 0, 1)
    length = 4 * (1 + transfer + 1 + 2 + 1 + 2)
    for number in range(STEPS):
        at = number * length
        line.step(at * MS, (at + length) * MS, number)
        for microbatch in range(4):
            place = {"microbatch": microbatch, "chunk": 0}
            seq, waited = number * 4 + microbatch, at - (2 if microbatch else 0)  # rank 1 is free since its send
            sent, there = at + 1, at + 1 + transfer
            line.compute(0, at * MS, sent * MS, phase="forward", stage=0, **place)
            line.message(
                (sent * MS, there * MS), (waited * MS, there * MS), 0, 1, "pp", seq, stream="pp.forward", bytes=4096
            )
            line.compute(1, there * MS, (there + 1) * MS, phase="forward", stage=1, **place)
            line.compute(1, (there + 1) * MS, (there + 3) * MS, phase="backward", stage=1, **place)
            back = ((there + 3) * MS, (there + 4) * MS)
            line.message(back, (there * MS, back[1]), 1, 0, "pp", 1000 + seq, stream="pp.backward", bytes=4096)
            line.compute(0, back[1], back[1] + 2 * MS, phase="backward", stage=0, **place)
            at += 1 + transfer + 1 + 2 + 1 + 2
    return line.run()


def slow_link() -> Injected:
    """Each of four sends takes 6 ms instead of 1: in each step rank 0 sends and rank 1 receives for 20 ms longer."""
    return Injected(
        "slow link",
        "pp 2, one microbatch at a time; each of 4 sends to stage 1 takes 6 ms instead of 1",
        link_run(1),
        link_run(6),
        20 * MS,
        rank=1,
        stage=1,
        straggler_cause=None,
        axis="pp receive",
        finding="The pp link from rank 0 to rank 1 (stage 0 to stage 1) is slow: a message of 4.096 kB takes 6 ms, 6 times",
        grows={"visible_comm": Fraction(1)},
    )


def expert_run(extra: int) -> Run:
    """Four expert ranks: dispatch, experts, combine in each of two layers; rank 0's experts take `extra` ms longer."""
    line = Timeline(world=4, mesh={"ep": 4})
    line.group("ep", "ep", 0, 1, 2, 3)
    layer = 2 + 1 + 4 + extra + 1
    for number in range(STEPS):
        start = number * (2 * layer + 2)
        line.step(start * MS, (start + 2 * layer + 2) * MS, number)
        for place in range(2):
            at, seq = start + place * layer, number * 4 + place * 2
            words = {"stream": "ep", "axis": "ep", "strategy": "ep", "bytes": 1 << 16}
            dispatch = dict.fromkeys(range(4), ((at + 2) * MS, (at + 3) * MS))
            line.collective("ep", seq, dispatch, "all_to_all", **words)
            done = {rank: at + 7 + (extra if rank == 0 else 0) for rank in range(4)}
            combine = {rank: (done[rank] * MS, (at + layer) * MS) for rank in range(4)}
            line.collective("ep", seq + 1, combine, "all_to_all", **words)
            for rank in range(4):
                line.compute(rank, at * MS, (at + 2) * MS, phase="forward", name="attention")
                line.compute(rank, (at + 3) * MS, done[rank] * MS, phase="forward", name="experts")
        for rank in range(4):
            line.compute(rank, (start + 2 * layer) * MS, (start + 2 * layer + 2) * MS, phase="optimizer", name="adamw")
    return line.run()


def with_tokens(run: Run, tokens: Mapping[int, int]) -> Run:
    """The run with one sample of tokens_per_expert a rank."""
    data = {}
    for rank in run.ranks:
        one = run.rank(rank)
        values = {"time_ns": 0, "name_id": len(one.strings), "key_id": -1, "value": tokens[rank]}
        counters = {name: np.array([values[name]], dtype) for name, dtype in COUNTER_COLUMNS.items()}
        data[rank] = replace(one, strings=(*one.strings, "tokens_per_expert"), counters=counters)
    return Run.from_memory(run.meta, data)


def skewed_experts() -> Injected:
    """Rank 0's experts get twice the tokens and take 3 ms longer in each of two layers; the others wait to combine."""
    return Injected(
        "skewed experts",
        "ep 4, two layers; rank 0's experts have twice the tokens and take 3 ms longer each time",
        with_tokens(expert_run(0), dict.fromkeys(range(4), 100)),
        with_tokens(expert_run(3), {0: 200, 1: 100, 2: 100, 3: 100}),
        6 * MS,
        rank=0,
        stage=None,
        straggler_cause="expert load",
        axis="ep all_to_all",
        finding="Rank 0 (ep0) keeps others waiting for 6 ms a step: expert load",
        grows={"compute": QUARTER, "imbalance": 3 * QUARTER},
    )


def reduced_run(buckets: int = 1, whole: int = 6, overlap: bool = False) -> Run:
    """Two replicas: 4 ms forward, 8 ms backward, and 16 MiB of gradients in `buckets` that take `whole` ms together.

    They are reduced after backward, or in its last 6 ms.
    """
    line = Timeline(world=2, mesh={"dp": 2})
    line.group("dp", "dp", 0, 1)
    begin = 6 if overlap else 12
    end = max(12, begin + whole)
    for number in range(STEPS):
        at = number * (end + 1)
        line.step(at * MS, (at + end + 1) * MS, number)
        edges = [at * MS + begin * MS + whole * MS * i // buckets for i in range(buckets + 1)]
        for i in range(buckets):
            parts = dict.fromkeys((0, 1), (edges[i], edges[i + 1]))
            words = {"axis": "dp", "strategy": "dp", "bytes": (1 << 24) // buckets}
            line.collective("dp", number * buckets + i, parts, stream="dp", **words)
        for rank in (0, 1):
            line.compute(rank, at * MS, (at + 4) * MS, phase="forward")
            line.compute(rank, (at + 4) * MS, (at + 12) * MS, phase="backward")
            line.compute(rank, (at + end) * MS, (at + end + 1) * MS, phase="optimizer")
    run = line.run()
    run.meta.parallel["overlap"] = overlap
    return run


def tiny_buckets() -> Injected:
    """The latency of 512 buckets makes their reduction 8 ms longer than that of one."""
    return Injected(
        "tiny buckets",
        "dp 2; the gradients in 512 buckets of 32 kB instead of one, which takes 8 ms longer",
        reduced_run(),
        reduced_run(512, 14),
        8 * MS,
        rank=None,
        stage=None,
        straggler_cause=None,
        axis="dp all_reduce",
        finding="The dp all-reduce is exposed for 14 ms a step (512 a step and rank of 32.77 kB)",
        grows={"visible_comm": Fraction(1)},
    )


def no_overlap() -> Injected:
    """The same 6 ms of reduction, inside backward or after it."""
    return Injected(
        "no overlap",
        "dp 2; 6 ms of gradient reduction after backward instead of during it",
        reduced_run(overlap=True),
        reduced_run(),
        6 * MS,
        rank=None,
        stage=None,
        straggler_cause=None,
        axis="dp all_reduce",
        finding="The dp all-reduce is exposed for 6 ms a step",
        grows={"visible_comm": Fraction(1)},
    )


MATRIX: tuple[Callable[[], Injected], ...] = (
    slow_rank,
    slow_stage,
    slow_link,
    late_host,
    skewed_experts,
    tiny_buckets,
    no_overlap,
)
