"""The tables behind the figures, as text: made once, shown short on a terminal and whole on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.volumes import AS_PREDICTED
from stepscope.analysis.report.model import Report
from stepscope.analysis.report.view import rank_label


@dataclass(frozen=True)
class Detail:
    """One table: what it is, its heads (`name|definition`), its rows from the most important on, and a remark."""

    title: str
    of: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1  # columns from here on are numbers
    note: str = ""
    page_only: Sequence[str] = ()  # heads of the columns that a terminal has no room for
    short: str = ""  # what a terminal says instead of the table

    def narrow(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows without the columns of the page only."""
        kept = [i for i, head in enumerate(self.heads) if head.partition("|")[0] not in self.page_only]
        return [self.heads[i].partition("|")[0] for i in kept], [[row[i] for i in kept] for row in self.rows]


def details(report: Report) -> list[Detail]:
    """Those tables that the run has anything for."""
    makers = (_alpha_beta, _ratios, _volumes, _memory, _experts, _loads, _idle, _contention)
    made = [make(report) for make in makers]
    return [one for one in made if one is not None and one.rows]


def word(value: object) -> str:
    """A text cell; a dash for an empty one."""
    return str(value) or units.DASH


def _interval(low: str, high: str) -> str:
    return units.DASH if low == units.DASH else f"{low} to {high}"


def _slope(value: float) -> str:
    return units.DASH if units.undefined(value) else units.significant(value, 3)


def _fitted(row: pd.Series) -> list[str]:
    """The cells that a fit gives: alpha, slope, their intervals, bandwidths, crossover, bound."""
    achieved = _slope(row["achieved_gb_per_s"])
    if row["status"] != "fitted":
        return [units.DASH] * 5 + [achieved, units.DASH, str(row["status"])]
    alpha = _interval(*(units.duration(row[f"alpha_{end}_ns"]) for end in ("low", "high")))
    slope = _interval(*(_slope(row[f"slope_{end}_us_per_mb"]) for end in ("low", "high")))
    middle = [units.duration(row["alpha_ns"]), alpha, _slope(row["slope_us_per_mb"]), slope]
    return [*middle, _slope(row["bus_gb_per_s"]), achieved, units.size(row["crossover_bytes"]), str(row["bound"])]


def _alpha_beta(report: Report) -> Detail | None:
    fits = report.alpha_beta.fits
    heads = (
        *("group", "collective", "number|In counted steps.", "size|Median message."),
        *("alpha|What an operation costs before its first byte.", "alpha, 95 %"),
        *("µs/MB|What each megabyte adds: the slope.", "µs/MB, 95 %"),
        "bus GB/s|Bandwidth of the slope, times what nccl-tests multiplies it by.",
        "achieved GB/s|Median of bytes / time of the operations as they were: the algorithm bandwidth.",
        "crossover|Size at which latency and bytes cost the same.",
        "bound by|Of the median message.",
        "outliers|Left out of the fit.",
    )
    rows = [
        [
            word(row["group"]),
            word(row["collective"].replace("_", "-")),
            str(row["operations"]),
            units.size(row["median_bytes"]),
            *_fitted(row),
            str(row["outliers"]),
        ]
        for _, row in fits.iterrows()
    ]
    of = "T = alpha + beta × bytes, on the last arriver's own duration (no wait in it). Longest in all first."
    hidden = ("alpha, 95 %", "µs/MB, 95 %", "achieved GB/s", "crossover")
    return Detail("What a communication costs", of, heads, rows, 2, page_only=hidden)


def _volumes(report: Report) -> Detail | None:
    heads = (
        *("stage", "axis", "strategy", "collective"),
        *("operations|Of a rank and step.", "theory"),
        *("sent|Bytes that a rank sends in a step.", "theory "),
        "difference|Recorded beside what the configuration predicts.",
    )
    rows = []
    frame = report.volumes
    odd = ~frame["verdict"].isin((AS_PREDICTED, ""))
    for _, row in pd.concat([frame[odd], frame[~odd]]).iterrows():
        numbers = [units.count(row[name]) for name in ("operations", "operations_theory")]
        numbers += [units.size(row[name]) for name in ("sent_bytes", "sent_bytes_theory")]
        stage = str(row["stage"]) if row["stage"] >= 0 else units.DASH
        words = [word(str(row[name]).replace("_", "-")) for name in ("axis", "strategy", "collective")]
        rows.append([stage, *words, *numbers, word(row["verdict"])])
    of = "Communication of a rank and step beside theory; what differs first. A dash: not predicted, or not recorded."
    agreed = len(frame) and bool((frame["verdict"] == AS_PREDICTED).all())
    short = _agreement(frame) if agreed else ""
    return Detail("Volumes", of, heads, rows, 4, page_only=("operations", "theory"), short=short)


def _agreement(frame: pd.DataFrame) -> str:
    """What agrees with theory, and no more: the number of buckets, or the bytes of tokens that may be dropped, has none."""
    size, number = (int(frame[name].notna().sum()) for name in ("bytes_theory", "operations_theory"))
    if size == number == len(frame):
        return f"bytes and operations of all {len(frame)} kinds of communication are as predicted"
    return (
        f"as predicted: bytes of {size} and operations of {number} of {len(frame)} kinds of communication; of the others"
        " theory says nothing"
    )


