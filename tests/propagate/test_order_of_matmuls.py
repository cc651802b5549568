"""Matmuls of one value: those of weights first, and what each order costs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from small_steps import squares, trained
from tutti.graph.text import op_name
from tutti.layout import Layout
from tutti.propagate.order_of_matmuls import weights_first
from tutti.verification.verdict import Subject

aten = torch.ops.aten
WIDTH, SAMPLES, TOKENS = 32, 64, 16


class Layers(nn.Module):
    """Norms with two linear layers without biases behind each."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, WIDTH, bias=False),
                    "down": nn.Linear(WIDTH, WIDTH, bias=False),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](block["up"](block["norm"](x)).relu())
        return x


PLACE = {"*up.weight": "tensor, -", "*down.weight": "-, tensor", "*norm": "-, tensor, -"}


def subject() -> Subject:
    torch.manual_seed(0)
    model = Layers().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Subject(
        trained(squares), model, optimizer, (torch.randn(SAMPLES, TOKENS, WIDTH).double(),)
    )


@pytest.mark.parametrize("layout", ["tensor=2", "data=2 tensor=2", "tensor=2 micro=2"])
def test_a_gathered_value_serves_both_matmuls(layout: str) -> None:
    made = subject()
    program = made.program(Layout.parse(layout), PLACE)
    moved = Counter(
        op_name(n) for n in program.collectives if n.meta["val"].numel() > WIDTH * WIDTH
    )
    assert moved == {"all_gather": 4, "reduce_scatter": 3}, moved  # the batch needs no gradient
    verdict = made.verdict(Layout.parse(layout), program=program)
    assert verdict.ok, str(verdict)


def graph_of(*, needs: bool) -> tuple[fx.Graph, fx.Node]:
    """`dw = dy.T @ x; dx = dy @ (w or w * dw's mean)`; w is a parameter."""
    graph = fx.Graph()
    w, x, dy = (graph.placeholder(name) for name in ("w", "x", "dy"))
    dw = graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (dy,)), x))
    cast = graph.call_function(aten._to_copy.default, (w,))
    used = graph.call_function(aten.mul.Tensor, (cast, dw)) if needs else cast
    dx = graph.call_function(aten.mm.default, (dy, used))
    graph.output((dw, dx))
    return graph, w


@pytest.mark.parametrize("needs", [False, True])
def test_a_matmul_moves_if_it_can(needs: bool) -> None:
    graph, w = graph_of(needs=needs)
    weights_first(graph, {w})
    graph.lint()
    read = [n.args[0].op == "placeholder" for n in graph.nodes if n.target is aten.mm.default]
    assert read == ([False, True] if needs else [True, False])
