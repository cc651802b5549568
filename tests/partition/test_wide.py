"""Sums over ranks of half-type values are carried out in float32, and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from in_turn import in_turn
from subjects import program
from tutti.capture.step import capture
from tutti.graph.edits.edit import erase_dead
from tutti.graph.ops import collectives
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Layout, Mesh, Sharding
from tutti.partition.localize import Local
from tutti.partition.partition import Program, partition
from tutti.partition.reshard import RouteStep, route
from tutti.partition.wide import Mover
from tutti.propagate.plan import plan
from tutti.report.explanation import records

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
REDUCES = (collectives.all_reduce, collectives.reduce_scatter)


def half_sums(made: Program) -> list[fx.Node]:
    """The collectives that would round at every addition."""
    found = [n for n in made.collectives if n.target in REDUCES and n.args[-1] in ("sum", "prod")]
    return [n for n in found if n.meta["val"].dtype in HALVES]


LAYOUTS = ("data=2 tensor=2", "data=2 seq=2 tensor=2", "data=2 zero=3 tensor=2")
ONE_EACH = [(layout,) for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("gpt", layout) for layout in ("data=2", *LAYOUTS)),
        *in_turn(("llama", "t5", "bert", "autocast", "checkpoint"), ONE_EACH),
    ],
)
def test_no_sum_over_ranks_is_in_a_half_type(name: str, layout: str) -> None:
    made = program(name, f"{layout} precision=bf16")
    assert half_sums(made) == []
    assert any(n.target in REDUCES for n in made.collectives)


def test_the_users_own_autocast_is_summed_in_float32_too() -> None:
    assert half_sums(program("autocast", "data=2 tensor=2")) == []


def matmul(
    layout: str,
    sizes: Sequence[int],
    kind: torch.dtype,
    then: Callable[[Tensor], Tensor],
    place: str = "tensor, -",
) -> Program:
    """`then(x @ w)` in dtype `kind`, by default with the inner dim split over `tensor`."""
    rows, inner, columns = sizes

    class Matmul(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(inner, columns, dtype=kind), requires_grad=False)

    def step(model: Matmul, x: Tensor) -> Tensor:
        return then(x @ model.w)

    captured = capture(step, Matmul(), None, (torch.randn(rows, inner, dtype=kind),))
    return partition(plan(captured, Layout.parse(layout), {"w": place}))


def run(made: Program, x: Tensor, w: Tensor) -> list[Tensor]:
    mesh = made.mesh
    inputs = []
    for rank in range(mesh.num_ranks):
        part = made.storage["w"].cut(w, mesh, mesh.coordinates(rank))
        inputs.append([part, x])
    return [out[0][0] for out in VirtualRanks(mesh).run(made.graph, nn.Module(), inputs)]


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("ways", [2, 8])
def test_ranks_add_in_float32_and_round_once(kind: torch.dtype, ways: int) -> None:
    made = matmul(f"tensor={ways}", (4, 16, 64), kind, lambda y: y * 2)
    assert half_sums(made) == [] and len(made.collectives) == 1
    torch.manual_seed(0)
    x, w = torch.randn(4, 16).to(kind), torch.randn(16, 64).to(kind)
    parts = [a @ b for a, b in zip(x.chunk(ways, 1), w.chunk(ways, 0), strict=True)]
    expected = sum(p.float() for p in parts).to(kind) * 2  # type: ignore[union-attr]
    for out in run(made, x, w):
        assert torch.equal(out, expected)
    if ways > 2:  # where two halves are added there is one rounding either way
        rounded = sum(parts[1:], parts[0]) * 2
        assert not torch.equal(rounded, expected)


def test_the_price_is_twice_the_bytes() -> None:
    half = matmul("tensor=2", (4, 16, 64), torch.bfloat16, lambda y: y * 2)
    full = matmul("tensor=2", (4, 16, 64), torch.float32, lambda y: y * 2)
    (a,), (b,) = records(half), records(full)
    assert (a.dtype, b.dtype) == ("f32", "f32")
    assert a.nbytes == b.nbytes == 4 * 4 * 64


def test_a_widening_cast_that_follows_leaves_no_rounding_in_between() -> None:
    """The sum waits for the cast, as that of a gradient on its way to a float32 weight."""
    made = matmul("tensor=2", (4, 16, 64), torch.bfloat16, lambda y: y.float())
    assert half_sums(made) == []
    assert sum(n.target is aten._to_copy.default for n in made.graph.nodes) == 1


def test_a_maximum_is_exact_in_any_type_and_moves_as_it_is() -> None:
    """A softmax over a split dim: the largest of all ranks in bf16, the sum of all ranks in float32."""
    made = matmul(
        "tensor=2", (64, 16, 64), torch.bfloat16, lambda y: y.softmax(-1), place="-, tensor"
    )
    found = [(n.args[-1], n.meta["val"].dtype) for n in made.collectives if n.target in REDUCES]
    assert found == [("max", torch.bfloat16), ("sum", torch.float32)]


def test_between_two_reductions_nothing_is_rounded() -> None:
    """Pending over two axes and wanted split over one: the value stays wide until it arrives."""
    mesh = Mesh((("data", 2), ("tensor", 2)))
    shape = (512, 512)
    source = Sharding.whole(shape).with_partial([("data", "sum"), ("tensor", "sum")])
    target = Sharding.parse("data, -", shape)
    steps = route(source, target, mesh).steps
    assert {s.kind for s in steps} == {"all_reduce", "reduce_scatter"}
    graph = moved(source, steps, mesh)
    torch.manual_seed(0)
    parts = [torch.randn(shape).bfloat16() for _ in range(4)]
    whole = sum(p.double() for p in parts).to(torch.bfloat16)  # type: ignore[union-attr]
    played = VirtualRanks(mesh).run(graph, nn.Module(), [[p] for p in parts])
    for rank, out in enumerate(played):
        part = target.cut(whole, mesh, mesh.coordinates(rank))
        # float32 holds the sum of four such numbers but for the last bit of a few
        assert out.dtype == torch.bfloat16
        assert (out != part).float().mean() < 1e-3
    rounded = [(parts[0] + parts[1]) + (parts[2] + parts[3])]
    assert (rounded[0] != whole).float().mean() > 1e-1


def moved(source: Sharding, steps: Sequence[RouteStep], mesh: Mesh) -> fx.Graph:
    """A graph that takes one bf16 value along `steps`, dead casts erased."""
    mode = FakeTensorMode()
    value = fx.Graph().placeholder("x")
    with mode:
        value.meta["val"] = torch.empty(source.shape, dtype=torch.bfloat16)
    local = Local(mode, mesh)
    node = local.graph.placeholder("x")
    node.meta = {"val": local.empty(value.meta["val"], source), "sharding": source}
    mover = Mover(local, value, value)
    for step in steps:
        node = mover.move(node, step)
    local.graph.output(node)
    erase_dead(local.graph)
    reduced = [n for n in local.graph.nodes if n.target in REDUCES]
    assert len(reduced) == 2 and {n.meta["val"].dtype for n in reduced} == {torch.float32}
    return local.graph
