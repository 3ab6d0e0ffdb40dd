"""Traces of torch.profiler (Kineto), on any device, old and new: one file a rank."""

from __future__ import annotations

from stepscope.analysis.ingest.build import Entry, Task


def read_file(task: Task) -> list[Entry]:
    """Read one trace and write its rank into the store under way. A file that holds no event is `broken`."""
    from stepscope.analysis.ingest.scanned import read_scanned  # LLVM: later opens need it not

    return read_scanned(task, ours=False)
