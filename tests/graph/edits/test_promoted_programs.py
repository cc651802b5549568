"""A promoted graph makes what the eager step makes where float64 is the default type."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from small_steps import trained
from tutti.capture.step import capture
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.verification.comparisons import feed_of, inputs_of, snapshot

Program = Callable[[Tensor, Tensor], Tensor]  # of x @ w, [4, 8], and of integers, [4]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@program
def times_a_float(y: Tensor, t: Tensor) -> Tensor:
    return y + torch.arange(8) * 0.1 + t[:, None] / 3


@program
def a_power_of_an_integer(y: Tensor, t: Tensor) -> Tensor:
    return y / torch.pow(10000, torch.arange(8) / 8) * torch.pow(torch.arange(1, 9), -0.5)


@program
def an_exponential_of_integers(y: Tensor, t: Tensor) -> Tensor:
    return y * torch.exp(-torch.arange(8)) + torch.sin(t)[:, None] + (t + 1).rsqrt()[:, None]


@program
def sinusoidal_embedding(y: Tensor, t: Tensor) -> Tensor:
    angles = t[:, None] * torch.exp(torch.arange(4) * (-math.log(10000) / 3))
    made = torch.cat([angles.sin(), angles.cos()], -1)
    return y + F.linear(made, y[:, :8].t() @ y)


@program
def rotary_embedding(y: Tensor, t: Tensor) -> Tensor:
    angles = torch.outer(t, 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)))
    turned = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(y.reshape(4, 4, 2)) * turned).flatten(1)


@program
def complex_exponential(y: Tensor, t: Tensor) -> Tensor:
    turned = torch.exp(1j * t[:, None])
    return torch.view_as_real(turned * torch.view_as_complex(y.reshape(4, 4, 2))).flatten(1)


@program
def made_of_numbers(y: Tensor, t: Tensor) -> Tensor:
    return y * torch.full((), 1.5) + torch.full((8,), 0.1) + torch.linspace(0, 1, 8)


@program
def chosen_numbers(y: Tensor, t: Tensor) -> Tensor:
    return torch.where(t[:, None] > 2, y, 0.3) * torch.where(t[:, None] > 2, 0.1, 0.3)


@program
def a_matmul_of_integers(y: Tensor, t: Tensor) -> Tensor:
    return (t[:, None] / 2.0 * torch.ones(4)) @ y + (torch.arange(16).view(4, 4) * 0.1) @ y


@program
def a_bias_of_attention(y: Tensor, t: Tensor) -> Tensor:
    apart = (torch.arange(4)[None] - torch.arange(4)[:, None]).abs()
    q, v = y[None], (torch.arange(32) * 0.1).view(1, 4, 8)
    return F.scaled_dot_product_attention(q, q, v, attn_mask=-apart * 0.3)[0] * y


@program
def rows_that_are_added(y: Tensor, t: Tensor) -> Tensor:
    at = torch.tensor([1, 0, 3, 2])
    added = torch.zeros_like(y).index_add(0, at, (torch.arange(32) * 0.1).view(4, 8))
    return added * y.scatter_add(1, t[:, None], torch.arange(4)[:, None] * 0.3)


@program
def rounded_to_integers(y: Tensor, t: Tensor) -> Tensor:
    near = (torch.log((t + 1) / 2) / math.log(64) * 8).long()
    return y + near[:, None] * 0.1 + torch.div(t, 0.3, rounding_mode="floor")[:, None]


@program
def normalized_integers(y: Tensor, t: Tensor) -> Tensor:
    return y * F.layer_norm(t[:, None] * 0.3 + torch.arange(8) * 0.1, (8,))


@program
def convolved_integers(y: Tensor, t: Tensor) -> Tensor:
    return y * F.conv1d((torch.arange(8) * 0.1).view(1, 1, 8), y.reshape(4, 1, 8)).view(4, 1)


class Matmul(nn.Module):
    def __init__(self, rest: Program) -> None:
        super().__init__()
        self.w, self.rest = nn.Parameter(torch.randn(4, 8)), rest

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.rest(x @ self.w, t)


step = trained(lambda model, x, t: model(x, t).square().mean())


def made(name: str) -> tuple[Matmul, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Matmul(PROGRAMS[name]).float()
    batch = torch.randn(4, 4), torch.tensor([0, 1, 3, 6])
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch


@pytest.mark.parametrize("name", PROGRAMS)
def test_promoted_graph_is_the_step_in_float64(name: str) -> None:
    model, optimizer, batch = made(name)
    captured = capture(step, model, optimizer, batch)
    state = {n: promoted_value(x) for n, x in snapshot(captured, model, optimizer).items()}
    feed = {n: promoted_value(x) for n, x in feed_of(captured, optimizer, batch).items()}
    graph, owner, _ = promoted(captured.graph, captured.owner)
    inputs = [inputs_of(captured, state, feed)]
    (loss,), (new,) = VirtualRanks(Mesh()).run(graph, owner, inputs)[0]
    assert torch.get_default_dtype() == torch.float32
    assert loss.dtype == new.dtype == torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        wide = copy.deepcopy(model).double()
        optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
        expected = step(wide, optimizer, batch[0].double(), batch[1])
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(new, wide.w.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", PROGRAMS)
def test_verify(name: str) -> None:
    model, optimizer, batch = made(name)
    found = tutti.verify(step, model, optimizer, batch, "data=2")
    assert found.ok, str(found)
