"""`early_update`: before and after as text; what waits for others or reads the old state comes first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import tutti
from small_programs import APART, SHARED, Builder, lines
from small_steps import step as train_step
from tutti.graph.analysis.liveness import peak_with_given
from tutti.graph.ops import collectives
from tutti.passes.early_update import early_update
from tutti.passes.pass_table import optimized
from tutti.passes.target import Target

aten = torch.ops.aten
HERE = ("data",)


def _call(b: Builder, region: str, target: Any, *args: Any, **options: Any) -> fx.Node:
    node = b.call(target, *args, **options)
    node.meta["region"] = region
    return node


def _backward(*, norm: bool = False, over: tuple[str, ...] = ()) -> fx.Graph:
    """Two weights, the second's gradient first; `norm`: scaled by both; `over`: summed over ranks."""
    b = Builder()
    w, v = b.given("w", 4), b.given("v", 4)
    grad_v = _call(b, "backward", aten.mul.Tensor, v, 2.0)
    if over:
        grad_v = _call(b, "backward", collectives.all_reduce, grad_v, over, "sum")
    through = _call(b, "backward", aten.mul.Tensor, v, 5.0)  # reads the old weight
    grad_w = _call(b, "backward", aten.mul.Tensor, w, through)
    if norm:
        scale = _call(b, "update", aten.add.Tensor, grad_w, grad_v)
        grad_w, grad_v = (_call(b, "update", aten.mul.Tensor, g, scale) for g in (grad_w, grad_v))
    new_w = _call(b, "update", aten.sub.Tensor, w, grad_w)
    new_v = _call(b, "update", aten.sub.Tensor, v, grad_v)
    return b.done([], [new_w, new_v])


def test_before_and_after() -> None:
    graph = _backward()
    assert lines(graph) == [
        "mul.Tensor(%v, 2.0)",
        "mul.Tensor(%v, 5.0)",
        "mul.Tensor(%w, %3)",
        "sub.Tensor(%w, %4)",
        "sub.Tensor(%v, %2)",
    ]
    assert early_update(graph, APART) > 0
    graph.lint()
    assert lines(graph) == [
        "mul.Tensor(%v, 2.0)",
        "mul.Tensor(%v, 5.0)",
        "sub.Tensor(%v, %2)",
        "mul.Tensor(%w, %3)",
        "sub.Tensor(%w, %5)",
    ]


def test_what_needs_every_gradient_stays() -> None:
    graph = _backward(norm=True)
    before = lines(graph)
    assert early_update(graph, APART) == 0
    assert lines(graph) == before


@pytest.mark.parametrize(("target", "moves"), [(APART, False), (SHARED, True)])
def test_only_what_shared_memory_brings_is_waited_for_at_once(target: Any, moves: bool) -> None:
    graph = _backward(over=HERE)
    assert bool(early_update(graph, target)) == moves
    names = [n.target for n in graph.nodes if n.op == "call_function"]
    assert names.index(aten.sub.Tensor) == (3 if moves else 4)


def test_readers_of_a_gathered_view_come_first() -> None:
    """On one host a gathered weight is a look at the state itself."""
    b = Builder()
    w = b.given("w", 4)
    whole = _call(b, "forward", collectives.all_gather, w, HERE, 0, 1, shape=(8,))
    late = _call(b, "backward", aten.mul.Tensor, whole, 2.0)
    graph = b.done([late], [_call(b, "update", aten.sub.Tensor, w, 1.0)])
    early_update(graph, SHARED)
    kinds = [n.target for n in graph.nodes if n.op == "call_function"]
    assert kinds == [collectives.all_gather, aten.mul.Tensor, aten.sub.Tensor]


def test_a_value_of_state_alone_waits_for_its_first_reader() -> None:
    """Right after the last reader of its weight, it would take memory until the gradient is there."""
    b = Builder()
    w, x = b.given("w", 4), b.given("x", 4)
    read = _call(b, "forward", aten.mul.Tensor, w, x)
    grad = _call(b, "backward", aten.exp.default, _call(b, "backward", aten.sin.default, read))
    decayed = _call(b, "update", aten.mul.Tensor, w, 0.9)
    graph = b.done([], [_call(b, "update", aten.sub.Tensor, decayed, grad)])
    early_update(graph, APART)
    kinds = [n.target for n in graph.nodes if n.op == "call_function"]
    assert kinds[-2:] == [aten.mul.Tensor, aten.sub.Tensor]


def test_a_graph_that_overwrites_stays() -> None:
    graph = _backward()
    for node in graph.nodes:
        if node.target is aten.sub.Tensor:
            node.target = aten.sub_.Tensor
    before = lines(graph)
    assert early_update(graph, APART) == 0
    assert lines(graph) == before


def test_no_more_than_two_gradients_are_held() -> None:
    """Six equal layers of 4 MiB each, which is more than may wait for another."""
    size, num_layers = 1024, 6
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    program = tutti.distribute(train_step, model, optimizer, "").program_of((torch.ones(1, size),))
    target = Target(donated=frozenset(n for n, _ in model.named_parameters()))

    def peak(*without: str) -> int:
        graph = optimized(program, target, without=without)
        return peak_with_given(graph, program.captured.mode)

    saved = peak("early_update") - peak()
    assert saved >= (num_layers - 2) * size * size * 4
