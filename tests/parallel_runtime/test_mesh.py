"""Ranks and groups: worked by hand for 8 and 16 ranks, then laws that hold for every mesh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.parallel_runtime.config import ParallelConfig
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.tracer.schema import AXES, MESH_AXES

VIEWS = ("pp", "dp", "cp", "tp", "ep", "edp", "dp_cp", "pp_tp", "pp_dp_cp_tp", "world")


def test_copies_of_experts_by_hand() -> None:
    """dp 4 x tp 2 in two copies, ep 2: ranks 0 to 3 are one copy, and experts of even ranks are the same."""
    mesh = Mesh(dp=4, ep=2, tp=2, replicas=2)
    assert mesh.all_groups("edp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert mesh.all_groups("edp_shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.all_groups("edp_replica") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.axis_of("edp_shard") == mesh.axis_of("edp_replica") == "edp"
    stages = Mesh(pp=2, dp=2, ep=2)
    assert stages.all_groups("edp_shard") == stages.all_groups("edp") == [(0,), (1,), (2,), (3,)]
    assert Mesh(pp=2, dp=4, ep=2, replicas=2).group("edp_replica", 6) == (4, 6)


def test_tp_is_innermost_and_pp_outermost() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.all_groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.all_groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.all_groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.all_groups("pp_tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert mesh.coordinates(6) == {"pp": 1, "dp": 1, "cp": 0, "ep": 0, "tp": 0}


def test_axes_come_outermost_first() -> None:
    assert tuple(Mesh().sizes()) == MESH_AXES == ("pp", "dp", "cp", "ep", "tp")


def test_expert_view_of_one_stage() -> None:
    mesh = Mesh(pp=2, dp=2, cp=1, ep=4, tp=2)  # dp x cp x tp = 4 ranks a stage: one block of 4 experts
    assert mesh.all_groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.size("edp") == 1
    mesh = Mesh(dp=2, cp=2, ep=2, tp=2)  # 8 ranks: blocks of two neighbours, four of them
    assert mesh.all_groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.all_groups("edp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert mesh.coordinates(5)["ep"] == 1


def test_first_and_last_stage_share_the_embedding() -> None:
    mesh = Mesh(pp=4, dp=2)
    assert mesh.all_groups("embedding") == [(0, 6), (1, 7)]
    assert mesh.group("embedding", 3) == ()
    assert Mesh(pp=2).all_groups("embedding") == [(0, 1)]
    assert Mesh(dp=2).all_groups("embedding") == [(0,), (1,)]


def test_names_of_axes() -> None:
    mesh = Mesh(pp=2, dp=2)
    assert [mesh.axis_of(view) for view in ("dp", "cp", "dp_cp", "embedding", "world", "edp")] == [
        "dp",
        "cp",
        "dp",  # cp has one rank: the group runs along dp
        "pp",
        "world",
        "edp",
    ]
    assert Mesh(dp=2, cp=2).axis_of("dp_cp") == "dp_cp"


def test_from_a_parallel_configuration() -> None:
    assert Mesh.of(ParallelConfig(pp=2, dp=3)) == Mesh(pp=2, dp=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "mesh axis dp has size 0"),
        ({"dp": 4, "ep": 3}, "ep 3 must divide dp x cp x tp = 4, the ranks of one stage: take ep 2"),
    ],
)
def test_illegal_sizes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(**arguments)


def test_unknown_views_and_ranks() -> None:
    for view in ("tp_dp", "ep_dp", "", "dp_dp"):
        with pytest.raises(ValueError, match="unknown view"):
            Mesh(dp=2).group(view, 0)
    with pytest.raises(ValueError, match="rank 2 is not among the 2 ranks"):
        Mesh(dp=2).group("dp", 2)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    pp, dp, cp, tp = (draw(st.integers(1, 3)) for _ in range(4))
    divisors = [n for n in range(1, dp * cp * tp + 1) if dp * cp * tp % n == 0]
    return Mesh(pp, dp, cp, draw(st.sampled_from(divisors)), tp)


@given(meshes())
def test_every_view_partitions_the_ranks(mesh: Mesh) -> None:
    for view in VIEWS:
        groups = mesh.all_groups(view)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.size(view)}
        assert all(list(group) == sorted(group) for group in groups)
        assert mesh.axis_of(view) in AXES
        for rank in range(mesh.world_size):
            assert mesh.group(view, rank)[mesh.index(view, rank)] == rank


@given(meshes())
def test_coordinates_name_the_rank_and_its_place_in_each_group(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        where = mesh.coordinates(rank)
        assert mesh.rank_of(**{axis: where[axis] for axis in ("pp", "dp", "cp", "tp")}) == rank
        assert {axis: mesh.index(axis, rank) for axis in where} == where


@given(meshes())
def test_the_two_views_of_a_stage_hold_the_same_ranks(mesh: Mesh) -> None:
    assert mesh.size("ep") * mesh.size("edp") == mesh.stage_size
    for rank in range(mesh.world_size):
        stage = mesh.coordinates(rank)["pp"]
        assert all(mesh.coordinates(other)["pp"] == stage for other in mesh.group("edp", rank))
        assert set(mesh.group("ep", rank)) & set(mesh.group("edp", rank)) == {rank}
