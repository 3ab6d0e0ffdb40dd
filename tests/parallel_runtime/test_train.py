"""Whole runs: the rows that a step records, the run directory that a command leaves, and what a killed rank leaves."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from pool import Pool, gloo

from stepscope.__main__ import INTERRUPTED, status_of
from stepscope.exit_codes import ExitCode
from stepscope.parallel_runtime import train as train_module
from stepscope.parallel_runtime.causes import InjectedCauses
from stepscope.parallel_runtime.compose import Configuration, build, streams_of
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig
from stepscope.parallel_runtime.device import Device
from stepscope.parallel_runtime.dry import operations_of_step
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.train import overall, train_step
from stepscope.tracer.clock import anchor, host_offsets
from stepscope.tracer.recorder import NullRecorder, Recorder
from stepscope.tracer.schema import RUN_FILE, Operation, RunMeta, plan_of, rank_file

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "schemas" / "trace_event.schema.json").read_text())

MODEL = ModelConfig(layers=4, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=32, seq=8)
TRAIN = TrainConfig(microbatch_size=2, microbatches=3, steps=2, dtype="float64", optimizer="sgd", lr=0.1, padding=0.5)


def configuration(model: ModelConfig = MODEL, train: TrainConfig = TRAIN, **parallel: Any) -> Configuration:
    return Configuration(model, ParallelConfig(**parallel), train)


def dry_plan(c: Configuration, rank: int) -> list[Operation]:
    """The rows of the second step on tensors without data."""
    return plan_of(operations_of_step(c, rank, steps=2))


def on_rank_step(rank: int, c: Configuration, steps: int = 2) -> tuple[list[Operation], dict[str, torch.Tensor]] | None:
    """Rows of the last step and gradients of this rank."""
    recorder = Recorder(rank)
    comm = gloo(Mesh.of(c.parallel), rank, recorder, streams_of(c.model, c.parallel, c.train))
    if comm is None:
        return None
    device = Device.named("cpu")
    program = build(c, comm, device)
    causes = InjectedCauses(c.train, rank, device, recorder)
    causes.into(program.chunks[0])
    for step in range(steps):
        train_step(program, step, causes)
    comm.close()
    gradients = {name: p.grad.clone() for name, p in program.named_parameters() if p.grad is not None}
    return recorder.operations(), gradients


# -- rows of a step ----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp4": configuration(dp=4, bucket_mb=0.005),
    "pp4 gpipe": configuration(pp=4, schedule="gpipe"),
    "dp2 pp2 interleaved": configuration(
        train=replace(TRAIN, microbatches=4), dp=2, pp=2, schedule="interleaved", chunks=2, bucket_mb=0.005
    ),
    "tp2 sp pp2 zb-h1": configuration(
        replace(MODEL, kv_heads=2), tp=2, sp=True, pp=2, schedule="zb-h1", recompute="selective"
    ),
    "dp2 pp2 zb-h1": configuration(dp=2, pp=2, schedule="zb-h1", bucket_mb=0.005),
    "dp2 pp2 tied, clipped": configuration(
        replace(MODEL, tied=True), replace(TRAIN, clip=0.1, optimizer="adamw"), dp=2, pp=2, bucket_mb=0.005
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_run_has_the_rows_of_a_real_one(pool: Pool, layout: str) -> None:
    c = LAYOUTS[layout]
    for rank, result in enumerate(pool.run(on_rank_step, c)):
        assert result is not None
        assert plan_of(result[0]) == dry_plan(c, rank)


def test_traffic_of_a_step_is_what_theory_says(pool: Pool) -> None:
    c = LAYOUTS["dp2 pp2 tied, clipped"]
    results = pool.run(on_rank_step, c)
    boundary = 8 * 2 * 16 * 8  # S x B x H of float64
    for rank, (operations, gradients) in enumerate(results):
        first, rows = rank < 2, [row for row in operations if row.kind == "comm"]
        traffic: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for row in rows:
            traffic[row.strategy, row.axis, row.collective].append(row.bytes)
        own = sum(gradient.numel() * 8 for gradient in gradients.values())
        assert sum(traffic.pop(("dp", "dp", "all_reduce"))) == own
        assert traffic.pop(("embedding", "pp", "all_reduce")) == [32 * 16 * 8]
        assert traffic.pop(("clip", "pp", "all_reduce")) == [8]
        assert traffic.pop(("pp", "pp", "send")) == [boundary] * 3
        assert traffic.pop(("pp", "pp", "receive")) == [boundary] * 3
        if not first:  # the ranks that end the model: the loss to report (token counts are known to all)
            assert traffic.pop(("loss", "dp", "all_reduce")) == [8]
        assert not traffic


def test_every_communication_is_waited_for_once(pool: Pool) -> None:
    for operations, _ in pool.run(on_rank_step, LAYOUTS["dp2 pp2 tied, clipped"]):
        issued = [row.op_id for row in operations if row.kind == "comm"]
        waited = [row.op_id for row in operations if row.kind == "wait"]
        assert sorted(issued) == sorted(waited)


def test_blocks_cover_the_step_in_the_order_of_the_loop(pool: Pool) -> None:
    operations = pool.run(on_rank_step, LAYOUTS["dp4"])[0][0]
    names = [row.name for row in operations if row.kind == "compute" and row.end_ns >= row.start_ns]
    order = list(dict.fromkeys(names))
    wanted = ["data", "zero gradients", "embedding", "layer.0", "layer.3", "head", "gradients", "optimizer"]
    assert [name for name in order if name in wanted] == wanted
    phases = {row.name: row.phase for row in operations if row.kind == "compute"}
    assert phases["optimizer"] == "optimizer"
    layers = {(row.phase, row.layer, row.microbatch) for row in operations if row.layer >= 0}
    assert layers == {(phase, layer, m) for phase in ("forward", "backward") for layer in range(4) for m in range(3)}


def test_overlap_starts_reducing_within_backward(pool: Pool) -> None:
    """With overlap, buckets are issued before the last backward has ended; without, all after it."""
    for overlap in (True, False):
        c = configuration(dp=4, bucket_mb=0.005, overlap=overlap)
        operations = pool.run(on_rank_step, c)[0][0]
        places = [row.phase for row in operations if row.kind == "comm" and row.strategy == "dp"]
        assert len(places) > 2
        assert ("backward" in places) == overlap


def test_clipping_scales_all_gradients_by_the_global_norm(pool: Pool) -> None:
    model, once = replace(MODEL, tied=True), replace(TRAIN, steps=1)
    free = pool.run(on_rank_step, configuration(model, once, dp=2, pp=2), 1)
    whole: dict[str, torch.Tensor] = {}
    for _, gradients in free:
        whole |= gradients  # a tied embedding has the same summed gradient on both stages
    norm = sum(float(gradient.square().sum()) for gradient in whole.values()) ** 0.5
    assert norm > 0.1
    clipped = pool.run(on_rank_step, configuration(model, replace(once, clip=0.1), dp=2, pp=2), 1)
    for _, gradients in clipped:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[name] * (0.1 / (norm + 1e-6)), rtol=1e-12, atol=0.0)
    loose = pool.run(on_rank_step, configuration(model, replace(once, clip=100.0), dp=2, pp=2), 1)
    assert all(torch.equal(gradient, whole[name]) for _, gradients in loose for name, gradient in gradients.items())


def test_injected_work_is_compute_and_injected_lateness_is_none(pool: Pool) -> None:
    train = replace(TRAIN, slow_rank=1, slow_ms=20.0, late_rank=2, late_ms=20.0)
    rows = [operations for operations, _ in pool.run(on_rank_step, configuration(train=train, dp=4))]
    slow = [[row for row in rank if row.name == "injected work"] for rank in rows]
    assert [len(injected) for injected in slow] == [0, 1, 0, 0]  # the first forward only
    assert slow[1][0].kind == "compute"
    assert slow[1][0].phase == "forward"
    assert slow[1][0].end_ns - slow[1][0].start_ns >= 20_000_000

    def first_gap(rank: list[Operation]) -> int:
        own = [row for row in rank if row.stream == "compute"]
        return own[1].start_ns - own[0].end_ns

    assert first_gap(rows[2]) >= 20_000_000


def on_rank_offsets(rank: int) -> dict:
    """The ranks of one host, taken for two."""
    import torch.distributed as dist

    from stepscope.parallel_runtime.launch import World

    world = World(rank, 4, rank, Device.named("cpu"), dist.HashStore())
    return host_offsets(rank, ["a", "b", "a", "b"], *world.messages(), anchor(), rounds=20)


def test_clocks_of_hosts_are_compared_over_the_default_group(pool: Pool) -> None:
    samples, *others = pool.run(on_rank_offsets)
    assert others == [{}, {}, {}]
    assert list(samples) == ["b"]
    # in truth one clock: the offset lies within its own bound, but for two anchors' difference
    assert abs(samples["b"].offset_ns) <= samples["b"].bound_ns + 1_000_000


def test_the_recorder_s_summary_of_a_run_is_its_worst_rank() -> None:
    ranks = [
        {"level": "full", "overhead": 0.01, "writer_share": 0.2, "dropped": 1},
        {"level": "full", "overhead": 0.02, "writer_share": 0.1, "dropped": 2},
    ]
    assert overall(ranks) == {"level": "full", "overhead": 0.02, "writer_share": 0.2, "dropped": 3}
    assert overall([NullRecorder().summary()])["writer_share"] is None


# -- the run directory -------------------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "stepscope", "run", *map(str, arguments)]


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no strict JSON")


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.loads(file.read(), parse_constant=refuse)["traceEvents"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run of the README: its directory and what was printed."""
    path = tmp_path_factory.mktemp("runs") / "a"
    layout = ("--dp", 2, "--pp", 2, "--schedule", "1f1b", "--microbatches", 8)
    arguments = (*layout, "--steps", 6, "--slow-rank", 1, "--slow-ms", 5, "--out")
    done = subprocess.run(command(*arguments, path), capture_output=True, text=True, timeout=120, check=True)
    return path, done.stdout


