"""Traces that lie in archives, in memory and on servers."""

from __future__ import annotations

import gzip
import json
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from trace_files import events_of, row, write

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run


def test_archives_and_filesystems_without_a_disk(tmp_path: Path) -> None:
    """`zip://` chains and any other filesystem of fsspec, with patterns, directories and names of files."""
    fsspec = pytest.importorskip("fsspec")
    texts = {f"t/rank{rank}.json": json.dumps({"traceEvents": [row(f"of {rank}", 0, 1)]}) for rank in (0, 1)}
    texts["t/LICENSE"] = "MIT"
    with zipfile.ZipFile(tmp_path / "traces.zip", "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
            with fsspec.open(f"memory://{name}", "w") as file:
                file.write(text)
    urls = [f"zip://{inside}::{tmp_path}/traces.zip" for inside in ("t/rank*.json", "t", "*", "**")]
    for url in (*urls, f"zip://t::file://{tmp_path}/traces.zip", "memory://t", "simplecache::memory://t"):
        run = open_run(url)
        assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1"], url
        ignored = [item.text for item in run.health.items if item.code == "ignored_files"]
        assert len(ignored) == (0 if "rank*" in url else 1) and all("LICENSE (" in text for text in ignored)
    assert open_run([f"zip://t/rank1.json::{tmp_path}/traces.zip"]).ranks == [1]
    with pytest.raises(StepscopeError, match=r"a zip archive: unpack it, or name what is in it \(zip://\*\*::"):
        open_run(tmp_path / "traces.zip")
    for wrong in ("zip://*::nothing.zip", f"zip://*::{tmp_path}/t.json", "nosuch://x"):
        (tmp_path / "t.json").write_text("{}")
        with pytest.raises(StepscopeError, match="cannot open"):
            open_run(wrong)


def test_what_has_changed_in_an_archive_or_in_memory_is_read_anew(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    for length in (1, 2):
        text = json.dumps({"traceEvents": [row("a", 0, length)]})
        with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
            archive.writestr("t.json", text)
        with fsspec.open("memory://changes/t.json", "w") as file:
            file.write(text)
        for url in (f"zip://t.json::{tmp_path}/t.zip", "memory://changes/t.json"):
            assert open_run(url).columns(0, "dur_ns")["dur_ns"].tolist() == [length * 1000], url


def test_traces_on_a_server(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", [row(f"of {rank}", 0, 1)])

    asked: list[str] = []

    class Quiet(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            """As ever, but remembered."""
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{server.server_port}"
        for url in (f"{there}/rank*.json", f"{there}/", [f"{there}/rank0.json", f"{there}/rank1.json"]):
            run = open_run(url)
            assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1"], url
        with pytest.raises(StepscopeError, match=r"cannot read http://.*/rank9.json: there is no such file"):
            open_run(f"{there}/rank9.json")
        # the server sends whole files only: a large one, and a damaged one, are read as they come, and not to list them
        rows = [row(f"kernel {i}", i, 1) for i in range(60_000)]
        data = json.dumps({"traceEvents": rows}).encode()
        (tmp_path / "large.json").write_bytes(data)
        (tmp_path / "damaged.json.gz").write_bytes(gzip.compress(data)[:-8] + b"12345678")
        assert len(data) > 5 << 20
        asked.clear()
        assert len(open_run(f"{there}/large.json").columns(0, "kind")["kind"]) == len(rows)
        assert asked == ["/large.json"] * 2  # a look at its begin, and the whole
        run = open_run(f"{there}/damaged.json.gz")
        assert len(run.columns(0, "kind")["kind"]) == len(rows)
        assert [item.code for item in run.health.items] == ["cut_file"]
        server.shutdown()


def test_a_server_that_stops_sending_leaves_the_rank_out(tmp_path: Path) -> None:
    class Breaking(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Less than it says."""
            self.send_response(200)
            self.send_header("Content-Length", "9000000")
            self.end_headers()
            self.wfile.write(json.dumps({"traceEvents": [row("a", 0, 1)] * 5000}).encode()[:-1000])

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StepscopeError, match=r"t.json cannot be read"):
            open_run(f"http://127.0.0.1:{server.server_port}/t.json")
        server.shutdown()


def test_a_library_that_a_url_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(
        StepscopeError, match=r"cannot open s3://b/t.json: Install s3fs to access S3; pip install .*remote"
    ):
        open_run("s3://b/t.json")
