"""Layers beside the usual ones: warps, transforms, solves. Each is the same step; no op is played whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn.utils.parametrizations import weight_norm

from small_steps import Loss, same_step

LAYOUTS = ("data=2 micro=2", "data=2 zero=3", "tensor=2")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regression(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


class Warp(nn.Module):
    """A spatial transformer: each image is turned as it asks for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.out = nn.Linear(32, 6), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        theta = 0.1 * self.turn(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.out(F.grid_sample(x, grid, align_corners=False))


class Space(nn.Module):
    """Down and up again in three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv3d(2, 4, 1), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.mish(self.into(x))
        coarse = F.adaptive_avg_pool3d(fine, 2)
        again = F.interpolate(coarse, scale_factor=2, mode="trilinear")
        return self.out(torch.cat([fine, again], 1))


class Mixing(nn.Module):
    """Tokens mixed by a Fourier transform, then filtered in the other domain; normed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = weight_norm(nn.Linear(6, 8)), weight_norm(nn.Linear(8, 4), dim=1)
        self.filter = nn.Parameter(0.1 * numbers(3, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft2(self.into(x)).real
        waves = torch.fft.rfft(mixed, dim=1) * torch.view_as_complex(self.filter)
        return self.out(torch.fft.irfft(waves, n=4, dim=1))


class Prototypes(nn.Module):
    """Distances to learned points, and a form that is linear in two things."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.pair = nn.Linear(6, 4), nn.Bilinear(4, 4, 8)
        self.points = nn.Parameter(numbers(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        return self.pair(h, h.tanh()) - torch.cdist(h, self.points)


class Gaussian(nn.Module):
    """A mean and a covariance for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.root = nn.Linear(6, 4), nn.Linear(6, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        root = self.root(x).view(-1, 4, 4)
        return self.mean(x), root @ root.mT + torch.eye(4)


def likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, covariance = model(x)
    gone = torch.linalg.solve(covariance, (y - mean)[:, :, None]).square().mean()
    return gone - MultivariateNormal(mean, covariance).log_prob(y).mean()


STEPS: dict[str, tuple[Callable[[], nn.Module], Loss, tuple[Tensor, ...]]] = {
    "warp": (Warp, regression, (numbers(8, 2, 4, 4), numbers(8, 4, 4, 4, seed=1))),
    "space": (Space, regression, (numbers(4, 2, 4, 4, 4), numbers(4, 2, 4, 4, 4, seed=1))),
    "mixing": (Mixing, regression, (numbers(8, 4, 6), numbers(8, 4, 4, seed=1))),
    "prototypes": (Prototypes, regression, (numbers(8, 6), numbers(8, 8, seed=1))),
    "gaussian": (Gaussian, likelihood, (numbers(8, 6), numbers(8, 4, seed=1))),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_same_step(name: str) -> None:
    build, loss_of, batch = STEPS[name]
    torch.manual_seed(0)
    model = build()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    same_step(loss_of, model, optimizer, batch, *LAYOUTS)
