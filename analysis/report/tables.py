"""One table behind the figures, as text, and the cells that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis import units


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


def word(value: object) -> str:
    """A text cell; a dash for an empty one."""
    return str(value) or units.DASH


def times(value: float) -> str:
    return units.DASH if units.undefined(value) else f"{units.significant(value, 3)} ×"
