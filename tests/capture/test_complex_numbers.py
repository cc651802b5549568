"""Complex numbers of Python in a step: `1j * frequency`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from as_eager import Program, assert_as_eager
from gradient_programs import losing


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
