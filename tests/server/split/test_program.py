"""Workers that share a batch: their gradients add up to those of the whole batch, tokens ignored unevenly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from server.split.steps import (
    Apart,
    Servers,
    batch,
    by_norm,
    captured,
    difference,
    run,
    start,
    step,
)
from thread_sums import Sums
from tutti.capture.step import capture
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.ops import collectives
from tutti.graph.players.move import Move
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Layout, Mesh
from tutti.report.collective_records import records
from tutti.server.split.program import in_slices, worker_layout, worker_program
from tutti.server.split.small_sums import SmallSums
from tutti.server.split.three_parts import split
from tutti.server.split.two_levels import TwoLevels
from tutti.server.split.worker_part import together


@pytest.mark.parametrize("num_workers", [2, 3])
def test_summed_gradients_are_those_of_one_device(num_workers: int) -> None:
    found, feed = captured("adamw")
    made = split(found)
    part = together(made)
    layout = worker_layout(Layout.parse(f"replica={num_workers} server=1 sync=step"), alone=False)
    program = worker_program(part, layout)
    moved = [n for n in program.graph.nodes if n.target in collectives.COLLECTIVES]
    assert moved and all(n.meta["val"].numel() < 32 for n in moved)  # counts and statistics
    graph, owner, _ = promoted(program.graph, found.owner)
    whole, mine = start(found), start(found)
    servers = Servers(made, mine)
    for k in range(2):
        returned, whole = run(found, whole, feed, k)
        inputs = {**mine, **feed, **{f"batch.{i}": x for i, x in enumerate(batch(k))}}
        own = [promoted_value(inputs[n]) for n in program.captured.inputs]
        ranks = VirtualRanks(program.mesh, step=k)
        outs = ranks.run(graph, owner, [list(own) for _ in range(num_workers)])
        parts = [part.parts(out) for out, _ in outs]
        gradients = {n: sum(p[1][n] for p in parts) for n in part.variables}
        scalars = servers.scalars(gradients, {**feed, **parts[0][2]})  # type: ignore[arg-type]
        servers.update(gradients, scalars)  # type: ignore[arg-type]
        mine |= servers.state() | dict(zip(program.captured.updated, outs[0][1], strict=True))
        for p in parts:
            assert max(map(difference, part.result(p[0], scalars, wide=True), returned)) < 1e-12
        assert max(difference(mine[n], whole[n]) for n in whole) < 1e-12


def test_slices_are_added_up_before_they_are_pushed() -> None:
    torch.manual_seed(0)
    model = Apart()
    found = capture(partial(step, by_norm), model, torch.optim.AdamW(model.parameters()), batch())
    part = together(split(found))
    layout = worker_layout(Layout.parse("replica=2 micro=3 server=1 sync=step"), alone=False)
    program = worker_program(part, layout)
    timed = in_slices(program)
    assert timed is not None
    moved = records(program, timed)
    assert {r.axes for r in moved} == {("replica",)} and all(len(r.shape) == 0 for r in moved)
    assert sum(r.times for r in moved) == 2  # the count and the loss, not once a slice
    (body,) = timed.bodies
    summed = [s.name for s in body.sums if s.op == "sum"]
    assert body.num_micro == 3 and len(summed) == len(part.variables) + 1


def test_gradients_are_summed_inside_a_worker_and_stay_open_across() -> None:
    torch.manual_seed(0)
    model = Apart()
    found = capture(partial(step, by_norm), model, torch.optim.AdamW(model.parameters()), batch())
    part = together(split(found))
    text, place = "replica=2 data=2 tensor=2 server=1 sync=step", {"up.weight": "tensor, -"}
    program = worker_program(part, worker_layout(Layout.parse(text), alone=False), place)
    across = [r for r in records(program) if "replica" in r.axes]
    assert len(across) == 2 and all(r.shape == () for r in across)  # the count and the loss
    returned, _ = program.graph.output_node().args[0]  # type: ignore[misc]
    _, gradients, _ = part.sections(list(returned))  # type: ignore[arg-type]
    sizes = [n.meta["val"].shape for n in gradients]
    assert sizes == [o.variable.shape for o in split(found).owned]  # whole, on every rank
    inside = [r for r in records(program) if "data" in r.axes and r.kind == "all_reduce"]
    assert len(inside) >= len({id(n) for n in gradients})
    assert "all_gather" in {r.kind for r in records(program) if r.axes == ("tensor",)}


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("axes", [("replica", "data"), ("data",), ("replica",)])
def test_two_levels_are_the_collectives_of_one_mesh(axes: tuple[str, ...], op: str) -> None:
    mesh = Mesh((("replica", 2), ("data", 3)))
    g = torch.Generator().manual_seed(0)
    xs = [torch.randint(-9, 9, (12, 12), generator=g).float() for _ in range(6)]
    calls = {
        n: (axes, *a[1:-1], op) if a[-1] == "sum" else (axes, *a[1:]) for n, a in COLLECTIVE.items()
    }
    virtual = VirtualRanks(mesh)
    wanted = {n: getattr(virtual, f"_{n}")([(x, *a) for x in xs]) for n, a in calls.items()}
    wheres = [(1, 1), (0, 1)]
    for kind, rest in (("all_gather", ""), ("reduce_scatter", op)):
        wanted[kind + " together"] = virtual._together(
            [(kind, [x, x + 1], axes, wheres, rest) for x in xs]
        )
    own, across = [Sums(3) for _ in range(2)], [Sums(2) for _ in range(3)]

    def play(rank: int) -> dict[str, Any]:
        place, x = mesh.coordinates(rank), xs[rank]
        w, k = place["replica"], place["data"]
        levels = SmallSums(own[w].of(k), k, 3), SmallSums(across[k].of(w), w, 2)
        player = TwoLevels(*levels, mesh, place)
        found = {n: getattr(player, n)(x, *a) for n, a in calls.items()}
        for kind, rest in (("all_gather", ""), ("reduce_scatter", op)):
            move = Move(kind, axes, tuple(wheres), rest)
            found[kind + " together"] = player.play(move, [x, x + 1])
        return found

    with ThreadPoolExecutor(6) as pool:
        outs = list(pool.map(play, range(6)))
    for name, values in wanted.items():
        for rank, value in enumerate(values):
            for a, b in zip(tree_leaves(outs[rank][name]), tree_leaves(value), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), name


COLLECTIVE: dict[str, tuple[Any, ...]] = {
    "all_reduce": (("data",), "sum"),
    "all_gather": (("data",), 1, 2),
    "reduce_scatter": (("data",), 1, 2, "sum"),
    "all_to_all": (("data",), 1, 1, 0, 1),
    "partialize": (("data",), "sum"),
    "shard": (("data",), 1, 1),
}


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_small_sums_are_the_collectives(op: str, dtype: torch.dtype) -> None:
    size, axes = 3, ("data",)
    g = torch.Generator().manual_seed(0)
    xs = [torch.randint(-9, 9, (6, 12), generator=g).to(dtype) for _ in range(size)]
    calls = {n: (*a[:-1], op) if a[-1] == "sum" else a for n, a in COLLECTIVE.items()}
    wheres, reduced = [(1, 2), (0, 1)], "all_gather" if op == "prod" else "reduce_scatter"
    virtual = VirtualRanks(Mesh((("data", size),)))
    wanted = {n: getattr(virtual, f"_{n}")([(x, *a) for x in xs]) for n, a in calls.items()}
    joint = (reduced, wheres, "" if reduced == "all_gather" else op)
    wanted["together"] = virtual._together(
        [(joint[0], [x, x + 1], axes, wheres, joint[2]) for x in xs]
    )
    wanted["sums"] = virtual._together([("all_reduce", [x, x + 1], axes, [(), ()], op) for x in xs])
    sums = Sums(size)

    def play(worker: int) -> dict[str, Any]:
        player, x = SmallSums(sums.of(worker), worker, size), xs[worker]
        player.begin()
        found = {n: getattr(player, n)(x, *a) for n, a in calls.items()}
        several = (
            Move(joint[0], axes, tuple(wheres), joint[2]),
            Move("all_reduce", axes, ((), ()), op),
        )
        found["together"], found["sums"] = (player.play(move, [x, x + 1]) for move in several)
        return found

    with ThreadPoolExecutor(size) as pool:
        outs = list(pool.map(play, range(size)))
    for name, values in wanted.items():
        for worker, value in enumerate(values):
            for a, b in zip(tree_leaves(outs[worker][name]), tree_leaves(value), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), name
