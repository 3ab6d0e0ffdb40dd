"""`stepscope run`: train a small transformer on several ranks, and record where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.analysis.errors import StepscopeError
from stepscope.commands.console import Quiet, say_next, wrong_usage
from stepscope.parallel_runtime.config import (
    BALANCE,
    CP_LAYOUTS,
    CP_MODES,
    DTYPES,
    OFFLOAD,
    OPTIMIZERS,
    RECOMPUTE,
    ROUTERS,
    SCHEDULES,
    ParallelConfig,
    TrainConfig,
    check,
    check_global_batch,
    global_batch,
)
from stepscope.parallel_runtime.naming import claim, claim_below, run_name
from stepscope.parallel_runtime.pp.split import parse_split
from stepscope.parallel_runtime.published import LAYOUTS, PRESETS, laid_out, preset
from stepscope.parallel_runtime.published import layout as layout_of
from stepscope.parallel_runtime.slow_link import parse_link

if TYPE_CHECKING:
    from stepscope.parallel_runtime.compose import Configuration
    from stepscope.parallel_runtime.train import RunSpec

LAYOUT, MODEL, EXPERTS, TRAINING = "Layout", "Model", "Mixture of experts", "Training"
CAUSES, RUN = "Injected causes", "Run"
DEVICES = ("auto", "cpu", "cuda")


def option(help: str, panel: str, *names: str) -> Any:
    """One option of the command, under its heading."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


