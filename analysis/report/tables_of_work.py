"""Tables about what ranks do beside communicating: stage balance, memory, experts, idle time, contention."""

from __future__ import annotations

from stepscope.analysis import units
from stepscope.analysis.causes.volumes import AS_PREDICTED
from stepscope.analysis.report.model import Report
from stepscope.analysis.report.tables import Detail, times, word
from stepscope.analysis.report.view import rank_label, spans

MOST_KERNELS = 24
"""Kernels of the contention table."""


def memory(report: Report) -> Detail | None:
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


def peaks(report: Report) -> Detail | None:
    """One row a phase: the rank that holds most in it."""
    frame = report.memory.peaks
    heads = ("phase", "rank|That holds most.", "activations", "state|On the device.", "in all")
    rows = []
    for phase in dict.fromkeys(frame["phase"]):
        of = frame[frame["phase"] == phase].to_dict("records")
        most = max(of, key=lambda row: row["total_bytes"])
        sizes = (units.size(most[f"{name}_bytes"]) for name in ("activation", "state", "total"))
        rows.append([str(phase).replace("_", " "), rank_label(report, most["rank"]), *sizes])
    short = ", ".join(f"{row[0]} {row[-1]}" for row in rows)
    return Detail("Peak by phase", "The most that a rank holds while a phase computes.", heads, rows, 2, short=short)


def experts(report: Report) -> Detail | None:
    heads = (
        *("rank", "tokens a step", "of the mean|Beside the ranks of its stage: the largest is the skew."),
        *("exchanges a step", "transferring", "waiting|For the others, in exchanges."),
    )
    rows = [
        [
            rank_label(report, int(row["rank"])),
            units.count(row["tokens_per_step"]),
            times(row["relative_load"]),
            units.count(row["exchanges_per_step"]),
            *(units.duration(row[f"exchange_{name}_ns_per_step"]) for name in ("transfer", "wait")),
        ]
        for _, row in report.experts.ranks.iterrows()
    ]
    of = "Tokens that each rank's experts took, busiest first: it decides how long an exchange takes."
    return Detail("Experts by rank", of, heads, rows)


def loads(report: Report) -> Detail | None:
    heads = ("layer", "expert", "on ranks", "tokens a step", "of the mean|Beside the layer's experts.")
    rows = [
        [
            *(str(row[name]) for name in ("layer", "expert")),
            ", ".join(str(rank) for rank in row["ranks"]),
            units.count(row["tokens_per_step"]),
            times(row["relative_load"]),
        ]
        for _, row in report.experts.loads.iterrows()
    ]
    short = ""
    if rows:
        top = report.experts.loads.iloc[0]
        short = (
            f"expert {top['expert']} of layer {top['layer']} takes {times(top['relative_load'])} the mean of its layer"
        )
    of = "Tokens that each expert took, over all its copies."
    return Detail("Experts, busiest first", of, heads, rows, 3, short=short)


WHY_IDLE = {
    "synchronisation": "A call of the host waits for the device (or did when it ran dry).",
    "launch_bound": "The next operation was launched only after the device had run dry.",
    "queued": "The rank waits for a communication that has not begun.",
    "hand_over": "A communication has been issued; the rank has not gone on, and it has not begun.",
    "device_gap": "The next operation had been launched, and began within 10 µs.",
    "held": "The next operation had been launched, and began later than that.",
    "host_work": "Rows of the host are recorded, and nothing tells when the next operation was launched.",
    "head": "Before the first operation of the step.",
    "tail": "After the last operation of the step.",
    "unexplained": "None of these: rows do not tell.",
}


def idle(report: Report) -> Detail | None:
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


def contention(report: Report) -> Detail | None:
    heads = (
        *("kernel", "grid|Blocks of its launch, which stand for the shapes that it works on."),
        *("runs|How many ran beside a transfer / alone.", "mean|Of those beside a transfer / of those alone."),
        "spread alone|Standard deviation / mean: where it is large, name and grid stand for kernels of several sizes.",
        *("contention|Mean beside a transfer / mean alone.", "lost a step"),
    )
    rows = [
        [
            word(row["name"].removeprefix("void ")),
            word(row["grid"]),
            f"{row['inside']} / {row['outside']}",
            f"{units.duration(row['inside_ns'])} / {units.duration(row['outside_ns'])}",
            units.share(row["outside_spread"]),
            times(row["contention"]),
            units.signed_duration(row["extra_ns_per_step"]),
        ]
        for _, row in report.contention.head(MOST_KERNELS).iterrows()
    ]
    left = len(report.contention) - len(rows)
    note = f"The {len(rows)} that lose most; {left} more are in the JSON." if left else ""
    of = "The same kernel beside a transfer and without any communication: what overlap costs the compute."
    return Detail("Contention", of, heads, rows, note=note, page_only=("grid", "mean"))


def stages(report: Report) -> Detail | None:
    heads = (
        *("stage", "ranks", "compute|Of a rank's microbatches in a step.", "of the mean|Beside the other stages."),
        *(
            "bubble",
            "imbalance",
            "head of line|Waiting for what had queued behind another communication on its stream.",
        ),
    )
    waits = ("bubble_ns_per_step", "imbalance_ns_per_step", "head_of_line_ns_per_step")
    rows = [
        [
            str(row["stage"]),
            spans(row["ranks"]),
            units.duration(row["compute_ns_per_step"]),
            times(row["relative_compute"]),
            *(units.duration(row[name]) for name in waits),
        ]
        for _, row in report.stages.iterrows()
    ]
    of = "The slowest stage sets the pipeline's rate. Means of a rank and step."
    return Detail("Stage balance", of, heads, rows, 2)


def beside(report: Report) -> Detail | None:
    """What stands beside the ledger, means of each rank's counted steps."""
    heads = (
        "rank",
        "waiting of operations|Hidden or not, of all operations: not the ledger's exposed wait.",
        "nonblocking|Exposed waits on which no computation depended.",
        "blocking communication|Visible communication that a recorded wait names.",
        "CPU step|The step annotation's own length.",
    )
    names = ("op_wait_ns", "nonblocking_ns", "blocking_comm_ns", "cpu_step_ns")
    frame = report.steps[report.steps["step"].isin(report.means.steps) & report.steps["rank"].isin(report.means.ranks)]
    means = frame.astype(dict.fromkeys(names, "float64")).groupby("rank")[list(names)].mean()
    rows = [
        [rank_label(report, int(str(rank))), *(units.duration(float(ns)) for ns in row)]
        for rank, row in zip(means.index, means.to_numpy(), strict=True)
    ]
    of = "Means of a counted step; they are no part of the partition."
    told = any(cell not in (units.DASH, "0 ns") for row in rows for cell in row[1:4])
    return Detail("Beside the ledger", of, heads, rows if told else [], 1)
