"""Meshes: where a rank stands, and which ranks differ in which axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import LayoutError
from tutti.layout import Mesh

names = st.lists(st.sampled_from("abcde"), unique=True, max_size=4)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    return Mesh(tuple((n, draw(st.integers(1, 4))) for n in draw(names)))


@given(meshes())
def test_text_parses_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@given(meshes())
def test_ranks_and_coordinates(mesh: Mesh) -> None:
    places = [mesh.coordinates(r) for r in range(mesh.num_ranks)]
    assert [mesh.rank(p) for p in places] == list(range(mesh.num_ranks))
    assert all(list(p) == list(mesh) for p in places)
    assert mesh.num_ranks == mesh.size(mesh) == math.prod(s for _, s in mesh.axes)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh.parse("data=2 tensor=4")
    assert mesh.coordinates(5) == {"data": 1, "tensor": 1}
    assert mesh.groups(["tensor"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups(["data"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_group_is_ordered_by_its_axes_major_to_minor() -> None:
    mesh = Mesh.parse("a=2 b=2")
    assert mesh.groups(["a", "b"]) == [[0, 1, 2, 3]]
    assert mesh.groups(["b", "a"]) == [[0, 2, 1, 3]]
    assert mesh.groups([]) == [[0], [1], [2], [3]]


@given(meshes(), st.data())
def test_groups_share_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.permutations(list(mesh)))[: data.draw(st.integers(0, len(mesh.axes)))]
    groups = mesh.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(mesh.num_ranks))
    for group in groups:
        for k, rank in enumerate(group):
            place = mesh.coordinates(rank)
            assert mesh.index(axes, place) == k
            rest = {a: c for a, c in place.items() if a not in axes}
            first = mesh.coordinates(group[0])
            assert rest == {a: first[a] for a in rest}


@pytest.mark.parametrize(
    "text", ["data", "data=", "data=x", "data=0", "2=data", "data=-1", "a=2 a=2"]
)
def test_text_that_cannot_be_read(text: str) -> None:
    with pytest.raises(LayoutError):
        Mesh.parse(text)


def test_membership() -> None:
    mesh = Mesh.parse("data=2 tensor=4")
    assert "data" in mesh and "seq" not in mesh and list(mesh) == ["data", "tensor"]


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_a_rank_outside_of_the_mesh(rank: int) -> None:
    with pytest.raises(LayoutError, match=f'mesh "data=2 tensor=4" has no rank {rank}') as caught:
        Mesh.parse("data=2 tensor=4").coordinates(rank)
    assert caught.value.fix == "a rank from 0 to 7"
