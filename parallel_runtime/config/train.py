"""How long, on what data, in which precision, and what is injected on purpose."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.parallel_runtime.config.values import at_least, finite, one_of

OPTIMIZERS = ("sgd", "adamw")
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class TrainConfig:
    """How long, on what, and which causes of lost time are injected on purpose."""

    microbatch_size: int = 2  # sequences of one microbatch
    microbatches: int = 4  # of one step and dp rank
    steps: int = 6
    dtype: str = "float32"  # of parameters, activations and gradients; 16-bit ones have a float32 copy in the optimizer
    optimizer: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.0
    clip: float = 0.0  # largest global gradient norm; 0: no clipping
    padding: float = 0.0  # largest share of a sequence that is padding (the count differs from sequence to sequence)
    seed: int = 0
    slow_rank: int = -1  # this rank computes slow_ms longer in the first forward of every step
    slow_ms: float = 0.0
    late_rank: int = -1  # this rank's host sleeps late_ms before every step's first work
    late_ms: float = 0.0
    slow_link: tuple[int, ...] = ()  # (from, to): what the one rank sends to the other takes slow_link_ms longer
    slow_link_ms: float = 0.0
    timeout_s: float = 300.0  # a communication that takes longer has failed

    def __post_init__(self) -> None:
        finite(self)
        for name in ("microbatch_size", "microbatches", "steps"):
            at_least(name, getattr(self, name), 1)
        one_of("dtype", self.dtype, DTYPES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.lr <= 0.0:
            raise ValueError(f"lr {self.lr} must be positive")
        for name in ("weight_decay", "clip", "slow_ms", "late_ms", "slow_link_ms"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} {getattr(self, name)} must not be negative: 0 turns it off")
        if not 0.0 <= self.padding < 1.0:
            raise ValueError(f"padding {self.padding} must lie in [0, 1): 0 pads nothing")
        if self.timeout_s <= 0.0:
            raise ValueError(f"timeout_s {self.timeout_s} must be positive")
        for who in ("slow", "late"):
            rank, ms = getattr(self, f"{who}_rank"), getattr(self, f"{who}_ms")
            if (rank >= 0) != (ms > 0.0):
                raise ValueError(f"{who}_rank and {who}_ms belong together: got rank {rank} and {ms} ms")
        if bool(self.slow_link) != (self.slow_link_ms > 0.0):
            raise ValueError(
                f"slow_link and slow_link_ms belong together: got {self.slow_link or 'no link'} and {self.slow_link_ms} ms"
            )
        if self.slow_link and (len(self.slow_link) != 2 or self.slow_link[0] == self.slow_link[1]):
            raise ValueError(f"slow_link {self.slow_link} must be two different ranks: the one sends to the other")