def test_the_command_prints_its_batch_its_progress_and_its_directory(recorded: tuple[Path, str]) -> None:
    path, output = recorded
    assert "4 ranks (pp 2 x dp 2" in output
    assert re.search(r"batch: 2 sequences x 8 microbatches x dp 2 = 32 sequences", output)
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+) +[\d,]+ tokens/s$", output, re.M)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert f"recorded in {path}" in output


def test_run_json_describes_the_run(recorded: tuple[Path, str]) -> None:
    meta = RunMeta.from_json((recorded[0] / RUN_FILE).read_text())
    assert meta.complete
    assert (meta.name, meta.source, meta.backend, meta.device, meta.world_size) == ("a", "measured", "gloo", "cpu", 4)
    assert meta.mesh == {"pp": 2, "dp": 2, "cp": 1, "ep": 1, "tp": 1}
    assert [where["pp"] for where in meta.coords] == [0, 0, 1, 1]
    assert {(group.axis, group.ranks) for group in meta.groups} == {
        ("dp", (0, 1)),
        ("dp", (2, 3)),
        ("pp", (0, 2)),
        ("pp", (1, 3)),
    }
    assert len(meta.hosts) == len(meta.clock) == 4
    assert all((clock.offset_ns, clock.bound_ns) == (0, 0) for clock in meta.clock)  # one host
    assert len(meta.pipeline_table) == 4
    assert Counter(action.phase for action in meta.pipeline_table[0]) == {"forward": 8, "backward": 8}
    assert meta.train["global_batch"] == 32
    assert meta.recorder["dropped"] == 0
    assert 0 < meta.recorder["overhead"] < 1


