"""Names of runs, made from their layout, and directories that no second run ever overwrites."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig


def layout_name(parallel: ParallelConfig) -> str:
    """The parallel layout in a word: `dp2-pp2-1f1b`; `single` for one rank."""
    words = [f"{axis}{size}" for axis in ("dp", "tp", "cp", "ep", "pp") if (size := getattr(parallel, axis)) > 1]
    if parallel.cp > 1:
        words += [parallel.cp_mode, parallel.cp_layout]
    if parallel.sp:
        words.append("sp")
    if parallel.zero:
        words.append(f"zero{parallel.zero}")
        words += [f"replicate{parallel.replicate}"] if parallel.replicate > 1 else []
        words += [] if parallel.reshard else ["no-reshard"]
    if parallel.offload != "none":
        words.append("offload")
    if parallel.pp > 1:
        words.append(parallel.schedule if parallel.chunks == 1 else f"{parallel.schedule}{parallel.chunks}")
    if parallel.recompute != "none":
        words.append(f"{parallel.recompute}-recompute")
    if parallel.dp > 1 and not parallel.overlap:
        words.append("no-overlap")
    return "-".join(words) or "single"


def run_name(preset: str, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> str:
    """Layout, microbatches, preset and injected causes: `dp2-pp2-1f1b-m8-tiny`, `dp4-m4-tiny-slow1`."""
    words = [layout_name(parallel), f"m{train.microbatches}", preset]
    if train.slow_rank >= 0:
        words.append(f"slow{train.slow_rank}")
    if train.late_rank >= 0:
        words.append(f"late{train.late_rank}")
    if train.slow_link:
        words.append("link" + "-".join(map(str, train.slow_link)))
    if model.routing_skew is not None:
        words.append(f"skew{model.routing_skew:g}")
    return "-".join(words)


def claim(path: Path) -> Path:
    """Make the directory `path`, which the user named. ValueError when something is there already."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if path.is_dir() and not any(path.iterdir()):
            return path
        raise ValueError(
            f"{path} exists already, and a recorded run is never overwritten: take --out {_free(path)}"
        ) from None
    return path


def claim_below(root: Path, name: str) -> Path:
    """Make and return `root/name`, or the first of `root/name-2`, `root/name-3`, ... that does not exist."""
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the loop above ends by returning")


def _free(path: Path) -> Path:
    return next(free for n in count(2) if not (free := path.with_name(f"{path.name}-{n}")).exists())
