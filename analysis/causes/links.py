"""Links: how long a message takes from one rank to another, beside the other links of its axis.

Messages are sends with their receives and shifts around a ring. A message's transfer begins when both ends are there; a
shift sends and receives in one operation, so its link took no longer than the shorter of both ends. Definitions:
definitions.md, Links.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from stepscope.analysis import intervals
from stepscope.analysis.causes.classes import ahead_of
from stepscope.analysis.causes.columns import coded
from stepscope.analysis.ledger.decompose import Decomposition
from stepscope.analysis.ledger.keys import code_columns
from stepscope.analysis.run import Columns

LINK_COLUMNS = (
    *("axis", "collective", "source", "target", "source_stage", "target_stage"),
    *("messages_per_step", "median_bytes", "median_transfer_ns", "relative"),
    *("target_exposed_ns_per_step", "source_exposed_ns_per_step"),
)
"""One row a link, the one whose messages are exposed longest at their target first. Stages are -1 where unknown;
`relative`: median transfer / median of those of the other links with the same axis, collective and size, NaN without."""


def links(
    decomposition: Decomposition, parts: pd.DataFrame, steps: tuple[int | str, ...], stage_of: Callable[[int], int]
) -> pd.DataFrame:
    """LINK_COLUMNS over the counted `steps`. `parts`: Matches.parts with `step`.

    Left out: what was not recorded at both ends, violations of causality, impossible durations.
    """
    axes, axis = coded(parts["axis"])
    messages = _messages(parts, axis, steps)
    if messages is None:
        return pd.DataFrame(columns=list(LINK_COLUMNS))
    rows, counted = [], frozenset(steps)
    for mine in _by_link(messages):
        at, collective, source, target = (int(messages[name][mine[0]]) for name in KEYS)
        transfer, end = messages["transfer_ns"][mine], messages["end_ns"][mine]
        rows.append(
            {
                **{"axis": axes[at], "collective": COLLECTIVES[collective], "source": source, "target": target},
                **{"source_stage": stage_of(source), "target_stage": stage_of(target)},
                "messages_per_step": len(mine) / len(steps),
                "median_bytes": float(np.median(messages["bytes"][mine])),
                "median_transfer_ns": float(np.median(transfer)),
                "target_exposed_ns_per_step": _exposed(decomposition, target, counted, transfer, end) / len(steps),
                "source_exposed_ns_per_step": _exposed(decomposition, source, counted, transfer, end) / len(steps),
            }
        )
    frame = pd.DataFrame(rows)
    frame["relative"] = _relative(frame)
    ordered = frame.sort_values("target_exposed_ns_per_step", ascending=False, kind="stable", ignore_index=True)
    return ordered[list(LINK_COLUMNS)]


KEYS = ("axis", "collective", "source", "target")

COLLECTIVES = ("ring_shift", "send_receive")


def _by_link(messages: Columns) -> list[np.ndarray]:
    """The rows of each link, in their order."""
    code = code_columns([messages[name] for name in KEYS])
    order = np.argsort(code, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(code[order])) + 1)


def _messages(parts: pd.DataFrame, axis: np.ndarray, steps: tuple[int | str, ...]) -> Columns | None:
    """One row a message: KEYS (axis as in `axis`, collective a place in COLLECTIVES), bytes, transfer_ns, end_ns (common
    clock); None where there is none."""
    columns = {name: parts[name].to_numpy() for name in PART}
    match, rank, source = (columns[name] for name in ("match_id", "rank", "source"))
    if not (source >= 0).any():
        return None
    stride = int(rank.max()) + 1
    key = match * stride + rank  # ascending: parts are sorted so
    sure = ~(columns["unmatched"] | columns["partial"] | columns["violation"] | columns["impossible"])
    got = np.flatnonzero((source >= 0) & sure & parts["step"].isin(steps).to_numpy())
    wanted = match[got] * stride + source[got]
    given = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
    whole = (key[given] == wanted) & sure[given]
    got, given = got[whole], given[whole]
    if len(got) == 0:
        return None
    transfer, ring = columns["transfer_ns"], (parts["collective"] == "ring_shift").to_numpy(bool)[got]
    return {
        "axis": axis[got],
        "collective": np.where(ring, 0, 1),
        "source": source[got],
        "target": rank[got],
        "bytes": columns["bytes"][got],
        "transfer_ns": np.where(ring, np.minimum(transfer[got], transfer[given]), transfer[got]),
        "end_ns": columns["end_ns"][got],
    }


PART = (
    *("match_id", "rank", "source", "bytes", "transfer_ns", "end_ns"),
    *("unmatched", "partial", "violation", "impossible"),
)


def _exposed(
    decomposition: Decomposition, rank: int, steps: frozenset[int | str], transfer: np.ndarray, end: np.ndarray
) -> int:
    """Time in ns in `steps` during which messages transfer (they end at `end`) and `rank` has visible communication."""
    end = end + ahead_of(decomposition, rank, end)
    windows = decomposition.windows[rank]
    visible = intervals.intersect(intervals.union(end - transfer, end), decomposition.time[rank].terms["visible_comm"])
    counted = np.array([step in steps for step in windows.steps], bool)
    return int(intervals.covered(visible, windows.start_ns, windows.end_ns)[counted].sum())


def _relative(frame: pd.DataFrame) -> list[float]:
    """Each link's median transfer by the median of the others' of its axis, collective and size."""
    found = np.full(len(frame), np.nan)
    median = frame["median_transfer_ns"].to_numpy()
    for group in frame.groupby(["axis", "collective", "median_bytes"]).indices.values():
        places = np.asarray(group)
        for place in places.tolist() if len(places) > 1 else []:
            usual = float(np.median(median[places[places != place]]))
            found[place] = median[place] / usual if usual > 0 else np.nan
    return found.tolist()
