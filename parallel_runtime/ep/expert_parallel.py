"""The communication of expert parallelism (Lepikhin et al. 2021): tokens go to the ranks of their experts, and back.

    route ─▶ [all-to-all of counts] ─▶ host reads them ─▶ sort ─▶ [dispatch] ─▶ experts ─▶ [combine] ─▶ weighted sum

Dispatch and combine are all-to-alls of rows; each is the other's backward. No token is dropped here, whatever the counts
(capacity is the router's), and none is padded, so sizes depend on data: the counts travel first, and the host must know
them to size the tensors. That read is the only one of the program, and has a row of its own.

Every rank routes the tokens that it alone holds: its own sequences (dp), its positions (cp, sp). Under tp without sp all
ranks of tp hold the same tokens: each routes its positions only, and an all-gather makes the result whole again. So the
ranks that hold the same experts (`edp`) never saw the same token, and their gradients are summed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepscope.parallel_runtime.comm import Comm
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.ep.permutation import by_expert, by_source, combine, order_of, permute, splits_of
from stepscope.parallel_runtime.ep.planned import received_of, sent_of
from stepscope.parallel_runtime.model.mixture import Experts
from stepscope.parallel_runtime.model.router import Routed
from stepscope.parallel_runtime.model.seams import Seams

COUNTS, SEQUENCE, LOAD = "ep.counts", "ep.sequence", "ep.load"
"""Streams beside that of the tokens, `ep`: counts of a dispatch; of a sequence that several ranks hold; of a step."""


def streams_of(model: ModelConfig, parallel: ParallelConfig) -> tuple[str, ...]:
    """Streams that the mixture uses."""
    if not model.experts:
        return ()
    balance = {"aux": (SEQUENCE,), "bias": (LOAD,)}
    return ("ep", COUNTS, *balance.get(model.balance, ()))


class ExpertParallel:
    """One rank of `ep`: it holds experts [index E / n, (index + 1) E / n) of every mixture of its stage."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, comm: Comm) -> None:
        self.model, self.parallel, self.comm = model, parallel, comm
        self.ranks, self.index = comm.size("ep"), comm.index("ep")
        self.taken: Counter[tuple[int, int]] = Counter()  # (layer, expert) -> tokens of this step

    def seams(self, base: Seams) -> Seams:
        """`base` with this rank's experts."""
        seams = replace(
            base,
            expert_parallel=self.ranks,
            through_experts=self.through_experts,
            over_sequence=self.over_sequence,
        )
        if self.parallel.tp > 1 and not self.parallel.sp:
            seams = replace(seams, routed_positions=self.routed_positions, all_positions=self.all_positions)
        return seams

    def through_experts(
        self, tokens_TH: Tensor, routed: Routed, experts: Experts, layer: int, counting: bool = True
    ) -> Tensor:
        """(T, H) -> (T, H): the weighted sum of what each token's experts, wherever they are, make of it."""
        sent, received = self._counts(routed)
        send, receive, pieces = splits_of(sent, received, self.ranks)
        order = order_of(routed.experts_TK)[: sum(sent)]
        rows = permute(tokens_TH, order, self.model.experts_per_token)
        arrived = AllToAll.apply(self.comm, rows, send, receive)
        groups = by_expert(arrived, pieces, self.ranks)
        if counting:
            first = self.index * len(groups)
            self.taken.update({(layer, first + place): len(group) for place, group in enumerate(groups)})
        made = [expert(group) for expert, group in zip(experts.each(), groups, strict=True)]
        back = AllToAll.apply(self.comm, by_source(made, pieces, self.ranks), receive, send)
        return combine(back, order, routed.weights_TK)

    def _counts(self, routed: Routed) -> tuple[list[int], list[int]]:
        """(tokens for each expert, tokens from each rank for each of this rank's experts), on the host, in one read."""
        each, tokens = len(routed.counts_E) // self.ranks, len(routed.experts_TK)
        split = [each] * self.ranks
        exchanging = self.comm.all_to_all(routed.counts_E, "ep", split, split, strategy="ep", stream=COUNTS)
        both = torch.cat((routed.counts_E, exchanging.wait()))
        plan = sent_of(self.model, tokens)
        known = self.comm.read_counts(both, lambda: [*plan, *received_of(plan, self.ranks, self.index)])
        return known[: len(plan)], known[len(plan) :]

    def over_sequence(self, counts_BE: Tensor) -> Tensor:
        """Choices in whole sequences, of which the ranks of cp and tp hold some positions each."""
        return self.comm.all_reduce(counts_BE, "cp_tp", strategy="ep", stream=SEQUENCE).wait()

    def routed_positions(self, x_SBH: Tensor) -> Tensor:
        """This rank's positions of what all ranks of tp hold."""
        return TakePositions.apply(self.comm, x_SBH)

    def all_positions(self, y_SBH: Tensor) -> Tensor:
        """All positions, from the ranks of tp."""
        return GatherPositions.apply(self.comm, y_SBH)

    def end_step(self) -> None:
        """Record how many tokens this rank's experts took in the step."""
        for (layer, expert), tokens in sorted(self.taken.items()):
            self.comm.recorder.counter("tokens_per_expert", tokens, key=f"layer.{layer} expert.{expert}")
        self.taken.clear()


# -- autograd functions --------------------------------------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """Rows to the ranks of ep, `send[i]` to rank i; in backward their gradients come back."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """(sum(send), H) -> (sum(receive), H)."""
        ctx.comm, ctx.send, ctx.receive = comm, send, receive
        return comm.all_to_all(rows, "ep", send, receive, strategy="ep").wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """A permutation of rows over ranks: its transpose is its inverse."""
        back = ctx.comm.all_to_all(gradients[0], "ep", ctx.receive, ctx.send, strategy="ep")
        return None, back.wait(), None, None


class TakePositions(torch.autograd.Function):
    """This rank's part of the positions forward, an all-gather over tp in backward."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """(S, B, H) -> (S / t, B, H)."""
        ctx.comm = comm
        return x.chunk(comm.size("tp"))[comm.index("tp")]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank needs the gradient of all positions."""
        return None, ctx.comm.all_gather(gradients[0], "tp", strategy="ep").wait()


class GatherPositions(torch.autograd.Function):
    """An all-gather over tp forward, this rank's part of the positions in backward: all ranks have the same gradient."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, y: Tensor) -> Tensor:
        """(S / t, B, H) -> (S, B, H)."""
        ctx.comm = comm
        return comm.all_gather(y, "tp", strategy="ep").wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """No sum: each rank would bring the same."""
        return None, gradients[0].chunk(ctx.comm.size("tp"))[ctx.comm.index("tp")].contiguous()
