"""Which file is which rank, and what is no trace at all: names, maps, directories, links, broken and odd files."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trace_files import codes, events_of, row, step, write, write_run

from stepscope.__main__ import status_of
from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run


def test_ranks_from_names_and_from_the_files_themselves(tmp_path: Path) -> None:
    for name, rank in (("a-rank-2.json", None), ("a-rank-10.json", None), ("a-rank-0.json", 0)):
        write(tmp_path / name, [row(name, 0, 1)], **({"distributedInfo": {"rank": rank}} if rank is not None else {}))
    run = open_run(tmp_path)
    assert run.ranks == [0, 2, 10]
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["a-rank-0.json", "a-rank-2.json", "a-rank-10.json"]
    assert codes(run) == ["rank_from_name", "missing_rank"]
    assert run.meta.world_size == 11 and run.health.items[1].text.startswith("8 of 11 ranks")


def test_ranks_from_coordinates(tmp_path: Path) -> None:
    for pp in range(2):
        for tp in range(2):
            write(tmp_path / f"17-TP-{tp}-DP-0-PP-{pp}-EP-0.trace.json", [row(f"pp{pp} tp{tp}", 0, 1)])
    run = open_run(str(tmp_path / "17-*.json"))
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["pp0 tp0", "pp0 tp1", "pp1 tp0", "pp1 tp1"]


@pytest.mark.parametrize("number", ["1712195495505", "99999999999999999999"])
def test_a_number_that_no_rank_has_is_none(tmp_path: Path, number: str) -> None:
    """A worker's name may carry a date or a process id: the order of the names counts then."""
    for name in (f"worker-{number}", "worker-3"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": [row("gemm", 0, 1)]}))
    assert open_run(tmp_path).ranks == [0, 1]


def test_names_without_a_rank_count_in_natural_order(tmp_path: Path) -> None:
    for name in ("trace9.json", "trace10.json"):
        write(tmp_path / name, [row(name, 0, 1)])
    run = open_run(tmp_path)
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["trace9.json", "trace10.json"]


def test_the_users_map_gives_ranks(tmp_path: Path) -> None:
    for name in ("x.json", "y.json"):
        write(tmp_path / name, [row(name, 0, 1)])
    rules = tmp_path / "mine.toml"
    rules.write_text('[ranks]\n"x*" = 1\n"y*" = 0\n')
    run = open_run([tmp_path / "x.json", tmp_path / "y.json"], rules=rules)
    assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["y.json", "x.json"]


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        write(tmp_path / name, [row("a", 0, 1)], distributedInfo={"rank": 0, "world_size": 2})
    with pytest.raises(StepscopeError, match=r"one\.json and two\.json are both rank 0"):
        open_run(tmp_path)


def test_a_copy_that_does_not_say_its_rank_is_said(tmp_path: Path) -> None:
    for rank, length in ((0, 5), (1, 5), (2, 6)):
        write(tmp_path / f"rank{rank}.json", [row("a", 0, 5), row("b", 10, length)])
    (item,) = (item for item in open_run(tmp_path).health.items if item.touches)
    assert item.code == "same_file" and item.text.startswith("rank0.json and rank1.json are the same")


def test_two_files_of_one_rank_and_one_name_are_named_with_their_directories(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write(tmp_path / place / "t.json", [row(place, 0, 1)], distributedInfo={"rank": 0, "world_size": 2})
    with pytest.raises(StepscopeError, match=r"a/t\.json and \S*b/t\.json are both rank 0"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "places",
    [
        ["rank-10/t.json", "rank-2/t.json", "rank-0/t.json"],  # the rank in the directory
        ["node10/gpu0.json", "node2/gpu0.json", "node2/gpu1.json"],  # a rank within a node: counted on
        ["node1/TP-0.json", "node0/TP-1.json", "node0/TP-0.json"],
    ],
)
def test_files_of_one_name_are_told_apart_by_their_directories(tmp_path: Path, places: list[str]) -> None:
    for place in places:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write(tmp_path / place, [row(place, 0, 1)])
    run = open_run(tmp_path)
    found = [events_of(run, rank)[0][0] for rank in run.ranks]
    assert found == sorted(places, key=lambda place: [int(n) for n in re.findall(r"\d+", place)])
    assert run.ranks == ([0, 2, 10] if places[0].startswith("rank") else [0, 1, 2])


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["gpu8_rank0", "gpu8_rank10", "gpu8_rank2"], [0, 10, 2]),  # the machine has 8, the rank is another number
        (["rank-0", "worker1"], [0, 1]),
        (["other", "rank-3"], [0, 3]),
        (["b", "rank-0", "rank-1"], [2, 0, 1]),
        (["node0_rank0", "node0_rank1", "node1_rank0"], [0, 1, 2]),  # ranks of a node
        (["gpu8_a", "gpu8_b"], [0, 1]),
        (["x1²2", "x1²10", "x٣"], [0, 1, 2]),  # what is no digit, and digits of other scripts
    ],
)
def test_ranks_that_some_names_carry(tmp_path: Path, names: list[str], ranks: list[int]) -> None:
    for name in names:
        write(tmp_path / f"{name}.json", [row(name, 0, 1)])
    run = open_run(tmp_path)
    assert {events_of(run, rank)[0][0]: rank for rank in run.ranks} == dict(zip(names, ranks, strict=True))


