"""Tensors outside of the model that lie in columns on some ranks, as `t()` and `svd` leave them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks

CALLS = 5


def trained(layout: str | None) -> list[float]:
    """Losses of a step that makes a projection of the last layer's gradient anew at every second call.

    The stage with the layer has it in columns, the other one has received it. Each way of the branch has a
    program, before whose first call rank 0 broadcasts its values.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept: dict[str, Any] = {"projection": torch.eye(6).double()[:, :3], "calls": 0}

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        last = model[3].weight
        with torch.no_grad():
            if kept["calls"] % 2 == 0:
                kept["projection"] = last.grad.t()[:, :3].cos()
            last.sub_(last.grad @ kept["projection"] @ kept["projection"].t(), alpha=0.1)
        kept["calls"] += 1
        optimizer.step()
        return loss

    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    losses = []
    for call in range(CALLS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(call)).double()
        loss = step(x) if step is not None else train_step(model, optimizer, x)
        losses.append(loss.item())
    return losses


def test_pipelines_keep_the_values(ranks: Ranks) -> None:
    expected = trained(None)
    for layout in ("pipe=2", "data=2 zero=1"):
        for found in ranks.run(trained, layout, n=2):
            np.testing.assert_allclose(found, expected, rtol=1e-10, err_msg=layout)
