"""The records that every analysis returns: health, the ledger's columns, findings.

They are the public JSON format (docs/json_format.md) in Python. Undefined numbers are None (NaN in frames), never 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

JSON_SCHEMA_VERSION = 1

TERMS = ("compute", "visible_comm", "bubble", "imbalance", "memcpy", "idle")
"""The six terms that partition a step, in the order in which an instant is classified (definitions.md)."""

LEDGER_COLUMNS = {
    "rank": "int64",
    "step": "object",  # an integer, or "all" where the trace has no step annotation
    "step_ns": "int64",
    "compute_ns": "int64",
    "visible_comm_ns": "int64",
    "bubble_ns": "int64",
    "imbalance_ns": "int64",
    "memcpy_ns": "int64",
    "idle_ns": "int64",
    "hidden_comm_ns": "int64",
    "hidden_wait_ns": "int64",
    "unsplit_ns": "int64",
    "overlap_efficiency": "float64",  # NaN without communication
    "comm_overlap": "float64",
    "method": "object",  # direct | inferred | balanced
    "flags": "object",  # tuple of LEDGER_FLAGS
}
"""One row a rank and step. step_ns = compute + visible_comm + bubble + imbalance + memcpy + idle, exactly."""

LEDGER_FLAGS = ("open_end", "partial", "empty", "slow_first", "host", "joined", "nonblocking", "clock")
"""`partial`, `empty`, `slow_first` (and a shortened `open_end`) rows stay out of every mean."""


@dataclass(frozen=True)
class HealthItem:
    """One thing that was repaired, missing, cut, implausible or inferred, and which numbers it touches.

    An empty `touches` is a remark; a `broken` item means that the rank or run could not be read.
    """

    code: str  # e.g. "cut_file", "missing_rank", "unmatched"
    text: str  # one sentence: what, how many, what it means
    rank: int | None = None
    file: str | None = None
    offset: int | None = None  # byte offset in the (uncompressed) file
    touches: tuple[str, ...] = ()  # names of ledger columns or sections of the JSON
    broken: bool = False


@dataclass
class Health:
    """The health report: shown before any figure."""

    items: list[HealthItem] = field(default_factory=list)

    @property
    def status(self) -> str:
        """`ok`, `touched` (some figure rests on repaired or missing data) or `broken` (something could not be read)."""
        if any(item.broken for item in self.items):
            return "broken"
        return "touched" if any(item.touches for item in self.items) else "ok"

    def add(self, code: str, text: str, **where: Any) -> None:
        """Append one item (see HealthItem for `where`)."""
        self.items.append(HealthItem(code, text, **where))

    def to_json(self) -> dict[str, Any]:
        """The `health` object of the public JSON."""
        rows = []
        for item in self.items:
            row = asdict(item)
            row.pop("broken")
            row["touches"] = list(item.touches)
            rows.append(row)
        return {"status": self.status, "items": rows}


@dataclass(frozen=True)
class Finding:
    """One sentence that says what costs time, with its price, its evidence and what to try."""

    text: str
    cost_ns_per_step: int
    rank: int | None
    step: int | str | None
    op_id: int | None
    start_ns: int | None
    end_ns: int | None
    confidence: str  # high | medium | low
    advice: str
