"""How many layers each part of the pipeline gets: the slowest part sets the pace, so equal layers are not equal work.

The first part has the embedding as well, the last one the head, which on a wide vocabulary costs as much as several layers.
Costs are estimated in multiplications and additions of a token's forward pass; backward is twice that everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from stepscope.parallel_runtime.config import ModelConfig

BALANCED = "balanced"
EQUAL = "equal"


def layer_cost(model: ModelConfig, layer: int) -> int:
    """Operations of one layer for one token: two for each entry of its matrices, and causal attention over the sequence."""
    keys = model.kv_heads * model.head_size
    matrices = 2 * model.hidden * (model.hidden + keys)  # query and output, key and value
    width = model.hidden * (3 if model.activation == "swiglu" else 2)
    if model.has_experts(layer):
        matrices += width * model.expert_width * model.experts_per_token + model.hidden * model.experts
    else:
        matrices += width * model.ffn
    return 2 * matrices + 2 * model.seq * model.hidden


def ends_cost(model: ModelConfig) -> tuple[int, int]:
    """(embedding, head with its loss) for one token. A lookup moves one row; the loss touches each logit a few times."""
    return model.hidden, 2 * model.vocab * model.hidden + 5 * model.vocab


def balanced(model: ModelConfig, parts: int) -> tuple[int, ...]:
    """Layers of each part, in order: the most expensive part as cheap as can be, and then all as equal as can be.

    ValueError where there are fewer layers than parts.
    """
    if parts > model.layers:
        raise ValueError(f"{parts} parts need a layer each, the model has {model.layers}: take layers {parts}")
    first, last = ends_cost(model)
    costs = [layer_cost(model, layer) for layer in range(model.layers)]
    costs[0] += first
    costs[-1] += last
    largest = _smallest_largest(costs, parts)
    return _most_equal(tuple(costs), parts, largest)


def costs_of(model: ModelConfig, sizes: Sequence[int]) -> list[int]:
    """Estimated cost of each part."""
    first, last = ends_cost(model)
    bounds = [sum(sizes[:part]) for part in range(len(sizes) + 1)]
    costs = [sum(layer_cost(model, layer) for layer in range(*bounds[part : part + 2])) for part in range(len(sizes))]
    costs[0] += first
    costs[-1] += last
    return costs


def _smallest_largest(costs: Sequence[int], parts: int) -> int:
    """The largest part of the best cut into `parts` runs of at least one layer, by bisection over what fits."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(costs, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(costs: Sequence[int], largest: int) -> int:
    """Fewest runs of which none costs more than `largest`; a run can always be cut again, so any more will do too."""
    parts, total = 1, 0
    for cost in costs:
        if total + cost > largest:
            parts, total = parts + 1, 0
        total += cost
    return parts


def _most_equal(costs: tuple[int, ...], parts: int, largest: int) -> tuple[int, ...]:
    """Of the cuts that keep within `largest` the one with the smallest sum of squares; more layers first in a tie."""
    sums = [sum(costs[:layer]) for layer in range(len(costs) + 1)]

    @cache
    def best(begin: int, left: int) -> tuple[int, tuple[int, ...]] | None:
        if left == 0:
            return (0, ()) if begin == len(costs) else None
        found: tuple[int, tuple[int, ...]] | None = None
        for end in range(len(costs) - left + 1, begin, -1):
            cost = sums[end] - sums[begin]
            rest = best(end, left - 1) if cost <= largest else None
            if rest is not None and (found is None or cost**2 + rest[0] < found[0]):
                found = (cost**2 + rest[0], (end - begin, *rest[1]))
        return found

    answer = best(0, parts)
    assert answer is not None, "a cut within the bound exists: the bound came from one"
    return answer[1]


def parse_split(text: str, model: ModelConfig, parts: int) -> tuple[int, ...]:
    """Layers of each part from what was typed: `equal` (), `balanced`, or numbers such as 2,1,1."""
    if text == EQUAL:
        return ()
    if text == BALANCED:
        return balanced(model, parts)
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"split {text!r} is unknown: take {EQUAL}, {BALANCED}, or layers of each part such as 2,1,1"
        ) from None
