"""Layers that change places between calls, and layers that leave the model, with state in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from ranks import Ranks
from small_steps import step as train_step

LAYOUTS = ["data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2"]


def layers_exchanged(model: Any, _: Any) -> nn.Module:
    model[0], model[2] = model[2], model[0]
    return model


def weights_exchanged(model: Any, _: Any) -> nn.Module:
    model[0].weight, model[2].weight = model[2].weight, model[0].weight
    return model


def layer_replaced(model: Any, optimizer: Any) -> nn.Module:
    """The former layer, which the script keeps."""
    kept, model[2] = model[2], nn.Linear(8, 8)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return kept


CHANGES: list[Callable[[Any, Any], nn.Module]] = [
    *(layers_exchanged, weights_exchanged, layer_replaced),
]


def trained(change: str, layout: str | None) -> list[np.ndarray]:
    """The losses, the weights and those of the layer that a change gives; plain PyTorch without a layout."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)]
    model, losses = nn.Sequential(*layers).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    kept: nn.Module = model
    for call in range(6):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(call)).double()
        losses.append(float(step(x) if step is not None else train_step(model, optimizer, x)))
        if call in (1, 3):
            kept = next(f for f in CHANGES if f.__name__ == change)(model, optimizer)
            model.double()
    found = [np.asarray(losses)]
    for one in (model, kept):
        with tutti.whole(one):
            found += [p.detach().numpy().copy() for p in one.parameters()]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_as_on_one_device(ranks: Ranks, change: Callable[..., Any], layout: str) -> None:
    expected = trained(change.__name__, None)
    for found in ranks.run(trained, change.__name__, layout, n=2):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
