"""The table of cuts: by hand, its inverse, and what each rank counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig
from stepscope.parallel_runtime.layout import (
    TABLE,
    Cut,
    counts_once,
    cuts_of,
    gather,
    is_cut,
    is_whole,
    local_sequence,
    of_experts,
    replicas,
    shard,
    shard_shape,
)
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import initial_value, parameter_shapes

PLAIN = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=4, ffn=24, vocab=32)
MIXED = replace(PLAIN, experts=8, ffn_bias=True, dense_layers=1)
FULL = replace(PLAIN, norm="layernorm", qkv_bias=True, output_bias=True, ffn_bias=True)
TIED = replace(FULL, tied=True)


def test_cuts_by_hand() -> None:
    """tp 2, rank 1: the lower half of the rows of a query, the right half of the columns of an output."""
    mesh, whole = Mesh(tp=2), torch.arange(16.0).view(4, 4)
    assert shard("layers.7.attention.query.weight", whole, mesh, 1).tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert shard("layers.7.attention.output.weight", whole, mesh, 1).tolist() == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert shard("layers.0.attention.output.bias", whole[0], mesh, 1).tolist() == [0, 1, 2, 3]
    assert cuts_of("embedding.weight") == (Cut(0, "tp"),)


def test_experts_by_hand() -> None:
    """dp 2 tp 2 ep 2: ranks 0 and 2 have the first half of the experts, whole, ranks 1 and 3 the second."""
    mesh, name = Mesh(dp=2, tp=2, ep=2), "layers.0.feed_forward.experts.up.weight"
    whole = torch.arange(16.0).view(4, 2, 2)
    for rank in range(4):
        assert shard(name, whole, mesh, rank).tolist() == whole[[0, 1] if rank % 2 == 0 else [2, 3]].tolist()
    assert mesh.group("edp", 2) == (0, 2)
    assert is_whole("layers.0.feed_forward.router.weight") and of_experts(name) and not is_whole(name)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match=r"layers\.\*\.attention\.sink"):
        cuts_of("layers.3.attention.sink")


def test_the_table_knows_every_parameter() -> None:
    dense = {"layers.0." + name.removeprefix("layers.*.") if "*" in name else name for name in TABLE}
    mixture = {name.replace(".0.", ".1.") for name in dense if ".router." in name or ".experts." in name}
    known = {name for name in dense if name.replace(".0.", ".1.") not in mixture}
    assert known == {name for name in parameter_shapes(FULL) if not name.startswith("layers.1.")}
    assert mixture == {name for name in parameter_shapes(MIXED) if "router" in name or "experts" in name}


@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([PLAIN, FULL, TIED]),
)
def test_shards_gather_to_the_whole(pp: int, dp: int, tp: int, model: ModelConfig) -> None:
    """Whichever rank asks, and all elements are counted once over pp and tp."""
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    for name, shape in parameter_shapes(model).items():
        whole = initial_value(name, shape, 0)
        parts = {rank: shard(name, whole, mesh, rank) for rank in range(mesh.world_size)}
        assert {tuple(part.shape) for part in parts.values()} == {shard_shape(name, shape, mesh)}
        assert all(torch.equal(gather(name, parts, mesh, rank), whole) for rank in parts)
        stage = [rank for rank in range(mesh.world_size) if mesh.coordinates(rank)["dp"] == 0]
        counted = [rank for rank in stage if counts_once(name, mesh, rank) and mesh.coordinates(rank)["pp"] == 0]
        assert sum(parts[rank].numel() for rank in counted) == whole.numel()
        assert len(counted) == (tp if is_cut(name, "tp") else 1)


@given(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_expert_shards_gather_to_the_whole(pp: int, dp: int, tp: int, ep: int) -> None:
    """Whichever rank asks; the first of `replicas` counts each element of the model once in the world."""
    if dp * tp % ep:
        return
    mesh, counted = Mesh(pp=pp, dp=dp, tp=tp, ep=ep), 0
    for name, shape in parameter_shapes(MIXED).items():
        whole = initial_value(name, shape, 0)
        parts = {rank: shard(name, whole, mesh, rank) for rank in range(mesh.world_size)}
        assert all(torch.equal(gather(name, parts, mesh, rank), whole) for rank in parts)
        firsts = [rank for rank in parts if counts_once(name, mesh, rank) and mesh.index(replicas(name), rank) == 0]
        counted = sum(parts[rank].numel() for rank in firsts if mesh.coordinates(rank)["pp"] == 0)
        assert counted == whole.numel()


def test_a_tied_copy_counts_on_the_first_stage() -> None:
    mesh = Mesh(pp=2, tp=2)
    assert [counts_once("embedding.weight", mesh, rank) for rank in range(4)] == [True, True, False, False]
    assert [counts_once("norm.weight", mesh, rank) for rank in range(4)] == [True, False, True, False]


def test_the_sequence_of_a_boundary() -> None:
    assert local_sequence(ModelConfig(seq=64), ParallelConfig()) == 64
