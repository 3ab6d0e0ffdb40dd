"""What the analysis must say of each sample: `python sample_traces/expected.py` writes it to expected.json.

The test compares; only a person who meant to change a definition runs this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stepscope.analysis.ingest import open_run
from stepscope.analysis.records import TERMS
from stepscope.analysis.report import analyze

SAMPLES = ("dp4", "dp2_pp2_1f1b", "dp2_pp2_gpipe", "dp4_slow_rank", "pp4_slow_stage")
HERE = Path(__file__).resolve().parent


def expected(run: Path) -> dict[str, Any]:
    """The part of the public JSON that is pinned: exact sums of the ledger, matches, pipeline, stragglers."""
    report = analyze(open_run(run)).to_json()
    ledger = report["ledger"]
    names = ("step_ns", *(f"{term}_ns" for term in TERMS), "hidden_comm_ns", "hidden_wait_ns", "unsplit_ns")
    return {
        "health": report["health"]["status"],
        "ranks": sorted({row["rank"] for row in ledger}),
        "steps": sorted({row["step"] for row in ledger}),
        "total_ns": {name: sum(row[name] for row in ledger) for name in names},
        "flags": sorted({flag for row in ledger for flag in row["flags"]}),
        "mean_step_ns": report["summary"]["step_ns"],
        "steps_in_means": report["run"]["steps_in_means"],
        "collectives": len(report["collectives"]),
        "matched_by": sorted({row["match"] for row in report["collectives"]}),
        "pipeline": report["pipeline"],
        "first_straggler": {name: report["stragglers"][0][name] for name in ("rank", "cause")},
    }


def main() -> None:
    """Write all of them, or those that are named."""
    for name in sys.argv[1:] or SAMPLES:
        text = json.dumps(expected(HERE / name), indent=1) + "\n"
        (HERE / name / "expected.json").write_text(text, "utf-8")
        print(f"{name}: written")


if __name__ == "__main__":
    main()
