"""Open a store, or build it first: the part that all formats share.

A format plans its tasks, reads one task into ranks (in whatever process), and says what the run as a whole is.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.analysis.engine import map_ranks
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import rank_writer, store
from stepscope.analysis.ingest.names_of_files import file_name
from stepscope.analysis.ingest.rules import load_rules
from stepscope.analysis.ingest.sizes import odd_sizes
from stepscope.analysis.ingest.source import watched
from stepscope.analysis.records import HealthItem
from stepscope.analysis.run import Run
from stepscope.tracer.schema import STORE_DIRECTORY, ActionMeta, GroupMeta, RunMeta

PARALLEL_FROM = 64 << 20
"""Files of more bytes than this together are read by several processes."""

SCANNED = ("run", "kineto")
"""Formats that the byte scanner reads."""

Entry = dict[str, Any]
"""What the manifest says of one rank: `store.write_rank`'s, and file, facts, health; or broken and health."""


@dataclass(frozen=True)
class Progress:
    """How far a first read is. `stage`: `preparing` (loading, or once in an installation compiling, the scanner) or `reading`."""

    stage: str
    files_done: int
    files: int
    bytes_done: int  # of the files as they are stored
    bytes: int
    unit: str = "ranks"  # what `files` counts: ranks where a file is one


if TYPE_CHECKING:
    from stepscope.analysis.ingest.normalize import RankFile

ProgressCall = Callable[[Progress], None]


@dataclass(frozen=True)
class Task:
    """One file to read into the store, in whatever process."""

    format: str
    path: str
    rank: int | None  # as far as its name or the user tells
    directory: Path
    build: str
    size: int = 0
    rules: str | None = None
    others: tuple[str, ...] = ()  # further files, where one task reads a whole job

    @property
    def file(self) -> str:
        """The file's name."""
        return file_name(self.path)

    def __str__(self) -> str:
        return f"{self.rank} ({self.file})" if self.rank is not None else self.file


@dataclass(frozen=True)
class Plan:
    """How one run is read."""

    path: Path  # where the run came from
    inside: bool  # keep the store in that directory
    sources: dict[str, Any]  # file -> size, modification time: what makes a store out of date
    tasks: Callable[[Path, str], list[Task]]  # of a store's directory and build id
    read: Callable[[Task], list[Entry]]  # a function of a module: processes must find it
    describe: Callable[[list[Entry], list[HealthItem]], RunMeta]  # of the readable ranks; adds health


def open_or_build(
    plan: Plan,
    progress: ProgressCall | None = None,
    refresh: bool = False,
    engine: str | None = None,
    workers: int | None = None,
) -> Run:
    """The run, from its store when that is up to date, else read and stored first."""
    if not refresh:
        places = [plan.path / STORE_DIRECTORY] if plan.inside else []
        for place in (*places, store.cache_place(plan.path)):
            manifest = store.read_manifest(place)
            if manifest is not None and manifest["sources"] == plan.sources:
                return store.open_store(place, manifest, plan.path)
    place, cache = store.writable_place(plan.path, plan.inside), store.cache_place(plan.path)
    store.remove_abandoned(place)
    try:
        return build(plan, place, progress, refresh, engine, workers)
    except (OSError, RuntimeError) as error:
        if not out_of_space(error):
            raise
        if place == cache:
            raise _no_space(cache) from error
    try:  # the run's own disk is full: the cache directory often lies on another
        return build(plan, cache, progress, refresh, engine, workers)
    except (OSError, RuntimeError) as error:
        if not out_of_space(error):
            raise
        raise _no_space(cache) from error


