"""`zero` in a mixture of experts: `expert` shards the state of weights that are not of experts, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tutti
from captured_once import captured_once
from mixtures import points, points_step, routed
from ranks import Ranks
from tutti.state.residence import local_of

BATCHES = 4


def _begun(layout: str) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    """A step under `layout`, or in plain PyTorch for "eager"; its model and optimizer."""
    model = routed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    if layout == "eager":
        return partial(points_step, model, optimizer), model, optimizer
    with captured_once("Routed"):
        return tutti.distribute(points_step, model, optimizer, layout), model, optimizer


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    with tutti.whole(model):
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of one device, whose capture the copies of this process have."""
    with captured_once("Routed"):
        _begun("")[0](*points(0))
    step, model, _ = _begun("eager")
    losses = [float(step(*points(k))) for k in range(BATCHES)]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def played(layout: str, saved: str = "", loaded: str = "") -> tuple[list[float], Any, Any]:
    """The losses and the weights of a run, and the numbers of entries of first moments and of weights here.

    A run that is `saved` ends after half of the batches; one that is `loaded` goes on with the others.
    """
    step, model, optimizer = _begun(layout)
    half = BATCHES // 2
    if loaded:
        step.load(loaded)
    with captured_once("Routed"):
        which = range(half) if saved else range(half, BATCHES) if loaded else range(BATCHES)
        losses = [float(step(*points(k))) for k in which]
    if saved:
        step.save(saved)
    held = {
        n: (local_of(optimizer.state[p]["exp_avg"]).numel(), local_of(p).numel())
        for n, p in model.named_parameters()
    }
    return losses, _weights(model), held


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)


# The layout; the parts of the moments of the router and of experts, and those of their weights.
LAYOUTS = [
    ("expert=2 zero=1", 2, (2, 2), (1, 2)),
    ("expert=2 zero=3", 2, (2, 2), (2, 2)),
    ("data=2 expert=2 zero=1", 4, (4, 4), (1, 2)),
    ("data=2 expert=2 zero=2 micro=2", 4, (4, 4), (1, 2)),
    ("data=2 expert=2 zero=3", 4, (4, 4), (4, 4)),
]


@pytest.mark.parametrize(("layout", "n", "moments", "weights"), LAYOUTS)
def test_ranks_train_as_one_device(
    layout: str, n: int, moments: tuple[int, int], weights: tuple[int, int], ranks: Ranks
) -> None:
    before = ranks.after(alone)
    losses, expected = before.result
    for found, state, held in before.run(played, layout, n=n):
        assert found == pytest.approx(losses, rel=1e-12)
        _same(state, expected)
        for name, value in expected.items():
            of_experts = value.ndim == 3
            assert held[name] == (
                value.numel() // moments[of_experts],
                value.numel() // weights[of_experts],
            ), name


@pytest.mark.parametrize(
    ("first", "then", "n"),
    [("data=2 expert=2 zero=3", "expert=2 zero=1", 2), ("expert=2 zero=1", "data=4 zero=2", 4)],
)
def test_a_run_goes_on_with_other_parts(
    first: str, then: str, n: int, ranks: Ranks, tmp_path: Path
) -> None:
    path, before = str(tmp_path / "saved"), ranks.after(alone)
    losses, expected = before.result
    begun = before.run(played, first, path, n=6 - n)
    goes_on = before.run(played, then, "", path, n=n)
    for (early, _, _), (late, state, _) in zip(begun, goes_on, strict=False):
        assert [*early, *late] == pytest.approx(losses, rel=1e-12)
        _same(state, expected)
