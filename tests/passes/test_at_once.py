"""`regather` and `reduce_scatter`: the text with them and without; what they bring in bytes and in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import tutti
from small_programs import Builder, lines
from small_steps import step as train_step
from tutti.graph.analysis.liveness import held
from tutti.graph.analysis.storage import Storages
from tutti.graph.ops import collectives
from tutti.partition.partition import Program
from tutti.passes.at_once import gathered_once, reduced_then_split
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target

aten = torch.ops.aten
HERE = ("data",)


def test_gathers_before_and_after() -> None:
    b = Builder()
    w, v = b.given("w", 2), b.given("v", 2)
    forward = b.call(collectives.all_gather, w, HERE, 0, 1, shape=(4,))
    other = b.call(collectives.all_gather, v, HERE, 0, 1, shape=(4,))
    loss = b.call(aten.mul.Tensor, forward, other)
    backward = b.call(collectives.all_gather, w, HERE, 0, 1, shape=(4,))
    graph = b.done([b.call(aten.mul.Tensor, loss, backward)], [])
    assert gathered_once(graph) == 1
    graph.lint()
    assert lines(graph) == [
        "all_gather(%w, data, 0, 1)",
        "all_gather(%v, data, 0, 1)",
        "mul.Tensor(%2, %3)",
        "mul.Tensor(%4, %2)",
    ]


def test_reductions_before_and_after() -> None:
    b = Builder()
    x = b.given("batch.0", 4, kind="batch")
    made = b.call(aten.mul.Tensor, x, 2.0)
    part = b.call(collectives.reduce_scatter, made, HERE, 0, 1, "sum", shape=(2,))
    graph = b.done([part], [])
    assert reduced_then_split(graph) == 1
    graph.lint()
    assert lines(graph) == [
        "mul.Tensor(%batch.0, 2.0)",
        "all_reduce(%1, data, sum)",
        "shard(%2, data, 0, 1)",
    ]
    assert [tuple(n.meta["val"].shape) for n in graph.nodes if n.op == "call_function"] == [
        (4,),
        (4,),
        (2,),
    ]


@pytest.fixture(scope="module")
def program() -> Program:
    """Six equal layers under zero=3, whose weights are most of what is held."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.distribute(train_step, model, optimizer, "data=2 zero=3")
    return step.program_of((torch.ones(4, 64),))


def _optimized(program: Program, *without: str) -> fx.Graph:
    target = Target(donated=frozenset(program.captured.updated))
    return optimized(program, target, without={"overlap", *without})


def _count(graph: fx.Graph, kind: Any) -> int:
    return sum(n.target is kind for n in graph.nodes)


def test_without_regather_weights_are_held(program: Program) -> None:
    """The backward needs all weights but the first: five of six are gathered twice."""
    once, twice = _optimized(program, "regather", "bucket"), _optimized(program, "bucket")
    assert _count(once, collectives.all_gather) == 6
    assert _count(twice, collectives.all_gather) == 11
    mode = program.captured.mode
    assert _held_after_forward(once, mode) - _held_after_forward(twice, mode) == 5 * 64 * 64 * 4


def _held_after_forward(graph: fx.Graph, mode: FakeTensorMode) -> int:
    every = held(graph, Storages(graph, mode))
    return next(nbytes for node, nbytes in every if node.meta.get("region") == "backward")


def test_without_reduce_scatter_whole_gradients_move(program: Program) -> None:
    graph = _optimized(program, "reduce_scatter", "bucket")
    assert _count(graph, collectives.reduce_scatter) == 0
    assert _count(_optimized(program, "bucket"), collectives.reduce_scatter) == 6