def out_of_space(error: BaseException | None) -> bool:
    """Whether a full disk (or quota) is at the bottom of it; the engine names the rank around the error itself."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _no_space(place: Path) -> StepscopeError:
    return StepscopeError(
        f"no space left for the columns of this run, neither beside it nor in {place.parent}: free some, or set"
        " XDG_CACHE_HOME to a directory on another disk"
    )


def build(
    plan: Plan,
    place: Path,
    progress: ProgressCall | None = None,
    replace: bool = False,
    engine: str | None = None,
    workers: int | None = None,
) -> Run:
    """Read what `plan` says into a store at `place`, in front of an older one if `replace`, and open that."""
    with store.Builder(place) as builder:
        tasks = plan.tasks(builder.path, builder.build)
        entries = _read(tasks, plan.read, progress, engine, workers)
        manifest = {"sources": plan.sources, "replace": replace, **_assemble(plan, entries)}
        place = builder.commit(manifest)
    committed = store.read_manifest(place)
    if committed is None:
        raise StepscopeError(f"the store {place} vanished while it was opened: try again")
    return store.open_store(place, committed, plan.path)


def _read(
    tasks: list[Task],
    read: Callable[[Task], list[Entry]],
    progress: ProgressCall | None,
    engine: str | None,
    workers: int | None,
) -> list[Entry]:
    total = sum(task.size for task in tasks)
    scanned = any(task.format in SCANNED for task in tasks)
    state = Progress("preparing", 0, len(tasks), 0, total, "ranks" if scanned else "files")
    within = 0  # bytes of the file under way

    def done(task: Task, entries: list[Entry]) -> None:
        nonlocal state, within
        within = 0
        state = changed(state, files_done=state.files_done + 1, bytes_done=state.bytes_done + task.size)
        if progress is not None:
            progress(state)

    def read_on(size: int) -> None:
        nonlocal within
        within += size
        if progress is not None:
            progress(changed(state, bytes_done=min(state.bytes_done + within, total)))

    if progress is not None:
        progress(state)
    if scanned:
        from stepscope.analysis.ingest.reading import prepare  # see there

        prepare()  # here, once: else every worker would compile
    state = changed(state, stage="reading")
    if progress is not None:
        progress(state)
    parallel = len(tasks) > 1 and total > PARALLEL_FROM
    with watched(read_on):  # seen where the files are read in this process
        results = map_ranks(read, tasks, engine or ("processes" if parallel else "serial"), workers, done)
    return [entry for entries in results for entry in entries]


def _assemble(plan: Plan, entries: list[Entry]) -> dict[str, Any]:
    """The manifest: what the run is, what the ranks say, and what does not fit."""
    _refuse_two_of_a_rank(entries)
    entries = sorted(entries, key=lambda entry: (entry["rank"] is None, entry["rank"]))
    health: list[HealthItem] = []
    readable = [entry for entry in entries if not entry.get("broken")]
    if not readable:
        why = [item["text"] for entry in entries for item in entry["health"]]
        raise StepscopeError(f"no rank of {plan.path} can be read: {'; '.join(why[:3]) or 'there is none'}")
    meta = plan.describe(readable, health)
    health += [*missing_ranks(meta, entries), *odd_sizes(meta, readable)]
    items = store.health_to_json(health) + [item for entry in entries for item in entry["health"]]
    ranks = [{key: value for key, value in entry.items() if key != "health"} for entry in readable]
    return {"meta": store.meta_to_json(meta), "health": items, "ranks": ranks}


def _refuse_two_of_a_rank(entries: list[Entry]) -> None:
    """Two files that are one rank: by what they say themselves, else by the rank that they were given."""
    first: dict[int, Entry] = {}
    for entry in entries:
        if entry.get("broken"):  # which rank it is of is a guess
            continue
        embedded = entry.get("facts", {}).get("rank")
        rank = embedded if embedded is not None else entry["rank"]
        if rank is None:
            continue
        other = first.setdefault(rank, entry)
        if other is not entry:
            key = "file" if other["file"] != entry["file"] else "path"  # of one name in two directories
            said = (
                embedded is not None and other["facts"].get("rank") is not None
            )  # a user's map does not overrule that
            advice = "" if said else ", or say which rank each is in the [ranks] table of a rules file"
            raise StepscopeError(f"{other[key]} and {entry[key]} are both rank {rank}: remove one of them{advice}")


def written(task: Task, rank: int, result: RankFile) -> Entry:
    """Write one rank, which is in memory, into the store under way; its entry."""
    result.data.events["rank"] = np.broadcast_to(np.int32(rank), len(result.data.events["start_ns"]))
    entry = rank_writer.write_rank(task.directory, task.build, rank, result.data)
    return with_facts(task, rank, result, entry)


def with_facts(task: Task, rank: int, result: RankFile, entry: Entry) -> Entry:
    """The entry of a rank that was written, with what is said about it."""
    health = store.health_to_json([changed(item, rank=rank, file=task.file) for item in result.health])
    return entry | {"file": task.file, "path": task.path, "facts": result.facts, "health": health}


def broken(task: Task, why: str) -> list[Entry]:
    """The entry of a file that cannot be read: the run goes on without it."""
    which = f"rank {task.rank}" if task.rank is not None else "its rank"
    item = HealthItem(
        "broken_rank",
        f"{task.file} cannot be read ({why}): {which} is left out",
        rank=task.rank,
        file=task.file,
        touches=("ledger", "summary", "collectives", "stragglers"),
        broken=True,
    )
    said = store.health_to_json([item])
    return [{"rank": task.rank, "file": task.file, "path": task.path, "broken": True, "health": said}]


def rules_of(task: Task) -> Any:
    """The rules that the task's rows are classified by."""
    return load_rules(task.rules)


