"""What is trained, on how many ranks, and how long: three frozen, validated dataclasses and two presets.

Every field is checked when the dataclass is made; `check` looks at the three together. A message says which value is
wrong and names the nearest legal choice. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import gcd, isfinite
from typing import Any

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("swiglu", "gelu")
CP_MODES = ("ring", "ulysses", "allgather")
CP_LAYOUTS = {"contiguous": 1, "zigzag": 2}  # pieces of the sequence that each rank holds
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")
RECOMPUTE = ("none", "selective", "full")
ROUTERS = ("softmax", "sigmoid")
BALANCE = ("bias", "aux", "capacity", "none")
OPTIMIZERS = ("sgd", "adamw")
DTYPES = ("float32", "float64", "bfloat16", "float16")
OFFLOAD = ("none", "cpu")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} {value} must be at least {least}: take {least}")


def _finite(configuration: object) -> None:
    """No option may be NaN or infinite: comparisons let them pass, and run.json has no words for them."""
    for name, value in vars(configuration).items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name} {value} must be finite")


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is unknown: take one of {', '.join(choices)}")


def _divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """`value` must divide `whole`; else the nearest divisor is named."""
    if whole % value:
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - value), n))
        raise ValueError(f"{name} {value} must divide {whole_name} {whole}: take {nearest}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: `layers` blocks of grouped-query attention with RoPE and a feed-forward part."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2  # key and value heads; equal to heads: multi-head attention
    ffn: int = 128  # inner width of the feed-forward part
    vocab: int = 256
    seq: int = 64  # tokens of one sequence
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    tied: bool = False  # the output head is the embedding table
    dropout: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    ffn_bias: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    experts: int = 0  # feed-forward parts of a layer, of which each token uses some; 0: dense
    experts_per_token: int = 2
    expert_ffn: int = 0  # inner width of an expert; 0: ffn
    dense_layers: int = 0  # the first so many layers have no experts
    router: str = "softmax"  # scores of the experts
    balance: str = "bias"  # what keeps the experts' loads even, see model/router.py
    balance_rate: float = 0.001  # bias: how far an offset moves in a step
    aux_weight: float = 0.01  # aux: of the auxiliary loss
    capacity_factor: float = 1.25  # capacity: what an expert takes of a microbatch, as a multiple of its even share
    routing_skew: float | None = (
        None  # tokens follow a planned, uneven routing (model/planned_routing.py); None: the router
    )

    def __post_init__(self) -> None:
        _finite(self)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"):
            _at_least(name, getattr(self, name), 1)
        _one_of("norm", self.norm, NORMS)
        _one_of("activation", self.activation, ACTIVATIONS)
        _divides("heads", self.heads, "hidden", self.hidden)
        _divides("kv_heads", self.kv_heads, "heads", self.heads)
        if self.head_size % 2:
            raise ValueError(
                f"hidden / heads = {self.hidden} / {self.heads} = {self.head_size} is odd, but rotary positions turn pairs"
                f" of features: take hidden {self.heads * (self.head_size + 1)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} must lie in [0, 1): 0 turns it off")
        if self.rope_theta <= 0.0 or self.norm_eps <= 0.0:
            raise ValueError("rope_theta and norm_eps must be positive: 10000 and 1e-5 are usual")
        self._check_experts()

    def _check_experts(self) -> None:
        """The mixture's own fields; without experts they have no meaning and no effect."""
        for name in ("experts", "expert_ffn", "dense_layers"):
            _at_least(name, getattr(self, name), 0)
        _at_least("experts_per_token", self.experts_per_token, 1)
        _one_of("router", self.router, ROUTERS)
        _one_of("balance", self.balance, BALANCE)
        for name in ("balance_rate", "aux_weight"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} {getattr(self, name)} must not be negative: 0 turns it off")
        if self.capacity_factor <= 0.0:
            raise ValueError(f"capacity_factor {self.capacity_factor} must be positive: 1.25 is usual")
        if self.routing_skew is not None and self.routing_skew < 0.0:
            raise ValueError(f"routing_skew {self.routing_skew} must not be negative: 0 plans an even routing")
        if not self.experts:
            if self.routing_skew is not None:
                raise ValueError(
                    "routing_skew plans the routing of tokens to experts, and there are none: take experts 8"
                )
            return
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} of {self.experts} experts: take experts_per_token"
                f" {self.experts}"
            )
        if self.dense_layers >= self.layers:
            raise ValueError(
                f"dense_layers {self.dense_layers} leaves none of {self.layers} layers to the experts: take dense_layers"
                f" {self.layers - 1}, or experts 0"
            )

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.hidden // self.heads

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_ffn or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of `layer` is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers


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
        _finite(self)
        for name in ("pp", "dp", "cp", "ep", "tp", "chunks"):
            _at_least(name, getattr(self, name), 1)
        if self.sp and self.tp == 1:
            raise ValueError("sp cuts the sequence over the ranks of tp, and tp is 1: take tp 2, or leave sp out")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero {self.zero} must be 0, 1, 2 or 3")
        self._check_sharding()
        _one_of("schedule", self.schedule, SCHEDULES)
        check_chunks(self.schedule, self.pp, self.chunks)
        _one_of("cp_mode", self.cp_mode, CP_MODES)
        _one_of("cp_layout", self.cp_layout, tuple(CP_LAYOUTS))
        _one_of("recompute", self.recompute, RECOMPUTE)
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
        _one_of("offload", self.offload, OFFLOAD)
        _at_least("replicate", self.replicate, 1)
        _at_least("prefetch", self.prefetch, 0)
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
        _finite(self)
        for name in ("microbatch_size", "microbatches", "steps"):
            _at_least(name, getattr(self, name), 1)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
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


