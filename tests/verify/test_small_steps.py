"""Steps that people write and the zoo has not: each is the same step, and no op of it is worked out whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

import tutti
from small_steps import Loss, trained

LAYOUTS = ("data=2 zero=3", "micro=2")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(num: int, *shape: int) -> Tensor:
    return torch.randint(num, shape, generator=torch.Generator().manual_seed(0))


def regression(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Its mean is of three dims."""
    return F.mse_loss(model(x), y)


def triplets(model: nn.Module, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Distances are `Tensor.norm`, an op of its own."""
    return F.triplet_margin_loss(model(a), model(b), model(c))


def gradient_penalty(model: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    """A gradient is taken before the optimizer's are cleared."""
    mixed = (0.3 * real + 0.7 * made).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return model(made).mean() - model(real).mean() + (slope.norm(2, 1) - 1).square().mean()


def policy(model: nn.Module, x: Tensor, action: Tensor, advantage: Tensor) -> Tensor:
    """`Categorical` looks at its arguments' values, by default."""
    chosen = Categorical(logits=model(x))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return -(chosen.log_prob(action) * advantage).mean() - 0.01 * chosen.entropy().mean()


def mlp(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, outputs))


STEPS: dict[str, tuple[Loss, int, tuple[Tensor, ...]]] = {
    "regression": (regression, 6, (numbers(8, 5, 6), numbers(8, 5, 6, seed=1))),
    "triplets": (triplets, 4, tuple(numbers(8, 6, seed=i) for i in range(3))),
    "gradient penalty": (gradient_penalty, 1, (numbers(8, 6), numbers(8, 6, seed=1))),
    "policy": (policy, 3, (numbers(8, 6), classes(3, 8), numbers(8, seed=1))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STEPS)
def test_the_same_step(name: str, layout: str) -> None:
    loss_of, outputs, batch = STEPS[name]
    model = mlp(outputs)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    found = tutti.verify(trained(loss_of), model, optimizer, batch, layout)
    assert found.ok, str(found)
    step = tutti.distribute(trained(loss_of), model, optimizer, layout)
    assert step.program_of(batch).fallbacks == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_with_constants_of_its_own(layout: str) -> None:
    """Rprop writes into parts of its values by numbers that it makes for each parameter."""
    model = mlp(3)
    optimizer = torch.optim.Rprop(model.parameters(), 1e-3)
    step = trained(lambda model, x, y: F.cross_entropy(model(x), y))
    found = tutti.verify(step, model, optimizer, (numbers(8, 6), classes(3, 8)), layout)
    assert found.ok, str(found)


def test_distributions_check_their_arguments_again_after_a_capture() -> None:
    before = Distribution._validate_args
    loss_of, outputs, batch = STEPS["policy"]
    model = mlp(outputs)
    tutti.distribute(trained(loss_of), model, torch.optim.SGD(model.parameters(), 0.1))(*batch)
    assert Distribution._validate_args == before
    with pytest.raises(ValueError, match="logits"):
        Categorical(logits=torch.tensor([float("nan"), 0.0]))
