"""Traces of torch.profiler (Kineto), on any device, old and new: one file a rank."""

from __future__ import annotations

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import Entry, Task, broken, rules_of, written
from stepscope.analysis.ingest.normalize import normalize
from stepscope.analysis.ingest.source import ByteSource


def read_file(task: Task) -> list[Entry]:
    """Read one trace and write its rank into the store under way. A file that holds no event is `broken`."""
    from stepscope.analysis.ingest.reading import read_trace  # numba takes a second, which later opens need not spend

    try:
        with ByteSource(task.path) as source:
            raw = read_trace(source)
    except StepscopeError as error:
        return broken(task, str(error))
    if not raw.rows:
        return broken(task, raw.cut or "it holds no event")
    result = normalize(raw, rules_of(task), ours=False)
    embedded = result.facts["rank"]
    return [written(task, embedded if embedded is not None else (task.rank or 0), result)]
