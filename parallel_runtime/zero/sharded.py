"""ZeRO-1 and ZeRO-2 (Rajbhandari et al. 2020): optimizer state, then gradients too, cut over the ranks of `shard`.

    backward ──▶ [reduce-scatter of a unit's gradients] ──▶ optimizer on the own shard ──▶ [all-gather of parameters]

ZeRO-1 keeps whole gradients, adds those of all microbatches and reduces once; ZeRO-2 keeps its shard only, so it reduces
in every microbatch, and lets one unit's whole gradients go before the next one's are reduced. Sums need no division: the
loss is already divided by the valid tokens of the global batch.

With several copies of the cut state (`replica`), each copy's sums are summed over the copies, once a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stepscope.parallel_runtime.comm import Comm, Handle, Ready
from stepscope.parallel_runtime.dp.data_parallel import GRADIENTS
from stepscope.parallel_runtime.zero.units import FlatUnit, flat_units, pieces_of, shard_range


class Over(NamedTuple):
    """The ranks that state is cut over, those that hold its copies, and their streams."""

    axis: str
    gather: str
    reduce: str
    copies: str
    reduce_copies: str

    @property
    def streams(self) -> tuple[str, ...]:
        """All of them."""
        return self.gather, self.reduce, self.reduce_copies


DENSE = Over("shard", "shard.gather", "shard.reduce", "replica", "replica.reduce")
EXPERTS = Over("edp_shard", "edp.gather", "edp.reduce", "edp_replica", "edp.replica.reduce")
"""The state of experts is cut over the ranks that hold the same ones, in each copy over its own."""

STREAMS = DENSE.streams


class Unit:
    """Buffers of one unit. Module parameters are views of `whole`; `pieces` are what the optimizer updates, views of
    `shard`, and their gradients views of `gradient`."""

    def __init__(self, flat: FlatUnit, parameters: Sequence[nn.Parameter], comm: Comm, level: int, axis: str) -> None:
        self.name, self.flat, self.parameters = flat.name, flat, list(parameters)
        self.begin_step()
        first = self.parameters[0]
        assert all(p.dtype == first.dtype for p in self.parameters), "one flat buffer holds one dtype"
        self.whole = torch.zeros(flat.padded, dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters, self.split(self.whole), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        ranks, index = comm.size(axis), comm.index(axis)
        begin, end = shard_range(flat.padded, ranks, index)
        own = self.whole[begin:end]
        self.shard = own.clone() if level == 3 else own
        self.whole_gradient = torch.zeros_like(self.whole) if level == 1 else None
        if self.whole_gradient is not None:
            self.gradient = self.whole_gradient[begin:end]
        else:
            self.gradient = torch.zeros_like(self.shard)
        sizes = dict(zip(flat.parameters, (p.numel() for p in self.parameters), strict=True))
        self.pieces: list[tuple[str, nn.Parameter]] = []
        for name, start, _, elements in pieces_of(flat, sizes, ranks, index):
            piece = nn.Parameter(self.shard[start : start + elements])
            piece.grad = self.gradient[start : start + elements]
            self.pieces.append((name, piece))

    def begin_step(self) -> None:
        """No gradient has come yet."""
        self._came = [0] * len(self.parameters)
        self._complete = 0  # backwards of which every gradient has come

    def came(self, index: int) -> bool:
        """A gradient of parameter `index` has come: whether it is the last one of its backward.

        Where weight gradients are deferred, those of the next microbatch's norms come before them: each is counted apart.
        """
        self._came[index] += 1
        before, self._complete = self._complete, min(self._came)
        return self._complete > before

    @property
    def pending(self) -> bool:
        """Whether some parameter lacks a gradient that another one of the unit has."""
        return max(self._came) > self._complete

    def split(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer, in its shape."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.flat.offsets, self.parameters, strict=True)
        ]

    def take_gradients(self) -> Tensor:
        """This backward's gradients of all parameters in one flat buffer; the parameters then have none."""
        flat = self.gradient.new_zeros(self.flat.padded)
        for parameter, view in zip(self.parameters, self.split(flat), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        return flat


class ShardedData:
    """Data parallelism over `shard` (and `replica`) with `level` 1 or 2 of ZeRO."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        comm: Comm,
        level: int,
        overlap: bool = True,
        over: Over = DENSE,
    ) -> None:
        """`named`: this rank's parameters by global name, in order of use. `overlap` off: every reduction is waited for at
        once (ZeRO-1: they all follow backward)."""
        self.over = over
        self.comm, self.level, self.overlap, self.strategy = comm, level, overlap, f"zero{level}"
        parameters = dict(named)
        units = flat_units({name: p.numel() for name, p in parameters.items()}, comm.size(over.axis))
        self.units = [
            Unit(flat, [parameters[name] for name in flat.parameters], comm, level, over.axis) for flat in units
        ]
        self.named = [piece for unit in self.units for piece in unit.pieces]
        self.parameters = [piece for _, piece in self.named]
        self._most = len(self.units) if level == 1 else int(overlap)  # reductions under way at a time
        self._armed: set[str] = set()  # units whose next gradients are the last ones
        self._reduced: set[str] = set()
        self._under_way: deque[tuple[Unit, Handle | Ready, bool]] = deque()
        self._between_copies: list[Handle | Ready] = []
        for unit in self.units:
            for index, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._ready, unit, index))

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Gradients become zero."""
        self._armed.clear()
        self._reduced.clear()
        for unit in self.units:
            unit.begin_step()
            if unit.whole_gradient is None:
                unit.gradient.zero_()
                continue
            unit.whole_gradient.zero_()
            for parameter, view in zip(unit.parameters, unit.split(unit.whole_gradient), strict=True):
                parameter.grad = view

    def arm(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The next gradients of these (None: of all) are the last of the step; a unit lies within one chunk."""
        concerned = None if parameters is None else {id(parameter) for parameter in parameters}
        for unit in self.units:
            if concerned is None or id(unit.parameters[0]) in concerned:
                self._armed.add(unit.name)

    def finish(self) -> None:
        """After the last backward: reduce what is left, and wait for everything."""
        self.comm.recorder.block(GRADIENTS)
        for unit in reversed(self.units):
            assert not unit.pending, f"unit {unit.name} lacks a gradient"
            if self.level == 1 and unit.name not in self._reduced:
                self._reduce(unit)
        while self._under_way:
            self._settle()
        for handle in self._between_copies:
            handle.wait()
        self._armed, self._between_copies = set(), []

    def after_update(self) -> None:
        """After the optimizer: everyone gets everyone's updated shards."""
        gathering = [
            self.comm.all_gather(
                unit.shard, self.over.axis, strategy=self.strategy, stream=self.over.gather, output=unit.whole
            )
            for unit in self.units
        ]
        for handle in gathering:
            handle.wait()

    # -- reductions --------------------------------------------------------------------------------------------------

    def _ready(self, unit: Unit, index: int, parameter: Tensor) -> None:
        """The hook of one parameter: its gradient of this backward is there."""
        if unit.came(index):
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """All gradients of a unit are there."""
        if self.level > 1 or (unit.name in self._armed and self.overlap):
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit.name)
        source, output = unit.whole_gradient, unit.gradient  # in place: the shard is a slice of the whole
        if source is None:
            source = unit.take_gradients()
            output = torch.empty_like(unit.gradient)
        handle = self.comm.reduce_scatter(
            source, self.over.axis, strategy=self.strategy, stream=self.over.reduce, output=output
        )
        # A reduction of an earlier microbatch may still be under way when the last one is armed: each has its own flag.
        self._under_way.append((unit, handle, unit.name in self._armed))
        del source
        while len(self._under_way) > self._most:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction and add it to the shard; the last one of a unit goes on to the other copies."""
        unit, handle, last = self._under_way.popleft()
        summed = handle.wait()
        if unit.whole_gradient is None:
            unit.gradient.add_(summed)
        if last or self.level == 1:
            self._between_copies.append(
                self.comm.all_reduce(
                    unit.gradient, self.over.copies, strategy=self.strategy, stream=self.over.reduce_copies
                )
            )

    # -- what is held ------------------------------------------------------------------------------------------------

    def held(self) -> tuple[list[Tensor], list[Tensor]]:
        """(parameters, gradients) in memory between two steps."""
        parameters = [tensor for unit in self.units for tensor in (unit.whole, unit.shard)]
        return parameters, [unit.gradient for unit in self.units]

    def gathered(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(gradients, parameters) of this rank's model, whole, by global name. Outside of steps; all ranks call it."""
        gradients: dict[str, Tensor] = {}
        parameters: dict[str, Tensor] = {}
        for unit in self.units:
            for flat, into in ((self._whole(unit.gradient), gradients), (self._whole_parameters(unit), parameters)):
                into.update(zip(unit.flat.parameters, (part.clone() for part in unit.split(flat)), strict=True))
        return gradients, parameters

    def _whole(self, shard: Tensor) -> Tensor:
        return self.comm.all_gather(shard, self.over.axis, strategy=self.strategy, stream=self.over.gather).wait()

    def _whole_parameters(self, unit: Unit) -> Tensor:
        return unit.whole
