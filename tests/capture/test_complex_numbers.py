"""Complex numbers in a step: those of Python (`1j * frequency`), parameters, and their norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import losing
from ranks import Ranks
from tutti.errors import CaptureError


def complex_numbers() -> Program:
    class Oscillating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay, self.frequency = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.exp(self.decay + 1j * self.frequency) * (2 - 0.5j) * x).real

    return losing(Oscillating(), lambda model, x: model(x).square().mean())


def test_complex_numbers_are_scalars() -> None:
    assert_as_eager(complex_numbers)


class _Filter(nn.Module):
    """A spectral filter of complex numbers behind a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.inner(x)) * self.filter, n=6)


def clipped(norm_type: float = 2.0) -> Program:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        optimizer.step()
        return loss, norm

    model = _Filter()
    return step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, 6),)


def clipped_by_sums() -> Program:
    return clipped(1.0)


def clipped_by_maximum() -> Program:
    return clipped(math.inf)


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
@pytest.mark.parametrize("program", [clipped, clipped_by_sums, clipped_by_maximum])
def test_complex_gradients_are_clipped(
    program: Callable[[], Program], layout: str, ranks: Ranks
) -> None:
    assert_as_eager(program, layout)
    assert_as_eager_on_ranks(ranks, program, layout)


def measured() -> Program:
    """Norms and moments of complex activations over the samples."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        waves = torch.fft.fft(model(x))
        norms = [torch.linalg.vector_norm(waves, p, dim=0).sum() for p in (1, 2, 3, math.inf)]
        return sum(norms, waves.var() + waves.std(0).sum())

    return losing(_Filter(), loss)


def test_norms_and_moments_of_split_complex_values(ranks: Ranks) -> None:
    assert_as_eager(measured, "data=2")
    assert_as_eager_on_ranks(ranks, measured, "data=2")


SERVERS = "replica=2 sync=step server=2"


def scaled_by(number: Callable[[Tensor], Tensor], *, returned: bool = False) -> Program:
    """Scales the filter's gradient by a number that follows from it."""

    def step(model: _Filter, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Any, ...]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        gradient = model.filter.grad
        assert gradient is not None
        found = number(gradient)
        model.filter.grad = gradient * (1 + found)
        optimizer.step()
        return loss, found if returned else None

    model = _Filter()
    return step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, 6),)


def verified(program: Program, layout: str) -> None:
    found = tutti.verify(*program, layout)
    assert found.ok, str(found)


@pytest.mark.parametrize("number", [Tensor.norm, Tensor.mean, lambda g: g.sum().abs()])
def test_servers_update_by_numbers_of_complex_gradients(number: Any) -> None:
    torch.manual_seed(0)
    verified(scaled_by(number), SERVERS)


def test_servers_refuse_to_return_complex_numbers() -> None:
    with pytest.raises(CaptureError, match=r"servers cannot run this step: div.*is returned"):
        verified(scaled_by(Tensor.mean, returned=True), SERVERS)
    with pytest.raises(CaptureError, match=r"servers cannot run this step: add.*complex number"):
        verified(scaled_by(lambda g: g.norm() * 1j), SERVERS)
