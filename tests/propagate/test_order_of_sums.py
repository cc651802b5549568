"""Sums of matmuls and of other values: the matmuls first, the numbers the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from small_steps import squares, trained
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.propagate.order_of_sums import products_first
from tutti.verification.verdict import Subject

aten = torch.ops.aten
WIDTH, ROWS = 32, 256


class Residual(nn.Module):
    """Three projections and a residual connection of one value, as in attention before its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.out(self.q(x).sigmoid() * self.k(x).tanh() * self.v(x))


PLACE = {"[qkv].weight": "tensor, -", "[qkv].bias": "tensor", "out.weight": "-, tensor"}


def subject() -> Subject:
    torch.manual_seed(0)
    model = Residual().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Subject(trained(squares), model, optimizer, (torch.randn(ROWS, WIDTH).double(),))


def test_one_all_reduce_serves_three_projections() -> None:
    made = subject()
    layout = Layout.parse("tensor=2")
    program = made.program(layout, PLACE)
    large = [n for n in program.collectives if n.meta["val"].numel() == ROWS * WIDTH]
    assert Counter(n.meta["region"] for n in large) == {"forward": 1, "backward": 1}
    verdict = made.verdict(layout, program=program)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("layout", ["tensor=2", "data=2"])
def test_only_axes_of_weights_change_the_order(layout: str) -> None:
    """Under the others a rank adds in the order of eager PyTorch."""
    made = subject().program(Layout.parse(layout)).plan.captured
    last = [n for n in made.graph.nodes if n.target is aten.add.Tensor][-1]
    product = last.args[1].target is aten.mm.default  # type: ignore[union-attr]
    assert product == (layout == "data=2")


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (lambda r, a, b: (r + a) + b, "a b r"),
        (lambda r, a, b: r + (a + b), "a b r"),
        (lambda r, a, b: (r + r) + a, "r r a"),  # 2 r is one value
        (lambda r, a, b: (a + b) + a, "a b a"),  # nothing to move
        (lambda r, a, b: r + a, "r a"),  # two values
        (lambda r, a, b: (y := r + a) * ((y + b) + r), "b y r"),  # y has another reader
        (lambda r, a, b: (r + a) + (r * 2 + b), "a b r y"),  # the last addition reads sums alone
        (lambda r, a, b: (r + a) + ((r * 2 + b) + (r * 3 + a)), "a b a r y y"),
    ],
)
def test_orders(formula: object, expected: str) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        a, b = x @ model.w, x.T @ model.w  # type: ignore[operator]
        return formula(x.exp(), a, b)  # type: ignore[operator]

    model = nn.Module()
    model.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    captured = capture(step, model, None, (torch.randn(4, 4, dtype=torch.float64),))
    last = [n for n in captured.graph.nodes if n.target is aten.add.Tensor][-1]
    readers = dict(last.users)
    products_first(captured.graph)
    captured.graph.lint()
    assert dict(last.users) == readers  # what is known of the sum by its name stays true
    names: dict[fx.Node, str] = {}
    for node in captured.graph.nodes:
        if node.target is aten.exp.default:
            names[node] = "r"
        elif node.target is aten.mm.default:
            names[node] = "ab"[list(names.values()).count("a")]
    sums = [n for n in captured.graph.nodes if n.target is aten.add.Tensor]
    reads = [x for n in sums for x in n.args if x not in sums or len(x.users) > 1]
    assert [names.get(x, "y") for x in reads][-len(expected.split()) :] == expected.split()
