"""The spread of shardings: a run that goes on from the last one ends where a run over all ops does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zoo
import zoo_models
from small_steps import step
from tutti.capture.captured import Captured, copied
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.propagate.plan import ShardingPlan, plan
from tutti.propagate.spread import Spread
from zoo_steps import plain_step, token_batch


@cache
def captured() -> Captured:
    torch.manual_seed(0)
    model = zoo_models.GPT(num_layers=2)
    return capture(plain_step, model, zoo.adamw(model), token_batch(0))


@pytest.mark.parametrize("layout", ["data=2 tensor=2 zero=3", "data=2 seq=2 zero=1", "tensor=4"])
def test_a_further_run_ends_where_one_over_all_ops_does(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(layout)
    run, runs = Spread.run, []

    def over_all(self: Spread, graph: fx.Graph) -> None:
        runs.append(self)
        self._nodes, self._ops = [], {}
        run(self, graph)

    monkeypatch.setattr(Spread, "run", over_all)
    whole = planned(layout)
    assert len(runs) > 2
    assert shardings(made) == shardings(whole)
    assert origins(made) == origins(whole)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_rows_of_split_samples_and_tokens_keep_their_samples_split_in_a_split_matmul() -> None:
    """The weight's columns take `tensor` from the tokens, and nothing from the samples."""
    model = Normed()
    made = capture(step, model, zoo.adamw(model), (torch.randn(64, 8, 16),))
    place = {"norm": "-, tensor, -", "up.weight": "tensor, -", "down.weight": "-, tensor"}
    own = plan(made, Layout.parse("data=16 tensor=4"), place)
    matmuls = [n for n in own.captured.graph.nodes if n.meta.get("module") == "up"]
    matmuls = [n for n in matmuls if n.target is torch.ops.aten.addmm.default]
    assert [str(own.spread.of(n)) for n in matmuls] == ["512@data, 64@tensor"]


def planned(layout: str) -> ShardingPlan:
    return plan(copied(captured()), Layout.parse(layout), zoo.PLACE_GPT)


def shardings(made: ShardingPlan) -> dict[str, str]:
    return {node.name: str(sharding) for node, sharding in made.spread.wanted.items()}


def origins(made: ShardingPlan) -> dict[tuple[str, str], Any]:
    return {(node.name, axis): str(via) for (node, axis), via in made.spread.origin.items()}
