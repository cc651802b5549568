"""Shardings: text and back, cut and assembled, dims taken apart and merged without moving an index."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.errors import ShardingError
from tutti.layout import Dim, Mesh, Segment, Sharding, assemble, canonical, split_dim, united

MESHES = [Mesh.parse(m) for m in ("a=2", "a=3", "a=2 b=2", "a=2 b=3", "a=2 b=2 c=2", "a=4 b=2")]
meshes = st.sampled_from(MESHES)
thorough = settings(max_examples=200)


@st.composite
def dims(draw: st.DrawFn, mesh: Mesh, free: list[str]) -> Dim:
    """Up to three segments, each split by some of the free axes (which it takes), in any order."""
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        num = draw(st.integers(0, len(free)))
        axes = tuple(draw(st.permutations(free))[:num])
        for axis in axes:
            free.remove(axis)
        segments.append(Segment(mesh.size(axes) * draw(st.integers(1, 3)), axes))
    return tuple(segments)


@st.composite
def shardings(draw: st.DrawFn, *, pending: bool = True) -> tuple[Sharding, Mesh]:
    mesh = draw(meshes)
    free = list(mesh)
    made = [draw(dims(mesh, free)) for _ in range(draw(st.integers(0, 3)))]
    op = draw(st.sampled_from(["sum", "max", "min", "prod"]))
    partial = [(a, op) for a in free if pending and draw(st.booleans())]
    return Sharding(tuple(made)).with_partial(partial), mesh


def index_of(dim: Dim, mesh: Mesh, rank: int) -> list[int]:
    return Sharding((dim,)).index(0, mesh, mesh.coordinates(rank)).tolist()


@thorough
@given(shardings())
def test_text_parses_back(made: tuple[Sharding, Mesh]) -> None:
    sharding, _ = made
    assert Sharding.parse(str(sharding)) == sharding


@thorough
@given(shardings(pending=False))
def test_cut_and_assembled(made: tuple[Sharding, Mesh]) -> None:
    sharding, mesh = made
    x = torch.randn(sharding.shape, dtype=torch.float64)
    parts = [sharding.cut(x, mesh, mesh.coordinates(r)) for r in range(mesh.num_ranks)]
    assert all(p.shape == sharding.local_shape(mesh) for p in parts)
    for rank, part in enumerate(parts):
        at = mesh.coordinates(rank)
        index = [sharding.index(d, mesh, at) for d in range(x.dim())]
        assert torch.equal(part, x[torch.meshgrid(*index, indexing="ij")] if index else x)
    assert torch.equal(assemble(parts, sharding, mesh), x)


@given(shardings())
def test_assembling_carries_out_what_is_pending(made: tuple[Sharding, Mesh]) -> None:
    sharding, mesh = made
    x = torch.rand(sharding.shape, dtype=torch.float64) + 0.5
    op = sharding.partial[0][1] if sharding.partial else "sum"
    ways = mesh.size(sharding.partial_axes)
    each = {"sum": x / ways, "prod": x ** (1 / ways)}.get(op, x)
    parts = []
    for rank in range(mesh.num_ranks):
        place = mesh.coordinates(rank)
        first = not any(place[a] for a in sharding.partial_axes)
        off = {"max": -1.0, "min": 1.0}.get(op, 0.0) * (not first)
        parts.append(sharding.cut(each, mesh, place) + off)
    torch.testing.assert_close(assemble(parts, sharding, mesh), x, rtol=1e-12, atol=1e-12)


@given(shardings(pending=False))
def test_the_ranks_of_a_dim_share_its_indices(made: tuple[Sharding, Mesh]) -> None:
    sharding, mesh = made
    for d, dim in enumerate(sharding.dims):
        held = [i for r in range(mesh.num_ranks) for i in index_of(dim, mesh, r)]
        copies = mesh.num_ranks // mesh.size([a for seg in dim for a in seg.axes])
        assert sorted(held) == sorted(list(range(sharding.shape[d])) * copies)


@thorough
@given(st.data(), meshes)
def test_joining_segments_moves_no_index(data: st.DataObject, mesh: Mesh) -> None:
    dim = data.draw(dims(mesh, list(mesh)))
    joined = canonical(dim, mesh)
    assert len(joined) <= len(dim) and canonical(joined, mesh) == joined
    for rank in range(mesh.num_ranks):
        assert index_of(joined, mesh, rank) == index_of(dim, mesh, rank)


@thorough
@given(st.data(), meshes)
def test_taking_a_dim_apart_moves_no_index(data: st.DataObject, mesh: Mesh) -> None:
    dim = canonical(data.draw(dims(mesh, list(mesh))), mesh)
    size = math.prod(seg.size for seg in dim)
    sizes, rest = [], size
    while rest > 1 and len(sizes) < 3:
        sizes.append(data.draw(st.sampled_from([k for k in range(1, rest + 1) if rest % k == 0])))
        rest //= sizes[-1]
    sizes.append(rest)
    parts = split_dim(dim, sizes, mesh)
    if parts is None:
        return
    assert [math.prod(s.size for s in part) for part in parts] == sizes
    for rank in range(mesh.num_ranks):
        product = [0]
        for part, part_size in zip(parts, sizes, strict=True):
            here = index_of(part, mesh, rank)
            product = [i * part_size + j for i in product for j in here]
        assert product == index_of(dim, mesh, rank)


@given(st.data(), meshes)
def test_a_merged_dim_comes_apart_where_it_was_joined(data: st.DataObject, mesh: Mesh) -> None:
    """What a view merges, the view back takes apart: the factors' own splits return."""
    free = list(mesh)
    factors = [canonical(data.draw(dims(mesh, free)), mesh) for _ in range(2)]
    sizes = [math.prod(s.size for s in f) for f in factors]
    parts = split_dim(canonical((*factors[0], *factors[1]), mesh), sizes, mesh)
    assert parts is not None
    for part, factor in zip(parts, factors, strict=True):
        for rank in range(mesh.num_ranks):
            assert index_of(part, mesh, rank) == index_of(factor, mesh, rank)


