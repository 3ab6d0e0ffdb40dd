"""What matching found, as frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from stepscope.analysis.ledger import clocks as clock
from stepscope.analysis.ledger import keys
from stepscope.analysis.ledger.parts import RECEIVE, RING, Parts
from stepscope.analysis.ledger.waits import Waits
from stepscope.tracer.schema import AXES, COLLECTIVES, STRATEGIES

PARTS = (
    "match_id",
    "rank",
    "row",
    "group",
    "axis",
    "strategy",
    "collective",
    "seq",
    "bytes",
    "stream",
    "op_id",
    "arrival_ns",
    "end_ns",
    "source",
    "last_arrival_ns",
    "wait_ns",
    "transfer_ns",
    "last_rank",
    "straggler",
    "method",
    "partial",
    "unmatched",
    "violation",
    "estimated_wait_ns",
    "impossible",
)
"""`row`: index into the rank's events. `source`: whom a receive or a ring shift gets its message from, else -1.
`last_rank`: who arrived last among those this part depends on, -1 where nobody
led by more than the clocks' uncertainty; `straggler`: the same, after whom it had queued behind (head of line).
Unmatched parts have no last arrival, wait or transfer (-1)."""

CLOCKS = ("rank", "offset_ns", "drift_ppm", "residual_ns", "bound_ns", "samples", "violations", "source")
RATES = ("group", "method", "operations", "matched", "partial", "unmatched", "rate", "estimated_wait_ns")
"""`estimated_wait_ns`: estimates of the waits of unmatched parts, summed; -1 where there is none."""


def empty(columns: Sequence[str]) -> pd.DataFrame:
    """What there is without communication."""
    return pd.DataFrame(columns=list(columns))


def parts_frame(parts: Parts, matched: keys.Matched, waits: Waits, lanes: Sequence[tuple[str, ...]]) -> pd.DataFrame:
    order = np.lexsort((parts["rank"], matched.match))
    ranks = np.array([*parts.ranks, -1], np.int64)
    unmatched = waits.unmatched

    def told(values: np.ndarray) -> np.ndarray:
        return np.where(unmatched, -1, values)[order]

    wait = waits.wait_end - parts["arrival"]
    streams, stream = _streams(parts, lanes)
    columns = {
        "match_id": matched.match[order],
        "rank": ranks[parts["rank"][order]],
        "row": parts["row"][order],
        "group": _words([*parts.groups.names, ""], parts["group"][order]),
        "axis": _words([*AXES, ""], parts["axis"][order]),
        "strategy": _words([*STRATEGIES, ""], parts["strategy"][order]),
        "collective": _words([*COLLECTIVES, ""], parts["collective"][order]),
        "seq": parts["seq"][order],
        "bytes": parts["bytes"][order],
        "stream": _words(streams, stream[order]),
        "op_id": parts["op_id"][order],
        "arrival_ns": parts["arrival"][order],
        "end_ns": parts["end"][order],
        "source": _sources(parts)[order],
        "last_arrival_ns": told(waits.last_arrival),
        "wait_ns": told(wait),
        "transfer_ns": told(parts["end"] - waits.wait_end),
        "last_rank": ranks[waits.leader[order]],
        "straggler": ranks[waits.straggler[order]],
        "method": _words([*keys.METHODS, ""], np.where(waits.present > 1, matched.method, -1)[order]),
        "partial": waits.partial[order],
        "unmatched": unmatched[order],
        "violation": waits.violation[order],
        "estimated_wait_ns": waits.estimate[order],
        "impossible": parts["impossible"][order],
    }
    return pd.DataFrame(columns)


def _sources(parts: Parts) -> np.ndarray:
    """The rank that each receive or ring shift gets its message from, -1 for everything else and where it is unknown."""
    collective = parts["collective"]
    received = np.where(collective == RECEIVE, parts["source"], -1)
    return np.where(collective == RING, parts["peer_from"].astype(np.int64), received)


def _words(words: Sequence[str], codes: np.ndarray) -> pd.api.extensions.ExtensionArray:
    """Text column of codes; -1 is the last of `words`, the empty one. Few words become text once, not once a row."""
    return pd.Series(words).array.take(np.where(codes < 0, len(words) - 1, codes))


def _streams(parts: Parts, lanes: Sequence[tuple[str, ...]]) -> tuple[list[str], np.ndarray]:
    """Names of all streams of all ranks, and of each part the place of its own."""
    base = np.concatenate(([0], np.cumsum([len(lane) for lane in lanes])))[:-1]
    return [name for lane in lanes for name in lane] or [""], base[parts["rank"]] + parts["lane"]


def clock_frame(parts: Parts, clocks: clock.Clocks, waits: Waits) -> pd.DataFrame:
    violations = np.bincount(parts["rank"][waits.violation], minlength=len(parts.ranks))
    return pd.DataFrame(
        {
            "rank": np.array(parts.ranks, np.int64),
            "offset_ns": clocks.offset_ns,
            "drift_ppm": clocks.drift_ppm,
            "residual_ns": clocks.residual_ns,
            "bound_ns": clocks.bound_ns,
            "samples": clocks.samples,
            "violations": violations,
            "source": clocks.source,
        }
    )


def _per_match(match: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum of a part's values by match, in the order of the matches' numbers."""
    total = np.zeros(int(match.max(initial=-1)) + 1, np.int64)  # numbers have no gaps
    np.add.at(total, match, values.astype(np.int64))
    return total


def rates_frame(parts: Parts, matched: keys.Matched, waits: Waits) -> pd.DataFrame:
    """Per group and method of matching: communications, those seen on all their ranks, on some, on one."""
    _, one = np.unique(matched.match, return_index=True)
    frame = pd.DataFrame(
        {
            "group": np.array([*parts.groups.names, ""], object)[parts["group"][one]],
            "method": np.array([*keys.METHODS, ""], object)[matched.method[one]],
            "operations": 1,
            "matched": waits.split[one].astype(np.int64),
            "partial": waits.partial[one].astype(np.int64),
            "unmatched": waits.unmatched[one].astype(np.int64),
            "estimated_wait_ns": _per_match(matched.match, np.maximum(waits.estimate, 0)),
            "estimates": _per_match(matched.match, waits.estimate >= 0),
        }
    )
    rates = frame.groupby(["group", "method"], as_index=False, sort=True).sum()
    rates["rate"] = rates["matched"] / rates["operations"]
    rates["estimated_wait_ns"] = rates["estimated_wait_ns"].where(rates["estimates"] > 0, -1)
    return rates[list(RATES)]
