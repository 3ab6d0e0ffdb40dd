"""What our rank files say about steps that did not end: the step in flight when a rank was killed or stopped.

Our files are in step order and note the begin of each step at once, so that a file that ends early vouches for every
step but the one it ends in.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.ingest.raw import MISSING, Question, Raw, own
from stepscope.analysis.run import Columns
from stepscope.analysis.units import counted
from stepscope.tracer.schema import STEP_ANNOTATION

BEGIN_NAME = "step begins"
"""Name of the instant that the recorder writes at the begin of each step."""

_Place = tuple[int, int, int, int]
"""A row: its time, its chunk, its index in it, and a number that it carries."""


class OpenSteps:
    """The begins and annotations of steps in one of our files, chunk by chunk.

    The annotation of a step is written when the step ends. If the file was cut before, the step's begin becomes its
    annotation, up to the file's last row. A file that was cut between two steps may have lost rows of the last one.
    """

    def __init__(self) -> None:
        self._is_begin = Question(lambda name: name == BEGIN_NAME, False, bool)
        self._is_step = Question(lambda name: name.startswith(STEP_ANNOTATION), False, bool)
        self._begins: dict[int, np.ndarray] = {}  # chunk -> rows
        self._last_begin: _Place | None = None  # with the step that begins
        self._last_step: _Place | None = None
        self._last_end: _Place | None = None
        self._titles: set[int] = set()  # codes of the names of annotated steps
        self._open_steps = self._open_comm = 0
        self._marked: _Place | None = None
        self._opened: tuple[_Place, int, int] | None = None  # the begin that becomes an annotation: name, end

    def add(self, number: int, chunk: Raw) -> None:
        """The rows of one chunk."""
        columns = chunk.columns
        self._open_steps += int((columns["partial"] > 0).sum())
        self._open_comm += int((columns["unfinished"] > 0).sum())
        begins = self._is_begin(chunk.strings, columns["name"]) & (columns["step"] != MISSING)
        self._begins[number] = np.flatnonzero(begins)
        steps = np.flatnonzero(self._is_step(chunk.strings, columns["name"]))
        self._titles.update(columns["name"][steps].tolist())
        self._last_begin = _later(self._last_begin, columns["ts"], self._begins[number], number, columns["step"])
        self._last_step = _later(self._last_step, columns["ts"], steps, number, columns["step"])
        ends = columns["ts"] + columns["dur"]
        self._last_end = _later(self._last_end, ends, np.arange(len(ends)), number, columns["step"])

    def settle(self, beside: Raw, note: Note) -> None:
        """The whole file was seen: which step it ends in, if it was cut. May add to the file's strings."""
        if self._open_steps or self._open_comm:
            under_way = counted(self._open_comm, "communication was", "communications were")
            note(
                "stopped_recording",
                f"the recording ended within a step ({under_way} under way): it is partial",
                touches=("ledger", "summary"),
            )
        if beside.cut is None or self._last_end is None:
            return
        self._marked = self._last_step or self._last_end
        if self._last_begin is not None:
            title = f"{STEP_ANNOTATION}{self._last_begin[3]}"
            if title not in {beside.strings[code] for code in self._titles}:
                beside.strings.append(title)
                self._marked = self._last_begin
                self._opened = (self._last_begin, len(beside.strings) - 1, self._last_end[0])

    def apply(self, number: int, columns: Columns) -> np.ndarray | None:
        """Mark the step in flight, in place; which rows are begins, and so no rows (None: none)."""
        begins = self._begins.get(number, np.zeros(0, np.int64))
        if self._marked is not None and self._marked[1] == number:
            columns["partial"] = columns["partial"].copy()
            columns["partial"][self._marked[2]] = 1
        if self._opened is not None and self._opened[0][1] == number:
            (start, _, row, _), title, end = self._opened
            own(columns, "name")[row] = title
            own(columns, "dur")[row] = end - start
            begins = begins[begins != row]
        if not len(begins):
            return None
        rows = np.zeros(len(columns["ts"]), bool)
        rows[begins] = True
        return rows


def _later(
    known: _Place | None, times: np.ndarray, rows: np.ndarray, number: int, carried: np.ndarray
) -> _Place | None:
    """The later one of a known row and the latest of these rows (the earlier one of two at the same time)."""
    if not len(rows):
        return known
    row = int(rows[np.argmax(times[rows])])
    if known is not None and known[0] >= times[row]:
        return known
    return int(times[row]), number, row, int(carried[row])