@pytest.mark.parametrize("names", [["rank0_step10", "rank0_step20"], ["worker1.1695", "worker1.1694", "worker0.1694"]])
def test_two_files_that_are_one_rank_by_their_names(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write(tmp_path / f"{name}.json", [row(name, 0, 1)])
    with pytest.raises(StepscopeError, match=r"\.json and .*\.json are both rank \d: remove one .* \[ranks\] table"):
        open_run(tmp_path)
    (tmp_path / "mine.toml").write_text("[ranks]\n" + "".join(f'"{name}.json" = {i}\n' for i, name in enumerate(names)))
    assert open_run(tmp_path, rules=tmp_path / "mine.toml").ranks == list(range(len(names)))


def test_a_broken_file_leaves_the_others(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [row("a", 0, 1)])
    (tmp_path / "rank1.json.gz").write_bytes(gzip.compress(b'{"traceEvents": ['))
    run = open_run(tmp_path)
    assert run.ranks == [0] and run.health.status == "broken"
    assert [item.file for item in run.health.items if item.code == "broken_rank"] == ["rank1.json.gz"]


def test_a_broken_file_takes_nobodys_rank(tmp_path: Path) -> None:
    """Its place in the order of names is only a guess, which the file that says which rank it is proves wrong."""
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"traceEvents": ['))
    write(tmp_path / "b.json", [row("a", 0, 1)], distributedInfo={"rank": 0, "world_size": 2})
    run = open_run(tmp_path)
    assert run.ranks == [0] and {"broken_rank", "missing_rank"} <= set(codes(run))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rank1.json", b""),
        ("rank1.json.gz", gzip.compress(b"[")[:3]),
        ("rank1.json.gz", gzip.compress(b"")),
        ("rank1.json", b'{"schemaVersion": 1, "deviceProperties": [{"name": "A'),
        ("rank1.json", b'{"schemaVersion": 1, "distributedInfo": {"rank": 1}, '),
        ("one.parquet", b"PAR1 and nothing else"),
        ("one.sqlite", b"SQLite format 3\0 and nothing else"),
    ],
)
def test_what_nothing_can_be_read_of_may_be_a_rank(tmp_path: Path, name: str, data: bytes) -> None:
    """It is left out and touches the figures; an empty file that is not called as traces are is none."""
    write(tmp_path / "rank0.json", [row("a", 0, 1)])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "log.json").write_text('{"loss": 1}\n{"loss": 2}\n')
    (tmp_path / "data.json").write_text(json.dumps({"text": "a" * (9 << 20)}))
    (tmp_path / name).write_bytes(data)
    run = open_run(tmp_path)
    unread, ignored = (
        next(item for item in run.health.items if item.code == f"{code}_files") for code in ("unread", "ignored")
    )
    assert unread.text.startswith(f"1 file cannot be read and was left out: {name} (") and "ledger" in unread.touches
    assert ignored.text.startswith(
        "3 files are no traces and were ignored: _SUCCESS (it is empty); data.json, log.json ("
    )
    assert not ignored.touches
    assert status_of(["doctor", str(tmp_path), "--quiet"]) == 3


