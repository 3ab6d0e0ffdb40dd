"""Which ranks record, and the directories that they record into where every host has its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from stepscope.tracer.schema import RUN_FILE, RunMeta
from stepscope.tracer.writer import write_meta

_PART = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?\Z")


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """`0-7,64` as ranks in order, each once. ValueError for another form, or a rank that the run does not have."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = _PART.match(part)
        if match is None:
            raise ValueError(f"record-ranks {text!r}: {part!r} is neither a rank nor a range: write it as 0-7,64")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"record-ranks {text!r}: {part!r} runs backwards: take {last}-{first}")
        if last >= world_size:
            raise ValueError(
                f"record-ranks {text!r}: rank {last} is not among the {world_size} ranks: take 0 to {world_size - 1}"
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def shorten(ranks: Iterable[int]) -> str:
    """Ranks as `parse_ranks` takes them: (0, 1, 2, 64) is `0-2,64`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def describe_here(directory: Path, meta: RunMeta) -> None:
    """Make sure that `directory` is this run's on this host too: a disk that rank 0 does not share has none yet.

    Called by the first rank of each host once rank 0 has written run.json. Where the directory is shared nothing is left
    to do. Raises ValueError where it holds another run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        there = RunMeta.from_json((directory / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        write_meta(directory, meta)
        return
    if there.run_id != meta.run_id:
        raise ValueError(
            f"{directory.absolute()} on this host holds another run ({there.name}), and a recorded run is never"
            " overwritten: take an --out that is new on every host"
        )
