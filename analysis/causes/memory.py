"""Memory of each rank: bytes of parameters, gradients and optimizer state beside ZeRO's arithmetic, and peaks by phase.

With P elements of the rank's part of the model before ZeRO and N ranks that ZeRO cuts over: parameters P b (ZeRO-3: / N),
gradients P b (ZeRO-2, 3: / N), optimizer state (ZeRO-1, 2, 3: / N). Definitions: definitions.md, Memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope.analysis.causes.counters import samples
from stepscope.analysis.causes.pipeline import stage_of
from stepscope.analysis.causes.setup import Setup, padded, replicated
from stepscope.analysis.ledger.steps import Windows
from stepscope.analysis.run import Run
from stepscope.tracer.schema import KINDS, PHASES, code_of

STATE = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer"}
ACTIVATIONS = "activation_bytes"
HOST = "host"
"""Key of the optimizer state that lives in the host's memory."""

TOLERANCE = 0.01
"""Measured bytes within this share of theory agree: optimizers also count their steps."""

STATE_COLUMNS = ("rank", "kind", "bytes", "theory_bytes", "verdict")
"""One row a rank and kind of state; `bytes` the largest sample. Unknown theory is NaN, its verdict empty."""

PEAK_COLUMNS = ("rank", "phase", "activation_bytes", "state_bytes", "total_bytes")
"""One row a rank and phase that computed; `state_bytes` on the device."""


@dataclass(frozen=True)
class Memory:
    """`state` (STATE_COLUMNS) and `peaks` (PEAK_COLUMNS); empty where a run recorded no such counters."""

    state: pd.DataFrame
    peaks: pd.DataFrame


def optimizer_bytes(optimizer: str, dtype: str, offload: str = "none") -> int | None:
    """Bytes of optimizer state a parameter: Adam's two moments, at least in float32, and a copy in that precision of 16-bit
    ones, and of all that are updated in the host's memory."""
    width = 8 if dtype == "float64" else 4
    copies = int(dtype in ("bfloat16", "float16") or offload != "none")
    moments = {"sgd": 0, "adam": 2, "adamw": 2}.get(optimizer)
    return None if moments is None else (copies + moments) * width


def theory(setup: Setup, stage: int) -> dict[str, int | None]:
    """Kind of state -> bytes that one rank of `stage` holds (ZeRO table of theory: divided by what ZeRO cuts over)."""
    parts = replicated(setup, stage)
    whole = sum(sum(elements.values()) for _, elements in parts)
    cut = sum(padded(one, ranks) // ranks for ranks, elements in parts for one in elements.values())
    each = optimizer_bytes(setup.optimizer, setup.dtype, setup.offload)
    return {
        "parameters": (cut if setup.zero >= 3 else whole) * setup.item,
        "gradients": (cut if setup.zero >= 2 else whole) * setup.item,
        "optimizer": None if each is None else (cut if setup.zero >= 1 else whole) * each,
    }


def verdict(measured: float, expected: float | None) -> str:
    """`as predicted`, or by how much it differs, in words; empty where nothing is predicted."""
    if expected is None:
        return ""
    if abs(measured - expected) <= TOLERANCE * expected:
        return "as predicted"
    if not expected:
        return f"{round(measured)} bytes where none are predicted"
    return f"{abs(measured / expected - 1):.1%} {'more' if measured > expected else 'less'} than predicted"


def memory(run: Run, windows: Mapping[int, Windows]) -> Memory:
    """State beside theory, and peaks by phase, over all recorded steps."""
    found = samples(run, windows, (*STATE, ACTIVATIONS))
    setup = Setup.of(run.meta)
    predicted = {
        stage: theory(setup, stage) for stage in {stage_of(run.meta, rank) for rank in run.ranks} - {-1} if setup
    }
    largest: dict[int, dict[str, dict[str, int]]] = {}  # rank -> counter -> key -> largest sample
    table = found.groupby(["rank", "name", "key"], as_index=False)["value"].max()
    for rank, name, key, value in zip(*(table[column].tolist() for column in table.columns), strict=True):
        largest.setdefault(rank, {}).setdefault(name, {})[key] = value
    activations = {int(str(rank)): part for rank, part in found[found["name"] == ACTIVATIONS].groupby("rank")}
    states, peaks = [], []
    for rank, counters in largest.items():
        expected = predicted.get(stage_of(run.meta, rank), {})
        for name, kind in STATE.items():
            if name in counters:
                total = sum(counters[name].values())
                states.append((rank, kind, total, expected.get(kind), verdict(total, expected.get(kind))))
        if rank in activations:
            device = [max((v for key, v in counters.get(name, {}).items() if key != HOST), default=0) for name in STATE]
            for phase, kept in _peaks(run, rank, activations[rank]).items():
                peaks.append((rank, phase, kept, sum(device), kept + sum(device)))
    state_frame = pd.DataFrame(states, columns=list(STATE_COLUMNS)).astype({"theory_bytes": float})
    return Memory(state_frame, pd.DataFrame(peaks, columns=list(PEAK_COLUMNS)))


def _peaks(run: Run, rank: int, activations: pd.DataFrame) -> dict[str, int]:
    """Phase -> largest activation bytes while it computes: samples taken in it, and what was kept when its rows began."""
    columns = run.columns(rank, "kind", "phase", "start_ns")
    rows = np.flatnonzero((columns["kind"] == code_of(KINDS, "compute")) & (columns["phase"] >= 0))
    rows = rows[np.argsort(columns["start_ns"][rows], kind="stable")]
    start, phase = columns["start_ns"][rows], columns["phase"][rows]
    ordered = activations.sort_values("time_ns", kind="stable")
    time, value = ordered["time_ns"].to_numpy(np.int64), ordered["value"].to_numpy(np.int64)
    largest = np.full(len(PHASES), -1, np.int64)
    before = np.searchsorted(time, start, "right") - 1
    np.maximum.at(largest, phase[before >= 0], value[before[before >= 0]])
    during = np.searchsorted(start, time, "right") - 1
    np.maximum.at(largest, phase[during[during >= 0]], value[during >= 0])
    return {name: int(largest[code]) for code, name in enumerate(PHASES) if largest[code] >= 0}