MESH = Mesh.parse("data=2 tensor=2")


@pytest.mark.parametrize(
    ("segments", "joined"),
    [
        ("4*8@data", "4*8@data"),
        ("8@data*4", "32@data"),
        ("2@data*4@tensor", "8@data+tensor"),
        ("4*2", "8"),
        ("2*8@data*3", "2*24@data"),
        ("1*8@data", "8@data"),
    ],
)
def test_canonical_forms(segments: str, joined: str) -> None:
    assert canonical(Sharding.parse(segments).dims[0], MESH) == Sharding.parse(joined).dims[0]


def test_a_cut_through_a_split_run_is_refused() -> None:
    assert split_dim(Sharding.parse("12@data").dims[0], [3, 4], MESH) is None
    assert split_dim(Sharding.parse("4*6@data").dims[0], [12, 2], MESH) is None


def test_the_short_form_needs_a_shape() -> None:
    sharding = Sharding.parse("data, data2+tensor, -", (8, 12, 5))
    assert str(sharding) == "8@data, 12@data2+tensor, 5"
    assert sharding.axes == {"data", "data2", "tensor"} and not sharding.is_whole


def test_pending_reductions_in_text() -> None:
    sharding = Sharding.parse("8@data, 12 {partial tensor seq:max}")
    assert sharding.partial == (("tensor", "sum"), ("seq", "max"))
    assert sharding.partial_axes == {"tensor", "seq"}
    assert Sharding.parse("8, 12").is_whole and not sharding.is_whole
    assert Sharding.parse("{partial data}").partial == (("data", "sum"),)


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        ("data, -", (8,), "2 entries for a tensor of 1 dims"),
        ("data", (8, 8), "one entry per dim"),
        ("8@", None, 'cannot read "8@"'),
        ("data, -", None, 'cannot read "data"'),
        ("da ta", (8,), 'cannot read "da ta"'),
        ("8 {partial", None, "cannot read the sharding"),
    ],
)
def test_text_that_cannot_be_read(text: str, shape: tuple[int, ...] | None, reason: str) -> None:
    with pytest.raises(ShardingError) as caught:
        Sharding.parse(text, shape)
    assert reason in str(caught.value)


