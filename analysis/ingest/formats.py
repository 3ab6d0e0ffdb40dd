"""How formats are told apart: what is needed before any reader is imported."""

from __future__ import annotations

SQLITE_MAGIC = b"SQLite format 3\0"
"""How an Nsight Systems export begins."""

TABLE_COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
"""Columns that every ndtimeline-style table has."""
