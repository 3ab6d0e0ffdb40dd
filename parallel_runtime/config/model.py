"""What is trained: a decoder-only transformer, dense or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.parallel_runtime.config.values import at_least, divides, finite, one_of

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("swiglu", "gelu")
ROUTERS = ("softmax", "sigmoid")
BALANCE = ("bias", "aux", "capacity", "none")


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
        finite(self)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"):
            at_least(name, getattr(self, name), 1)
        one_of("norm", self.norm, NORMS)
        one_of("activation", self.activation, ACTIVATIONS)
        divides("heads", self.heads, "hidden", self.hidden)
        divides("kv_heads", self.kv_heads, "heads", self.heads)
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
            at_least(name, getattr(self, name), 0)
        at_least("experts_per_token", self.experts_per_token, 1)
        one_of("router", self.router, ROUTERS)
        one_of("balance", self.balance, BALANCE)
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
