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
from stepscope.analysis.ledger.decompose import Decomposition

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
    messages = _messages(parts, steps)
    if messages.empty:
        return pd.DataFrame(columns=list(LINK_COLUMNS))
    rows = []
    for _, part in messages.groupby(["axis", "collective", "source", "target"], sort=False):
        first = part.iloc[0]
        source, target = int(first["source"]), int(first["target"])
        rows.append(
            {
                **{"axis": first["axis"], "collective": first["collective"], "source": source, "target": target},
                **{"source_stage": stage_of(source), "target_stage": stage_of(target)},
                "messages_per_step": len(part) / len(steps),
                "median_bytes": float(part["bytes"].median()),
                "median_transfer_ns": float(part["transfer_ns"].median()),
                "target_exposed_ns_per_step": _exposed(decomposition, target, part) / len(steps),
                "source_exposed_ns_per_step": _exposed(decomposition, source, part) / len(steps),
            }
        )
    frame = pd.DataFrame(rows)
    frame["relative"] = _relative(frame)
    ordered = frame.sort_values("target_exposed_ns_per_step", ascending=False, kind="stable", ignore_index=True)
    return ordered[list(LINK_COLUMNS)]


def _messages(parts: pd.DataFrame, steps: tuple[int | str, ...]) -> pd.DataFrame:
    """One row a message: axis, collective, source, target, bytes, transfer_ns, end_ns (common clock)."""
    if parts.empty or not (parts["source"] >= 0).any():
        return pd.DataFrame()
    stride = int(parts["rank"].max()) + 1
    key = parts["match_id"].to_numpy() * stride + parts["rank"].to_numpy()  # ascending: parts are sorted so
    sure = ~(parts["unmatched"] | parts["partial"] | parts["violation"] | parts["impossible"]).to_numpy()
    got = np.flatnonzero((parts["source"] >= 0).to_numpy() & sure & parts["step"].isin(steps).to_numpy())
    source = parts["source"].to_numpy()[got]
    given = np.minimum(np.searchsorted(key, parts["match_id"].to_numpy()[got] * stride + source), len(key) - 1)
    whole = (key[given] == parts["match_id"].to_numpy()[got] * stride + source) & sure[given]
    got, given, source = got[whole], given[whole], source[whole]
    transfer, end = parts["transfer_ns"].to_numpy(), parts["end_ns"].to_numpy()
    ring = parts["collective"].to_numpy()[got] == "ring_shift"
    return pd.DataFrame(
        {
            "axis": parts["axis"].to_numpy()[got],
            "collective": np.where(ring, "ring_shift", "send_receive"),
            "source": source,
            "target": parts["rank"].to_numpy()[got],
            "bytes": parts["bytes"].to_numpy()[got],
            "transfer_ns": np.where(ring, np.minimum(transfer[got], transfer[given]), transfer[got]),
            "end_ns": end[got],
        }
    )


def _exposed(decomposition: Decomposition, rank: int, messages: pd.DataFrame) -> int:
    """Time in ns during which these messages transfer and the ledger of `rank` says visible communication."""
    end = messages["end_ns"].to_numpy()
    end = end + ahead_of(decomposition, rank, end)
    moving = intervals.union(end - messages["transfer_ns"].to_numpy(), end)
    return intervals.length(intervals.intersect(moving, decomposition.time[rank].terms["visible_comm"]))


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
