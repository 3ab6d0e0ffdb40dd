"""Run directories written by stepscope: run.json and one trace a rank -> the column store, built once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepscope.analysis.engine import map_ranks
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import store
from stepscope.analysis.ingest.normalize import RankFile, normalize
from stepscope.analysis.ingest.plain import read_plain
from stepscope.analysis.ingest.rules import load_rules
from stepscope.analysis.ingest.source import ByteSource
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Run
from stepscope.tracer.schema import RUN_FILE, STORE_DIRECTORY, GroupMeta, RunMeta, rank_file

PARALLEL_FROM = 64 << 20
"""Files of more bytes than this together are read by several processes."""

_RANK_FILE = re.compile(r"rank_(\d{5,})\.trace\.json(?:\.gz)?\Z")


@dataclass(frozen=True)
class Progress:
    """How far a first read is."""

    ranks_done: int
    ranks: int
    bytes_done: int
    bytes: int


ProgressCall = Callable[[Progress], None]


@dataclass(frozen=True)
class RankTask:
    """One rank to read, in whatever process."""

    path: Path
    rank: int
    directory: Path
    build: str

    def __str__(self) -> str:
        return f"{self.rank} ({self.path.name})"


def is_run_directory(path: Path) -> bool:
    """Does the directory hold a run of ours?"""
    return path.is_dir() and ((path / RUN_FILE).is_file() or bool(rank_files(path)))


def rank_files(path: Path) -> list[tuple[int, Path]]:
    """(rank, file) of every rank file in a run directory, by rank."""
    found = ((_RANK_FILE.match(file.name), file) for file in path.iterdir())
    return sorted((int(match.group(1)), file) for match, file in found if match)


def open_run_directory(
    path: Path, progress: ProgressCall | None = None, refresh: bool = False, engine: str | None = None
) -> Run:
    """The run in `path`, from its store when that is up to date, else read and stored first.

    Raises StepscopeError when there is nothing to read, or two files are the same rank.
    """
    path = path.resolve()
    files = rank_files(path)
    if not files:
        raise StepscopeError(f"{path} has no rank file ({rank_file(0)}): did the run end before its first step?")
    _refuse_two_of_a_rank(files)
    sources = _fingerprint([path / RUN_FILE, *(file for _, file in files)])
    if not refresh:
        for place in (path / STORE_DIRECTORY, store.cache_place(path)):
            manifest = store.read_manifest(place)
            if manifest is not None and manifest["sources"] == sources:
                return store.open_store(place, manifest, path)
    place = store.writable_place(path, inside=True)
    store.remove_abandoned(place)
    with store.Builder(place) as builder:
        tasks = [RankTask(file, rank, builder.path, builder.build) for rank, file in files]
        entries = _read_ranks(tasks, progress, engine)
        manifest = _assemble(path, sources, entries) | {"replace": refresh}
        place = builder.commit(manifest)
    manifest = store.read_manifest(place)
    if manifest is None:
        raise StepscopeError(f"the store {place} vanished while it was opened: try again")
    return store.open_store(place, manifest, path)


def _read_ranks(tasks: list[RankTask], progress: ProgressCall | None, engine: str | None) -> list[dict[str, Any]]:
    sizes = {task.rank: task.path.stat().st_size for task in tasks}
    total = sum(sizes.values())
    state = Progress(0, len(tasks), 0, total)

    def done(task: RankTask, entry: dict[str, Any]) -> None:
        nonlocal state
        state = replace(state, ranks_done=state.ranks_done + 1, bytes_done=state.bytes_done + sizes[task.rank])
        if progress is not None:
            progress(state)

    if progress is not None:
        progress(state)
    parallel = len(tasks) > 1 and total > PARALLEL_FROM
    return map_ranks(read_rank, tasks, engine or ("processes" if parallel else "serial"), done=done)


def read_rank(task: RankTask) -> dict[str, Any]:
    """Read one rank file and write its part of the store; returns what the manifest says of it.

    A file that cannot be read as a trace is no error: the entry says `broken` and the run goes on without the rank.
    """
    try:
        with ByteSource(task.path) as source:
            raw = read_plain(source)
    except StepscopeError as error:
        return _broken(task, str(error))
    if not raw.rows:
        return _broken(task, raw.cut or "it holds no event")
    result = normalize(raw, load_rules(), own=True)
    result.data.events["rank"][:] = task.rank
    entry = store.write_rank(task.directory, task.build, task.rank, result.data)
    return entry | {"file": task.path.name, "facts": result.facts, "health": _placed(result, task)}


def _broken(task: RankTask, why: str) -> dict[str, Any]:
    item = HealthItem(
        "broken_rank",
        f"{task.path.name} cannot be read ({why}): rank {task.rank} is left out",
        rank=task.rank,
        file=task.path.name,
        touches=("ledger", "summary", "collectives", "stragglers"),
        broken=True,
    )
    return {"rank": task.rank, "file": task.path.name, "broken": True, "health": store.health_to_json([item])}


def _placed(result: RankFile, task: RankTask) -> list[dict[str, Any]]:
    return store.health_to_json([replace(item, rank=task.rank, file=task.path.name) for item in result.health])


def _refuse_two_of_a_rank(files: list[tuple[int, Path]]) -> None:
    for (rank, file), (next_rank, next_file) in pairwise(files):
        if rank == next_rank:
            raise StepscopeError(f"{file.name} and {next_file.name} are both rank {rank}: remove one of them")


def _fingerprint(files: list[Path]) -> dict[str, list[int]]:
    """Size and modification time of every source that exists."""
    status = ((file, file.stat()) for file in files if file.exists())
    return {file.name: [found.st_size, found.st_mtime_ns] for file, found in status}


def _assemble(path: Path, sources: dict[str, list[int]], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest: what run.json says, what the ranks say, and what does not fit."""
    embedded: dict[int, str] = {}
    for entry in entries:
        rank = entry.get("facts", {}).get("rank")
        if rank is not None and embedded.setdefault(rank, entry["file"]) != entry["file"]:
            raise StepscopeError(
                f"{embedded[rank]} and {entry['file']} both say that they are rank {rank}: remove one of them"
            )
    health: list[HealthItem] = []
    read = [entry for entry in entries if not entry.get("broken")]
    meta = _read_meta(path, read, health)
    health += _missing_ranks(meta, entries)
    ranks = [{key: value for key, value in entry.items() if key != "health"} for entry in read]
    items = store.health_to_json(health) + [item for entry in entries for item in entry["health"]]
    if not read:
        raise StepscopeError(f"no rank of {path} can be read: {items[-1]['text']}")
    return {"sources": sources, "meta": asdict(meta), "health": items, "ranks": ranks}


