"""`filled_slots`: ops between the all-to-alls of experts run on the filled slots alone."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import gloo_releases
import tutti
from mixtures import EXPERTS, NAMES, NUM_LAYERS, WIDTH, arguments, points, points_step, routed
from pass_programs import experts
from ranks import Ranks
from tutti.capture.captured import Captured, copied
from tutti.capture.step import capture
from tutti.environment import WITHOUT
from tutti.execution.measure import peak_nbytes
from tutti.graph.edits.edit import RECOMPUTED
from tutti.graph.ops import collectives
from tutti.graph.ops.expert_rows import cut_slots, fill_slots, from_experts, to_experts, to_filled
from tutti.layout import Layout
from tutti.partition.partition import Program, partition
from tutti.passes.filled_slots import filled_slots
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target
from tutti.planner.memory import predict
from tutti.propagate.plan import plan

aten = torch.ops.aten
PLACE = {"*.experts.*_proj": "expert, -, -"}
ROUTED = {"*.up": "expert, -, -", "*.down": "expert, -, -"}


@cache
def captured(name: str) -> Captured:
    return capture(*arguments(name))


def program(name: str, layout: str) -> Program:
    return partition(plan(copied(captured(name)), Layout.parse(layout), PLACE))


def count(graph: fx.Graph, target: object) -> int:
    return len([n for n in graph.nodes if n.target is target])


@pytest.mark.parametrize("name", NAMES)
def test_no_slots_of_the_models_are_filled_up(name: str) -> None:
    """Four moves a layer, and one of integers; only the latter are cut from all slots."""
    made, layers = program(name, "data=2 expert=2"), NUM_LAYERS[name]
    assert count(made.graph, fill_slots) == 5 * layers
    graph = optimized(made, Target(frozenset()))
    assert count(graph, fill_slots) == 0
    assert count(graph, cut_slots) == layers and count(graph, to_filled) == 2 * layers


def test_another_op_on_slots_keeps_all_of_them() -> None:
    """A sum along the slots has other numbers, and another number of them, without the empty ones."""
    graph = experts()
    (silu,) = graph.find_nodes(op="call_function", target=aten.silu.default)
    with graph.inserting_after(silu):
        total = graph.call_function(aten.cumsum.default, (silu, 0))
    total.meta = dict(silu.meta)
    (apart,) = [n for n in silu.users if n.target is aten.reshape.default]
    apart.update_arg(0, total)
    before = [n.target for n in graph.nodes]
    assert filled_slots(graph) == 0 and [n.target for n in graph.nodes] == before


def test_slots_that_are_returned_stay() -> None:
    graph = experts()
    (silu,) = graph.find_nodes(op="call_function", target=aten.silu.default)
    output = graph.output_node()
    output.args = (([silu], []),)
    assert filled_slots(graph) == 0


def test_predicted_memory_is_that_of_evenly_chosen_experts() -> None:
    """512 rows that go to two experts each; room for all on each of four ranks is four times as much."""
    model = routed(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(512, WIDTH), torch.randn(512, WIDTH))
    found = capture(points_step, model, optimizer, batch)
    made = partition(plan(found, Layout.parse("expert=4"), ROUTED))
    with_all = optimized(made, Target(frozenset()), without={"filled_slots"})
    filled = optimized(made, Target(frozenset()))
    have, whole = predict(made, filled).call_nbytes, predict(made, with_all).call_nbytes
    assert 2 * have < whole


def test_recomputation_moves_rows_again() -> None:
    """Beside three moves a layer in the forward and two in the backward."""
    moves = Counter(
        (node.meta["region"], RECOMPUTED in node.meta)
        for node in optimized(program("Mixtral", "expert=2 remat=full"), Target(frozenset())).nodes
        if node.target is collectives.all_to_all
    )
    assert moves.pop(("backward", True)) > 0
    assert moves == {("forward", False): 6, ("backward", False): 4}


@pytest.mark.parametrize("num", [0, 1, 3, 6])
def test_filled_slots_are_the_first_of_all_slots(num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    x = torch.randn(24, 5, generator=generator)
    kinds = torch.randint(-1, 6, (24,), generator=generator)
    fullest = torch.tensor(num)
    slots = to_experts(x, kinds, 6, 3, 6)
    if num < 6:  # no block has more rows for a group
        kinds = torch.where(kinds.reshape(4, 6) < 0, -1, kinds.reshape(4, 6))
        kinds[:, num:] = -1
        slots = to_experts(x, kinds.flatten(), 6, 3, 6)
    made = to_filled(x, kinds.flatten(), 6, 3, 6, fullest, 3)
    assert torch.equal(made, cut_slots(slots, fullest, 3))
    rows = from_experts(made, kinds.flatten(), 6, 3)
    assert torch.equal(rows, from_experts(slots, kinds.flatten(), 6, 3))


def predicted_and_measured(without: str) -> tuple[int, int]:
    """Bytes at the peak of a call for 16 thousand rows that go to two experts each: the middle of three."""
    model = routed(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = tutti.distribute(points_step, model, optimizer, "expert=2", place=ROUTED)
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randn(8192, WIDTH, generator=generator) for _ in range(2)]
    with mock.patch.dict(os.environ, {WITHOUT.name: without}):
        for _ in range(2):
            step(*batch)
    assert step._last is not None
    played = step._last.execution
    with gloo_releases.waited_for():
        measured = sorted(peak_nbytes(lambda: step(*batch))[0] for _ in range(3))
    return predict(played.program, played.graph).call_nbytes, measured[1]


def test_memory_on_ranks(ranks: Ranks) -> None:
    """Predicted within 3 %, but for rows that choose experts unevenly; less with the pass."""
    with_all = ranks.run(predicted_and_measured, "filled_slots", n=2)
    filled = ranks.run(predicted_and_measured, "", n=2)
    for (_, whole), (_, have) in zip(with_all, filled, strict=True):
        assert have < 0.75 * whole
    assert [p for p, _ in with_all] == pytest.approx([m for _, m in with_all], rel=0.03)
    assert [p for p, _ in filled] == pytest.approx([m for _, m in filled], rel=0.25)


def losses(layout: str, crowded: bool) -> list[float]:
    """Of three steps; `crowded`: all rows choose the experts of the first rank."""
    model: Any = routed()
    if crowded:
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.router.weight[EXPERTS // 2 :] = -1e3
                layer.router.weight[: EXPERTS // 2] *= 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = partial(points_step, model, optimizer)
    if layout:
        step = tutti.distribute(points_step, model, optimizer, layout, place=ROUTED)
    return [float(step(*(x.abs() for x in points(k)))) for k in range(3)]


@pytest.mark.parametrize(
    ("layout", "crowded"),
    [
        ("expert=2", False),
        ("expert=2", True),
        ("expert=2 remat=full", False),
        ("expert=2 micro=2", True),
    ],
)
def test_ranks_with_few_and_with_all_rows_train_as_one_device(
    layout: str, crowded: bool, ranks: Ranks
) -> None:
    want = losses("", crowded)
    for have in ranks.run(losses, layout, crowded, n=2):
        assert have == pytest.approx(want, rel=1e-12)