def test_rank_files_are_strict_json_and_follow_the_schema(recorded: tuple[Path, str]) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for rank in range(4):
        events = events_of(recorded[0] / rank_file(rank))
        kinds = {}  # one event of each shape is enough: validating thousands takes seconds
        for event in events:
            kinds[event["ph"], event.get("cat"), tuple(event.get("args", ()))] = event
        for event in kinds.values():
            validator.validate(event)
        steps = [e["name"] for e in events if e["ph"] == "X" and e["name"].startswith("ProfilerStep#")]
        assert steps == [f"ProfilerStep#{k}" for k in range(6)]
        counters = {event["name"] for event in events if event["ph"] == "C"}
        assert counters == {"parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"}


def test_compute_rows_cover_neither_a_wait_nor_each_other(recorded: tuple[Path, str]) -> None:
    for rank in range(4):
        rows = [e for e in events_of(recorded[0] / rank_file(rank)) if e["ph"] == "X" and e["tid"] == 7]
        spans = sorted((round(e["ts"] * 1000), round(e["dur"] * 1000), e["cat"]) for e in rows)
        assert {"kernel", "wait"} == {category for _, _, category in spans}
        for (start, length, _), (following, _, _) in itertools.pairwise(spans):
            assert start + length <= following


def test_partners_record_the_same_communication(recorded: tuple[Path, str]) -> None:
    """Every (group, number) is there on all its ranks, with one size; a send's partner is a receive."""
    seen: dict[tuple[Any, ...], list[tuple[int, str, int]]] = defaultdict(list)
    for rank in range(4):
        for event in events_of(recorded[0] / rank_file(rank)):
            arguments = event.get("args", {})
            if "Collective name" not in arguments:
                continue
            message = (arguments["Src Rank"], arguments["Dst Rank"]) if "Src Rank" in arguments else ()
            key = (arguments["Process Group Name"], message, arguments["Seq"])
            seen[key].append((rank, arguments["Collective name"], arguments["bytes"]))
    assert len(seen) > 6 * 16
    for (_, message, _), parts in seen.items():
        assert len({size for _, _, size in parts}) == 1
        assert len(parts) == 2
        if message:
            assert sorted(parts) == sorted([(message[0], "send", parts[0][2]), (message[1], "recv", parts[0][2])])