@dataclass(frozen=True)
class Preset:
    """A named model with the microbatch size that suits it."""

    model: ModelConfig
    microbatch_size: int


PRESETS = {
    "tiny": Preset(ModelConfig(hidden=128, ffn=256), microbatch_size=2),
    "small": Preset(ModelConfig(layers=8, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=1024, seq=256), 2),
    "tiny-moe": Preset(ModelConfig(hidden=128, ffn=256, experts=8, expert_ffn=128), microbatch_size=2),
}


def preset(name: str) -> Preset:
    """The preset called `name`; ValueError names all of them."""
    _one_of("preset", name, tuple(PRESETS))
    return PRESETS[name]


def global_batch(parallel: ParallelConfig, train: TrainConfig) -> int:
    """Sequences of one step over all ranks: microbatch size x microbatches x dp."""
    return train.microbatch_size * train.microbatches * parallel.dp


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


def check_global_batch(wanted: int | None, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Refuse a global batch that the layout does not give; None asks for nothing."""
    found = global_batch(parallel, train)
    if wanted is None or wanted == found:
        return
    each = train.microbatch_size * parallel.dp
    microbatches = max(1, round(wanted / each))
    raise ValueError(
        f"global batch {wanted} is not microbatch size {train.microbatch_size} x microbatches {train.microbatches}"
        f" x dp {parallel.dp} = {found}: take microbatches {microbatches}, which gives {microbatches * each}"
    )


def check(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Refuse what only the three together show to be illegal."""
    _check_pipeline(model, parallel, train)
    _check_tensor_parallel(model, parallel)
    _check_context_parallel(model, parallel)
    _check_expert_parallel(model, parallel)
    for name in ("slow_rank", "late_rank"):
        rank = getattr(train, name)
        if rank >= parallel.world_size:
            last = parallel.world_size - 1
            raise ValueError(f"{name} {rank} is not among the {parallel.world_size} ranks: take 0 to {last}")
    if any(not 0 <= rank < parallel.world_size for rank in train.slow_link):
        ends = "-".join(map(str, train.slow_link))
        raise ValueError(
            f"slow_link {ends} does not lie among the {parallel.world_size} ranks: take 0 to {parallel.world_size - 1}"
        )


def _check_pipeline(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Every chunk has a layer, and the schedule can group the microbatches."""
    check_microbatches(parallel.schedule, parallel.pp, train.microbatches)
    if parallel.pp > model.layers:
        raise ValueError(
            f"pp {parallel.pp} stages need a layer each, the model has {model.layers}: take pp {model.layers}"
        )
    places = parallel.pp * parallel.chunks
    if places > model.layers:
        raise ValueError(
            f"pp {parallel.pp} x chunks {parallel.chunks} = {places} parts need a layer each, the model has"
            f" {model.layers}: take chunks {model.layers // parallel.pp}, or layers {places}"
        )
    if parallel.split and sum(parallel.split) != model.layers:
        others = parallel.split[:-1]
        left = max(1, model.layers - sum(others))
        nearest = f"take split {(*others, left)}" if sum(others) + left == model.layers else "leave split out"
        raise ValueError(
            f"split {parallel.split} has {sum(parallel.split)} layers, the model has {model.layers}: {nearest}"
        )


def _check_tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """tp cuts the heads (query, key and value), the feed-forward width and the vocabulary; sp the sequence."""
    cut = {name: getattr(model, name) for name in ("kv_heads", "ffn", "vocab")}  # heads is a multiple of kv_heads
    for name, size in cut.items():
        if size % parallel.tp:
            common = gcd(*cut.values())
            legal = [n for n in range(1, common + 1) if common % n == 0]
            nearest = min(legal, key=lambda n: (abs(n - parallel.tp), n))
            raise ValueError(f"tp {parallel.tp} must divide {name} {size}: take tp {nearest}")
    pieces = parallel.cp * (parallel.tp if parallel.sp else 1)
    if parallel.sp and model.seq % pieces:
        longer = -(-model.seq // pieces) * pieces
        raise ValueError(f"sp cuts sequences of {model.seq} tokens into {pieces} equal parts: take seq {longer}")


def _check_context_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """cp cuts the sequence into equal pieces; ulysses cuts the heads as well, in the middle of attention."""
    if parallel.cp == 1:
        return
    each = CP_LAYOUTS[parallel.cp_layout]
    pieces = each * parallel.cp
    if model.seq % pieces:
        longer = -(-model.seq // pieces) * pieces
        fewer = [n for n in range(2, parallel.cp) if model.seq % (each * n) == 0]
        other = "contiguous" if each > 1 and model.seq % parallel.cp == 0 else ""
        ways = [f"seq {longer}", *(f"cp {n}" for n in fewer[-1:]), *(f"cp_layout {name}" for name in [other] if name)]
        raise ValueError(
            f"cp {parallel.cp} with the {parallel.cp_layout} layout cuts a sequence into {pieces} equal pieces, and seq"
            f" is {model.seq}: take {' or '.join(ways)}"
        )
    heads = model.kv_heads // parallel.tp  # query heads are a multiple
    if parallel.cp_mode == "ulysses" and heads % parallel.cp:
        legal = [n for n in range(1, heads + 1) if heads % n == 0 and model.seq % (each * n) == 0]
        nearest = min(legal, key=lambda n: (abs(n - parallel.cp), n))
        held = f"kv_heads {model.kv_heads}" + (f" / tp {parallel.tp} = {heads}" if parallel.tp > 1 else "")
        raise ValueError(f"cp {parallel.cp} in mode ulysses must divide {held}: take cp {nearest}, or cp_mode ring")


def _check_expert_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """ep cuts the experts over the ranks of a stage; each rank routes equal parts of the positions."""
    if not model.experts:
        if parallel.ep > 1:
            raise ValueError(
                f"ep {parallel.ep} cuts the experts, and the model has none: take ep 1, or experts {4 * parallel.ep}"
            )
        return
    if parallel.replicate > 1 and parallel.ep * parallel.tp > 1:
        raise ValueError(
            f"replicate {parallel.replicate} copies the state over dp, but that of experts lies across dp x cp x tp: take"
            " replicate 1"
        )
    ranks = parallel.dp * parallel.cp * parallel.tp
    legal = [n for n in range(1, ranks + 1) if ranks % n == 0 and model.experts % n == 0]
    if parallel.ep not in legal:
        nearest = min(legal, key=lambda n: (abs(n - parallel.ep), n))
        raise ValueError(
            f"ep {parallel.ep} must divide experts {model.experts} and dp x cp x tp = {ranks}, the ranks of one stage:"
            f" take ep {nearest}"
        )
    pieces = parallel.cp * parallel.tp
    if model.seq % pieces:
        longer = -(-model.seq // pieces) * pieces
        raise ValueError(
            f"each of {pieces} ranks of cp x tp routes an equal part of the {model.seq} tokens of a sequence: take seq"
            f" {longer}"
        )


def as_dictionaries(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The three as plain dictionaries, as run.json holds them (global batch and world size included)."""
    return (
        asdict(model),
        {**asdict(parallel), "world_size": parallel.world_size},
        {**asdict(train), "global_batch": global_batch(parallel, train)},
    )
