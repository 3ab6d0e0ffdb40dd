"""What stands behind a straggler's cause, where the rows tell: what its host did in its gaps, how many tokens it had.

`late host` becomes `data loading` or `garbage collection` where host rows of such a name cover most of what the rank was
idle beyond its peers; `slower compute` becomes `expert load` where it had more tokens for its experts, by at least the
share that it computed longer; so does `slower communication` where experts are exchanged: who takes more, is sent more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

import numpy as np

from stepscope.analysis import intervals
from stepscope.analysis.ledger.decompose import Decomposition
from stepscope.analysis.run import Run
from stepscope.tracer.schema import KINDS, code_of

TOKENS = "tokens_per_expert"
"""The counter of what each of a rank's experts was given in a step."""

HOST_WORK = {
    "data loading": re.compile(r"dataloader|data_load|load_batch|next_batch|get_batch|fetch_batch", re.IGNORECASE),
    "garbage collection": re.compile(r"\bgc\b|gc\.collect|gc_collect|garbage", re.IGNORECASE),
}
"""Names of host rows that say what the host was busy with (torch writes `enumerate(DataLoader)#...`)."""

REFINES = {
    "data loading": ("late host",),
    "garbage collection": ("late host",),
    "expert load": ("slower compute", "slower communication"),
}
"""A reason -> the causes that it refines."""

MOST_OF_IT = 0.5
"""A reason is named when it covers at least this share of the excess."""


def bases(cause: str) -> tuple[str, ...]:
    """The causes that a reason refines; a cause as it is."""
    return REFINES.get(cause, (cause,))


class Reasons:
    """Looks for reasons in the rows of one run; reads a rank's host rows only when asked about that rank."""

    def __init__(self, run: Run, decomposition: Decomposition) -> None:
        self._run, self._decomposition = run, decomposition

    def refine(
        self, cause: str, rank: int, peers: Sequence[int], steps: Sequence[int | str], excess: float, share: float
    ) -> str:
        """The reason behind `cause` of `rank`, or `cause` itself.

        `excess`: ns a step by which it exceeds its peers' median; `share`: that as a share of the median.
        """
        if cause == "late host":
            return self.host_work(rank, steps, excess) or cause
        exchanged = cause == "slower communication" and self._run.meta.mesh.get("ep", 1) > 1
        if (cause == "slower compute" or exchanged) and self.more_tokens(rank, peers) >= max(share, 0.01):
            return "expert load"
        return cause

    def host_work(self, rank: int, steps: Sequence[int | str], excess: float) -> str | None:
        """What the host did in the idle time of `rank` for MOST_OF_IT of `excess` ns a step; None where no row tells."""
        columns, strings = self._run.columns(rank, "kind", "name_id", "start_ns", "dur_ns"), self._run.strings(rank)
        host = np.flatnonzero((columns["kind"] == code_of(KINDS, "host")) & (columns["name_id"] >= 0))
        used = np.unique(columns["name_id"][host])
        windows = self._decomposition.windows[rank]
        chosen = set(steps)
        counted = np.array([step in chosen for step in windows.steps], bool)
        idle = self._decomposition.time[rank].terms["idle"]
        found = {}
        for reason, name in HOST_WORK.items():
            codes = [code for code in used.tolist() if name.search(strings[code])]
            rows = host[np.isin(columns["name_id"][host], codes)]
            start, length = columns["start_ns"][rows], columns["dur_ns"][rows]
            inside = intervals.intersect(idle, intervals.union(start, start + length))
            covered = intervals.covered(inside, windows.start_ns, windows.end_ns)[counted]
            found[reason] = float(covered.sum()) / max(len(steps), 1)
        most = max(found, key=lambda reason: found[reason])
        return most if excess > 0 and found[most] >= MOST_OF_IT * excess else None

    def more_tokens(self, rank: int, peers: Sequence[int]) -> float:
        """By what share the tokens of the rank's experts exceed its peers' median; 0 without such counters."""
        mine, others = self._tokens(rank), [self._tokens(peer) for peer in peers]
        middle = median(others) if others else 0
        return mine / middle - 1 if middle > 0 else 0.0

    def _tokens(self, rank: int) -> float:
        counters, strings = self._run.counters(rank), self._run.strings(rank)
        codes = [code for code, name in enumerate(strings) if name == TOKENS]
        return float(counters["value"][np.isin(counters["name_id"], codes)].sum())
