"""Makes the table of docs/injected_causes.md from the exact timelines of tests/analysis/injected_timelines.py.

`python docs/injected_causes.py` rewrites what stands between the two marks of the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "injected_causes.md"
BEGIN = "<!-- made by `python docs/injected_causes.py` -->"
END = "<!-- end of what is made -->"


def table() -> str:
    """One row a cause: what was injected, what the analysis names first, and by how much each term changed."""
    for folder in (ROOT / "tests" / "analysis", ROOT / "tests", ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from injected_timelines import MATRIX

    from stepscope.analysis import units
    from stepscope.analysis.compare import compare
    from stepscope.analysis.report.view import SHORT_LABELS

    heads = ["cause", "injected", "first finding", "change of the step and its terms (mean over ranks); all others 0"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for make in MATRIX:
        injected = make()
        comparison = compare([injected.base, injected.run])
        (pair,) = comparison.pairs
        changed = [
            f"{SHORT_LABELS.get(name, name)} {units.signed_duration(float(delta.delta_ns))}"
            for delta in (pair.step, *pair.terms)
            if delta.delta_ns
            for name in [delta.name.removesuffix("_ns")]
        ]
        finding = comparison.reports[1].findings[0].text.partition(";")[0]
        cells = [injected.cause, injected.setup, finding, ", ".join(changed)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rewritten(page: str) -> str:
    """`page` with the table made anew; ValueError for a page without the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs a line {BEGIN!r} and after it a line {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
