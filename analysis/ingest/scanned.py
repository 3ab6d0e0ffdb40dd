"""Files that the byte scanner reads, one a rank: scanned, understood and written into the store in bounded memory."""

from __future__ import annotations

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest.build import Entry, Task, broken, rules_of, with_facts
from stepscope.analysis.ingest.memory import keep_freed_blocks
from stepscope.analysis.ingest.normalize import Normalizer
from stepscope.analysis.ingest.plain_columns import embedded_rank
from stepscope.analysis.ingest.rank_writer import RankWriter
from stepscope.analysis.ingest.reading import read_chunks
from stepscope.analysis.ingest.source import ByteSource


def read_scanned(task: Task, ours: bool) -> list[Entry]:
    """Read one trace and write its rank into the store under way.

    A file that cannot be read as a trace is no error: the entry says `broken` and the run goes on without the rank.
    """
    keep_freed_blocks()
    with Normalizer(rules_of(task), ours, task.directory) as normalizer:
        try:
            with ByteSource(task.path) as source:
                beside = read_chunks(source, normalizer.add)
        except StepscopeError as error:
            return broken(task, str(error))
        if not normalizer.seen:
            return broken(task, beside.cut or "it holds no event")
        embedded = None if ours else embedded_rank(beside)
        rank = embedded if embedded is not None else (task.rank or 0)
        normalizer.understand(beside)
        with RankWriter(task.directory, task.build, rank, normalizer.constants | {"rank": rank}) as writer:
            result = normalizer.write(writer)
        return [with_facts(task, rank, result, writer.entry)]
