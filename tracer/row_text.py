"""Rows as the text of a Chrome trace (docs/trace_format.md): strict JSON, built from parts that are made once a call site.

A row costs a few dictionary look-ups and one formatting; all that is static (names, sizes, groups) is text already.
"""

from __future__ import annotations

import math
import re

from stepscope.tracer.rows import (
    BeginRow,
    CommRow,
    CommSite,
    ComputeRow,
    Context,
    CopyRow,
    CounterRow,
    HostRow,
    Row,
    StepRow,
    WaitRow,
    wait_name,
)
from stepscope.tracer.schema import KINETO_COLLECTIVES, STEP_ANNOTATION, Operation

HOST_THREAD = 1
COMPUTE_STREAM = 7
FIRST_COMM_STREAM = 20

COST_NAMES = Operation._fields[-6:]
POINT_TO_POINT = ("send", "receive", "ring_shift")
ROOTED = ("broadcast", "reduce", "gather", "scatter")

_UNCLEAN = re.compile('["\\\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_CACHE_LIMIT = 50_000
"""Entries after which a cache starts anew: only names that change all the time get there."""


def clean(name: str) -> str:
    """The name without what breaks JSON or its readers: quotes, backslashes, control characters, lone surrogates."""
    name = str(name)
    return _UNCLEAN.sub(_replacement, name) if _UNCLEAN.search(name) else name


def _replacement(match: re.Match[str]) -> str:
    character = match.group()
    if character == '"':
        return "'"
    if character == "\\":
        return "/"
    return "\ufffd" if "\ud800" <= character <= "\udfff" else " "


def microseconds(ns: int) -> str:
    """Integer nanoseconds as decimal microseconds with exactly three decimals: exact."""
    if ns < 0:
        return "-" + microseconds(-ns)
    return f"{ns // 1000}.{ns % 1000:03d}"


class RowText:
    """Formats the rows of one rank. Times are absolute and written relative to `base_ns`."""

    def __init__(self, rank: int, base_ns: int) -> None:
        self._rank, self._base = rank, base_ns
        self._streams: dict[str, int] = {}
        self._where: dict[Context, str] = {}
        self._compute: dict[Context, tuple[str, str]] = {}
        self._waits: dict[str, str] = {}
        self._flows: dict[tuple[str, int], str] = {}
        self._comm: dict[CommSite, tuple[str, str]] = {}

    def texts(self, row: Row) -> list[str]:
        """The JSON objects of one row: itself, its flow events, the name of a stream that is seen for the first time."""
        if isinstance(row, ComputeRow):
            return [self._compute_text(row)]
        if isinstance(row, CommRow):
            return self._comm_texts(row)
        if isinstance(row, WaitRow):
            return self._wait_texts(row)
        if isinstance(row, CopyRow):
            return [self._copy_text(row)]
        if isinstance(row, CounterRow):
            return self._counter_texts(row)
        if isinstance(row, BeginRow):
            head = self._head("i", "user_annotation", "step begins", HOST_THREAD)
            return [f'{head}{self._ts(row.time_ns)},"s":"t","args":{{"step":{int(row.step)}}}}}']
        return [self._host_text(row)]

    def process_texts(self, labels: str) -> list[str]:
        """The rows that name the process (the rank) and its first two lanes."""
        pid = self._rank
        name = f"rank {pid}" + (f" ({clean(labels)})" if labels else "")
        return [
            f'{{"ph":"M","name":"process_name","pid":{pid},"tid":0,"args":{{"name":"{name}"}}}}',
            f'{{"ph":"M","name":"process_sort_index","pid":{pid},"tid":0,"args":{{"sort_index":{pid}}}}}',
            *self._thread_texts(HOST_THREAD, "host"),
            *self._thread_texts(COMPUTE_STREAM, "compute"),
        ]

    # -- one kind of row each ----------------------------------------------------------------------------------------

    def _compute_text(self, row: ComputeRow) -> str:
        parts = self._compute.get(row.context)
        if parts is None:
            head = self._head("X", "kernel", row.context[0], COMPUTE_STREAM)
            parts = (head, f',"args":{{"stream":{COMPUTE_STREAM}{self._place(row.context)}')
            _bounded(self._compute)[row.context] = parts
        costs = ""
        if row.costs:
            costs = "".join(f',"{n}":{int(cost)}' for n, cost in zip(COST_NAMES, row.costs, strict=False))
        return f"{parts[0]}{self._span(row.start_ns, row.end_ns)}{parts[1]}{costs}}}}}"

    def _copy_text(self, row: CopyRow) -> str:
        head = self._head("X", "gpu_memcpy", row.name, COMPUTE_STREAM)
        args = f'"stream":{COMPUTE_STREAM}{self._place(row.context)},"bytes":{int(row.bytes)}'
        return f'{head}{self._span(row.start_ns, row.end_ns)},"args":{{{args}}}}}'

    def _comm_texts(self, row: CommRow) -> list[str]:
        stream, texts = self._stream(row.site.stream)
        parts = self._comm.get(row.site)
        if parts is None:
            head = self._head("X", "kernel", row.site.label, stream)
            parts = (head, f',"args":{{"stream":{stream}{self._facts(row.site)}')
            _bounded(self._comm)[row.site] = parts
        issue = row.issue_ns - self._base
        tail = f',"op_id":{row.op_id},"Seq":{row.seq},"issue_ns":{issue}{self._place(row.context)}'
        unfinished = ',"unfinished":1' if row.unfinished else ""
        texts.append(f"{parts[0]}{self._span(row.start_ns, row.end_ns)}{parts[1]}{tail}{unfinished}}}}}")
        # an arrow starts in the last nanosecond of the row that issued: a viewer ties it to the row open at that time
        texts.append(self._flow("s", row.op_id, COMPUTE_STREAM, max(row.issue_ns - 1, self._base)))
        texts.append(self._flow("t", row.op_id, stream, row.start_ns))
        return texts

    def _wait_texts(self, row: WaitRow) -> list[str]:
        head = self._waits.get(row.label)
        if head is None:
            head = self._head("X", "wait", wait_name(row.label), COMPUTE_STREAM)
            _bounded(self._waits)[row.label] = head
        args = f'"waits_for":{row.op_id}{self._place(row.context)}'
        text = f'{head}{self._span(row.start_ns, row.end_ns)},"args":{{{args}}}}}'
        return [text, self._flow("f", row.op_id, COMPUTE_STREAM, max(row.start_ns, row.end_ns - 1))]

    def _counter_texts(self, row: CounterRow) -> list[str]:
        if not math.isfinite(row.value):
            return []
        value = repr(float(row.value)) if isinstance(row.value, float) else f"{int(row.value)}"
        head = self._head("C", "", row.name, HOST_THREAD)
        return [f'{head}{self._ts(row.time_ns)},"args":{{"{clean(row.key) or "value"}":{value}}}}}']

    def _host_text(self, row: HostRow | StepRow) -> str:
        name, args = (row.name, "") if isinstance(row, HostRow) else (f"{STEP_ANNOTATION}{int(row.step)}", "")
        if isinstance(row, StepRow) and row.partial:
            args = '"partial":1'
        head = self._head("X", "user_annotation", name, HOST_THREAD)
        return f'{head}{self._span(row.start_ns, row.end_ns)},"args":{{{args}}}}}'

    # -- parts -------------------------------------------------------------------------------------------------------

    def _head(self, phase: str, category: str, name: str, thread: int) -> str:
        cat = f'"cat":"{category}",' if category else ""
        return f'{{"ph":"{phase}",{cat}"name":"{clean(name)}","pid":{self._rank},"tid":{thread}'

    def _ts(self, time_ns: int) -> str:
        return f',"ts":{microseconds(time_ns - self._base)}'

    def _span(self, start_ns: int, end_ns: int) -> str:
        return f',"ts":{microseconds(start_ns - self._base)},"dur":{microseconds(end_ns - start_ns)}'

    def _flow(self, phase: str, op_id: int, thread: int, time_ns: int) -> str:
        number = (self._rank << 32) | op_id  # unique also when the files of several ranks are shown together
        head = self._flows.get((phase, thread))
        if head is None:
            head = self._head(phase, "communication", "communication", thread)
            head = self._flows[phase, thread] = head + (',"bp":"e"' if phase == "f" else "")
        return f'{head}{self._ts(time_ns)},"id":{number}}}'

    def _place(self, context: Context) -> str:
        text = self._where.get(context)
        if text is None:
            _, layer, phase, stage, chunk, microbatch = context
            numbers = {"stage": stage, "chunk": chunk, "microbatch": microbatch, "layer": layer}
            parts = [f',"{name}":{int(number)}' for name, number in numbers.items() if number >= 0]
            text = "".join([f',"phase":"{clean(phase)}"', *parts])
            _bounded(self._where)[context] = text
        return text

    def _facts(self, site: CommSite) -> str:
        """The static arguments of a communication row."""
        ranks = ", ".join(str(int(rank)) for rank in site.ranks)
        sizes = {"In msg nelems": site.in_elements, "Out msg nelems": site.out_elements, "bytes": site.bytes}
        facts = (
            f',"axis":"{clean(site.axis)}","strategy":"{clean(site.strategy)}"'
            f',"Collective name":"{clean(KINETO_COLLECTIVES.get(site.collective, site.collective))}"'
            + (f',"dtype":"{clean(site.dtype)}"' if site.dtype else "")
            + "".join([f',"{name}":{int(size)}' for name, size in sizes.items() if size >= 0])
            + f',"Group size":{len(site.ranks)},"Process Group Name":"{clean(site.group)}"'
            f',"Process Group Description":"mesh_{clean(site.axis)}","Process Group Ranks":"[{ranks}]"'
        )
        if site.collective in POINT_TO_POINT:
            source, destination = self._ends(site)
            return f'{facts},"Src Rank":{int(source)},"Dst Rank":{int(destination)}'
        if site.collective in ROOTED:
            return f'{facts},"Root Rank":{int(site.peer)}'
        return facts

    def _ends(self, site: CommSite) -> tuple[int, int]:
        """Global ranks that a point-to-point row names as source and destination."""
        if site.collective == "send":
            return self._rank, site.peer
        if site.collective == "receive":
            return site.peer, self._rank
        return site.peer_from, site.peer

    def _stream(self, name: str) -> tuple[int, list[str]]:
        """The stream's number, and the rows that name it when it is new."""
        number = self._streams.get(name)
        if number is not None:
            return number, []
        number = self._streams[name] = FIRST_COMM_STREAM + len(self._streams)
        return number, self._thread_texts(number, name)

    def _thread_texts(self, thread: int, name: str) -> list[str]:
        where = f'"pid":{self._rank},"tid":{thread}'
        return [
            f'{{"ph":"M","name":"thread_name",{where},"args":{{"name":"{clean(name)}"}}}}',
            f'{{"ph":"M","name":"thread_sort_index",{where},"args":{{"sort_index":{thread}}}}}',
        ]


def _bounded(cache: dict) -> dict:
    if len(cache) >= _CACHE_LIMIT:
        cache.clear()
    return cache
