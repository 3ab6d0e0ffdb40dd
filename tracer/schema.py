"""The words that training, tracing, reading and showing share: no dependency beyond the standard library.

Four things are fixed here and nowhere else:

* the vocabularies (kind, phase, axis, strategy, collective), stored as small integer codes in the column store;
* `Operation`: one row of one rank's program, in program order: what a real run records, a dry run predicts and a replay runs;
* `RunMeta`: what `run.json` says about a run;
* the column store: the columns of one event, of one counter, and what describes a lane.

All times are integer nanoseconds. Absolute times (`start_ns` in the column store) count from the Unix epoch.
A missing integer is -1 everywhere, a missing string the empty one.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

SCHEMA_VERSION = 1
"""Version of run.json, of the rank files' own arguments and of the column store."""

# -- vocabularies ------------------------------------------------------------------------------------------------------

KINDS = ("compute", "comm", "wait", "memcpy", "host")
"""What a row is. `host` is everything that is no device work: annotations, CPU operators, runtime calls."""

PHASES = ("forward", "backward", "weight_grad", "recompute", "optimizer", "other")

MESH_AXES = ("pp", "dp", "cp", "ep", "tp")
"""Outermost to innermost. `ep` is the expert view over dp, cp and tp of one pipeline stage."""

_JOINED = tuple(
    "_".join(names) for size in range(2, len(MESH_AXES) + 1) for names in itertools.combinations(MESH_AXES, size)
)
AXES = (*MESH_AXES, "edp", "world", *_JOINED)
"""The mesh axis whose group a communication runs on; `edp` is expert data parallel, `dp_cp` two axes joined."""

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "tp", "sp", "pp", "cp", "ep", "loss", "clip", "embedding")
"""Why a communication happens."""

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "receive",
    "ring_shift",  # send to the next and receive from the previous rank of the group, one full-duplex operation
)

KINETO_COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "receive": "recv",
    "ring_shift": "ring_shift",
}
"""Our name -> what torch.profiler writes as `Collective name`; a reader also accepts the names of other writers."""

SOURCES = ("measured", "simulated", "imported")

COUNTERS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "tokens_per_expert")


def code_of(vocabulary: tuple[str, ...], word: str) -> int:
    """Code of `word` in `vocabulary`, -1 for a word that it does not hold (and for the empty word)."""
    try:
        return vocabulary.index(word)
    except ValueError:
        return -1


