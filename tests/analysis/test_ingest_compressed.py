"""Compressed traces that are not as gzip would have written them: what can still be had is kept, the rest is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trace_files import row, step

from stepscope.analysis.ingest import open_run
from stepscope.analysis.ingest.source import ByteSource

ROWS = [step(1, 0, 1000), step(2, 1000, 1000), *(row(f"kernel {i * 7919 % 1000}", 10 + i, 0.5) for i in range(5000))]
TEXT = json.dumps({"traceEvents": ROWS}).encode()
GZIP = gzip.compress(TEXT)
HALVES = gzip.compress(TEXT[:100_000]), gzip.compress(TEXT[100_000:])


@pytest.mark.parametrize(
    "data",
    [GZIP + b"\0" * 300_000, HALVES[0] + b"\0" * 200_000 + HALVES[1], gzip.compress(b"") + GZIP + gzip.compress(b"")],
    ids=["padded", "padded between", "empty members"],
)
def test_padding_and_members_are_ordinary(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json.gz").write_bytes(data)
    run = open_run(tmp_path)
    assert not run.health.items and len(run.columns(0, "kind")["kind"]) == len(ROWS)


@pytest.mark.parametrize("behind", [b"\x1f", b"x", b"some words\n" * 20_000])
def test_what_stands_behind_the_compressed_data_is_ignored_and_said(tmp_path: Path, behind: bytes) -> None:
    (tmp_path / "t.json.gz").write_bytes(GZIP + behind)
    run = open_run(tmp_path)
    (item,) = run.health.items
    assert (item.code, item.touches) == ("spare_bytes", ()) and len(TEXT) - 2 <= (item.offset or 0) <= len(TEXT)
    assert len(run.columns(0, "kind")["kind"]) == len(ROWS)


def test_what_is_no_trace_is_none_with_bytes_behind_it_either(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(GZIP)
    (tmp_path / "settings.json.gz").write_bytes(gzip.compress(b'{"batch": 8}') + b"x")
    (item,) = open_run(tmp_path).health.items
    assert item.code == "ignored_files" and "settings.json.gz" in item.text


def test_a_wrong_checksum_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(GZIP[:-8] + b"\1\2\3\4" + GZIP[-4:])
    run = open_run(tmp_path)
    assert [item.code for item in run.health.items] == ["cut_file"]
    assert len(run.columns(0, "kind")["kind"]) == len(ROWS)


@pytest.mark.parametrize("member", ["one", "second"])
def test_every_byte_before_the_damage_is_handed_out(tmp_path: Path, member: str) -> None:
    """Four blocks that are kept as they are (type 0), then one of a type that there is none of (3)."""
    before = TEXT[:70_000] if member == "second" else b""
    blocks = [TEXT[at : at + 60_000] for at in range(0, 240_000, 60_000)]
    sizes = (60_000).to_bytes(2, "little") + (0xFFFF - 60_000).to_bytes(2, "little")
    stored = GZIP[:10] + b"".join(b"\0" + sizes + block for block in blocks) + b"\7" + TEXT[:1000]
    (tmp_path / "t.json.gz").write_bytes((gzip.compress(before) if before else b"") + stored)
    with ByteSource(tmp_path / "t.json.gz") as source:
        data = source.read()
    assert data == before + TEXT[:240_000]
    assert source.cut is not None and "damaged" in source.cut and source.produced == len(data)
