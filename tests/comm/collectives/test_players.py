"""All players answer one protocol, and play every kind of move as the virtual ranks do."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ranks import Ranks
from thread_sums import Sums
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.in_shared_memory import InSharedMemory
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.execution.edge_channels import EdgeMessages
from tutti.graph.ops import collectives
from tutti.graph.players.by_dim import ByDim
from tutti.graph.players.move import Move
from tutti.graph.players.player import Messages, Player, SharedMemory
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.server.split.small_sums import SmallSums
from tutti.server.split.two_levels import TwoLevels
from ways import SHARED, WAYS, by

OPS = ("sum", "max", "min", "prod")
SIDE = 24  # in parts of all the meshes here, each in two segments
WHERES = ((0, 1), (1, 2))
PLAYERS = (ByDim, ProcessGroups, SmallSums, TwoLevels)
GRID = Mesh((("data", 2), ("tensor", 2)))
LINE = Mesh((("data", 3),))
WORKERS = Mesh((("replica", 2), ("data", 3)))
BOTH = ("data", "tensor")

Values = list[Any]  # what a rank has of every case, in order


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        *itertools.product((Player,), PLAYERS),
        (SharedMemory, InSharedMemory),
        (Messages, EdgeMessages),
    ],
    ids=lambda x: x.__name__,
)
def test_every_player_has_the_signatures_of_the_protocol(protocol: type, kind: type) -> None:
    names = [
        name
        for base in protocol.__mro__
        for name in vars(base)
        if not name.startswith("_") and base is not object
    ]
    assert names
    for name in names:
        want, have = getattr(protocol, name), getattr(kind, name)
        assert type(want) is type(have), name
        if callable(want):
            assert _parameters(want) == _parameters(have), name


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def inputs(mesh: Mesh) -> list[list[Tensor]]:
    """Two tensors for each rank, of whole numbers, so that every order of a sum gives the same."""
    generator = torch.Generator().manual_seed(0)
    shape = (mesh.num_ranks, 2, SIDE, SIDE)
    whole = torch.randint(-3, 4, shape, generator=generator).float()
    return [[x.clone() for x in of_rank] for of_rank in whole]


def nodes(axes: tuple[str, ...], *, in_place: bool = False) -> fx.Graph:
    """A program that has a node for every move on its two inputs, and gives out all of their results."""
    graph = fx.Graph()
    xs = [graph.placeholder("x"), graph.placeholder("y")]
    joined = [("all_gather", WHERES, ""), *(("reduce_scatter", WHERES, op) for op in OPS)]
    joined += [("all_reduce", ((), ()), op) for op in OPS]
    if in_place:
        made = [
            graph.call_function(collectives.together_, (kind, xs, axes, list(wheres), op))
            for kind, wheres, op in joined
        ]
        graph.output(made)
        return graph
    joined.append(("all_to_all", ((0, 1, 1, 2), (1, 2, 1, 1)), ""))
    made = []
    for kind, wheres, op in joined:
        given = (kind, xs, axes, list(wheres), op)
        made.append(graph.call_function(collectives.together, given))
        started = graph.call_function(collectives.start, given)
        made.append(graph.call_function(collectives.finish, (started, xs)))
        single = getattr(collectives, kind)
        rest = Move(kind, axes, wheres, op).rest(0)
        made.append(graph.call_function(single, (xs[0], axes, *rest)))
    made += [graph.call_function(collectives.shard, (xs[0], axes, *where)) for where in WHERES]
    made += [graph.call_function(collectives.partialize, (xs[0], axes, op)) for op in OPS]
    graph.output(made)
    return graph


def wanted(mesh: Mesh, axes: tuple[str, ...], *, in_place: bool = False) -> list[Values]:
    graph = nodes(axes, in_place=in_place)
    return VirtualRanks(mesh).run(graph, nn.Module(), inputs(mesh))


def played(player: Player, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Values:
    """The same program by a player."""
    found: dict[fx.Node, Any] = {}
    graph = nodes(axes)
    feeds = iter(xs)
    for node in graph.nodes:
        given: Any = node.args
        if node.op == "placeholder":
            found[node] = next(feeds)
        elif node.op == "output":
            return [found[x] for x in given[0]]
        elif node.target is collectives.together:
            found[node] = player.play(Move.of(node), xs)
        elif node.target is collectives.start:
            found[node] = player.start(Move.of(node), xs)
        elif node.target is collectives.finish:
            found[node] = player.finish(found[given[0]], xs)
        elif node.target in collectives.COLLECTIVES:
            (found[node],) = player.play(Move.of(node), xs[:1])
            named = getattr(player, node.target.__name__)(xs[0], *given[1:])  # type: ignore[union-attr]
            assert torch.equal(named, found[node])
        elif node.target is collectives.shard:
            found[node] = player.shard(xs[0], *given[1:])
        else:
            assert node.target is collectives.partialize
            found[node] = player.partialize(xs[0], *given[1:])
    raise AssertionError("a graph without output")


def same(found: list[Values], want: list[Values], graph: fx.Graph) -> None:
    texts = [x.format_node() for x in graph.output_node().all_input_nodes]
    for rank, (mine, other) in enumerate(zip(found, want, strict=True)):
        for text, a, b in zip(texts, mine, other, strict=True):
            for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
                assert x.dtype == y.dtype and torch.equal(x, y), f"rank {rank}: {text}"


def by_process_groups(way: str, axes: tuple[str, ...]) -> Values:
    with by(way):
        player = ProcessGroups(Groups(dict(GRID.axes), [axes]))
    xs = inputs(GRID)[player.groups.rank]
    found = played(player, axes, xs)
    assert player.shared_memory is None and player.current is None
    assert all(torch.equal(x, y) for x, y in zip(xs, inputs(GRID)[player.groups.rank], strict=True))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("axes", [("tensor",), BOTH], ids=str)
def test_process_groups(ranks: Ranks, way: str, axes: tuple[str, ...]) -> None:
    same(ranks.run(by_process_groups, way, axes), wanted(GRID, axes), nodes(axes))


def in_threads(mesh: Mesh, axes: tuple[str, ...], make: Callable[[int], Player]) -> None:
    def play(rank: int) -> Values:
        return played(make(rank), axes, inputs(mesh)[rank])

    with ThreadPoolExecutor(mesh.num_ranks) as pool:
        found = list(pool.map(play, range(mesh.num_ranks)))
    same(found, wanted(mesh, axes), nodes(axes))


def test_small_sums() -> None:
    sums = Sums(3)
    in_threads(LINE, ("data",), lambda k: SmallSums(sums.of(k), k, 3))


@pytest.mark.parametrize("axes", [("replica", "data"), ("data",), ("replica",)], ids=str)
def test_two_levels(axes: tuple[str, ...]) -> None:
    own, across = [Sums(3) for _ in range(2)], [Sums(2) for _ in range(3)]

    def make(rank: int) -> Player:
        place = WORKERS.coordinates(rank)
        w, k = place["replica"], place["data"]
        levels = SmallSums(own[w].of(k), k, 3), SmallSums(across[k].of(w), w, 2)
        return TwoLevels(*levels, WORKERS, place)

    in_threads(WORKERS, axes, make)


@pytest.mark.parametrize("player", [SmallSums(lambda name, x: x, 0, 2)])
def test_a_player_without_a_pipeline_has_no_messages(player: Player) -> None:
    for message in (lambda: player.send([], 0, 1), lambda: player.receive(0, 1, [])):
        with pytest.raises(AssertionError, match="there is one only"):
            message()


def memory_of(axes: tuple[str, ...]) -> tuple[ProcessGroups, InSharedMemory, list[Tensor]]:
    """A player with two buffers."""
    with by(SHARED):
        player = ProcessGroups(Groups(dict(GRID.axes), [axes]))
    shared = player.groups.shared(axes)
    assert shared is not None
    memory = player.lodge({axes: shared.arena(8192)}, {})
    assert player.shared_memory is memory
    buffers = [memory.buffer(axes, 4096 * i, [SIDE, SIDE], torch.float32) for i in range(2)]
    assert memory.buffer(axes, 4096, [SIDE, SIDE], torch.float32) is buffers[1]
    return player, memory, buffers


def in_buffers(axes: tuple[str, ...]) -> Values:
    player, memory, buffers = memory_of(axes)
    xs, found = inputs(GRID)[player.groups.rank], []
    for node in nodes(axes, in_place=True).nodes:
        if node.target is collectives.together_:
            for x in buffers:  # other values than those of the last move
                memory.claimed(x, axes).fill_(torch.nan)
            memory.meet(axes)
            for x, value in zip(buffers, xs, strict=True):
                x.copy_(value)
            made = memory.play(Move.of(node), buffers)
            if node.args[0] == "all_reduce":  # in place
                assert all(x is y for x, y in zip(made, buffers, strict=True))
            found.append([x.clone() for x in made])
            memory.meet(axes)
    assert memory.current is None
    return found


@pytest.mark.parametrize("axes", [("tensor",), BOTH], ids=str)
def test_buffers_in_shared_memory(ranks: Ranks, axes: tuple[str, ...]) -> None:
    graph = nodes(axes, in_place=True)
    same(ranks.run(in_buffers, axes), wanted(GRID, axes, in_place=True), graph)


def parts_in_place(axes: tuple[str, ...], op: str) -> Values:
    player, memory, buffers = memory_of(axes)
    for k in (1, 0):  # the values of the second move are wanted
        memory.meet(axes)
        for x, value in zip(buffers, inputs(GRID)[player.groups.rank], strict=True):
            memory.claimed(x, axes).copy_(value + k)
        made = memory.play(Move("reduce_part", axes, WHERES, op), buffers)
    parts = [memory.part(x, axes, *where) for x, where in zip(made, WHERES, strict=True)]
    assert all(x is y for x, y in zip(made, buffers, strict=True))
    assert parts[0].data_ptr() in range(buffers[0].data_ptr(), buffers[1].data_ptr())
    return [[x.clone() for x in parts]]


@pytest.mark.parametrize("op", OPS)
def test_a_part_is_reduced_in_place(ranks: Ranks, op: str) -> None:
    graph = fx.Graph()
    xs = [graph.placeholder("x"), graph.placeholder("y")]
    given = ("reduce_scatter", xs, BOTH, list(WHERES), op)
    graph.output([graph.call_function(collectives.together, given)])
    want = VirtualRanks(GRID).run(graph, nn.Module(), inputs(GRID))
    same(ranks.run(parts_in_place, BOTH, op), want, graph)


def gathered_state(axes: tuple[str, ...], placed: bool) -> Values:
    """State of which each rank has a part: gathered by a look at it, and into a copy of each rank."""
    with by(SHARED):
        player = ProcessGroups(Groups(dict(GRID.axes), [axes]))
    group, shared = player.groups[axes], player.groups.shared(axes)
    assert shared is not None
    x = inputs(GRID)[player.groups.rank][0]
    rows = shared.common(group.size * x.nbytes).view(x.dtype).view(group.size, *x.shape)
    own = rows[group.position] if placed else x.clone()
    whole = rows.view(-1, x.shape[1])
    wholes = {(axes, own.data_ptr()): whole} if placed else {}
    memory = player.lodge({}, wholes)
    own.copy_(x)
    found = memory.whole(own, axes)
    assert (found is whole) if placed else (found is None)
    move = Move("all_gather", axes, ((0, 1),))
    (looked,) = memory.play(move, [own])
    first, other = (
        shared.empty(whole.shape, x.dtype) if placed else torch.empty_like(whole) for _ in range(2)
    )
    found = []
    for copy, factor in ((first, 1), (first, 2), (other, 1)):  # new values, and the state elsewhere
        memory.hold({"w": copy})
        (into,) = memory.gather_into(move, ["w"], [x.mul_(factor)])
        assert into is copy
        memory.meet(axes)
        found.append(into.clone())
    assert torch.equal(found[1], 2 * found[0]) and torch.equal(found[2], found[1])
    return [looked.clone(), found[0]]


@pytest.mark.parametrize("placed", [True, False], ids=["there", "elsewhere"])
def test_state_in_shared_memory(ranks: Ranks, placed: bool) -> None:
    graph = fx.Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("y")
    whole = [graph.call_function(collectives.all_gather, (x, BOTH, 0, 1)) for _ in range(2)]
    graph.output(whole)
    want = VirtualRanks(GRID).run(graph, nn.Module(), inputs(GRID))
    same(ranks.run(gathered_state, BOTH, placed), want, graph)
