"""ZeRO-3, or FSDP (Zhao et al. 2023): parameters are cut too, and are whole only while a block uses them.

    forward    [all-gather layer 0] ▶ layer 0 ▶ free    [all-gather layer 1, prefetched] ▶ layer 1 ▶ free   ...
    backward   ...   [all-gather layer 1] ▶ layer 1 ▶ free, [reduce-scatter]    [all-gather layer 0, prefetched] ▶ layer 0

The whole buffer keeps its identity and its views; only its storage comes and goes, so what autograd has saved of a weight
is there again when backward needs it. Blocks call `enter` and `leave` through the model's seams. The recomputation of a
block runs inside its backward, without them: what it has gathered stays until its gradients are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from stepscope.parallel_runtime.comm import Comm, Handle, Ready
from stepscope.parallel_runtime.model.seams import Seams
from stepscope.parallel_runtime.zero.sharded import DENSE, Over, ShardedData, Unit
from stepscope.parallel_runtime.zero.units import Use


class Gathered:
    """Whether a unit's parameters are whole, and the gather that makes them so."""

    def __init__(self, unit: Unit, comm: Comm, strategy: str, over: Over) -> None:
        self.unit, self.comm, self.strategy, self.over = unit, comm, strategy, over
        self._bytes = unit.whole.untyped_storage().nbytes()
        self._gathering: Handle | Ready | None = None
        self._there = True
        self.free()

    def ask(self) -> None:
        """Start to gather, unless the parameters are there or on their way."""
        if self._there:
            return
        self._there = True
        self.unit.whole.untyped_storage().resize_(self._bytes)
        self._gathering = self.comm.all_gather(
            self.unit.shard,
            self.over.axis,
            strategy=self.strategy,
            stream=self.over.gather,
            output=self.unit.whole,
        )

    def wait(self) -> None:
        """The parameters may be used when it returns."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Let the memory go."""
        assert self._gathering is None, f"unit {self.unit.name} is freed while it is gathered"
        if self._there:
            self.unit.whole.untyped_storage().resize_(0)
            self._there = False


class FullyShardedData(ShardedData):
    """ShardedData of level 3, which gathers and frees parameters around each block."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        comm: Comm,
        uses: Sequence[Sequence[Use]],
        overlap: bool = True,
        reshard: bool = True,
        prefetch: int = 1,
        over: Over = DENSE,
    ) -> None:
        """`uses`: the blocks of each chunk in order of forward, with the units that each reads; `prefetch`: blocks gathered
        ahead, within a chunk."""
        super().__init__(named, comm, 3, overlap, over)
        self.reshard, self.prefetch = reshard, prefetch
        self._gathered = {unit.name: Gathered(unit, comm, self.strategy, over) for unit in self.units}
        self._place = {use.block: (chunk, place) for chunk in uses for place, use in enumerate(chunk)}

    # -- called by the model -----------------------------------------------------------------------------------------

    def enter(self, block: str) -> None:
        """Before a block's forward."""
        self._bring(block, 1)

    def leave(self, block: str, output: Tensor) -> Tensor:
        """After a block's forward; the gradient of its output starts its backward."""
        if self.reshard:
            for unit in self._units(block):
                unit.free()
        if output.requires_grad:
            output.register_hook(lambda gradient: self._bring(block, -1))
        return output

    def _bring(self, block: str, direction: int) -> None:
        """Gather what the block needs, and what those that follow in this direction need; wait for the former."""
        uses, place = self._place[block]
        for ahead in range(self.prefetch + 1):
            where = place + direction * ahead
            if 0 <= where < len(uses):
                for unit in self._units(uses[where].block):
                    unit.ask()
        for unit in self._units(block):
            unit.wait()

    def _units(self, block: str) -> list[Gathered]:
        """Of those that this strategy cuts: a layer has a unit of experts too, or of experts only, or none."""
        uses, place = self._place[block]
        return [self._gathered[name] for name in uses[place].units if name in self._gathered]

    # -- a step ------------------------------------------------------------------------------------------------------

    def _complete(self, unit: Unit) -> None:
        """Nothing in this backward reads the unit any more."""
        super()._complete(unit)
        self._gathered[unit.name].free()

    def after_update(self) -> None:
        """The next forward gathers what it needs."""

    def _whole_parameters(self, unit: Unit) -> Tensor:
        return self._whole(unit.shard)


class LateSeams:
    """The seams of a model that is built before its parameters can be cut: they reach the strategies once these are there."""

    def __init__(self) -> None:
        self.strategies: list[FullyShardedData] = []

    def into(self, base: Seams) -> Seams:
        """`base` whose blocks call the strategies."""
        return replace(base, enter=self._enter, leave_block=self._leave)

    def _enter(self, block: str) -> None:
        assert self.strategies, "the model runs before its parameters are cut"
        for strategy in self.strategies:
            strategy.enter(block)

    def _leave(self, block: str, output: Tensor) -> Tensor:
        for strategy in self.strategies:
            output = strategy.leave(block, output)
        return output