def meta_from_ranks(name: str, entries: list[Entry], source: str) -> RunMeta:
    """What the ranks' own headers and rows say about the run; without a world size, the highest rank bounds it."""
    facts = [entry["facts"] for entry in entries]
    world = max(max(fact["world_size"] or 0 for fact in facts), max(entry["rank"] for entry in entries) + 1)
    groups: dict[str, GroupMeta] = {}
    for fact in facts:
        for group in fact["groups"]:
            known = groups.get(group["name"])
            if known is None or (not known.axis and group["axis"]) or (not known.ranks and group["ranks"]):
                groups[group["name"]] = GroupMeta(group["name"], group["axis"], tuple(group["ranks"]))
    backends = sorted({fact["backend"] for fact in facts if fact["backend"]})
    coords = _coordinates(entries, world)
    placed = len(coords) == world and all(coords)
    tables = [tuple(ActionMeta(*action) for action in fact.get("table", ())) for fact in facts]
    hosts = tuple(fact["host"] for fact in facts)
    return RunMeta(
        run_id=name,
        name=name,
        source=source,
        complete=source == "imported",
        world_size=world,
        hosts=hosts if all(hosts) and len(hosts) == world else (),
        mesh=facts[0]["mesh"] if placed else {},
        coords=tuple(coords) if placed else (),  # type: ignore[arg-type]
        pipeline_table=tuple(tables) if placed and len(tables) == world and all(tables) else (),
        groups=tuple(groups.values()),
        backend=", ".join(backends),
    )


def _coordinates(entries: list[Entry], world: int) -> list[dict[str, int] | None]:
    """Coordinates by rank, as the files tell them; ranks without a file have those that are left, in order."""
    told = {entry["rank"]: entry["facts"].get("coords") for entry in entries}
    mesh = entries[0]["facts"].get("mesh", {})
    if len(told) == world or not all(told.values()) or prod(mesh.values()) != world:
        return list(told.values())
    every = (dict(zip(mesh, place, strict=True)) for place in product(*map(range, mesh.values())))
    taken = {frozenset(place.items()) for place in told.values() if place}
    left = (place for place in every if frozenset(place.items()) not in taken)
    return [told.get(rank) or next(left) for rank in range(world)]


def missing_ranks(meta: RunMeta, entries: list[Entry]) -> list[HealthItem]:
    """The ranks of the world that no file is of: those that should have one, and those that were not to record."""
    present = {entry["rank"] for entry in entries}
    asked = meta.recorder.get("ranks")
    wanted = set(range(meta.world_size)) if asked is None else set(asked)
    items = []
    for code, what, absent in (
        ("missing_rank", "have no file", wanted - present),
        ("unrecorded_rank", "were not recorded, as was asked for", set(range(meta.world_size)) - wanted - present),
    ):
        if not absent:
            continue
        ranks = sorted(absent)
        listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        text = (
            f"{len(ranks)} of {meta.world_size} ranks {what} ({listed}): the waits of those that communicate with "
            "them are lower bounds or cannot be split"
        )
        touches = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "unsplit_ns", "collectives", "stragglers")
        items.append(HealthItem(code, text, rank=ranks[0] if len(ranks) == 1 else None, touches=touches))
    return items


def fingerprint(file: Path) -> list[int]:
    """Size and modification time of a source."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]
