"""What a run says of its model, layout and training, as numbers; and the parameters that each rank holds by it.

Read from run.json alone. A run that does not say enough has no setup: what theory predicts of it is then unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from stepscope.tracer.schema import RunMeta

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")
"""Those whose chunk c of stage s is virtual stage c P + s."""

TABLE, HEAD = "embedding", "head"


class Held(NamedTuple):
    """Elements of one block's parameters on one rank, before ZeRO: cut over tp, of experts (cut over ep), and whole."""

    cut: int = 0
    experts: int = 0
    whole: int = 0

    @property
    def elements(self) -> int:
        """All of them."""
        return self.cut + self.experts + self.whole


@dataclass(frozen=True)
class Setup:
    """The fields of run.json's `model`, `parallel` and `train` that sizes and volumes depend on."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    microbatch_size: int
    microbatches: int
    kv_heads: int = 0
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    experts: int = 0
    experts_per_token: int = 1
    expert_ffn: int = 0
    dense_layers: int = 0
    balance: str = "none"
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    sp: bool = False
    zero: int = 0
    replicate: int = 1
    reshard: bool = True
    offload: str = "none"
    cp_mode: str = "ring"
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    split: tuple[int, ...] = ()
    dtype: str = "float32"
    optimizer: str = "adamw"
    clip: float = 0.0

    @classmethod
    def of(cls, meta: RunMeta) -> Setup | None:
        """The setup of a run; None where it does not say enough, or says words that are not known here."""
        said: dict[str, Any] = {**meta.mesh, **meta.model, **meta.parallel, **meta.train}
        known = {one.name for one in fields(cls)}
        values = {name: value for name, value in said.items() if name in known and value is not None}
        if any(not values.get(name) for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq", "microbatches")):
            return None
        if not values.get("microbatch_size"):
            return None
        values["split"] = tuple(values.get("split", ()))
        one = cls(**values)
        words = (one.dtype in ITEM_BYTES, one.schedule in SCHEDULES, one.cp_mode in ("ring", "ulysses", "allgather"))
        degrees = (one.pp, one.dp, one.cp, one.tp, one.ep, one.replicate, one.chunks)
        return one if all(words) and min(degrees) >= 1 and one.pp * one.chunks <= one.layers else None

    @property
    def item(self) -> int:
        """Bytes of one element of parameters, activations and gradients."""
        return ITEM_BYTES[self.dtype]

    @property
    def shard(self) -> int:
        """Ranks over which ZeRO cuts the model state."""
        return self.dp * self.cp // self.replicate

    @property
    def expert_shard(self) -> int:
        """Ranks over which ZeRO cuts the state of experts, where it is apart: those of a copy that hold the same ones."""
        return self.dp * self.cp * self.tp // self.ep // self.replicate

    @property
    def experts_apart(self) -> bool:
        """Whether gradients and state of experts are over other ranks than all else; else they go with their layer."""
        return self.experts > 0 and self.ep * self.tp > 1

    @property
    def key_value(self) -> int:
        """Width of keys and of values over all heads."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def passes(self) -> int:
        """Forward passes of a microbatch: full recomputation does it again."""
        return 2 if self.recompute == "full" else 1

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of a layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def chunk_layers(self, stage: int, chunk: int) -> range:
        """Layers of one chunk: as equal as possible, the first places taking what does not divide."""
        places, place = self.pp * self.chunks, chunk * self.pp + stage
        sizes = self.split or [self.layers // places + (i < self.layers % places) for i in range(places)]
        first = sum(sizes[:place])
        return range(first, first + sizes[place])

    def layers_of(self, stage: int) -> list[int]:
        """Layers of all chunks of a stage."""
        return [layer for chunk in range(self.chunks) for layer in self.chunk_layers(stage, chunk)]


def blocks(setup: Setup, stage: int) -> dict[str, Held]:
    """Block -> parameters that one rank of `stage` holds of it; a tied table is on the first stage and on the last."""
    first, last = stage == 0, stage == setup.pp - 1
    norm = setup.hidden * (2 if setup.norm == "layernorm" else 1)
    table = setup.vocab * setup.hidden // setup.tp
    found = {TABLE: Held(cut=table)} if first or (last and setup.tied) else {}
    found |= {f"layer.{layer}": _layer(setup, setup.has_experts(layer), norm) for layer in setup.layers_of(stage)}
    if last:
        found[HEAD] = Held(cut=0 if setup.tied else table, whole=norm)
    return found


def replicated(setup: Setup, stage: int) -> list[tuple[int, dict[str, int]]]:
    """What replicas of one rank of `stage` reduce, or cut under ZeRO: (ranks, block -> elements). Dense first; experts
    in a part of their own where they are over other ranks (edp, maybe 1)."""
    held = blocks(setup, stage)
    if not setup.experts_apart:
        return [(setup.shard, {name: one.elements for name, one in held.items()})]
    dense = {name: one.elements - one.experts for name, one in held.items()}
    return [
        (setup.shard, dense),
        (setup.expert_shard, {name: one.experts for name, one in held.items() if one.experts}),
    ]


def _layer(setup: Setup, mixture: bool, norm: int) -> Held:
    """One transformer layer: attention and feed-forward matrices cut over tp; norms and biases after a sum are whole."""
    hidden, key_value, tp = setup.hidden, setup.key_value, setup.tp
    cut = (2 * hidden * hidden + 2 * hidden * key_value) // tp
    cut += (hidden + 2 * key_value) // tp if setup.qkv_bias else 0
    whole = 2 * norm + (hidden if setup.output_bias else 0)
    inner = 2 if setup.activation == "swiglu" else 1  # matrices into the inner width
    width = (setup.expert_ffn or setup.ffn) if mixture else setup.ffn
    matrices, biases = (inner + 1) * hidden * width, inner * width if setup.ffn_bias else 0
    outer = hidden if setup.ffn_bias else 0
    if mixture:
        each = matrices + biases + outer
        return Held(cut, setup.experts // setup.ep * each, whole + setup.experts * hidden)
    return Held(cut + matrices // tp + biases // tp, 0, whole + outer)


def padded(elements: int, ranks: int) -> int:
    """Elements of a flat buffer that divides by `ranks`."""
    return -(-elements // ranks) * ranks
