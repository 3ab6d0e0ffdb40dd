"""What our rank files say about steps that did not end: the step in flight when a rank was killed or stopped.

Our files are in step order and note the begin of each step at once, so that a file that ends early vouches for every
step but the one it ends in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stepscope.analysis.ingest.damage import Note
from stepscope.analysis.ingest.raw import MISSING, Raw
from stepscope.analysis.units import counted
from stepscope.tracer.schema import STEP_ANNOTATION

BEGIN_NAME = "step begins"
"""Name of the instant that the recorder writes at the begin of each step."""


def settle_steps(raw: Raw, note: Note) -> Raw:
    """The file's rows without the begin-of-step instants; `partial` is set on the step that the file ends in.

    The annotation of a step is written when the step ends. If the file was cut before, the step's begin becomes its
    annotation, up to the file's last row. A file that was cut between two steps may have lost rows of the last one.
    """
    open_steps, open_comm = raw.columns["partial"] > 0, raw.columns["unfinished"] > 0
    if open_steps.any() or open_comm.any():
        under_way = counted(int(open_comm.sum()), "communication was", "communications were")
        note(
            "stopped_recording",
            f"the recording ended within a step ({under_way} under way): it is partial",
            touches=("ledger", "summary"),
        )
    begins = _named(raw, lambda name: name == BEGIN_NAME) & (raw.columns["step"] != MISSING)
    if raw.cut is None or not raw.rows:
        return raw.take(~begins)
    raw = raw.take(np.arange(raw.rows))  # a copy of the columns: they are changed here
    annotated = _named(raw, lambda name: name.startswith(STEP_ANNOTATION))
    last_begin, last_step = _latest(raw, begins), _latest(raw, annotated)
    if last_begin is not None:
        title = f"{STEP_ANNOTATION}{int(raw.columns['step'][last_begin])}"
        known = {raw.strings[code] for code in raw.columns["name"][annotated].tolist()}
        if title not in known:
            end = int((raw.columns["ts"] + raw.columns["dur"]).max())
            raw.strings.append(title)
            raw.own("name")[last_begin] = len(raw.strings) - 1
            raw.own("dur")[last_begin] = end - raw.columns["ts"][last_begin]
            begins[last_begin] = False
            last_step = last_begin
    marked = last_step if last_step is not None else int(np.argmax(raw.columns["ts"] + raw.columns["dur"]))
    raw.own("partial")[marked] = 1
    return raw.take(~begins)


def _named(raw: Raw, fits: Callable[[str], bool]) -> np.ndarray:
    """Which rows have a name that fits."""
    return raw.ask(raw.columns["name"], fits, False, bool)


def _latest(raw: Raw, chosen: np.ndarray) -> int | None:
    """Index of the chosen row that starts last."""
    rows = np.flatnonzero(chosen)
    return int(rows[np.argmax(raw.columns["ts"][rows])]) if len(rows) else None