def test_what_divides() -> None:
    assert Sharding.parse("8@data, 6").divides(MESH)
    assert not Sharding.parse("6@data+tensor").divides(MESH)
    assert not Sharding.parse("2*3@data").divides(MESH)


def splits(size: int, mesh: Mesh) -> set[Dim]:
    """Every canonical split of a dim by each of the axes at most once."""
    found: set[Dim] = set()
    for sizes in products_of(size):
        for places in product(range(-1, len(sizes)), repeat=len(list(mesh))):
            for order in permutations(zip(mesh, places, strict=True)):
                axes = [tuple(a for a, at in order if at == i) for i in range(len(sizes))]
                if all(n % mesh.size(a) == 0 for n, a in zip(sizes, axes, strict=True)):
                    found.add(canonical(map(Segment, sizes, axes), mesh))
    return found


def products_of(size: int) -> list[tuple[int, ...]]:
    return [(size,)] + [
        (n, *rest) for n in range(2, size) if size % n == 0 for rest in products_of(size // n)
    ]


@pytest.mark.parametrize(
    ("size", "mesh"), [(4, "a=2 b=2"), (6, "a=2 b=3"), (8, "a=2 b=2"), (8, "a=2 b=4")]
)
def test_two_splits_united(size: int, mesh: str) -> None:
    """Against all splits: what is found is what both say, and where none is found, there is none."""
    ranks = Mesh.parse(mesh)

    def held(dim: Dim) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(index_of(dim, ranks, r)) for r in range(ranks.num_ranks))

    every = {dim: held(dim) for dim in splits(size, ranks)}
    some = {indices: dim for dim, indices in every.items()}
    num_found = 0
    for one, other in product(every, repeat=2):
        both = tuple(map(frozenset.intersection, every[one], every[other]))
        found = united(one, other, ranks)
        num_found += found is not None
        assert (held(found) if found else None) == (both if both in some else None), (one, other)
    assert len(every) < num_found < len(every) ** 2


def test_splits_of_no_elements() -> None:
    mesh = Mesh.parse("a=2 b=2")
    one, other = (Segment(0, ("a",)),), (Segment(0, ("b",)),)
    assert united(one, one, mesh) == united(one, (Segment(0),), mesh) == one
    assert united(one, other, mesh) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a, a", "names the axis a twice"),
        ("a+a, -", "names the axis a twice"),
        ("4@a*2@a, 8", "names the axis a twice"),
        ("8@a, 8 {partial a}", "names the axis a twice"),
        ("8, 8 {partial a a:max}", "names the axis a twice"),
        ("4@a, 8", "another size than 8"),
        (("a", "-"), "is of type tuple, not a text"),
        (None, "is of type NoneType, not a text"),
    ],
)
def test_text_that_is_no_sharding(text: str, said: str) -> None:
    with pytest.raises(ShardingError, match=said) as caught:
        Sharding.parse(text, (8, 8))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "shape", "size", "said"),
    [
        ("a, b", (7, 3), (7, 3), "all parts of a dim have one size"),
        ("a, -", (8, 3), (6, 3), r"it is one of a tensor of shape \[8, 3\]"),
        ("a, -", (8, 3), (4, 6), r"it is one of a tensor of shape \[8, 3\]"),
        ("-, -", (8, 3), (8,), r"it is one of a tensor of shape \[8, 3\]"),
        ("c, -", (8, 3), (8, 3), "the mesh has no axis c"),
    ],
)
def test_a_tensor_that_cannot_be_cut(
    text: str, shape: tuple[int, ...], size: tuple[int, ...], said: str
) -> None:
    mesh = Mesh.parse("a=2 b=4")
    with pytest.raises(ShardingError, match=said) as caught:
        Sharding.parse(text, shape).cut(torch.zeros(size), mesh, mesh.coordinates(0))
    assert caught.value.fix
