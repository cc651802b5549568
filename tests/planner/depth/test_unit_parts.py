"""Parts of layers: between attention and perceptron, and nowhere that more bytes cross."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from small_steps import step
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.depth.repeated_layers import Run, ShortUnits
from tutti.planner.depth.step_pieces import Blocks
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.step_estimates import StepEstimates

WIDTH, DEPTH = 32, 6


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class InTurn(nn.Module):
    """As in GPT-2: the perceptron reads the sum of the residual and the mixed values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixing(), Mixing()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


class SideBySide(InTurn):
    """As in GPT-J: both read the input, which crosses beside the first result."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(x) + self.second(x)


class SharedDropout(InTurn):
    """One module in both halves, so no child ends before the other begins."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.act(self.first(x))
        return x + self.act(self.second(x))


@cache
def blocks(kind: type[InTurn]) -> Blocks:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(DEPTH)))
        job = Job.of(step, model, torch.optim.SGD(model.parameters(), 0.1), Layout())
    machine = PricedMachine.of(Cluster.parse("8 x h100"))
    made = StepEstimates(job, (torch.zeros(8, WIDTH),), lambda _: machine, num_layouts=10**6)
    return made.blocks(Layout())


@pytest.mark.parametrize(("kind", "count"), [(InTurn, 2), (SideBySide, 1), (SharedDropout, 1)])
def test_a_layer_has_parts_where_few_bytes_cross(kind: type[InTurn], count: int) -> None:
    ((parts, number),) = blocks(kind).layers
    assert (len(parts), number) == (count, DEPTH)
    assert len(list(blocks(kind).sequence())) == count * DEPTH


def test_equal_halves_have_equal_work() -> None:
    (((first, second), _),) = blocks(InTurn).layers
    assert first.forward == pytest.approx(second.forward)
    assert first.parameters == second.parameters == 4 * (WIDTH * WIDTH + WIDTH)
    assert first.kept == second.kept > 0
    assert first.backward == pytest.approx(second.backward, rel=0.2)


def test_parts_are_the_whole() -> None:
    """A layer in two parts and one in a single part have the same weights."""
    (((first, second), _),) = blocks(InTurn).layers
    (((whole,), _),) = blocks(SharedDropout).layers
    both = first + second
    for name in ("parameters", "slots", "gradients", "read", "read_again"):
        assert getattr(both, name) == getattr(whole, name), name


def test_children_of_units_of_several_layers() -> None:
    run = Run("h", 2, 2, 5)
    units = ShortUnits([run], {run: 2})
    assert units.child("h.2.attn.q.weight") == (0, "attn")
    assert units.child("h.5.mlp") == (1, "mlp")
    assert units.child("h.5") is units.child("h.1.mlp") is units.child("head") is None