def _memory(report: Report) -> Detail | None:
    """One row a rank: its state, beside theory where they differ, and its largest total."""
    state, peaks = report.memory.state, report.memory.peaks
    kinds = list(dict.fromkeys(state["kind"]))
    heads = ("rank", *kinds, "activations|Largest.", "peak|State on the device and activations.", "in phase", "theory")
    rows = []
    for rank, part in state.groupby("rank"):
        sizes = dict(zip(part["kind"], part["bytes"], strict=True))
        odd = [
            f"{row['kind']} {row['verdict']}" for _, row in part.iterrows() if row["verdict"] not in (AS_PREDICTED, "")
        ]
        told = "; ".join(odd) or (AS_PREDICTED if (part["verdict"] == AS_PREDICTED).any() else units.DASH)
        mine = peaks[peaks["rank"] == rank].to_dict("records")
        most = max(mine, key=lambda row: row["total_bytes"], default=None)
        numbers = ["activation_bytes", "total_bytes"]
        held = [units.DASH] * 3 if most is None else [*(units.size(most[n]) for n in numbers), str(most["phase"])]
        rows.append([rank_label(report, int(str(rank))), *(units.size(sizes.get(kind)) for kind in kinds), *held, told])
    of = "Bytes recorded on each rank, the largest of all steps, beside what ZeRO's arithmetic says of the state."
    short = ""
    if len(peaks) and set(state["verdict"]) == {AS_PREDICTED}:
        top = max(peaks.to_dict("records"), key=lambda row: row["total_bytes"])
        short = f"model state as predicted on all ranks; peak {units.size(top['total_bytes'])} on rank {top['rank']} in {top['phase']}"
    return Detail("Memory", of, heads, rows, 1, short=short)


def _experts(report: Report) -> Detail | None:
    heads = (
        *("rank", "tokens a step", "of the mean|Beside the ranks of its stage: the largest is the skew."),
        *("exchanges a step", "transferring", "waiting|For the others, in exchanges."),
    )
    rows = [
        [
            rank_label(report, int(row["rank"])),
            units.count(row["tokens_per_step"]),
            _times(row["relative_load"]),
            units.count(row["exchanges_per_step"]),
            *(units.duration(row[f"exchange_{name}_ns_per_step"]) for name in ("transfer", "wait")),
        ]
        for _, row in report.experts.ranks.iterrows()
    ]
    of = "Tokens that each rank's experts took, busiest first: it decides how long an exchange takes."
    return Detail("Experts by rank", of, heads, rows)


def _loads(report: Report) -> Detail | None:
    heads = ("layer", "expert", "on ranks", "tokens a step", "of the mean|Beside the layer's experts.")
    rows = [
        [
            *(str(row[name]) for name in ("layer", "expert")),
            ", ".join(str(rank) for rank in row["ranks"]),
            units.count(row["tokens_per_step"]),
            _times(row["relative_load"]),
        ]
        for _, row in report.experts.loads.iterrows()
    ]
    short = ""
    if rows:
        top = report.experts.loads.iloc[0]
        short = (
            f"expert {top['expert']} of layer {top['layer']} takes {_times(top['relative_load'])} the mean of its layer"
        )
    of = "Tokens that each expert took, over all its copies."
    return Detail("Experts, busiest first", of, heads, rows, 3, short=short)


def _times(value: float) -> str:
    return units.DASH if units.undefined(value) else f"{units.significant(value, 3)} ×"


WHY_IDLE = {
    "synchronisation": "A call of the host waits for the device (or did when it ran dry).",
    "launch_bound": "The next operation was launched only after the device had run dry.",
    "queued": "The rank waits for a communication that has not begun.",
    "hand_over": "A communication has been issued; the rank has not gone on, and it has not begun.",
    "host_work": "Rows of the host are recorded, and nothing tells when the next operation was launched.",
    "head": "Before the first operation of the step.",
    "tail": "After the last operation of the step.",
    "unexplained": "None of these: rows do not tell.",
}


def _idle(report: Report) -> Detail | None:
    """Means over counted ranks and steps; only reasons that occur."""
    rows = report.idle
    rows = rows[rows["rank"].isin(report.means.ranks) & rows["step"].isin(report.means.steps)]
    whole = float(rows["idle_ns"].mean()) if len(rows) else 0.0
    cells = []
    for reason, meaning in WHY_IDLE.items():
        ns = float(rows[f"{reason}_ns"].mean()) if len(rows) else 0.0
        if ns > 0:
            cells.append((ns, [reason.replace("_", " "), units.duration(ns), units.share(ns / whole), meaning]))
    cells.sort(key=lambda cell: -cell[0])
    of = "Why nothing was in flight, the first reason that applies; means of a rank and step."
    heads = ("reason", "idle", "share", "meaning")
    return Detail("Idle time explained", of, heads, [row for _, row in cells], 1, page_only=("meaning",))


def _ratios(report: Report) -> Detail | None:
    heads = ("axis", "compute a step", "transfer a step|Waits are no transfer.", "compute / transfer")
    rows = [
        [
            word(row["axis"]),
            *(units.duration(row[f"{name}_ns_per_step"]) for name in ("compute", "transfer")),
            units.DASH if units.undefined(row["ratio"]) else units.significant(row["ratio"], 3),
        ]
        for _, row in report.ratios.iterrows()
    ]
    return Detail("Compute beside communication", "By mesh axis; means of a rank and step.", heads, rows)


def _contention(report: Report) -> Detail | None:
    heads = (
        *("kernel", "beside a transfer|How many ran so.", "alone", "mean beside", "mean alone"),
        *("contention|Mean beside / mean alone.", "lost a step"),
    )
    rows = [
        [
            word(row["name"]),
            *(str(row[name]) for name in ("inside", "outside")),
            *(units.duration(row[f"{name}_ns"]) for name in ("inside", "outside")),
            _times(row["contention"]),
            units.signed_duration(row["extra_ns_per_step"]),
        ]
        for _, row in report.contention.iterrows()
    ]
    of = "The same kernel beside a transfer and without any communication: what overlap costs the compute."
    return Detail("Contention", of, heads, rows, page_only=("mean beside", "mean alone"))
