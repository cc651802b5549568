"""Which seeds are taken: integers of 64 bits; others would give the numbers of another seed, or fail late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from small_steps import trained
from tutti.errors import TuttiError


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(model(x), 0.5).square().mean()


step = trained(_loss)


def losses(seed: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    played = tutti.distribute(step, model, optimizer, "", seed=seed)
    x = torch.randn(4, 8)
    return [played(x).item() for _ in range(2)]


def verified(seed: Any) -> bool:
    model = nn.Linear(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tutti.verify(step, model, optimizer, [torch.randn(4, 8)], "data=2", seed=seed).ok


def test_seeds_of_64_bits_differ() -> None:
    seeds = [0, 1, 2**32 + 1, 2**63, 2**64 - 2, -1]
    assert len({tuple(losses(seed)) for seed in seeds}) == len(seeds)


def test_negative_seeds_are_those_of_pytorch() -> None:
    """`torch.manual_seed` counts them from 2**64 down."""
    first = torch.manual_seed(-1).get_state()
    assert torch.equal(first, torch.manual_seed(2**64 - 1).get_state())
    assert losses(-1) == losses(2**64 - 1)


@pytest.mark.parametrize("seed", [np.int64(7), np.int32(7), np.uint64(7)])
def test_numpys_integers_are_pythons(seed: Any) -> None:
    assert losses(seed) == losses(7)
    assert verified(seed)


@pytest.mark.parametrize("take", [losses, verified])
@pytest.mark.parametrize("seed", [2**64, 2**64 + 1, -(2**63) - 1, 10**40])
def test_more_bits_are_refused(take: Any, seed: int) -> None:
    with pytest.raises(TuttiError, match=f"seed={seed} has more than 64 bits"):
        take(seed)


@pytest.mark.parametrize("take", [losses, verified])
@pytest.mark.parametrize(
    "seed",
    [True, np.bool_(True), 1.0, 1.5, float("nan"), "1", None, torch.tensor(1), np.array([1])],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_integer_is_refused(take: Any, seed: Any) -> None:
    kind = type(seed).__name__
    with pytest.raises(TuttiError, match=f"is a {kind}, not an integer"):
        take(seed)
