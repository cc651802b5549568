"""Virtual ranks: each collective against its definition, and float64 throughout when promoted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from subjects import program, subject
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.ops import collectives
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh, Sharding, assemble

aten = torch.ops.aten
MESH = Mesh.parse("data=2 tensor=3")
SHAPE = (6, 12)


def parts(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator) for _ in range(MESH.num_ranks)]


def play(target: Any, arguments: tuple[Any, ...], xs: list[Tensor], mesh: Mesh = MESH) -> list[Any]:
    graph = fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"), *arguments)))
    return VirtualRanks(mesh).run(graph, nn.Module(), [[x] for x in xs])


def group(rank: int, axes: tuple[str, ...]) -> list[int]:
    return next(g for g in MESH.groups(axes) if rank in g)


@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor"), ("tensor", "data")])
@pytest.mark.parametrize(
    ("op", "reduce"),
    [
        ("sum", lambda x: x.sum(0)),
        ("max", lambda x: x.amax(0)),
        ("min", lambda x: x.amin(0)),
        ("prod", lambda x: x.prod(0)),
    ],
)
def test_all_reduce(axes: tuple[str, ...], op: str, reduce: Callable[[Tensor], Tensor]) -> None:
    xs = parts()
    for rank, got in enumerate(play(collectives.all_reduce, (axes, op), xs)):
        expected = reduce(torch.stack([xs[r] for r in group(rank, axes)]))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor"), ("tensor", "data")])
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather(axes: tuple[str, ...], dim: int) -> None:
    xs = parts()
    for rank, got in enumerate(play(collectives.all_gather, (axes, dim, 1), xs)):
        assert got.equal(torch.cat([xs[r] for r in group(rank, axes)], dim))


def test_all_gather_below_a_major_segment() -> None:
    """Dim 1 of 12 seen as (3, 4): each of the three runs gets the runs of the others behind it."""
    xs = parts()
    for rank, got in enumerate(play(collectives.all_gather, (("data",), 1, 3), xs)):
        views = [xs[r].reshape(6, 3, 4) for r in group(rank, ("data",))]
        assert got.equal(torch.cat(views, 2).reshape(6, 24))


@pytest.mark.parametrize("outer", [1, 2])
def test_reduce_scatter_is_reduce_then_shard(outer: int) -> None:
    xs = parts()
    arguments = (("tensor",), 1, outer)
    whole = play(collectives.all_reduce, (("tensor",), "sum"), xs)
    expected = play(collectives.shard, arguments, whole)
    for got, want in zip(
        play(collectives.reduce_scatter, (*arguments, "sum"), xs), expected, strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("outer", [1, 2])
def test_gather_undoes_shard(outer: int) -> None:
    xs = [parts()[0]] * MESH.num_ranks
    for axes in (("data",), ("tensor",), ("tensor", "data")):
        cut = play(collectives.shard, (axes, 1, outer), xs)
        assert cut[0].shape[1] == 12 // MESH.size(axes)
        assert all(x.equal(xs[0]) for x in play(collectives.all_gather, (axes, 1, outer), cut))


def test_all_to_all_moves_a_split_from_one_dim_to_another() -> None:
    whole = torch.arange(72.0).reshape(SHAPE)
    places = [MESH.coordinates(r) for r in range(MESH.num_ranks)]
    before = Sharding.parse("tensor, -", SHAPE)
    after = Sharding.parse("-, tensor", SHAPE)
    xs = [before.cut(whole, MESH, p) for p in places]
    for place, got in zip(
        places, play(collectives.all_to_all, (("tensor",), 1, 1, 0, 1), xs), strict=True
    ):
        assert got.equal(after.cut(whole, MESH, place))


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_partialize_then_reduce_is_nothing(op: str) -> None:
    xs = [parts()[0]] * MESH.num_ranks
    pending = play(collectives.partialize, (("tensor",), op), xs)
    assert all(x.equal(xs[0]) for x in play(collectives.all_reduce, (("tensor",), op), pending))


def test_positions_are_the_indices_that_a_rank_holds() -> None:
    sharding = Sharding.parse("2*3@tensor, 12@data")
    whole = torch.arange(6)[:, None] * torch.ones(12, dtype=torch.int64)
    xs = [torch.zeros(1)] * MESH.num_ranks
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output(graph.call_function(collectives.positions, (str(sharding), 0, "cpu")))
    for rank, got in enumerate(VirtualRanks(MESH).run(graph, nn.Module(), [[x] for x in xs])):
        assert got.equal(sharding.cut(whole, MESH, MESH.coordinates(rank))[:, 0])


def test_watch_sees_every_value_of_every_rank() -> None:
    seen: list[tuple[str, int]] = []
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mul.Tensor, (x, 2.0))
    graph.output((y, None))
    out = VirtualRanks(MESH).run(
        graph, nn.Module(), [[x] for x in parts()], lambda n, v: seen.append((n.name, len(v)))
    )
    assert seen == [("x", 6), ("mul_tensor", 6)] and out[0][1] is None


def test_promotion_leaves_no_narrow_dtype() -> None:
    for name, layout in (("llama", "data=2"), ("autocast", "data=2"), ("bert", "data=2")):
        made = program(name, layout)
        graph, owner, back = promoted(made.graph, made.captured.owner)
        assert (
            set(back.values())
            == set(made.graph.nodes) - {n for n in made.graph.nodes if n.op == "output"}
            or len(back) >= len(made.graph.nodes) - 1
        )
        dtypes = {
            a
            for n in graph.nodes
            for a in (*n.args, *n.kwargs.values())
            if isinstance(a, torch.dtype)
        }
        assert not dtypes & {torch.float32, torch.bfloat16, torch.float16}
        assert all(b.dtype == torch.float64 or not b.is_floating_point() for b in owner.buffers())


def test_a_promoted_run_is_float64_at_every_node() -> None:
    found = subject("autocast")
    captured = found.captured
    graph, owner, _ = promoted(captured.graph, captured.owner)
    dtypes: set[torch.dtype] = set()
    feed = {n: promoted_value(x) for n, x in (found.start | found.feed).items()}

    def see(_node: fx.Node, values: list[Any]) -> None:
        dtypes.update(v.dtype for v in values if isinstance(v, Tensor))

    VirtualRanks(Mesh()).run(graph, owner, [[feed[n] for n in captured.inputs]], see)
    assert {d for d in dtypes if d.is_floating_point} == {torch.float64}
    assert captured.graph is not graph
    assert promoted_value(torch.arange(3)).dtype == torch.int64 and promoted_value(2.5) == 2.5


def test_assembled_parts_of_every_value_make_up_the_whole() -> None:
    """Cut, then assemble, for the storage of a real program."""
    made = program("gpt", "data=2 tensor=2 zero=3")
    places = [made.mesh.coordinates(r) for r in range(made.mesh.num_ranks)]
    for state in made.captured.state:
        x, sharding = state.tensor.detach(), made.storage[state.name]
        cut = [sharding.cut(x, made.mesh, p) for p in places]
        assert assemble(cut, sharding, made.mesh).equal(x)
        assert {tuple(c.shape) for c in cut} == {sharding.local_shape(made.mesh)}
