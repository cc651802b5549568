"""Matmuls with weights picked by an index become products by expert, with the same values and gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from mixtures import NAMES, NUM_LAYERS, arguments
from tutti.capture.captured import Captured
from tutti.capture.step import capture
from tutti.graph.ops.expert_rows import PRODUCTS, expert_mm, expert_outer

EXPERTS, WIDTH, ROWS = 4, 6, 12


class Picked(nn.Module):
    """Each row times the weights of its expert, by one of the ways to write it."""

    def __init__(self, way: str, experts: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH))
        self.way = way
        self.register_buffer("experts", experts)

    def forward(self, x: Tensor) -> Tensor:
        picked: Tensor = self.weight[self.experts]
        match self.way:
            case "column":
                return torch.bmm(picked, x.unsqueeze(-1)).squeeze(-1)
            case "row":
                return torch.bmm(x.unsqueeze(1), picked.transpose(1, 2)).squeeze(1)
            case "einsum":
                return torch.einsum("snk,sk->sn", picked, x)
            case "twice":
                return torch.bmm(picked, x.unsqueeze(-1)).squeeze(-1) + picked.sum(-1)
            case _:  # a matrix for each row
                return torch.bmm(picked, torch.stack([x, 2 * x], -1)).sum(-1)


def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def given(way: str, *, low: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Picked(way, torch.randint(low, EXPERTS, (ROWS,)))
    return step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(ROWS, WIDTH),)


def counts(captured: Captured) -> Counter[Any]:
    return Counter(n.target for n in captured.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("way", ["column", "row", "einsum"])
def test_no_row_has_a_copy_of_its_weights(way: str) -> None:
    found = counts(capture(*given(way)))
    assert found[expert_mm] == 1 and found[expert_outer] == 1
    aten = torch.ops.aten
    assert not found[aten.index.Tensor] and not found[aten.index_put.default]
    assert not found[aten.bmm.default]


@pytest.mark.parametrize("way", ["column", "row", "einsum", "twice", "matrix"])
@pytest.mark.parametrize("low", [0, -EXPERTS])
def test_the_numbers_are_those_of_the_index(way: str, low: int) -> None:
    """Repeated numbers add up; those below 0 count from the end."""
    verdict = tutti.verify(*given(way, low=low), layout="data=2")
    assert verdict.ok and verdict.max_error < 1e-12, str(verdict)
    assert verdict.capture_error < 1e-5, str(verdict)


def test_a_matrix_for_each_row_stays_as_it_is() -> None:
    found = counts(capture(*given("matrix")))
    assert not any(found[op] for op in PRODUCTS)


class Among(nn.Module):
    """Rows of activations picked by an index: as many matrices as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 5 * WIDTH)
        self.register_buffer("others", torch.randint(0, ROWS, (ROWS,)))

    def forward(self, x: Tensor) -> Tensor:
        matrices: Tensor = self.wide(x).view(ROWS, 5, WIDTH)
        return torch.bmm(matrices[self.others], x.unsqueeze(-1)).squeeze(-1)


def test_activations_are_no_experts() -> None:
    torch.manual_seed(0)
    model = Among()
    given = step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(ROWS, WIDTH),)
    found = counts(capture(*given))
    assert not any(found[op] for op in PRODUCTS)


@pytest.mark.parametrize(
    ("name", "precision"), list(zip(NAMES, ("fp32", "bf16", "bf16"), strict=True))
)
def test_mixtures_of_hugging_face(name: str, precision: str) -> None:
    """Two products a layer in the forward; two and two gradients of weights in the backward.

    Under autocast each weight is cast once.
    """
    captured = capture(*arguments(name), precision=precision)
    found = counts(captured)
    assert found[expert_mm] == 4 * NUM_LAYERS[name]
    assert found[expert_outer] == 2 * NUM_LAYERS[name]
    products = [n for n in captured.graph.nodes if n.target is expert_mm]
    assert len({n.args[1] for n in products}) == 2 * NUM_LAYERS[name]
    dtypes = {n.meta["val"].dtype for n in products}
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    picked = [n for n in captured.graph.nodes if n.target is torch.ops.aten.bmm.default]
    assert not any(n.args[0].target is torch.ops.aten.index.Tensor for n in picked)