# -- one row of a rank's program ---------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One row of one rank's program, in program order.

    `kind` is `compute` (work of the training thread, never covering a wait), `comm` (a communication at the place where
    it was issued), `wait` (the training thread needs the result of communication `op_id`), `memcpy` or `host`.
    A dry run leaves the times at -1; a replay fills them in virtual time; costs are filled by dry runs only.
    Rows follow structure and never time or cost: the same configuration gives the same rows on every device.
    """

    kind: str
    name: str
    # where it belongs
    phase: str = "other"
    stage: int = -1
    chunk: int = -1
    microbatch: int = -1
    layer: int = -1
    # where it runs: "compute", or the name of a communication stream such as "dp" or "pp.forward.send"
    stream: str = "compute"
    # communication: static facts (equal in every step) ...
    op_id: int = -1  # unique in the rank; a wait row carries the op_id that it waits for
    collective: str = ""
    axis: str = ""
    strategy: str = ""
    group: str = ""  # name of the process group, the same on all its ranks
    ranks: tuple[int, ...] = ()  # global ranks of the group, in group order
    peer: int = -1  # global rank: destination of a send or ring shift, source of a receive, root of a rooted one
    peer_from: int = -1  # global rank that a ring shift receives from
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    bytes: int = -1  # message size as nccl-tests counts it, see trace_format.md
    # ... and its number: counted per (group, source, destination) for point to point, else per group
    seq: int = -1
    # times, integer ns of this host's clock since the epoch
    issue_ns: int = -1
    start_ns: int = -1
    end_ns: int = -1
    # cost of a compute row (dry and simulated runs)
    matmul_flops: int = 0
    matmul_bytes: int = 0
    attention_flops: int = 0
    attention_bytes: int = 0
    elementwise_bytes: int = 0
    kernels: int = 0


TIME_AND_COST = (
    "issue_ns",
    "start_ns",
    "end_ns",
    "matmul_flops",
    "matmul_bytes",
    "attention_flops",
    "attention_bytes",
    "elementwise_bytes",
    "kernels",
)


def plan_of(operations: list[Operation]) -> list[Operation]:
    """The rows without times and costs: what real and dry runs of one configuration must agree on."""
    blank = {name: Operation._field_defaults[name] for name in TIME_AND_COST}
    return [operation._replace(**blank) for operation in operations]


# -- run.json ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupMeta:
    """One process group: its name (as in the rows), mesh axis and global ranks in group order."""

    name: str
    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ClockMeta:
    """Clock of one rank against rank 0: add `offset_ns` to its times; `bound_ns` is the uncertainty."""

    offset_ns: int = 0
    drift_ppm: float = 0.0
    bound_ns: int = 0


@dataclass(frozen=True)
class ActionMeta:
    """One action of the planned pipeline table of a rank."""

    phase: str
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class RunMeta:
    """The content of `run.json`. `model`, `parallel` and `train` are the runtime's dataclasses as plain dictionaries."""

    run_id: str
    name: str
    source: str = "measured"
    complete: bool = False
    created: str = ""  # ISO 8601, UTC
    schema_version: int = SCHEMA_VERSION
    hosts: tuple[str, ...] = ()  # host name of each rank
    world_size: int = 1
    mesh: dict[str, int] = field(default_factory=dict)  # axis -> size, outermost first
    coords: tuple[dict[str, int], ...] = ()  # coordinates of each rank
    groups: tuple[GroupMeta, ...] = ()
    backend: str = ""
    device: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    pipeline_table: tuple[tuple[ActionMeta, ...], ...] = ()  # of each rank
    recorder: dict[str, Any] = field(default_factory=dict)  # level, overhead, dropped; ranks, where not all record
    clock: tuple[ClockMeta, ...] = ()  # of each rank
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Strict JSON, stable key order."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunMeta:
        """Read what `to_json` wrote; unknown keys are ignored, so that newer minor additions still open.

        Raises ValueError (what is wrong, in words) for anything that is not a run.json.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"run.json is not JSON: {error}") from error
        if not isinstance(raw, dict) or "run_id" not in raw or "name" not in raw:
            raise ValueError("run.json has no run_id or name: it was not written by stepscope")
        version = raw.get("schema_version", 0)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise ValueError(f"run.json has schema version {version}; this stepscope reads up to {SCHEMA_VERSION}")
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in raw.items() if key in known}
        try:
            values["groups"] = tuple(GroupMeta(g["name"], g["axis"], tuple(g["ranks"])) for g in raw.get("groups", ()))
            values["clock"] = tuple(ClockMeta(**c) for c in raw.get("clock", ()))
            values["pipeline_table"] = tuple(
                tuple(ActionMeta(**a) for a in rank) for rank in raw.get("pipeline_table", ())
            )
            for name in ("hosts", "coords"):
                values[name] = tuple(raw.get(name, ()))
            meta = cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"run.json has a field of another shape: {error!r}") from error
        _check_shapes(meta)
        return meta


MAX_RANKS = 1 << 20
"""No world size is believed beyond: every rank of a run is listed somewhere."""


def _check_shapes(meta: RunMeta) -> None:
    """ValueError for a field of another type than it is written with, or a number of ranks that cannot be."""
    plain = RunMeta(run_id="", name="")
    for one in fields(meta):
        value, usual = getattr(meta, one.name), type(getattr(plain, one.name))
        if type(value) is not usual:
            raise ValueError(f"run.json has a field of another shape: {one.name} is no {usual.__name__}")
    sizes = {"world_size": meta.world_size, **{f"mesh {axis}": size for axis, size in meta.mesh.items()}}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= MAX_RANKS:
            raise ValueError(f"run.json says {name} {size!r}: no run has so many ranks")


# -- the run directory -------------------------------------------------------------------------------------------------

RUN_FILE = "run.json"
STORE_DIRECTORY = ".stepscope"
MANIFEST_FILE = "manifest.json"
STEP_ANNOTATION = "ProfilerStep#"


def rank_file(rank: int) -> str:
    """Name of one rank's trace inside the run directory."""
    return f"rank_{rank:05d}.trace.json.gz"


# -- the column store --------------------------------------------------------------------------------------------------

EVENT_COLUMNS = {
    "rank": "int32",
    "lane": "int32",  # index into the rank's lanes
    "start_ns": "int64",
    "dur_ns": "int64",
    "kind": "int8",  # KINDS
    "phase": "int8",  # PHASES
    "stage": "int16",
    "chunk": "int16",
    "microbatch": "int32",
    "layer": "int32",
    "axis": "int8",  # AXES
    "strategy": "int8",  # STRATEGIES
    "collective": "int8",  # COLLECTIVES
    "bytes": "int64",
    "group_id": "int32",  # the rank's string table
    "seq": "int64",
    "peer": "int32",
    "peer_from": "int32",
    "op_id": "int64",  # of a wait row: the communication that it waited for
    "name_id": "int32",  # the rank's string table
    "launch_id": "int64",  # correlation (64 bits; -1: none) with the launching call (device rows and runtime calls)
    "issue_ns": "int64",
    "dtype_id": "int32",  # the rank's string table
    "grid_id": "int32",  # the same: blocks of a kernel's launch, `512x1x1`, which stand for the shapes that it works on
    "in_elements": "int64",
    "out_elements": "int64",
    "flags": "int32",  # the FLAG_* bits
}
"""Column -> numpy dtype. Rows are sorted by (lane, start_ns); one file a rank; -1 is missing."""

FLAG_IMPOSSIBLE = 1  # its recorded duration was impossible and has been cut
FLAG_FUSED = 2  # compute and communication in one kernel
FLAG_DEVICE_COPY = 4  # a device-to-device copy
FLAG_PARTIAL = 8  # the file ended before the event did
FLAG_GRAPH = 16  # launched by a graph launch shared with other kernels

COUNTER_COLUMNS = {"time_ns": "int64", "name_id": "int32", "key_id": "int32", "value": "int64"}
"""One sample of one series of one counter; name and key are in the rank's string table."""

LANE_ROLES = ("compute", "comm", "memcpy", "host")


class Lane(NamedTuple):
    """One stream (or host thread) of one rank. `name` is what a person reads, `axis` the mesh axis that it serves."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody needs of a lane
    name: str
    role: str  # LANE_ROLES
    axis: str = ""
    stream: int = -1
    pid: str = ""
    tid: str = ""