def _read_meta(path: Path, entries: list[dict[str, Any]], health: list[HealthItem]) -> RunMeta:
    """run.json, or as much of it as the rank files say themselves."""
    file = path / RUN_FILE
    try:
        meta = RunMeta.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "run.json is missing"
    except (OSError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else f"run.json cannot be read ({error.strerror})"
    else:
        if not meta.complete:
            text = "the run did not finish, or is still running: its last step may be missing on some ranks"
            health.append(HealthItem("incomplete_run", text, file=RUN_FILE, touches=("summary",)))
        return meta
    text = f"{why}: mesh, groups and plan are taken from the rank files as far as they tell them"
    health.append(HealthItem("no_run_json", text, file=RUN_FILE, touches=("pipeline", "summary")))
    return meta_from_ranks(path.name, [entry["facts"] for entry in entries], "measured")


def meta_from_ranks(name: str, facts: list[dict[str, Any]], source: str) -> RunMeta:
    """What the ranks' own headers and rows say about the run."""
    world = max((fact["world_size"] or 0 for fact in facts), default=0)
    groups: dict[str, GroupMeta] = {}
    for fact in facts:
        for group in fact["groups"]:
            known = groups.get(group["name"])
            if known is None or (not known.axis and group["axis"]) or (not known.ranks and group["ranks"]):
                groups[group["name"]] = GroupMeta(group["name"], group["axis"], tuple(group["ranks"]))
    backends = sorted({fact["backend"] for fact in facts if fact["backend"]})
    return RunMeta(
        run_id=name,
        name=name,
        source=source,
        complete=source == "imported",
        world_size=max(world, len(facts), 1),
        groups=tuple(groups.values()),
        backend=", ".join(backends),
    )


def _missing_ranks(meta: RunMeta, entries: list[dict[str, Any]]) -> list[HealthItem]:
    present = {entry["rank"] for entry in entries}
    missing = sorted(set(range(meta.world_size)) - present)
    if not missing:
        return []
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    text = (
        f"{len(missing)} of {meta.world_size} ranks have no file ({listed}): their communication partners' waits are "
        "lower bounds or cannot be split"
    )
    touches = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "unsplit_ns", "collectives", "stragglers")
    return [HealthItem("missing_rank", text, rank=missing[0] if len(missing) == 1 else None, touches=touches)]
