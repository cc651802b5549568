"""Steps that people write and the zoo has not: each is the same step, and no op of it is worked out whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.optim import SGD

import tutti
from small_steps import Loss, same_step, step, trained

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


def last_token(model: nn.Module, x: Tensor, length: Tensor) -> Tensor:
    """Classifiers of Hugging Face read each row at its own place."""
    out = model(x)
    return out[torch.arange(len(out)), length].square().mean()


def pairs_of_features(model: nn.Module, x: Tensor) -> Tensor:
    """DLRM: products of pairs, of which one triangle counts."""
    out = model(x)
    first, second = torch.tril_indices(5, 5, -1)
    return (out @ out.transpose(1, 2))[:, first, second].sin().mean()


def shared_heads(model: nn.Module, x: Tensor) -> Tensor:
    """Falcon: the last heads are keys and values, picked by a list."""
    heads = model(x).reshape(8, 5, 3, 2)
    return (heads[:, :, :-2] * heads[:, :, [-2]] + heads[:, :, [-1]]).square().mean()


def pooled(model: nn.Module, x: Tensor) -> Tensor:
    """Swin: the backward of the pooling is written with strides."""
    return F.adaptive_avg_pool1d(model(x).transpose(1, 2), 1).flatten(1).square().mean()


def masked(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Masked modelling: a value with a gradient at places that a mask picks."""
    out = model(x).clone()
    out[mask] = list(model.parameters())[-1]
    out[:, 1:3] += 1
    out[:, torch.arange(5) > 3] = 0.5
    return out.square().mean()


def images(model: nn.Module, x: Tensor, picture: Tensor, tokens: Tensor) -> Tensor:
    """Models of images and text put what they make of images at the places of their tokens, in order."""
    mask = (tokens == 0).unsqueeze(-1)
    out = model(x).masked_scatter(mask, model(picture))
    torch._check_tensor_all(mask.sum() > 0, lambda: "no place for an image")
    return out.sin().mean()


def frames(model: nn.Module, x: Tensor) -> Tensor:
    """Overlapping windows by strides."""
    return model(x).flatten(1).contiguous().as_strided((8, 7, 6), (30, 4, 1)).sin().square().mean()


def likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """PyTorch looks whether a variance is negative."""
    out = model(x)
    return F.gaussian_nll_loss(out, y, F.softplus(out))


def against_constants(model: nn.Module, x: Tensor) -> Tensor:
    """PyTorch works 1 - target out in place, and the target is no input here."""
    target = torch.linspace(0, 1, 6)
    total = torch.tensor(0.0)
    total += F.binary_cross_entropy_with_logits(model(x), TARGETS * target)
    return total


TARGETS = torch.rand(8, 5, 6, generator=torch.Generator().manual_seed(0))


def mlp(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, outputs))


STEPS: dict[str, tuple[Loss, int, tuple[Tensor, ...]]] = {
    "regression": (regression, 6, (numbers(8, 5, 6), numbers(8, 5, 6, seed=1))),
    "triplets": (triplets, 4, tuple(numbers(8, 6, seed=i) for i in range(3))),
    "gradient penalty": (gradient_penalty, 1, (numbers(8, 6), numbers(8, 6, seed=1))),
    "last token": (last_token, 6, (numbers(8, 5, 6), classes(10, 8) - 5)),
    "pairs of features": (pairs_of_features, 4, (numbers(8, 5, 6),)),
    "shared heads": (shared_heads, 6, (numbers(8, 5, 6),)),
    "pooled": (pooled, 6, (numbers(8, 5, 6),)),
    "masked": (masked, 6, (numbers(8, 5, 6), numbers(8, 5) > 0)),
    "likelihood": (likelihood, 6, (numbers(8, 5, 6), numbers(8, 5, 6, seed=1))),
    "policy": (policy, 3, (numbers(8, 6), classes(3, 8), numbers(8, seed=1))),
}


# What they close over, or how their backward adds up, takes the whole batch.
WHOLE: dict[str, tuple[Loss, int, tuple[Tensor, ...]]] = {
    "images": (
        images,
        6,
        (numbers(8, 5, 6), numbers(8, 2, 6, seed=1), torch.arange(40).view(8, 5) % 3),
    ),
    "frames": (frames, 6, (numbers(8, 5, 6),)),
    "against constants": (against_constants, 6, (numbers(8, 5, 6),)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_same_step(name: str) -> None:
    check(*STEPS[name], *LAYOUTS)


@pytest.mark.parametrize("name", WHOLE)
def test_the_same_step_of_ranks(name: str) -> None:
    check(*WHOLE[name], LAYOUTS[0])


def check(loss_of: Loss, outputs: int, batch: tuple[Tensor, ...], *layouts: str) -> None:
    model = mlp(outputs)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    same_step(loss_of, model, optimizer, batch, *layouts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_with_constants_of_its_own(layout: str) -> None:
    """Rprop writes into parts of its values by numbers that it makes for each parameter."""
    model = mlp(3)
    optimizer = torch.optim.Rprop(model.parameters(), 1e-3)
    step = trained(lambda model, x, y: F.cross_entropy(model(x), y))
    found = tutti.verify(step, model, optimizer, (numbers(8, 6), classes(3, 8)), layout)
    assert found.ok, str(found)


def test_distributions_check_their_arguments_again_after_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Distribution, "_validate_args", True
    )  # to import PyTorch's compiler ends it
    loss_of, outputs, batch = STEPS["policy"]
    model = mlp(outputs)
    tutti.distribute(trained(loss_of), model, torch.optim.SGD(model.parameters(), 0.1))(*batch)
    with pytest.raises(ValueError, match="logits"):
        Categorical(logits=torch.tensor([float("nan"), 0.0]))


def test_a_weight_that_a_hook_makes_at_each_call() -> None:
    """The older `weight_norm`: the module holds a weight with a history, which PyTorch does not copy."""
    model = mlp(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is said to be deprecated
        nn.utils.weight_norm(model[0])  # type: ignore[index]
    found = tutti.verify(
        step, model, SGD(model.parameters(), 0.1), (numbers(8, 6),), "data=2 zero=3"
    )
    assert found.ok, str(found)