def test_what_is_no_trace_is_refused_with_reasons(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(StepscopeError) as caught:
        open_run(tmp_path)
    said = str(caught.value)
    assert "LICENSE: it is neither JSON" in said and "config.json: it is JSON without" in said and "empty" in said
    with pytest.raises(StepscopeError, match="a pattern that fits some"):
        open_run(str(tmp_path / "*.absent"))


def test_files_below_a_directory_and_by_url(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "t" / "deep").mkdir(parents=True)
    write(tmp_path / "t" / "deep" / "rank3.json", [row("a", 0, 1)])
    assert open_run(tmp_path / "t").ranks == [3]
    assert open_run(f"file://{tmp_path}/t/deep").ranks == [3]
    assert open_run(f"file://{tmp_path}/t/deep/rank*.json").ranks == [3]
    assert not list((tmp_path / "t").rglob(".stepscope*"))  # a foreign folder is left as it is
    assert len(list((own_cache / "stepscope").iterdir())) == 3


def test_a_directory_of_runs_says_which_there_are(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / name)
    with pytest.raises(StepscopeError, match=r"is no run, it holds 2 runs \(a, b\): name one"):
        open_run(tmp_path)


def test_what_a_run_of_several_files_is_called(tmp_path: Path) -> None:
    (tmp_path / "june").mkdir()
    files = [write(tmp_path / "june" / f"rank{rank}.json", [row("a", 0, 1)]) for rank in (0, 1)]
    assert open_run(files).meta.name == open_run(str(tmp_path / "june" / "rank*.json")).meta.name == "june"
    assert open_run(f"file://{tmp_path}/june/rank?.json").meta.name == "june"
    odd = write(tmp_path / "we ird%20[name]#1?.json", [row("a", 0, 1)])  # a file is a file, whatever it is called
    assert open_run(odd).meta.name == "we ird%20[name]#1?.json"
    assert open_run(tmp_path / "june").meta.name == "june" and open_run(files[1]).meta.name == "rank1.json"


def test_a_link_says_the_rank_of_what_it_leads_to(tmp_path: Path) -> None:
    """As where data are kept under the hashes of their contents. A file that is there by two names is read once."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "run").mkdir()
    for rank, blob in enumerate(("fe12", "0a34", "77bc")):
        write(tmp_path / "blobs" / blob, [row(f"of {rank}", 0, 1)])
        (tmp_path / "run" / f"rank{rank}.json").symlink_to(tmp_path / "blobs" / blob)
    (tmp_path / "run" / "latest.json").symlink_to("rank2.json")
    for paths in (tmp_path / "run", sorted((tmp_path / "run").glob("rank*")), str(tmp_path / "run" / "rank*")):
        run = open_run(paths)
        assert [events_of(run, rank)[0][0] for rank in run.ranks] == ["of 0", "of 1", "of 2"]
    (tmp_path / "run" / "there").symlink_to(tmp_path / "blobs")
    assert open_run(tmp_path / "run" / "there" / ".." / "run" / "rank1.json").ranks == [
        1
    ]  # .. of what the link leads to
    write(tmp_path / "rank5.json", [row("of 5", 0, 1)], distributedInfo={"rank": 5, "world_size": 6})
    (tmp_path / "a.json").symlink_to("rank5.json")
    assert open_run([tmp_path / "a.json", tmp_path / "rank5.json"]).ranks == [5]


def test_links_in_a_circle_and_pipes_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(StepscopeError, match="cannot be read"):
        open_run(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path / "pip*"):
        with pytest.raises(StepscopeError, match="is a pipe or a device"):
            open_run(path)
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [row("gemm", 0, 1)]}))
    assert open_run(tmp_path).ranks == [0]


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    """Names are bytes: one that is no UTF-8 is a name as well, on a terminal that knows no letter but ASCII too."""
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.json"))
    write(file, [step(1, 0, 9), row("gemm \u2713", 0, 1)])
    for path in (file, tmp_path):
        words = [sys.executable, "-m", "stepscope", "doctor", str(path), "--quiet"]
        done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"") and b"health ok" in done.stdout
