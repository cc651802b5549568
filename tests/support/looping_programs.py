"""Training programs with loops that end by values of tensors, after other numbers of turns at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from python_programs import mlp, update

Made = tuple[Callable[..., Any], nn.Module, Any]


def made_of(forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], Made]:
    """The program that trains on the mean square of `forward`."""

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        return update(forward(m, x).square().mean(), o)

    def made() -> Made:
        model = mlp()
        return step, model, SGD(model.parameters(), lr=0.1)

    return made


def limit(x: Tensor) -> Tensor:
    """A bound of the loops: 0.03 to 0.5 for most batches."""
    return 0.3 * x[0, 0].abs()


def breaks(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    while True:
        y = y * 0.5
        if y.abs().max() < limit(x):
            return y


def breaks_by_a_number(m: nn.Module, x: Tensor) -> Tensor:
    """As fixed-point iterations do, in a bounded loop."""
    y = m(x)
    for _ in range(100_000):
        before, y = y, 0.5 * y + 0.1 * torch.tanh(y)
        if (y - before).abs().max().item() < 0.1 * limit(x).item():
            break
    return y


def goes_on(m: nn.Module, x: Tensor) -> Tensor:
    """The condition is that of the loop, and holds for more turns than a call has traces."""
    y = m(x)
    while (y.abs().max() > 0.1 * limit(x)).item():
        y = y * 0.8
    return y


def has_two_exits(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    while True:
        y = y * 0.7
        if y.abs().max() > 2:
            continue
        if y.mean() > 0 and y.abs().max() < limit(x):
            y = y + 0.1
            break
        if y.abs().max() < 0.7 * limit(x):
            break
    return y


def adapts(m: nn.Module, x: Tensor) -> Tensor:
    """An integration whose steps are tried anew until their error is small."""
    y, t = x, x.new_zeros(())
    left = x.new_ones(())
    while left > 0:
        part = torch.minimum(x.new_ones(()), left)
        while True:
            slope = m(y).mean(1, keepdim=True)
            new = y - part * slope
            error = (part * (m(new).mean(1, keepdim=True) - slope)).detach().abs().max()
            if error < limit(x):
                break
            part = 0.5 * part
        y, t = new, t + part
        left = 1 - t
    return y


LOOPING = {
    one.__name__: made_of(one)
    for one in (breaks, breaks_by_a_number, goes_on, has_two_exits, adapts)
}