def run(
    ctx: typer.Context,
    dp: Annotated[int, option("Data parallel replicas.", LAYOUT)] = 1,
    pp: Annotated[int, option("Pipeline stages.", LAYOUT)] = 1,
    tp: Annotated[int, option("Tensor parallel ranks: heads, feed-forward and vocabulary are cut.", LAYOUT)] = 1,
    sp: Annotated[bool, option("Cut the sequence over tp between the matrices.", LAYOUT, "--sp")] = False,
    cp: Annotated[int, option("Context parallel ranks: the sequence is cut, attention included.", LAYOUT)] = 1,
    cp_mode: Annotated[
        str, option(f"How attention sees the whole sequence: {', '.join(CP_MODES)}.", LAYOUT)
    ] = ParallelConfig.cp_mode,
    cp_layout: Annotated[
        str, option(f"Which positions a rank of cp holds: {', '.join(CP_LAYOUTS)}.", LAYOUT)
    ] = ParallelConfig.cp_layout,
    ep: Annotated[
        int, option("Expert parallel ranks, among those of dp x cp x tp: the experts are cut.", LAYOUT)
    ] = ParallelConfig.ep,
    schedule: Annotated[str, option(f"Pipeline schedule: {', '.join(SCHEDULES)}.", LAYOUT)] = "1f1b",
    chunks: Annotated[
        int | None, option("Chunks of layers a stage, with --schedule interleaved (2 unless given).", LAYOUT)
    ] = None,
    split: Annotated[
        str, option("Layers of each stage: equal, balanced (by estimated cost), or numbers such as 2,1,1.", LAYOUT)
    ] = "equal",
    bucket_mb: Annotated[float, option("Size of a gradient bucket in MB.", LAYOUT)] = ParallelConfig.bucket_mb,
    overlap: Annotated[
        bool, option("Reduce gradient buckets during backward, or all after it.", LAYOUT, "--overlap/--no-overlap")
    ] = True,
    zero: Annotated[
        int, option("Cut over dp: 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing.", LAYOUT)
    ] = ParallelConfig.zero,
    replicate: Annotated[
        int, option("With --zero: copies of the cut state, each over dp / copies ranks.", LAYOUT)
    ] = ParallelConfig.replicate,
    reshard: Annotated[
        bool,
        option(
            "With --zero 3: let parameters go after forward, or keep them for backward.",
            LAYOUT,
            "--reshard/--no-reshard",
        ),
    ] = ParallelConfig.reshard,
    prefetch: Annotated[
        int, option("With --zero 3: blocks whose parameters are gathered ahead.", LAYOUT)
    ] = ParallelConfig.prefetch,
    offload: Annotated[
        str, option(f"Where optimizer state lives off the device: {', '.join(OFFLOAD)}.", LAYOUT)
    ] = ParallelConfig.offload,
    recompute: Annotated[
        str, option(f"Activations that backward computes again: {', '.join(RECOMPUTE)}.", LAYOUT)
    ] = ParallelConfig.recompute,
    layout: Annotated[
        str | None, option(f"A published layout with its model: {', '.join(LAYOUTS)}; options beside it win.", LAYOUT)
    ] = None,
    preset_name: Annotated[str, option(f"Model: {', '.join(PRESETS)}.", MODEL, "--preset")] = "tiny",
    layers: Annotated[int | None, option("Layers, in place of the preset's.", MODEL)] = None,
    hidden: Annotated[int | None, option("Hidden width, in place of the preset's.", MODEL)] = None,
    heads: Annotated[int | None, option("Attention heads, in place of the preset's.", MODEL)] = None,
    kv_heads: Annotated[int | None, option("Key and value heads, in place of the preset's.", MODEL)] = None,
    seq: Annotated[int | None, option("Tokens of a sequence, in place of the preset's.", MODEL)] = None,
    tied: Annotated[bool, option("The output head is the embedding table.", MODEL, "--tied")] = False,
    dropout: Annotated[float, option("Share of activations that dropout zeroes.", MODEL)] = 0.0,
    experts: Annotated[int | None, option("Experts of a layer, in place of the preset's; 0: dense.", EXPERTS)] = None,
    experts_per_token: Annotated[
        int | None, option("Experts that each token uses, in place of the preset's.", EXPERTS)
    ] = None,
    expert_ffn: Annotated[int | None, option("Inner width of an expert, in place of the preset's.", EXPERTS)] = None,
    dense_layers: Annotated[int | None, option("The first so many layers have no experts.", EXPERTS)] = None,
    router: Annotated[str | None, option(f"Scores of the experts: {' or '.join(ROUTERS)}.", EXPERTS)] = None,
    balance: Annotated[str | None, option(f"What keeps loads even: {', '.join(BALANCE)}.", EXPERTS)] = None,
    balance_rate: Annotated[
        float | None, option("With --balance bias: how far a score's offset moves in a step.", EXPERTS)
    ] = None,
    aux_weight: Annotated[float | None, option("With --balance aux: weight of the auxiliary loss.", EXPERTS)] = None,
    capacity_factor: Annotated[
        float | None, option("With --balance capacity: what an expert takes, in even shares.", EXPERTS)
    ] = None,
    microbatches: Annotated[int, option("Microbatches of a step.", TRAINING)] = TrainConfig.microbatches,
    microbatch_size: Annotated[
        int | None, option("Sequences of a microbatch, in place of the preset's.", TRAINING)
    ] = None,
    global_batch_wanted: Annotated[
        int | None,
        option("Sequences of a step, checked: microbatch size x microbatches x dp.", TRAINING, "--global-batch"),
    ] = None,
    steps: Annotated[int, option("Steps.", TRAINING)] = TrainConfig.steps,
    dtype: Annotated[
        str, option(f"{', '.join(DTYPES)}; 16 bits: with a float32 copy in the optimizer.", TRAINING)
    ] = TrainConfig.dtype,
    optimizer: Annotated[str, option(f"{' or '.join(OPTIMIZERS)}.", TRAINING)] = TrainConfig.optimizer,
    lr: Annotated[float, option("Learning rate.", TRAINING)] = TrainConfig.lr,
    clip: Annotated[float, option("Largest gradient norm; 0: no clipping.", TRAINING)] = TrainConfig.clip,
    padding: Annotated[
        float, option("Largest share of a sequence that is padding (it differs by sequence).", TRAINING)
    ] = TrainConfig.padding,
    seed: Annotated[int, option("Of initial values and data.", TRAINING)] = TrainConfig.seed,
    slow_rank: Annotated[int, option("This rank computes longer in every step ...", CAUSES)] = -1,
    slow_ms: Annotated[float, option("... by so many milliseconds.", CAUSES)] = 0.0,
    late_rank: Annotated[int, option("This rank's host sleeps before every step ...", CAUSES)] = -1,
    late_ms: Annotated[float, option("... for so many milliseconds.", CAUSES)] = 0.0,
    slow_link: Annotated[
        str | None, option("What the first of two ranks sends to the second, such as 0-1, takes longer ...", CAUSES)
    ] = None,
    slow_link_ms: Annotated[float, option("... by so many milliseconds an operation.", CAUSES)] = 0.0,
    routing_skew: Annotated[
        float | None, option("Expert e gets (e + 1)^-skew of the tokens, whatever the router says; 0: even.", CAUSES)
    ] = None,
    out: Annotated[Path | None, option("Run directory; by default runs/, named after the layout.", RUN)] = None,
    device: Annotated[str, option("cpu, cuda, or auto: cuda where each rank can have a GPU.", RUN)] = "auto",
    record: Annotated[bool, option("Record the run, or only train.", RUN, "--record/--no-record")] = True,
    record_ranks: Annotated[
        str | None, option("Record only these ranks, such as 0-7,64; run.json says which.", RUN, "--record-ranks")
    ] = None,
    force: Annotated[
        bool, option("Start even where model state does not fit this machine by estimate.", RUN, "--force")
    ] = False,
    timeout_s: Annotated[
        float, option("A communication that takes longer has failed.", RUN, "--timeout")
    ] = TrainConfig.timeout_s,
    quiet: Quiet = False,
) -> None:
    """Train a small transformer on dp x cp x tp x pp ranks, and record where the time of every step goes.

    The ranks are processes of this machine (CPU with gloo, or one GPU each with NCCL); under torchrun they are the ones
    that torchrun started. The run directory holds one trace a rank, which also opens in Perfetto, and `run.json`.

    The models llama-3 and deepseek-v3 are published shapes to plan with (docs/presets.md); what this machine's memory
    cannot hold is refused before it starts.

    Example: `stepscope run --dp 2 --pp 2 --schedule 1f1b --microbatches 8 --out runs/a`
    """
    from dataclasses import replace

    with wrong_usage():
        if device not in DEVICES:
            raise ValueError(f"device {device!r} is unknown: take one of {', '.join(DEVICES)}")
        given = {name for name in ctx.params if _is_given(ctx, name)}
        published = None if layout is None else layout_of(layout)
        if published is not None and "preset_name" in given and preset_name != published.preset:
            raise ValueError(f"layout {layout} is one of {published.preset}, not of {preset_name}: leave --preset out")
        preset_name = preset_name if published is None else published.preset
        chosen = preset(preset_name)
        changes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
        changes |= {"seq": seq}
        changes |= {"tied": tied or None, "dropout": dropout}
        changes |= {"experts": experts, "experts_per_token": experts_per_token, "expert_ffn": expert_ffn}
        changes |= {"dense_layers": dense_layers, "router": router, "balance": balance, "balance_rate": balance_rate}
        changes |= {"aux_weight": aux_weight, "capacity_factor": capacity_factor, "routing_skew": routing_skew}
        model = replace(chosen.model, **{name: value for name, value in changes.items() if value is not None})
        chunks = (2 if schedule == "interleaved" and pp > 1 else 1) if chunks is None else chunks
        parallel = ParallelConfig(
            pp=pp,
            dp=dp,
            cp=cp,
            cp_mode=cp_mode,
            cp_layout=cp_layout,
            ep=ep,
            tp=tp,
            sp=sp,
            schedule=schedule,
            chunks=chunks,
            split=parse_split(split, model, pp * chunks),
            bucket_mb=bucket_mb,
            zero=zero,
            replicate=replicate,
            reshard=reshard,
            prefetch=prefetch,
            offload=offload,
            recompute=recompute,
            overlap=overlap,
        )
        train = TrainConfig(
            microbatch_size=chosen.microbatch_size if microbatch_size is None else microbatch_size,
            microbatches=microbatches,
            steps=steps,
            dtype=dtype,
            optimizer=optimizer,
            lr=lr,
            clip=clip,
            padding=padding,
            seed=seed,
            slow_rank=slow_rank,
            slow_ms=slow_ms,
            late_rank=late_rank,
            late_ms=late_ms,
            slow_link=parse_link(slow_link),
            slow_link_ms=slow_link_ms,
            timeout_s=timeout_s,
        )
        if published is not None:
            model, parallel, train = laid_out(published, model, parallel, train, given)
        check(model, parallel, train)
        check_global_batch(global_batch_wanted, parallel, train)

    from stepscope.parallel_runtime.compose import Configuration
    from stepscope.parallel_runtime.recording import parse_ranks
    from stepscope.parallel_runtime.train import RunSpec

    name = run_name(preset_name, model, parallel, train)
    chosen_ranks = None if record_ranks is None else parse_ranks(record_ranks, parallel.world_size)
    spec = RunSpec(out.name if out else name, Configuration(model, parallel, train), record, quiet, chosen_ranks)
    _start(name, spec, out, device, force)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether a person wrote this option."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _start(name: str, spec: RunSpec, out: Path | None, device_name: str, force: bool) -> None:
    """Launch the ranks; claim the directory once for all of them."""
    import os
    import sys

    from stepscope.parallel_runtime.device import Device
    from stepscope.parallel_runtime.estimate import available_bytes, state_bytes, too_large
    from stepscope.parallel_runtime.failures import RankFailure
    from stepscope.parallel_runtime.launch import launch, ranks_here
    from stepscope.parallel_runtime.train import run_rank

    configuration, quiet = spec.configuration, spec.quiet
    speaks = not quiet and os.environ.get("RANK", "0") == "0"
    device = Device.named(device_name, ranks_here=ranks_here(configuration.parallel.world_size))
    claimed: list[Path] = []

    def prepare() -> str:
        if not spec.record:
            return ""
        claimed.append(claim(out) if out else claim_below(Path("runs"), name))
        return str(claimed[0])

    if speaks:
        print(describe(name, configuration, device), flush=True)
    here = ranks_here(configuration.parallel.world_size)
    state = state_bytes(configuration.model, configuration.parallel, configuration.train)
    refusal = too_large(state, here, available_bytes(device.kind), device.kind)
    if refusal is not None and not force:
        raise StepscopeError(refusal)
    try:
        launch(
            run_rank,
            prepare,
            (spec,),
            world_size=configuration.parallel.world_size,
            device=device.kind,
            timeout_s=configuration.train.timeout_s,
        )
    except (RankFailure, KeyboardInterrupt) as ending:
        kept = f"What was recorded until then: stepscope analyze {claimed[0]}" if claimed else ""
        if isinstance(ending, RankFailure):
            raise StepscopeError(f"{ending}\n{kept}".rstrip()) from ending
        if kept:
            print(kept, file=sys.stderr)
        raise
    if claimed and not quiet:
        print(f"recorded in {claimed[0]}", flush=True)
        say_next(f"stepscope analyze {claimed[0]}")


def describe(name: str, configuration: Configuration, device: Any) -> str:
    """What is about to run, in three lines: layout, model, batch."""
    from stepscope.analysis.units import counted
    from stepscope.parallel_runtime.model.initial import parameter_count

    model, parallel, train = configuration.model, configuration.parallel, configuration.train
    degrees = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    degrees += f", ep {parallel.ep} x edp {parallel.expert_data_parallel} in a stage" if model.experts else ""
    mixture = f", {model.experts} experts of {model.expert_width}" if model.experts else ""
    mixture += f" ({model.experts_per_token} a token)" if model.experts else ""
    return "\n".join(
        [
            f"{name}: {counted(parallel.world_size, 'rank')} ({degrees}), {device.kind} with {device.backend}",
            f"model: {model.layers} layers of {model.hidden}{mixture}, {parameter_count(model):,} parameters, {train.dtype}",
            f"batch: {train.microbatch_size} sequences x {train.microbatches} microbatches x dp {parallel.dp}"
            f" = {global_batch(parallel, train)} sequences of {model.seq} tokens",
        ]
    )
