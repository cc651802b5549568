"""Routes between shardings: every stop on the way holds the tensor, and the textbook cases are shortest."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from brute_force import check_result, parts_of
from tutti.graph.ops import collectives
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh, Segment, Sharding, canonical
from tutti.partition.reshard import Route, route

TWO, UNEVEN = Mesh.parse("data=2 tensor=2"), Mesh.parse("data=2 tensor=3")
THREE = Mesh.parse("data=2 tensor=2 seq=2")
# How each size may be seen as a product of segments.
PRODUCTS = {8: [(8,), (4, 2), (2, 4)], 12: [(12,), (4, 3), (2, 6)], 24: [(24,), (4, 6), (2, 2, 6)]}


def shardings(shape: tuple[int, ...], mesh: Mesh) -> Iterator[Sharding]:
    """Every way to lie: each axis splits some segment of some dim (in either order), pends, or rests."""
    for sizes in itertools.product(*(PRODUCTS[n] for n in shape)):
        places = [(d, k) for d, segments in enumerate(sizes) for k in range(len(segments))]
        for order in itertools.permutations(mesh):
            for chosen in itertools.product([None, "sum", "max", *places], repeat=len(order)):
                yield from _lying(sizes, dict(zip(order, chosen, strict=True)), mesh)


def _lying(
    sizes: tuple[tuple[int, ...], ...], chosen: dict[str, object], mesh: Mesh
) -> Iterator[Sharding]:
    dims = tuple(
        canonical(
            (
                Segment(size, tuple(a for a, where in chosen.items() if where == (d, k)))
                for k, size in enumerate(segments)
            ),
            mesh,
        )
        for d, segments in enumerate(sizes)
    )
    partial = [(a, str(where)) for a, where in chosen.items() if isinstance(where, str)]
    sharding = Sharding(dims).with_partial(partial)
    if sharding.divides(mesh) and len({op for _, op in partial}) < 2:
        yield sharding


def sampled_pairs(shape: tuple[int, ...], mesh: Mesh, num: int) -> list[tuple[Sharding, Sharding]]:
    ways = list(dict.fromkeys(shardings(shape, mesh)))
    if len(ways) ** 2 <= num:
        return list(itertools.product(ways, ways))
    chooser = random.Random(0)
    return [(chooser.choice(ways), chooser.choice(ways)) for _ in range(num)]


def played(source: Sharding, found: Route, mesh: Mesh, x: Tensor) -> list[list[Tensor]]:
    """What every rank holds before the first step and after each, by step."""
    graph = fx.Graph()
    made = [graph.placeholder("x")]
    for step in found.steps:
        target = getattr(collectives, step.kind)
        made.append(graph.call_function(target, (made[-1], *step.arguments)))
    graph.output(made)
    parts = parts_of(x, source, mesh, torch.Generator().manual_seed(1))
    ranks = VirtualRanks(mesh).run(graph, nn.Module(), [[p] for p in parts])
    return [list(stop) for stop in zip(*ranks, strict=True)]


def check(source: Sharding, target: Sharding, mesh: Mesh) -> Route:
    found = route(source, target, mesh)
    x = torch.randn(source.shape, dtype=torch.float64)
    stops = [source, *(step.result for step in found.steps)]
    assert stops[-1] == target
    for stop, parts in zip(stops, played(source, found, mesh, x), strict=True):
        check_result(parts, x, stop, mesh, f"{source} -> {target} on {mesh}: at {stop}")
    return found


@pytest.mark.parametrize(
    ("shape", "mesh", "num"),
    [
        ((8, 12), TWO, 300),
        ((12, 24), UNEVEN, 200),
        ((8, 8, 12), TWO, 150),
        ((8, 12), THREE, 150),
        ((24,), UNEVEN, 200),
        ((8,), THREE, 200),
    ],
    ids=str,
)
def test_every_stop_on_the_way_is_the_tensor(shape: tuple[int, ...], mesh: Mesh, num: int) -> None:
    for source, target in sampled_pairs(shape, mesh, num):
        check(source, target, mesh)


CHOSEN = [
    "data+tensor, -",
    "tensor+data, -",
    "tensor, data",
    "data, tensor",
    "-, tensor+data",
    "4*2@data, 12",
    "4@tensor*2@data, 12",
    "8@tensor, 2*6@data",
    "8, 6@tensor*2@data",
    "8@data, 12 {partial tensor}",
    "8, 12@tensor {partial data:max}",
    "8, 12 {partial data tensor}",
    "8, 12 {partial data:max tensor:max}",
    "8, 12",
]


@pytest.mark.parametrize("source", CHOSEN)
@pytest.mark.parametrize("target", CHOSEN)
def test_chosen_pairs(source: str, target: str) -> None:
    shape = (8, 12)

    def parsed(text: str) -> Sharding:
        return Sharding.parse(text, shape if text[0] in "dt-" else None)

    check(parsed(source), parsed(target), TWO)


TEXTBOOK = [
    # source, target, kinds of the steps, elements that each rank sends, of an [8, 12] tensor
    ("8, 12 {partial data}", "8@data, 12", ["reduce_scatter"], 48.0),
    ("8, 12 {partial data}", "8, 12", ["all_reduce"], 96.0),
    ("8@data, 12", "8, 12@data", ["all_to_all"], 24.0),
    ("8@data, 12", "8, 12", ["all_gather"], 48.0),
    ("8, 12", "8@data, 12@tensor", ["shard", "shard"], 0.0),
    ("8, 12", "8, 12 {partial data}", ["partialize"], 0.0),
    ("8@tensor+data, 12", "8@tensor, 12", ["all_gather"], 24.0),
    ("8@tensor+data, 12", "8, 12", ["all_gather"], 72.0),
    ("8, 12 {partial data tensor}", "8, 12", ["all_reduce"], 144.0),
    ("8@data, 12 {partial tensor}", "8@data, 12@tensor", ["reduce_scatter"], 24.0),
    ("8@data, 12 {partial tensor}", "8@data+tensor, 12", ["reduce_scatter"], 24.0),
    ("8, 12 {partial data tensor}", "8@data+tensor, 12", ["reduce_scatter"], 72.0),
    ("8, 12 {partial data tensor}", "8@tensor+data, 12", ["reduce_scatter"], 72.0),
    ("8@data, 12@tensor", "8@data, 12@tensor", [], 0.0),
    ("8@data, 12", "8@data+tensor, 12", ["shard"], 0.0),
]


@pytest.mark.parametrize(("source", "target", "kinds", "moved"), TEXTBOOK)
def test_textbook_cases_are_shortest(
    source: str, target: str, kinds: list[str], moved: float
) -> None:
    found = check(Sharding.parse(source), Sharding.parse(target), TWO)
    assert [step.kind for step in found.steps] == kinds
    assert math.isclose(sum(step.moved for step in found.steps), moved)


def test_a_zero3_weight_is_gathered_below_its_tensor_part() -> None:
    """Stored `tensor+data`, computed `tensor`: the minor axis comes off with one plain all-gather."""
    (step,) = check(Sharding.parse("8@tensor+data, 12"), Sharding.parse("8@tensor, 12"), TWO).steps
    axes, dim, outer = step.arguments
    assert (step.kind, axes, dim, outer) == ("all_gather", ("data",), 0, 1)


def test_the_major_axis_cannot_be_gathered_alone() -> None:
    """`data+tensor` to `tensor`: the rows of a rank are not one run of the target's."""
    found = check(Sharding.parse("8@data+tensor, 12"), Sharding.parse("8@tensor, 12"), TWO)
    assert len(found.steps) > 1


def test_a_merged_dim_is_gathered_inside() -> None:
    (step,) = check(Sharding.parse("4*2@data, 12"), Sharding.parse("8, 12"), TWO).steps
    assert step.kind == "all_gather" and step.arguments == (("data",), 0, 4)


def test_no_route_costs_more_than_gathering_everything() -> None:
    whole = Sharding.whole((8, 12))
    for source, target in sampled_pairs((8, 12), TWO, 200):
        detour = route(source, whole, TWO).cost + route(whole, target, TWO).cost
        assert route(source, target, TWO).cost <= detour + 1e-9, (str(source), str(target))
