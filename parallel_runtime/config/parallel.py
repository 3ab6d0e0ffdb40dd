"""On how many ranks, and how: the degree of every axis and the way each strategy works."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.parallel_runtime.config.values import at_least, finite, one_of

CP_MODES = ("ring", "ulysses", "allgather")
CP_LAYOUTS = {"contiguous": 1, "zigzag": 2}  # pieces of the sequence that each rank holds
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "cpu")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of every axis, and how each strategy works."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    cp_mode: str = "ring"  # how attention sees the whole sequence
    cp_layout: str = "zigzag"  # which positions each rank holds
    ep: int = 1
    tp: int = 1
    sp: bool = False  # sequence parallel regions inside tp
    zero: int = 0  # 0: plain DP; 1, 2, 3: optimizer state, gradients too, parameters too are cut over dp (and cp)
    replicate: int = 1  # with zero: so many copies of the cut state, each over dp / replicate ranks
    reshard: bool = True  # zero 3: let a unit's parameters go after forward, and gather them again for backward
    prefetch: int = 1  # zero 3: units that are gathered ahead of the one in use
    offload: str = "none"  # where optimizer state lives: on the device, or in the host's memory (cpu)
    schedule: str = "1f1b"
    chunks: int = 1  # virtual stages a rank
    split: tuple[
        int, ...
    ] = ()  # layers of each stage, then of each stage's next chunk ...; empty: as equal as possible
    bucket_mb: float = 0.25  # size of a gradient bucket, 10^6 bytes
    recompute: str = "none"  # activations that backward computes again: none, those of attention, those of a layer
    overlap: bool = True  # reduce a bucket as soon as it is full; off: everything after backward

    def __post_init__(self) -> None:
        finite(self)
        for name in ("pp", "dp", "cp", "ep", "tp", "chunks"):
            at_least(name, getattr(self, name), 1)
        if self.sp and self.tp == 1:
            raise ValueError("sp cuts the sequence over the ranks of tp, and tp is 1: take tp 2, or leave sp out")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero {self.zero} must be 0, 1, 2 or 3")
        self._check_sharding()
        one_of("schedule", self.schedule, SCHEDULES)
        check_chunks(self.schedule, self.pp, self.chunks)
        one_of("cp_mode", self.cp_mode, CP_MODES)
        one_of("cp_layout", self.cp_layout, tuple(CP_LAYOUTS))
        one_of("recompute", self.recompute, RECOMPUTE)
        if self.bucket_mb <= 0.0:
            raise ValueError(f"bucket_mb {self.bucket_mb} must be positive: a tiny value gives one bucket a parameter")
        places = self.pp * self.chunks
        if self.split and (len(self.split) != places or min(self.split) < 1):
            what = (
                f"{self.pp} stages (pp)"
                if self.chunks == 1
                else f"pp {self.pp} x chunks {self.chunks} = {places} parts"
            )
            raise ValueError(f"split {self.split} must name {what} of at least one layer each")

    def _check_sharding(self) -> None:
        """What ZeRO's options need of each other."""
        one_of("offload", self.offload, OFFLOAD)
        at_least("replicate", self.replicate, 1)
        at_least("prefetch", self.prefetch, 0)
        if self.zero and self.dp * self.cp == 1:
            raise ValueError(f"zero {self.zero} cuts the model state over dp, and dp is 1: take dp 2, or zero 0")
        if self.replicate > 1:
            if not self.zero:
                raise ValueError(f"replicate {self.replicate} copies what zero cuts, and zero is 0: take replicate 1")
            legal = [n for n in range(1, self.dp + 1) if self.dp % n == 0 and self.dp // n * self.cp > 1]
            if self.replicate not in legal:
                nearest = min(legal, key=lambda n: (abs(n - self.replicate), n))
                raise ValueError(
                    f"replicate {self.replicate} must divide dp {self.dp} and leave at least 2 ranks to cut the state"
                    f" over: take replicate {nearest}"
                )
        if not self.reshard and self.zero != 3:
            raise ValueError(f"without reshard parameters stay gathered, and zero {self.zero} cuts none: take zero 3")

    @property
    def world_size(self) -> int:
        """Number of ranks; expert parallelism is a second view of dp x cp x tp and adds none."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights have actions of their own (phase weight_grad)."""
        return self.schedule == "zb-h1"

    @property
    def gradient_phase(self) -> str:
        """The phase in which parameters get their gradients."""
        return "weight_grad" if self.splits_backward else "backward"

    @property
    def expert_data_parallel(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.dp * self.cp * self.tp // self.ep

    def layers_of(self, stage: int, layers: int) -> tuple[int, ...]:
        """Global layer numbers of one pipeline stage, those of all its chunks."""
        return tuple(layer for chunk in range(self.chunks) for layer in self.chunk_layers(stage, chunk, layers))

    def chunk_layers(self, stage: int, chunk: int, layers: int) -> range:
        """Global layer numbers of one chunk; without `split` the first places take what does not divide."""
        places, place = self.pp * self.chunks, chunk * self.pp + stage
        sizes = self.split or tuple(layers // places + (i < layers % places) for i in range(places))
        first = sum(sizes[:place])
        return range(first, first + sizes[place])


def check_chunks(schedule: str, stages: int, chunks: int) -> None:
    """Refuse chunks that the schedule does not know, or that nothing would come between."""
    if chunks > 1 and schedule != "interleaved":
        raise ValueError(
            f"chunks {chunks}: schedule {schedule} runs one chunk a stage: take schedule interleaved, or chunks 1"
        )
    if chunks > 1 and stages == 1:
        raise ValueError(f"chunks {chunks} take turns between the stages, and pp is 1: take pp 2, or chunks 1")


def check_microbatches(schedule: str, stages: int, microbatches: int) -> None:
    """Refuse numbers of microbatches that the schedule cannot group."""
    if schedule == "interleaved" and microbatches % stages:
        nearest = max(stages, (microbatches + stages // 2) // stages * stages)
        raise ValueError(
            f"schedule interleaved takes microbatches in groups of pp {stages}, and {microbatches} is no multiple: take"
            f" microbatches {nearest}"
        )
