"""Two runs compared part by part; how far rounding moves a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from small_steps import trained
from tutti.graph.ops import collectives
from tutti.graph.players.rounding import PLACES, Rounding
from tutti.layout import Layout
from tutti.verification.verdict import Subject
from wrong_programs import drop

aten = torch.ops.aten


def called(op: Any) -> fx.Node:
    return fx.Graph().call_function(op)


def test_errors_are_of_the_last_places_and_drawn_anew() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    first, second = (Rounding(k).of(called(aten.mul.Tensor), x) for k in (0, 1))
    for made in (first, second):
        errors = (made - x) / x
        assert 0 < float(errors.abs().max()) <= (PLACES + 1) * torch.finfo(x.dtype).eps
        assert float((errors != 0).double().mean()) > 0.8
    assert not torch.equal(first, second)
    assert torch.equal(first, Rounding(0).of(called(aten.mul.Tensor), x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_not_rounded_stays(dtype: torch.dtype) -> None:
    counts = torch.tensor([0.0, 1.0, -3.0, 0.5, 96.0, float("inf")], dtype=dtype)
    assert torch.equal(Rounding(0).of(called(aten.mul.Tensor), counts), counts)
    x = torch.randn(8, dtype=dtype)
    assert torch.equal(Rounding(0).of(called(aten.amax.default), x), x)
    assert torch.equal(Rounding(0).of(called(aten.view.default), x), x)
    assert torch.equal(Rounding(0).of(called(aten.mul.Tensor), x.long()), x.long())


class OfTwo(nn.Module):
    """BatchNorm over two values, again and again: each divides by what is left of a difference."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16, eps=1e-12) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        return x


@cache
def of_two() -> Subject:
    torch.manual_seed(1)
    model = OfTwo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-20)
    step = trained(lambda model, x: model(x).square().mean() + 0.1 * model(x)[:, 0].sum())
    return Subject(step, model, optimizer, (torch.randn(2, 16),))


def test_a_step_that_magnifies_rounding() -> None:
    """Its gradients leave the tolerance; what errors of rounding do to one device explains it."""
    one = of_two()
    program = one.program(Layout.parse("data=2"))
    found = one.verdict(program.layout, program=program)
    assert found.ok and found.rounding is not None and found.rounding > 1e-9, str(found)
    assert "  rounding   " in str(found)


def test_and_a_mistake_in_it() -> None:
    one = of_two()
    program = one.program(Layout.parse("data=2"))
    node = [n for n in program.collectives if n.target is collectives.all_reduce][-1]
    drop(program, node)
    found = one.verdict(program.layout, program=program)
    assert not found.ok and found.rounding is None, str(found)
