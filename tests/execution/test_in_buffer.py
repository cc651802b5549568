"""Real ranks whose reduced gradients stay in shared memory until the update has read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runs
import tutti
from ranks import Ranks
from tutti.graph.ops import collectives

NUM_STEPS = 6


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(layout: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, whole weights, and how many reductions were made in place."""
    torch.manual_seed(0)
    linears = [nn.Linear(128, 128) for _ in range(6)]
    model = nn.Sequential(*linears, nn.GELU(), nn.Linear(128, 64)).double()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = tutti.distribute(train_step, model, adamw, layout)
    batch = torch.randn(8, 128, dtype=torch.float64)
    losses = [float(step(batch)) for _ in range(NUM_STEPS)]
    compiled: Any = step._last
    nodes = [n for n in compiled.execution.graph.nodes if n.target is collectives.together_]
    kept = [n for n in nodes if n.args[0] == "reduce_part"]
    return losses, {n: runs.whole(x).clone() for n, x in step.state_dict().items()}, len(kept)


@pytest.mark.parametrize("layout", ["data=2 zero=1", "data=2 zero=3"])
def test_two_ranks_train_as_one_device(ranks: Ranks, layout: str) -> None:
    losses, weights, none = train("")
    assert none == 0
    for found, whole, kept in ranks.run(train, layout, n=2):
        assert kept > 0
        assert found == pytest.approx(losses, rel=1e-12)
        for name, x in weights.items():
            torch.testing.assert_close(whole[name], x, rtol=1e-10, atol=1e-12)
