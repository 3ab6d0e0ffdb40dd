"""A slow link, injected on purpose: what crosses it takes so much longer, as recorded."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.parallel_runtime.config import TrainConfig
from stepscope.tracer.recorder import CommSite


def parse_link(text: str | None) -> tuple[int, ...]:
    """`0-1` -> (0, 1): the link over which rank 0 sends to rank 1; nothing for None. ValueError for anything else."""
    if text is None:
        return ()
    ends = text.split("-")
    if len(ends) != 2 or not all(end.strip().isdecimal() for end in ends):
        raise ValueError(f"link {text!r} is not two ranks with a dash between, such as 0-1: rank 0 sends to rank 1")
    return tuple(int(end) for end in ends)


@dataclass(frozen=True)
class SlowLink:
    """`source` sends to `target` slowly: each operation over the link takes `delay_s` seconds longer."""

    source: int
    target: int
    delay_s: float

    @classmethod
    def of(cls, train: TrainConfig) -> SlowLink | None:
        """What the configuration injects; None where it injects none."""
        if not train.slow_link:
            return None
        source, target = train.slow_link
        return cls(source, target, train.slow_link_ms / 1e3)

    def delay_of(self, site: CommSite, rank: int) -> float:
        """By how many seconds `rank` holds up an operation between its start and its first byte: only the source does.

        A message crosses the link if it goes to the target; a collective if both are in its group, once.
        """
        if rank != self.source:
            return 0.0
        crosses = site.peer == self.target if site.collective in ("send", "ring_shift") else self.target in site.ranks
        return self.delay_s if crosses and site.collective != "receive" else 0.0