def test_injected_work_is_in_the_trace(recorded: tuple[Path, str]) -> None:
    slow = [[e for e in events_of(recorded[0] / rank_file(r)) if e["name"] == "injected work"] for r in range(4)]
    assert [len(rows) for rows in slow] == [0, 6, 0, 0]
    assert all(row["dur"] >= 5000 for row in slow[1])


def test_a_second_run_never_overwrites(recorded: tuple[Path, str]) -> None:
    before = sorted(path.stat().st_mtime_ns for path in recorded[0].iterdir())
    done = subprocess.run(command("--out", recorded[0]), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert "--out" in done.stderr
    assert sorted(path.stat().st_mtime_ns for path in recorded[0].iterdir()) == before


def test_a_full_disk_at_the_end_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, meta: RunMeta) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_module, "write_meta", full)
    train_module.finish(tmp_path, RunMeta("id", "a"))
    assert ["No space left" in record.message for record in caplog.records] == [True]


def test_an_illegal_layout_is_refused_at_once() -> None:
    done = subprocess.run(command("--pp", 9, "--no-record"), capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.USAGE
    assert "pp 9 stages need a layer each, the model has 4: take pp 4" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [("--dp", "0"), ("--schedule", "foo"), ("--preset", "huge"), ("--lr", "nan"), ("--bucket-mb", "inf")],
    ids=" ".join,
)
def test_a_value_that_makes_no_sense_is_wrong_usage(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["run", "--no-record", *wrong]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert wrong[1] in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "tp 3 must divide kv_heads 2: take tp 2"),
        (["--cp", "3"], "and seq is 64: take seq 66 or cp 2"),
        (["--zero", "1"], "dp is 1: take dp 2, or zero 0"),
        (["--dp", "4", "--zero", "3", "--replicate", "3"], "take replicate 2"),
        (["--chunks", "0"], "chunks 0 must be at least 1"),
        (["--device", "tpu"], "take one of auto, cpu, cuda"),
        (["--device", "dry"], "take one of auto, cpu, cuda"),
        (["--microbatch-size", "0"], "microbatch_size 0 must be at least 1"),
        (["--preset", "tiny-moe", "--capacity-factor", "nan"], "capacity_factor nan must be finite"),
        (["--lr", "nan"], "lr nan must be finite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_layout_that_cannot_be_is_wrong_usage(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["run", "--out", str(tmp_path / "a"), *arguments]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_without_a_record_nothing_is_written(tmp_path: Path) -> None:
    arguments = command("--no-record", "--steps", 1, "--microbatches", 1, "--quiet")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


# -- a killed rank -----------------------------------------------------------------------------------------------------


def whole_steps(path: Path) -> int:
    """Complete steps in a rank file that may end anywhere."""
    inflater, text, data = zlib.decompressobj(31), b"", path.read_bytes()
    while data:
        text += inflater.decompress(data)
        data = inflater.unused_data
        if inflater.eof:
            inflater = zlib.decompressobj(31)
        elif not data:
            break
    return len(re.findall(rb'"ph": ?"X"[^\n]*"ProfilerStep#\d+"', text))


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process id of a launcher's children, in order of their start."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return dict(enumerate(sorted(map(int, children))))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the rank's process in /proc")
def test_a_killed_rank_leaves_a_readable_run(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    arguments = command("--dp", 2, "--pp", 2, "--steps", 100_000, "--out", path)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    4"):
                break
        ranks = ranks_of(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)  # it ends by itself, long before its communication timeout
    assert process.returncode == 1
    assert "Error: rank 1 failed first: killed by SIGKILL" in errors
    assert f"stepscope analyze {path}" in errors
    for pid in ranks.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not RunMeta.from_json((path / RUN_FILE).read_text()).complete
    for rank in range(4):
        assert whole_steps(path / rank_file(rank)) >= 3, rank


def test_control_c_names_where_the_steps_are(tmp_path: Path) -> None:
    path = tmp_path / "interrupted"
    arguments = command("--dp", 2, "--microbatches", 1, "--layers", 1, "--steps", 100_000, "--out", path)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    3"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert errors == f"What was recorded until then: stepscope analyze {path}\nInterrupted.\n"
    assert not RunMeta.from_json((path / RUN_FILE).read_text()).complete
    assert min(whole_steps(path / rank_file(rank)) for rank in range(2)) >= 2
