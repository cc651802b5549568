"""A script renames a parameter between calls, and gives the old name back later: pruning, plain renames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import tutti
from ranks import Ranks
from small_steps import step as train_step

LAYOUTS = [
    ("tensor=2", 2),
    ("data=2 zero=1", 2),
    ("data=2 zero=3", 2),
    ("pipe=2 micro=2", 2),
]


class Layer(nn.Module):
    """A linear layer, whose weight has one of two names and computes other things under each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if hasattr(self, "w") else x @ self.other.T + 1


def pruned(layers: Any) -> None:
    prune.l1_unstructured(layers[2], "weight", amount=0.5)


def not_pruned(layers: Any) -> None:
    prune.remove(layers[2], "weight")


def renamed(layers: Any) -> None:
    layers[2].other = layers[2].w
    del layers[2].w


def named_as_before(layers: Any) -> None:
    layers[2].w = layers[2].other
    del layers[2].other


Change = Callable[[Any], None]
CHANGES: dict[str, tuple[Change, Change]] = {
    "pruned": (pruned, not_pruned),
    "renamed": (renamed, named_as_before),
}


def trained(kind: str, layout: str | None) -> list[np.ndarray]:
    """The losses, the weights and the slots at the end; by plain PyTorch without a layout."""
    torch.manual_seed(0)
    middle = nn.Linear(16, 16) if kind == "pruned" else Layer()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), middle, nn.GELU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    losses = []
    for call in range(6):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(call)).double()
        if call in (1, 3):
            with tutti.whole(model):
                CHANGES[kind][call == 3](model)
        losses.append(float(step(x) if step is not None else train_step(model, optimizer, x)))
    with tutti.whole(model, slots=True):
        found = [np.asarray(losses)]
        for _, p in sorted(model.named_parameters()):
            found += [x.detach().numpy().copy() for x in (p, *optimizer.state[p].values())]
    return found


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
@pytest.mark.parametrize("kind", CHANGES)
def test_as_on_one_device(ranks: Ranks, kind: str, layout: str, n: int) -> None:
    expected = trained(kind, None)
    for found in ranks.run(trained, kind, layout, n=n):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", CHANGES)
def test_one_device(kind: str) -> None:
    for x, y in zip(trained(kind, ""), trained(kind, None), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
