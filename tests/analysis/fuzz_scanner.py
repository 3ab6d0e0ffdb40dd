"""Real traces, damaged at random, through the byte scanner: no crash, no hang, no event lost that a strict parser keeps.

    python tests/analysis/fuzz_scanner.py TRACE.json.gz... --seconds 1200     by hand, for as long as one likes
    python tests/analysis/fuzz_scanner.py TRACE.json.gz... --seed 17          one case again, its bytes into --keep

A case is a stretch of a real file's events with its head and tail, and a few edits. It is made from its number alone, so
that every failure can be had again. Three kinds:

* `valid`: still strict JSON (odd values, keys given twice, nested arguments): all fields of all events as Python's strict
  parser reads them;
* `known`: what profilers are known to write (raw quotes, NaN, nothing after a colon, raw control characters, broken
  characters and escapes, spare commas, an end cut off): every event is there, those that no edit touched in all fields;
* `damage`: anything anywhere. Where a strict parser still reads it, as it does; else events may be lost, but never those
  far from the damage without a word: a repair or a cut file says so.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from strict_reader import assert_same, read_strictly

from stepscope.analysis.ingest import reading
from stepscope.analysis.ingest.raw import NUMBERS, TEXTS, Raw

HANG_S = 60
"""A case takes milliseconds: one that takes this long hangs."""

KINDS = ("damage", "valid", "known")

TOKENS = (
    *('"', '\\"', "\\", "\\\\", "{", "}", "[", "]", ",", ":", "}, {", '"}', '", "', '": "', "}]", "]}", "[[", "}}"),
    *("\x00", "\x01", "\t", "\n", "é", "\U0001f600", "\u2028", "\ufeff", "\\ud800", "\\u00e9", "\\x", "\\u12"),
    *("NaN", "-nan", "Infinity", "-Infinity", "inf", "N/A", "null", "true", "1e999", "-", "0x1f", "1_000", "٣"),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "1" * 400),
    *("1.7976931348623157e308", "0.000000000000000000001", "1e-400", "00012", "+5", ".5", "5."),
    *('"args": {', '"ph": "X"', '{"ph": "X"', '"traceEvents": [', '"name": "', '"ts": ', '{"a": [{"b": {"c": []}}]}'),
)
BYTES = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f", b"\x00", b"\x80")

VALID_VALUES = (
    *(
        "null",
        "true",
        "[]",
        "{}",
        '""',
        "0",
        "-7",
        "1e3",
        "1E-3",
        "12.3456",
        "9007199254740993",
        "18446744073709551615",
        "9223372036854775808",
        "-9223372036854775808",
        "18446744073709551613",
        "18446744073709551616",
    ),
    *(
        '"NaN"',
        '"12.5"',
        '"\\ud83d\\ude00"',
        '"\\\\"',
        '"a\\"b"',
        '", \\"ts\\": 5"',
        '"}, {"',
        '"]}"',
        '"\\u0000"',
        '"7"',
    ),
    *(
        '{"name": {"ts": [1, {"args": {}}]}}',
        '[[[["}"]]], {"]": "["}]',
        '{"args": {"stream": 9}}',
        '"' + "x" * 3000 + '"',
    ),
)
IN_TEXT = ('"', '""', '"x', "\\x", "\\U", "\\ud800", "\x01", "\t", "\n", "\x7f", 'a "b" c', "\U0001f600", "\u2028")
NO_VALUES = ("NaN", "-nan", "nan", "inf", "-inf", "Infinity", "-Infinity", "N/A", "")
_VALUE = re.compile(r'": ?("(?:[^"\\]|\\.)*"|-?[0-9][^,}\]\s]*)')

Edit = tuple[int, int, bytes]
"""Place, length and what comes instead."""


@dataclass(frozen=True)
class Source:
    """One real trace: what comes before its first event, its events, and what comes after the last."""

    head: bytes
    events: tuple[bytes, ...]
    tail: bytes


@dataclass(frozen=True)
class Case:
    """One damaged file, and which of its events no edit came near."""

    kind: str
    data: bytes
    untouched: tuple[bytes, ...]
    whole: tuple[bytes, ...]  # all that were complete before the edits
    window: int


@lru_cache(maxsize=32)
def load(path: Path) -> Source:
    """Split a strict trace into its events."""
    text = gzip.decompress(path.read_bytes()).decode()
    begin = text.index("[", text.index('"traceEvents"')) + 1
    decoder, events, at = json.JSONDecoder(), [], begin
    while True:
        at += len(text[at : at + 200]) - len(text[at : at + 200].lstrip(" \t\r\n,"))
        if text[at] == "]":
            break
        _, end = decoder.raw_decode(text, at)
        events.append(text[at:end].encode())
        at = end
    return Source(text[:begin].encode(), tuple(events), text[at:].encode())


def make(sources: list[Path], seed: int) -> Case:
    """The case of this number."""
    chance = random.Random(seed)
    source = load(chance.choice(sources))
    count = chance.choice((1, 2, 3, 8, 30, 120))
    first = chance.randrange(max(1, len(source.events) - count))
    events = list(source.events[first : first + count])
    if chance.random() < 0.3:
        chance.shuffle(events)
    join = chance.choice((b",\n  ", b", ", b",", b"\r\n,\t"))
    kind = chance.choice(KINDS)
    longest = max(map(len, (source.head, source.tail, *events)))
    window = (1 << (4 * longest).bit_length()) * chance.choice((1, 1, 4, 64))
    if kind == "valid":
        events = [changed_within(chance, event) for event in events]
        return Case(kind, source.head + join.join(events) + source.tail, (), (), window * 2)
    places, at = [], len(source.head)
    for event in events:
        places.append((at, at + len(event)))
        at += len(event) + len(join)
    data = source.head + join.join(events) + source.tail
    make_edit = an_edit if kind == "damage" else a_known_edit
    edits = without_overlaps([make_edit(chance, data, places) for _ in range(chance.choice((1, 1, 2, 4)))])
    near = 1 if kind == "damage" else 0
    hit = [any(p <= b and a <= p + size for p, size, _ in edits) for a, b in places]
    safe = [not any(hit[max(0, i - near) : i + near + 1]) for i in range(len(events))]
    untouched = tuple(event for event, is_safe in zip(events, safe, strict=True) if is_safe)
    if kind == "known" and chance.random() < 0.1:  # the end is missing from the last event on
        end = chance.randrange(*places[-1])
        edits = [edit for edit in edits if edit[0] + edit[1] < places[-1][0]] + [(end, len(data) - end, b"")]
        untouched = tuple(event for event, is_safe in zip(events[:-1], safe, strict=False) if is_safe)
        events = events[:-1]
    return Case(kind, applied(data, edits), untouched, tuple(events), window)


def without_overlaps(edits: list[Edit]) -> list[Edit]:
    """Those that do not reach into one another, by place."""
    kept: list[Edit] = []
    for edit in sorted(edits):
        if not kept or kept[-1][0] + kept[-1][1] < edit[0]:
            kept.append(edit)
    return kept


def a_known_edit(chance: random.Random, data: bytes, places: list[tuple[int, int]]) -> Edit:
    """What some profiler has written: an odd text, a value that is none, or a comma too many."""
    a, b = chance.choice(places)
    event = data[a:b].decode("latin-1")
    arguments = event.find('"args"')
    found = [one for one in _VALUE.finditer(event) if not event[: one.start()].endswith('"ph')]
    texts = [one for one in found if event[one.start(1)] == '"' and one.start(1) < max(arguments, 0) + len(event)]
    numbers = [one for one in found if event[one.start(1)] != '"']
    if numbers and chance.random() < 0.4:
        one = chance.choice(numbers)
        return a + one.start(1), one.end(1) - one.start(1), chance.choice(NO_VALUES).encode()
    if texts and chance.random() < 0.8:
        one = chance.choice(texts)
        at = chance.randint(one.start(1) + 1, one.end(1) - 1)
        new = chance.choice([*map(str.encode, IN_TEXT[:5]), *(text.encode() for text in IN_TEXT[5:]), *BYTES])
        decides = event[at : one.end(1) - 1].lstrip()[:1]
        if not (decides and decides in ",}") and "\\" not in event[max(0, at - 1) : at + 1]:
            return a + at, 0, new
    return b - 1, 0, b","


def an_edit(chance: random.Random, data: bytes, places: list[tuple[int, int]]) -> Edit:
    """Damage of one kind somewhere, mostly among the events."""
    a, b = chance.choice(places)
    at = chance.randrange(a, b) if chance.random() < 0.9 else chance.randrange(len(data))
    what = chance.randrange(9)
    if what == 0:  # a bit
        return at, 1, bytes([data[at] ^ (1 << chance.randrange(8))])
    if what == 1:  # a byte
        return at, 1, bytes([chance.randrange(256)])
    if what == 2:  # a hole
        return at, chance.choice((1, 2, 5, 20, 200)), b""
    if what == 3:  # a stretch twice
        size = chance.choice((1, 3, 20, 300))
        return at, 0, data[at : at + size]
    if what == 4:  # from elsewhere
        other, size = chance.randrange(len(data)), chance.choice((1, 4, 30, 300))
        return at, chance.choice((0, size)), data[other : other + size]
    if what == 5:
        return at, chance.choice((0, 0, 1, 3)), chance.choice(BYTES)
    if what == 6:  # the value of a key
        found = list(_VALUE.finditer(data[a:b].decode("latin-1")))
        if found:
            one = chance.choice(found)
            return a + one.start(1), one.end(1) - one.start(1), chance.choice(TOKENS).encode()
    return at, chance.choice((0, 0, 0, 1, 4)), chance.choice(TOKENS).encode("utf-8", "surrogatepass")


def changed_within(chance: random.Random, event: bytes) -> bytes:
    """The event with some values replaced, a key added or given twice: still strict JSON."""
    text = event.decode()
    for one in reversed(list(_VALUE.finditer(text))):
        if chance.random() < 0.1 and not text[: one.start()].endswith('"ph'):
            text = text[: one.start(1)] + chance.choice(VALID_VALUES) + text[one.end(1) :]
    if chance.random() < 0.2:
        key = chance.choice(("args", "name", "ts", "", "a\\u0062", "args ", "ph"))
        value = '"X"' if key == "ph" else chance.choice(VALID_VALUES)
        text = f'{{"{key}"{chance.choice((":", " : "))}{value}, {text[1:]}'
    try:
        json.loads(text)
    except ValueError:  # a colon within a text was taken for a key's
        return event
    return text.encode()


def applied(data: bytes, edits: list[Edit]) -> bytes:
    """The data with the edits made, the last place first."""
    for at, size, new in sorted(edits, reverse=True):
        data = data[:at] + new + data[at + size :]
    return data


def rows_of(raw: Raw) -> Counter[tuple[object, ...]]:
    """All events by all their fields."""
    strings = [*raw.strings, ""]
    columns = [raw.columns[name].tolist() for name in NUMBERS]
    columns += [[strings[code] for code in raw.columns[name].tolist()] for name in TEXTS if name != "group_ranks"]
    return Counter(zip(*columns, strict=True))


def check(case: Case) -> str:
    """What came of it, in a word; AssertionError says what is wrong."""
    raw = reading.read_trace(reading.BytesInMemory(case.data), case.window)
    said = bool(raw.repairs) or raw.cut is not None
    try:
        strict = read_strictly(case.data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        strict = None
    capped = {repair.code for repair in raw.repairs} & {"long_event", "long_text"}
    twice = case.data.count(b"traceEvents") > 1  # strict parsers keep the last of two lists, this one both
    if strict is not None and not capped and not twice:
        strict.header = raw.header  # numbers are kept as text there
        assert_same(raw, strict)
        return "strict"
    assert case.kind != "valid" or capped, "valid JSON"
    wanted = rows_of(read_strictly(b'{"traceEvents": [' + b",".join(case.untouched) + b"]}"))
    lost = wanted - rows_of(raw)
    if case.kind == "known":
        assert not lost, f"{lost.total()} of {wanted.total()} untouched events are lost"
        all_events = read_strictly(b'{"traceEvents": [' + b",".join(case.whole) + b"]}").rows
        assert raw.rows >= all_events, f"{all_events - raw.rows} events are lost"
        return "repaired"
    if not lost:
        return "repaired"
    assert said, f"{lost.total()} untouched events are missing, and nothing is said of it"
    return "lost some, said so"


def one(sources: list[Path], seed: int) -> tuple[str, str]:
    """(what came of it, what is wrong)."""
    try:
        return check(make(sources, seed)), ""
    except Exception as error:  # whatever it is, it is what is looked for
        return "wrong", f"{type(error).__name__}: {str(error).strip()[:300]}"


def _worker(sources: list[Path], seed: Synchronized, stop: float, found: multiprocessing.Queue) -> None:
    counts: Counter[str] = Counter()
    while time.monotonic() < stop:
        word, wrong = one(sources, seed.value)
        counts[word] += 1
        if wrong:
            found.put((seed.value, wrong))
        seed.value += 1
    found.put((-1, dict(counts)))


def run(sources: list[Path], seconds: float, first: int = 0) -> tuple[Counter[str], dict[int, str]]:
    """Cases from number `first` on, in a process of its own that is watched; (what came of them, failures by number)."""
    context = multiprocessing.get_context("spawn")
    seed, found = context.Value("q", first), context.Queue()
    stop, counts, failures = time.monotonic() + seconds, Counter[str](), dict[int, str]()
    while time.monotonic() < stop:
        process = context.Process(target=_worker, args=(sources, seed, stop, found))
        process.start()
        last, since = seed.value, time.monotonic()
        while process.is_alive() or not found.empty():
            try:
                number, what = found.get(timeout=1)
            except Exception:  # queue.Empty: nothing yet
                number, what = -2, ""
            if number >= 0:
                failures[number] = what
                print(f"case {number}: {what}", flush=True)
            elif number == -1:
                counts.update(what)
            if seed.value != last:
                last, since = seed.value, time.monotonic()
            elif process.is_alive() and time.monotonic() - since > HANG_S:
                failures[last] = f"no end within {HANG_S} s"
                process.kill()
        process.join()
        if process.exitcode:
            failures.setdefault(seed.value, f"the process ended with {process.exitcode}")
            print(f"case {seed.value}: {failures[seed.value]}", flush=True)
            seed.value += 1
    return counts, failures


def main() -> None:
    """Fuzz, or make one case again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="real Kineto traces (.json.gz)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, help="only this case")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()), help="where the bytes of a case go")
    options = parser.parse_args()
    if options.seed is not None:
        case = make(options.traces, options.seed)
        file = options.keep / f"case-{options.seed}.json"
        file.write_bytes(case.data)
        print(f"{file}: {len(case.data)} bytes, {case.kind}, window {case.window}: {one(options.traces, options.seed)}")
        return
    counts, failures = run(options.traces, options.seconds, options.first)
    print(f"{sum(counts.values())} cases: {dict(counts)}; {len(failures)} failures: {sorted(failures)[:50]}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
