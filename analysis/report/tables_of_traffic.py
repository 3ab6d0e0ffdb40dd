"""Tables about communication: exposed time, what one costs, links, volumes, matching, clocks."""

from __future__ import annotations

import pandas as pd

from stepscope.analysis import units
from stepscope.analysis.causes.volumes import AGREEING
from stepscope.analysis.report.model import Report
from stepscope.analysis.report.tables import Detail, times, word
from stepscope.analysis.report.view import LABELS, rank_label


def classes(report: Report) -> Detail | None:
    """Exposed communication and waits by axis and collective; the phases of compute stand beside the terms."""
    frame = report.class_means
    frame = frame[frame["term"] != "compute"]
    rows = [
        [
            LABELS[row["term"]] + (", not to be split" if row["unsplit"] else ""),
            word(row["axis"].replace("_", "-")),
            word(row["collective"].replace("_", "-")),
            units.duration(row["ns_per_step"]),
            units.share(row["share"]),
        ]
        for _, row in frame.iterrows()
    ]
    of = "What stood in the way of compute, by mesh axis and collective; means of a rank and step."
    return Detail("Exposed communication and waits", of, ("term", "axis", "collective", "a step", "share"), rows, 3)


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


def alpha_beta(report: Report) -> Detail | None:
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


def links(report: Report) -> Detail | None:
    heads = (
        *("axis", "from", "to", "messages|Of a step.", "size|Median message."),
        *(
            "takes|Median, from when both ends are there.",
            "of the others|Beside other links with messages of that size.",
        ),
        "exposed|At the receiving rank, a step.",
    )
    rows = [
        [
            word(row["axis"]),
            *(rank_label(report, row[end]) for end in ("source", "target")),
            units.significant(row["messages_per_step"]),
            units.size(row["median_bytes"] if row["median_bytes"] >= 0 else None),
            units.duration(row["median_transfer_ns"]),
            times(row["relative"]),
            units.duration(row["target_exposed_ns_per_step"]),
        ]
        for _, row in report.links.iterrows()
    ]
    of = "Messages from rank to rank: sends with their receives, shifts around a ring."
    return Detail("Links", of, heads, rows, 3)


def ratios(report: Report) -> Detail | None:
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


NO_THEORY = "There is no theory beside it: the run does not say its model, layout and batch."


def volumes(report: Report) -> Detail | None:
    if bool((report.volumes["verdict"] == "").all()):
        return _recorded(report)
    heads = (
        *("stage", "axis", "strategy", "collective"),
        *("operations|Of a rank and step.", "theory"),
        *("sent|Bytes that a rank sends in a step.", "theory "),
        "difference|Recorded beside what the configuration predicts.",
    )
    rows = []
    frame = report.volumes
    odd = ~frame["verdict"].isin((*AGREEING, ""))
    for _, row in pd.concat([frame[odd], frame[~odd]]).iterrows():
        numbers = [units.count(row[name]) for name in ("operations", "operations_theory")]
        numbers += [units.size(row[name]) for name in ("sent_bytes", "sent_bytes_theory")]
        stage = str(row["stage"]) if row["stage"] >= 0 else units.DASH
        words = [word(str(row[name]).replace("_", "-")) for name in ("axis", "strategy", "collective")]
        rows.append([stage, *words, *numbers, word(row["verdict"])])
    of = "Communication of a rank and step beside theory; what differs first. A dash: not predicted, or not recorded."
    agreed = len(frame) and bool(frame["verdict"].isin(AGREEING).all())
    short = _agreement(frame) if agreed else ""
    return Detail("Volumes", of, heads, rows, 4, page_only=("operations", "theory"), short=short)


def _recorded(report: Report) -> Detail:
    """The volumes of a run that theory knows nothing of: what was recorded, without the columns in which nothing was."""
    heads = (
        *("stage", "axis", "strategy", "collective"),
        "operations|Of a rank and step.",
        "bytes|Of their messages, of a rank and step.",
        "sent|Bytes that a rank sends in a step.",
    )
    rows = [
        [
            str(row["stage"]) if row["stage"] >= 0 else units.DASH,
            *(word(str(row[name]).replace("_", "-")) for name in ("axis", "strategy", "collective")),
            units.count(row["operations"]),
            *(units.size(row[name]) for name in ("bytes", "sent_bytes")),
        ]
        for _, row in report.volumes.iterrows()
    ]
    kept = [i for i, head in enumerate(heads) if head == "collective" or any(row[i] != units.DASH for row in rows)]
    numbers_from = sum(i < 4 for i in kept)
    of = "Communication of a rank and step, as recorded. A dash: not recorded of all of them."
    shown = [[row[i] for i in kept] for row in rows]
    return Detail("Volumes", of, [heads[i] for i in kept], shown, numbers_from, note=NO_THEORY)


def _agreement(frame: pd.DataFrame) -> str:
    """What agrees with theory, and no more: the number of buckets, or the bytes of tokens that may be dropped, has none."""
    size, number = (int(frame[name].notna().sum()) for name in ("bytes_theory", "operations_theory"))
    if size == number == len(frame):
        return f"bytes and operations of all {len(frame)} kinds of communication are as predicted"
    return (
        f"as predicted: bytes of {size} and operations of {number} of {len(frame)} kinds of communication; of the others"
        " theory says nothing"
    )


def matching(report: Report) -> Detail | None:
    heads = (
        *("group", "by|Evidence: recorded numbers (seq), order, or time (inferred).", "communications", "whole"),
        *("partial|Recorded on some of their ranks.", "unmatched|Recorded on one rank.", "rate"),
        "estimated wait|Of unmatched ones, in all: what exceeds the 5th percentile of their like.",
    )
    frame = report.matching.sort_values("rate", kind="stable")
    rows = [
        [
            word(row["group"]),
            word(row["method"]),
            *(str(row[name]) for name in ("operations", "matched", "partial", "unmatched")),
            units.share(row["rate"]),
            units.duration(None if row["estimated_wait_ns"] is pd.NA else float(row["estimated_wait_ns"])),
        ]
        for _, row in frame.iterrows()
    ]
    short = ""
    if len(frame) and bool((frame["rate"] == 1).all()):
        methods = ", ".join(sorted(set(frame["method"]) - {""}))
        by = f", by {methods}" if methods else ""
        short = (
            f"all {units.counted(int(frame['operations'].sum()), 'communication')} of "
            f"{units.counted(len(frame), 'group')} matched{by}"
        )
    of = "Communications paired across ranks: by which evidence, and how many of them whole."
    return Detail("Matching", of, heads, rows, 2, short=short)


def clocks(report: Report) -> Detail | None:
    heads = (
        *("rank", "source|host: one clock; recorded by the run; or estimated from communications."),
        *("ahead|Of the common clock.", "drift, ppm", "residual", "uncertainty"),
        "violations|Operations that end before one they need has come.",
    )
    frame = report.clocks
    rows = [
        [
            rank_label(report, row["rank"]),
            str(row["source"]),
            units.signed_duration(row["offset_ns"]),
            units.significant(row["drift_ppm"]),
            *(units.duration(row[name]) for name in ("residual_ns", "bound_ns")),
            str(row["violations"]),
        ]
        for _, row in frame.iterrows()
    ]
    one = len(frame) and bool((frame["source"] == "host").all()) and not frame["violations"].any()
    of = "Clocks of the ranks against the common one."
    return Detail(
        "Clocks", of, heads, rows, 2, short="all ranks on one clock, no violation of causality" if one else ""
    )
