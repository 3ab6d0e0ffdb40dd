"""The byte scanner: field for field what a strict parser reads, and everything that a strict parser would throw away."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strict_reader import assert_same, read_strictly, texts

from stepscope.analysis.ingest import reading
from stepscope.analysis.ingest.raw import FIELDS, MISSING, NUMBERS, Raw, exact_id, exact_integer, exact_ns
from stepscope.analysis.ingest.scanner.codes import MAX_TEXT
from stepscope.analysis.ingest.scanner.decimals import identity, number
from stepscope.analysis.ingest.source import ByteSource
from stepscope.analysis.ingest.text import decode_text


def scanned(path: Path, data: bytes, window: int = 1 << 16) -> Raw:
    path = path / "trace.json"
    path.write_bytes(data)
    with ByteSource(path) as source:
        return reading.read_trace(source, window)


def event(name: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": 1.5,
        "dur": 2,
        "args": {"stream": 7},
    } | changes


def repairs(raw: Raw) -> dict[str, int]:
    return {repair.code: repair.times for repair in raw.repairs}


# -- valid files -------------------------------------------------------------------------------------------------------


def test_every_field_of_every_real_trace(corpus: Path) -> None:
    files = sorted(corpus.glob("kineto*/*.json.gz"))
    assert len(files) >= 17
    for file in files:
        with ByteSource(file) as source:
            raw = reading.read_trace(source)
        assert raw.cut is None and raw.repairs == [], file
        assert_same(raw, read_strictly(gzip.decompress(file.read_bytes())))


KEYS = sorted({key for field in FIELDS for key in field.keys} | {"grid", "Call stack", "s", "id", "bp", "args"})
PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "X",
        "7",
        "kernel",
        'q"uote',
        "back\\slash",
        "\\",
        '"',
        "a, b",
        '", "b": 1',
        "}]",
        "\x07\n",
        "é",
        "😀",
        "12.5",
        "1e3",
    ]
)
NUMBER = (
    st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.decimals(-1000, 1000, places=3).map(float)
)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN | st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
EVENT = st.dictionaries(st.sampled_from(KEYS) | PLAIN, VALUE, max_size=8).flatmap(
    lambda top: st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=8).map(
        lambda args: {"ph": "X"} | top | ({} if "args" in top else {"args": args})
    )
)
HEADER = st.dictionaries(
    PLAIN.filter(lambda key: key != "traceEvents" and "\\" not in json.dumps(key)), VALUE, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(EVENT | st.integers(0, 9) | st.none(), max_size=6),
    HEADER,
    HEADER,
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
    st.sampled_from([2048, 4096, 1 << 16]),
)
@example([{"ph": "X", "args": {"Dst Rank": 1 << 63}}], {}, {}, None, False, 2048)
@example([{"ph": "X", "name": "a\\", "args": {}}, {"ph": "X", "name": '\\"'}], {}, {}, None, False, 2048)
def test_valid_json_is_read_as_a_strict_parser_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[Any],
    before: dict,
    after: dict,
    indent: Any,
    escaped: bool,
    window: int,
) -> None:
    whole = before | {"traceEvents": events} | {key: value for key, value in after.items() if key not in before}
    text = json.dumps(whole, indent=indent, ensure_ascii=escaped, separators=(",", ":") if indent is None else None)
    if max(len(json.dumps(part)) for part in [*events, *whole.values(), ""]) * 2 > window // 2 - 100:
        window = 1 << 20
    raw = scanned(tmp_path_factory.mktemp("t"), text.encode(), window)
    assert raw.cut is None
    assert {repair.code for repair in raw.repairs} <= {"too_large"}  # numbers beyond 64 bits are valid JSON
    strict = read_strictly(text.encode())
    strict.header = raw.header  # compared apart: numbers are kept as text there
    assert_same(raw, strict)
    assert set(raw.header) == set(whole) - {"traceEvents"}


@pytest.mark.parametrize("indent", [None, 0, 4])
def test_metadata_before_and_after_in_any_layout(tmp_path: Path, indent: int | None) -> None:
    body = {
        "schemaVersion": 1,
        "distributedInfo": {"rank": 3},
        "traceEvents": [event(), event("b")],
        "baseTimeNanoseconds": 5,
    }
    raw = scanned(tmp_path, json.dumps(body, indent=indent).encode())
    compact = scanned(tmp_path, json.dumps(body, separators=(",", ":")).encode())
    assert_same(raw, compact)
    assert raw.header == {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "baseTimeNanoseconds": 5}


def test_the_list_of_events_is_found_at_the_top_only(tmp_path: Path) -> None:
    text = '{"note": "\\"traceEvents\\": [", "inner": {"traceEvents": [{"ph": "X", "name": "no"}]}, "traceEvents": ['
    raw = scanned(tmp_path, (text + json.dumps(event("yes")) + "]}").encode())
    assert texts(raw, "name") == ["yes"] and raw.header["note"] == '"traceEvents": ['


def test_files_much_longer_than_the_window(tmp_path: Path) -> None:
    body = {
        "traceEvents": [
            event(f"name {i % 100}", ts=i, args={"correlation": i, "deep": [{"x": "y" * 50}] * 5}) for i in range(3000)
        ]
    }
    data = json.dumps(body).encode()
    raw = scanned(tmp_path, data, window=4096)
    assert_same(raw, read_strictly(data))
    assert raw.repairs == [] and raw.columns["correlation"].tolist() == list(range(3000))


# -- numbers -----------------------------------------------------------------------------------------------------------

NUMBERS_AS_TEXT = [
    "0", "-0", "7", "-7", "12.5", "12.3456", "-0.001", "1712195495505582.988", "9223372036854775807", "9223372036854775808",
    "-9223372036854775807", "9223372036854775.807", "9223372036854775.808", "9223372036854776", "9007199254740993",
    "1e0000000003", "1e-4000000", "1e99999999999",
    "1e3", "1.5E-2", "12e+2", "5e-4", "1e30", "0e99999", "123456789012345678e-3", "99999999999999999999",
    "99999999999999999999e-5", "nan", "", "-", "1e", "0x10", "1 2", " 5 ", "5.", "+5", "1_0",
]  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS_AS_TEXT)
def test_numbers_are_exact(text: str) -> None:
    data = np.frombuffer(text.encode() + b"#", np.uint8)
    assert number(data, 0, len(text), True) == exact_ns(text)
    assert number(data, 0, len(text), False) == exact_integer(text)


IDS_AS_TEXT = [
    *NUMBERS_AS_TEXT, "9223372036854775809", "18446744073709551613", "18446744073709551614", "18446744073709551615",
    "18446744073709551616", "18446744073709551620", "99999999999999999999", "09223372036854775808", "00000000000000000000017",
    " 18446744073709551000\t", "1844674407370955161x", "18446744073709551613.0", "-9223372036854775808",
]  # fmt: skip


@pytest.mark.parametrize("text", IDS_AS_TEXT)
def test_ids_are_exact(text: str) -> None:
    data = np.frombuffer(text.encode() + b"#", np.uint8)
    assert identity(data, 0, len(text)) == exact_id(text)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_ids_of_64_bits_are_told_apart(one: int, other: int) -> None:
    """But the last two, which say that there is none, and 2^63 itself is not taken for missing."""
    same = one == other or (exact_id(str(one)) in (0, -1) and exact_id(str(other)) in (0, -1))
    assert (exact_id(str(one)) == exact_id(str(other))) == (one == other) or same
    assert exact_id(str(one)) != MISSING


@settings(max_examples=500, deadline=None)
@given(st.integers(-(10**15), 10**15), st.integers(0, 999), st.integers(0, 10**6))
def test_nanoseconds_come_from_the_decimal_text(whole: int, thousandths: int, below: int) -> None:
    sign = "-" if whole < 0 else ""
    text = f"{sign}{abs(whole)}.{thousandths:03d}{below}"
    value = abs(whole) * 1000 + thousandths
    assert exact_ns(text) == (-value if sign else value)
    data = np.frombuffer(text.encode(), np.uint8)
    assert number(data, 0, len(text), True) == exact_ns(text)
    assert math.isclose(exact_ns(text) / 1000, float(text), abs_tol=0.002)


# -- what a strict parser throws away ----------------------------------------------------------------------------------


def test_a_raw_quote_in_a_name(tmp_path: Path) -> None:
    data = json.dumps({"traceEvents": [event(), event("q#uote"), event("b")]}).replace("#", '"').encode()
    raw = scanned(tmp_path, data)
    assert texts(raw, "name") == ["a", 'q"uote', "b"] and repairs(raw) == {"raw_quote": 1}
    assert data[raw.repairs[0].offset - 1 :].startswith(b'"q"uote"')


@pytest.mark.parametrize(
    "name",
    [
        '"',
        '""',
        'a"',
        '"a',
        'say "hi", there',
        'two", "of',
        'f("x", 3)',
        '"}',
        'a"} b',
        'x":y',
        '", "ts": 5, "',
        'a", b',
    ],
)
def test_raw_quotes_of_all_kinds_lose_no_other_event(tmp_path: Path, name: str) -> None:
    events = [event(), event("#"), event("b"), event("c")]
    raw = scanned(tmp_path, json.dumps({"traceEvents": events}).replace("#", name).encode())
    found = texts(raw, "name")
    assert found[0] == "a" and found[-2:] == ["b", "c"] and raw.cut is None
    assert sum(repairs(raw).values()) >= 1 or name == '", "ts": 5, "'
    if name not in ('", "ts": 5, "', '"}'):
        assert found == ["a", name, "b", "c"] and raw.columns["ts"].tolist() == [1500] * 4


@pytest.mark.parametrize(
    "value", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity", "-Infinity", "N/A", "", "None", "not known"]
)
@pytest.mark.parametrize("field", ["dur", "correlation", "dtype", "memory bandwidth (GB/s)"])
def test_values_that_are_none_become_null(tmp_path: Path, value: str, field: str) -> None:
    one = event(
        "odd", args={"stream": 7, "correlation": 5, "dtype": "Float", "memory bandwidth (GB/s)": 3, "grid": [1]}
    )
    place = one if field == "dur" else one["args"]
    place[field] = "#"
    raw = scanned(tmp_path, json.dumps([event(), one, event("b")]).replace('"#"', value).encode())
    assert texts(raw, "name") == ["a", "odd", "b"] and repairs(raw) == {"unreadable_value": 1}
    assert raw.columns["dur"].tolist() == [2000, MISSING if field == "dur" else 2000, 2000]
    assert raw.columns["correlation"][1] == (MISSING if field == "correlation" else 5)
    assert texts(raw, "dtype")[1] == (None if field == "dtype" else "Float")
    assert raw.columns["stream"].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("written", "read", "code"),
    [
        (b"a\x01b", "a\x01b", "control_character"),
        (b"tab\there", "tab\there", "control_character"),
        (rb"C:\Users\x", "C:\\Users\\x", "unknown_escape"),
        (b"bad \xff byte", "bad \ufffd byte", "bad_encoding"),
        (rb"half \ud800 pair", "half \ufffd pair", "bad_encoding"),
    ],
)
def test_odd_strings_are_kept_and_counted(tmp_path: Path, written: bytes, read: str, code: str) -> None:
    data = json.dumps({"traceEvents": [event(), event("#"), event("#"), event("b")]}).encode().replace(b"#", written)
    raw = scanned(tmp_path, data)
    assert texts(raw, "name") == ["a", read, read, "b"]
    assert repairs(raw) == {code: 2} and data[raw.repairs[0].offset :].startswith(written)


def test_pairs_of_surrogates_are_characters() -> None:
    assert decode_text(rb"\ud83d\ude00 \u00e9 \n\\x") == ("\U0001f600 \u00e9 \n\\x", None)


def test_commas_keys_and_args_that_are_not_as_they_should_be(tmp_path: Path) -> None:
    text = """\ufeff[{"ph":"X","name":"a","ts":1,"ts":2,"args":{"stream":1},"args":{"correlation":5,},},
        {"ph":"X","name":"b","args":"none"},, {"ph":"X","name":"c","args":null}, {"ph":"X","ts":4 "name":"d"},]"""
    raw = scanned(tmp_path, text.encode())
    assert texts(raw, "name") == ["a", "b", "c", "d"] and raw.cut is None
    assert raw.columns["ts"].tolist() == [2000, MISSING, MISSING, 4000]
    assert raw.columns["stream"][0] == MISSING and raw.columns["correlation"][0] == 5
    assert repairs(raw)["spare_comma"] == 4


def test_an_event_that_makes_no_sense_is_left_out_alone(tmp_path: Path) -> None:
    good = [json.dumps(event(name)) for name in "abc"]
    text = (
        '{"traceEvents": ['
        + ", ".join([good[0], '{"ph": "X" [}, "x"', good[1], '{7: "x"}', good[2]])
        + '], "after": 1}'
    )
    raw = scanned(tmp_path, text.encode())
    assert texts(raw, "name") == ["a", "b", "c"] and repairs(raw)["lost_event"] == 2
    assert raw.header == {"after": 1} and raw.cut is None
    assert raw.repairs[0].offset == text.index('{"ph": "X" [')


def test_an_event_longer_than_any_is_left_out(tmp_path: Path) -> None:
    huge = event("huge", args={"Call stack": "x" * 9000, "stream": 7})
    raw = scanned(tmp_path, json.dumps({"traceEvents": [event(), huge, event("b")], "after": 1}).encode(), window=8192)
    assert texts(raw, "name") == ["a", "b"] and repairs(raw) == {"long_event": 1} and raw.header == {"after": 1}


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_ends_anywhere_keeps_what_came_before(tmp_path: Path, compressed: bool) -> None:
    data = json.dumps(
        {"distributedInfo": {"rank": 2}, "traceEvents": [event("a"), event("b"), event("c")], "after": 1}
    ).encode()
    first = data.index(b"{", data.index(b"traceEvents"))
    ends = [data.index(b"}}", first) + 2]
    for _ in range(2):
        ends.append(data.index(b"}}", ends[-1]) + 2)
    close = data.index(b"]", ends[-1])
    for size in range(first, len(data), 11 if compressed else 3):
        part = gzip.compress(data[:size]) if compressed else data[:size]
        raw = scanned(tmp_path, part)
        assert texts(raw, "name") == list("abc")[: sum(end <= size for end in ends)], size
        assert (raw.cut is None) == (size > close), size
        assert repairs(raw) == {} and raw.header["distributedInfo"] == {"rank": 2}
        if size <= close:
            assert raw.cut_offset <= size


def test_a_compressed_file_cut_in_the_middle(tmp_path: Path) -> None:
    data = json.dumps([event(f"name {i}", ts=i) for i in range(2000)]).encode()
    packed = gzip.compress(data)
    raw = scanned(tmp_path, packed[: len(packed) // 2])
    assert 500 < raw.rows < 1500 and raw.cut is not None and "compressed" in raw.cut
    damaged = bytearray(packed)
    damaged[len(packed) // 2 : len(packed) // 2 + 40] = bytes(40)
    raw = scanned(tmp_path, bytes(damaged))
    assert 500 < raw.rows < 2000 and raw.cut is not None


def test_the_string_table_grows_and_then_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FIRST_TEXTS", 16)
    monkeypatch.setattr(reading, "MAX_TEXTS", 256)
    data = json.dumps([event(f"name {i}", ts=i) for i in range(1000)]).encode()
    raw = scanned(tmp_path, data)
    names = texts(raw, "name")
    assert names[:200] == [f"name {i}" for i in range(200)] and names[-1] == "(one of too many names)"
    assert raw.columns["ts"].tolist() == [1000 * i for i in range(1000)] and raw.rows == 1000
    assert repairs(raw)["too_many_texts"] == names.count("(one of too many names)")


def test_long_strings_are_cut(tmp_path: Path) -> None:
    raw = scanned(tmp_path, json.dumps([event("é" * 50000)], ensure_ascii=False).encode(), window=1 << 20)
    [name] = texts(raw, "name")
    assert name == "é" * (MAX_TEXT // 2) and repairs(raw) == {"long_text": 1}


HEAD, TAIL = '{"traceEvents": [', '], "rank": 3}'
CLOSED_TOO_EARLY = {
    "a bracket between events": HEAD + "{first}], {second}, {third}" + TAIL,
    "a bracket in a damaged event": HEAD
    + '{first}, {"ph": "X", "name": "b", "ts": 2, "args": }], "bp": "e"}, {third}'
    + TAIL,
    "a second list": HEAD + '{first}], "x": 1, "traceEvents": [{second}, {third}' + TAIL,
}


@pytest.mark.parametrize("what", CLOSED_TOO_EARLY)
def test_a_list_that_closes_too_early_loses_no_later_event(tmp_path: Path, what: str) -> None:
    text = CLOSED_TOO_EARLY[what]
    for name, ts in (("first", 1), ("second", 2), ("third", 3)):
        text = text.replace(f"{{{name}}}", json.dumps(event(name, ts=ts)))
    raw = scanned(tmp_path, text.encode())
    names = texts(raw, "name")
    assert names[0] == "first" and names[-1] == "third" and raw.cut is None and raw.header["rank"] == 3
    assert set(repairs(raw)) & {"spare_bracket", "second_list"}
    assert ("second" in names) == ("damaged" not in what)


def test_a_value_that_swallows_events_is_told_of(tmp_path: Path) -> None:
    good = json.dumps(event())
    text = (
        HEAD + good + ', {"ph": "X", "name": "b", "args": {"x": [[, ' + ", ".join([good] * 3) + "]]}}, " + good + TAIL
    )
    raw = scanned(tmp_path, text.encode())
    assert repairs(raw)["swallowed_event"] == 1 and raw.rows == 3
    nested = {"x": [{"ph": None}, {"ph": "X", "y": [[], {}, -1.5e3, 'a "b"']}], "z": {}}
    raw = scanned(tmp_path, json.dumps([event(args=nested), event()]).encode())
    assert repairs(raw) == {} and raw.rows == 2  # valid JSON says so itself


def test_a_thread_keeps_the_name_that_one_row_gives(tmp_path: Path) -> None:
    rows = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": arguments}
        for arguments in ({"name": "main"}, {"label": "x"}, {"name": ""})
    ]
    raw = scanned(tmp_path, json.dumps([*rows, event()]).encode())
    assert raw.thread_names == {("1", "2"): "main"}


# -- anything at all ---------------------------------------------------------------------------------------------------

BASE = json.dumps(
    {
        "schemaVersion": 1,
        "traceEvents": [event(name, args={"stream": 7, "Input": [["x"], {}]}) for name in "abcd"],
        "z": 1,
    }
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(BASE)),
            st.integers(0, 12),
            st.sampled_from(
                [b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\xff", b"\x00", b"NaN", b'"ph":"X"', b"}, {"]
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([512, 1024, 1 << 16]),
)
def test_damage_anywhere_neither_crashes_nor_hangs(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, bytes]], window: int
) -> None:
    data = BASE.encode()
    for at, length, new in edits:
        data = data[:at] + new + data[at + length :]
    raw = scanned(tmp_path_factory.mktemp("t"), data, window)
    assert all(len(raw.columns[name]) == raw.rows for name in NUMBERS)
    try:
        strict = read_strictly(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    assert raw.rows >= strict.rows or window < 1 << 16


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    [
        b'"',
        b'"x',
        b"{",
        b"[",
        b"\\",
        b'{"a":',
        b'{"ph":"X","name":"abc, ',
        b'{"ph":"X","ts":"abc, "dur":',
        b'{"ph":"X" [},',
        b"}, {",
    ],
)
def test_no_file_takes_longer_than_a_few_times_its_length(
    tmp_path: Path, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part leaves the scanner in the dark up to the end: scanned anew from every part, that would take hours."""
    monkeypatch.setattr(reading, "WASTE_LIMIT", 1 << 20)
    good = json.dumps(event("good")).encode()
    raw = scanned(tmp_path, b'{"traceEvents": [' + good + b", " + part * 200_000 + b"]}", window=8 << 20)
    assert "good" in texts(raw, "name")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"[", b'{"traceEvents": [', b"\x1f\x8b"]))
def test_any_bytes_end(tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes) -> None:
    raw = scanned(tmp_path_factory.mktemp("t"), head + data, 512)
    assert raw.rows >= 0
