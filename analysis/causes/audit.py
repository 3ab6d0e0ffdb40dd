"""What is not as theory or good placement has it, as remarks of the health report: they touch no figure.

A volume or a state that differs from its prediction is a bug of the program, of the trace or of the configuration that
run.json tells; none of that costs time by itself, so it is no finding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from stepscope.analysis.causes.memory import Memory
from stepscope.analysis.causes.volumes import AS_PREDICTED, NOT_PREDICTED
from stepscope.analysis.records import HealthItem
from stepscope.analysis.units import counted
from stepscope.tracer.schema import RunMeta

MOST_NAMED = 3


def remarks(meta: RunMeta, volumes: pd.DataFrame, memory: Memory) -> list[HealthItem]:
    """At most one remark each about volumes, memory, and tensor-parallel groups across hosts."""
    found = []
    odd = _differing(volumes)
    if len(odd):
        words = [
            f"{'' if row['stage'] < 0 else 'stage {} '.format(row['stage'])}{row['strategy'] or row['axis']}"
            f" {row['collective'].replace('_', '-')}: {row['verdict']}"
            for row in odd.to_dict("records")
        ]
        found.append(HealthItem("volume_differs", f"communication is not what theory predicts: {_first(words)}"))
    odd = _differing(memory.state)
    if len(odd):
        words = [f"rank {row['rank']} {row['kind']}: {row['verdict']}" for row in odd.to_dict("records")]
        found.append(HealthItem("memory_differs", f"model state is not what theory predicts: {_first(words)}"))
    across = groups_across_hosts(meta, "tp")
    if across:
        text = (
            f"{counted(len(across), 'tp group spans', 'tp groups span')} hosts ({', '.join(across[:MOST_NAMED])}): tp talks"
            " in every layer, so its ranks belong on one host"
        )
        found.append(HealthItem("tp_across_hosts", text))
    return found


def _differing(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[~frame["verdict"].isin((AS_PREDICTED, NOT_PREDICTED, ""))]


def _first(words: Sequence[str]) -> str:
    rest = len(words) - MOST_NAMED
    return "; ".join(words[:MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def groups_across_hosts(meta: RunMeta, axis: str) -> list[str]:
    """Names of the process groups of an axis whose ranks are on more than one known host."""
    hosts = {rank: host for rank, host in enumerate(meta.hosts) if host}
    return [
        group.name
        for group in meta.groups
        if group.axis == axis and len({hosts[rank] for rank in group.ranks if rank in hosts}) > 1
    ]
