"""The first layouts of a plan have the placement that a run under each of them finds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import step
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import Estimate, estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.search.ranking import ranked
from tutti.planning import step_estimates
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.step_estimates import StepEstimates

WIDTH, WORDS = 512, 16384
MACHINE = PricedMachine.of(Cluster.parse("4 x h100"))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Words(nn.Module):
    """Many words and few layers: sums over `data` decide whether the words are split."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Perceptron() for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def estimates_of(depth: int, num_layouts: int) -> StepEstimates:
    with torch.device("meta"):
        model = Words(depth)
    job = Job.of(step, model, torch.optim.AdamW(model.parameters()), Layout())
    batch = (torch.zeros(64, 128, dtype=torch.long),)
    return StepEstimates(job, batch, lambda _: MACHINE, num_layouts=num_layouts)


ONE_BY_TWO, TWO_BY_TWO = Layout.parse("tensor=2"), Layout.parse("data=2 tensor=2")


def found(estimates: StepEstimates, *layouts: Layout) -> dict[str, Estimate]:
    made = ranked(layouts, estimates, float("inf"), refined=estimates.refinement)
    return {row.layout: row.estimate for row in made.rows}


def test_each_layout_has_its_own_program() -> None:
    estimates = estimates_of(1, 1)
    made = found(estimates, ONE_BY_TWO, TWO_BY_TWO)
    for layout in (ONE_BY_TWO, TWO_BY_TWO):
        alone = CandidatePrograms(estimates.job, estimates.batch, on_processors=False)
        exact = estimate(alone.program(layout), MACHINE)
        assert made[str(layout)].seconds == exact.seconds
        assert made[str(layout)].peak_nbytes == exact.peak_nbytes
    assert estimates(TWO_BY_TWO).seconds != made[str(TWO_BY_TWO)].seconds  # without it


@pytest.mark.parametrize("layout", [ONE_BY_TWO, TWO_BY_TWO])
def test_pieces_of_a_deep_model_have_it(layout: Layout) -> None:
    alone = found(estimates_of(6, 10**6), layout)[str(layout)]
    among = found(estimates_of(6, 10**6), ONE_BY_TWO, TWO_BY_TWO)[str(layout)]
    assert among.seconds == alone.seconds
    assert among.peak_nbytes == alone.peak_nbytes


@pytest.mark.parametrize("depth, num_layouts", [(1, 1), (6, 10**6)])
def test_another_process_says_which_placement_it_took(
    depth: int, num_layouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process takes the layouts without `tensor`; another one shares a placement among the rest."""
    layouts = (ONE_BY_TWO, TWO_BY_TWO, Layout.parse("data=2"))
    alone = found(estimates_of(depth, num_layouts), *layouts)
    monkeypatch.setattr(step_estimates, "num_processes", lambda *_, **__: 2)
    parts = [layouts[2:], layouts[:2]]
    monkeypatch.setattr(step_estimates, "divided", lambda *_: parts)
    monkeypatch.setattr(step_estimates, "SharedGroups", lambda _: Parts(parts))
    estimates = estimates_of(depth, num_layouts)
    order, ask = estimates.of_many(layouts)
    made = ranked(order, ask, float("inf"), refined=estimates.refinement)
    shared = {row.layout: row.estimate for row in made.rows}
    assert {x: e.seconds for x, e in shared.items()} == {x: e.seconds for x, e in alone.items()}


class Parts:
    """In place of groups that processes take in any order."""

    def __init__(self, groups: list[tuple[Layout, ...]]) -> None:
        self.groups = groups
        self._left = iter(groups)

    def taken(self) -> tuple[Layout, ...]:
        return next(self._left)
