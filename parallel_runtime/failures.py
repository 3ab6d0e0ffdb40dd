"""How ranks fail, and which of several failures is the cause: the others are its echo."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

from stepscope.parallel_runtime.comm import CommunicationError


@dataclass(frozen=True)
class Failure:
    """How one rank ended. `cause`: 0 killed or vanished, 1 raised, 2 a communication failed: the order of suspicion."""

    rank: int
    cause: int
    error: str
    traceback: str = ""
    at_ns: int = field(default_factory=time.monotonic_ns)
    # of a failed communication
    name: str = ""
    partners: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure that an exception is."""
        text = "".join(traceback.format_exception(error))
        if not isinstance(error, CommunicationError):
            return cls(rank, 1, f"{type(error).__name__}: {error}", text)
        site = error.site
        two = site.collective in ("send", "receive")
        pair = (site.peer, error.rank) if site.collective == "receive" else (error.rank, site.peer)
        name = f"{site.collective} number {error.seq} on {site.group}" + (f", {pair[0]} to {pair[1]}" if two else "")
        if two:  # both ends of a message are one thing
            name = name.replace("receive", "message").replace("send", "message")
        return cls(rank, 2, error.reason, text, name=name, partners=pair if two else site.ranks)


class RankFailure(RuntimeError):
    """A rank failed; all have ended. The text names the first failure, with its traceback, and what followed."""

    def __init__(self, failures: list[Failure]) -> None:
        ordered = sorted(failures, key=lambda failure: (failure.cause, failure.at_ns))
        self.first, self.others = ordered[0], ordered[1:]
        super().__init__(story(self.first, self.others))


def story(first: Failure, others: list[Failure]) -> str:
    lines = [f"rank {first.rank} failed first: {first.error}"]
    if first.cause == 2:
        came = {failure.rank for failure in (first, *others) if failure.name == first.name}
        missing = [str(rank) for rank in first.partners if rank not in came]
        if missing:
            lines[0] = (
                f"{first.name} failed on rank {first.rank}: rank {', '.join(missing)} never came to it ({first.error})"
            )
        else:
            lines[0] = f"{first.name} failed on rank {first.rank}: {first.error}"
    if first.traceback:
        lines.append(first.traceback.rstrip())
    lines += [
        f"then rank {failure.rank}: {f'{failure.name}: ' if failure.name else ''}{failure.error.splitlines()[0]}"
        for failure in others
    ]
    return "\n".join([*lines, "all ranks have ended"])
