"""How formats are told apart: what is needed before any reader is imported."""

from __future__ import annotations

import re

PARQUET_MAGIC = b"PAR1"

SQLITE_MAGIC = b"SQLite format 3\0"
"""How an Nsight Systems export begins."""

TABLE_COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
"""Columns that every ndtimeline-style table has."""

CONFIG = "config.json"
"""Beside the dumps of a pipeline (pp-vis): how many stages and chunks it has."""


def table_header(data: bytes) -> tuple[list[str], str]:
    """The names of the columns of a table as text (CSV), and what separates them: `,`, `;`, a tab or `|`."""
    line = data.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    found = re.search(r"[,;\t|]", line)
    separator = found.group() if found else ","
    return [name.strip().strip('"').strip() for name in line.split(separator)], separator
