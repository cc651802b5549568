"""Numbers that Python reads from tensors made of constants alone: as eager, and constants of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import losing_output as of
from ranks import Ranks
from tutti.capture.python import known_values
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_values import ITEM
from tutti.capture.step import capture
from tutti.errors import CaptureError


def dims(z: Tensor) -> Tensor:
    """As the Dice losses of MONAI."""
    z = z.sigmoid().view(8, 2, 2)
    axes = torch.arange(1, z.ndim).tolist()
    return (z.square().sum(dim=axes) / z.sum(dim=axes)).mean()


def rates(z: Tensor) -> Any:
    """As stochastic depth."""
    return sum((1 - rate.item()) * z.square().mean() for rate in torch.linspace(0, 0.3, 3))


def plain_numbers(z: Tensor) -> Tensor:
    """As a schedule of diffusion."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 10), 0)
    return (float(kept[3].sqrt()) * z + int(torch.eye(4).sum())).square().mean()


def sizes(z: Tensor) -> Tensor:
    a, b = z.split(torch.full((2,), 2).tolist(), dim=1)
    return (a * b).mean() + z.square().mean()


def slices(z: Tensor) -> Any:
    """As lengths of packed sequences."""
    ends = F.pad(torch.tensor([3, 5]).cumsum(0), (1, 0))
    return sum(z[ends[k] : ends[k + 1]].square().mean() for k in range(2))


def pairs(z: Tensor) -> Any:
    rows, others = torch.triu_indices(4, 4, 1).tolist()
    return sum((z[i] * z[j]).sum() for i, j in zip(rows, others, strict=True)) / len(rows)


def largest(z: Tensor) -> Tensor:
    """An op with two results."""
    most, at = torch.tensor([3.0, 1.0, 2.0]).max(0)
    return z.square().mean() * most.item() + z[:, int(at)].mean()


def selections(z: Tensor) -> Any:
    """As the crops of DINO and SwAV, of which those of one size go through the backbone together."""
    sizes = torch.tensor([2, 2, 1])
    ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
    crops, start, total = z.view(4, 2, 4).unbind(0), 0, z.sum() * 0
    for end in ends:
        total = total + torch.cat(crops[start:end]).square().mean()
        start = end
    (odd,) = (torch.arange(4) % 2).nonzero(as_tuple=True)
    return total + z[:, odd].mean() + sizes.unique().sum() * z.mean()


def branches(z: Tensor) -> Tensor:
    mask = torch.ones(4, dtype=torch.bool)
    scale = 2 if mask.all() and 3 in torch.tensor([1, 2, 3]) else 7
    return z.square().mean() * scale


def counted(z: Tensor) -> Any:
    """A tensor that the step overwrites, by itself."""
    count, total = torch.tensor(0), torch.zeros(())
    while count.item() < 3:
        total = total + z.square().mean() * int(count)
        count += 1
    return total + {"3": z.mean()}[f"{count}"] + {"3.0": z.mean()}[f"{count.double():.1f}"]


def arrays(z: Tensor) -> Any:
    order = np.argsort(torch.tensor([3, 1, 2]).numpy())
    weights = np.asarray(torch.arange(4) * 2)
    return sum(int(weights[k]) * z[:, int(k)].square().mean() for k in order) + z.square().mean()


def of_the_default_dtype(z: Tensor) -> Tensor:
    """In float32 the sum would be another one."""
    return z.square().mean() * torch.full((3,), 0.1).sum().item()


def of_a_form(z: Tensor) -> Tensor:
    """The values of the other tensor do not matter."""
    counts = z.new_zeros(3) + torch.ones_like(z[:3, 0])
    rest = torch.full_like(z, 0.5).sum() + z.T.new_ones(2).sum() + torch.zeros_like(z.T).sum()
    return z.square().mean() * int(counts.sum()) + z.mean() * float(rest)


KNOWN = [
    dims,
    rates,
    plain_numbers,
    sizes,
    slices,
    pairs,
    largest,
    selections,
    branches,
    counted,
    arrays,
]
KNOWN += [of_the_default_dtype, of_a_form]


@pytest.mark.parametrize("loss", KNOWN, ids=lambda loss: loss.__name__)
def test_a_read_constant(loss: Callable[[Tensor], Any]) -> None:
    assert_as_eager(lambda: of(loss))
    step, model, optimizer, batch = of(loss)
    captured = capture(step, model, optimizer, batch)
    assert not [n for n in captured.graph.nodes if n.target is ITEM]


def written_through_a_view(z: Tensor) -> Tensor:
    weights = torch.zeros(4)
    weights.view(2, 2)[0].add_(2.0)
    return z.square().mean() * weights.sum().item()


def written_with_a_value(z: Tensor) -> Tensor:
    weights = torch.zeros(3)
    weights[1].copy_(z.detach().mean())
    return z.square().mean() * (2 + weights.sum().item())


def of_an_input(z: Tensor) -> Tensor:
    return z.square().mean() * (1 + (z.detach() * 0 + torch.ones(4)).sum().item())


def random(z: Tensor) -> Tensor:
    return z.square().mean() * torch.rand(3).sum().item()


def random_in_place(z: Tensor) -> Tensor:
    return z.square().mean() * torch.zeros(3).uniform_(1, 2).sum().item()


OTHERS = [written_through_a_view, written_with_a_value, of_an_input, random, random_in_place]


@pytest.mark.parametrize("loss", OTHERS, ids=lambda loss: loss.__name__)
def test_a_value_that_is_no_constant(loss: Callable[[Tensor], Any]) -> None:
    """It is read at every call."""
    assert_as_eager(lambda: of(loss))


def every() -> Program:
    return of(lambda z: sum(loss(z) for loss in KNOWN))


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
def test_on_ranks(ranks: Ranks, layout: str) -> None:
    assert_as_eager_on_ranks(ranks, every, layout)


def test_beside_weights_without_memory() -> None:
    with torch.device("meta"):
        step, model, optimizer, batch = of(of_a_form)
        captured = capture(step, model, optimizer, batch)
    assert not [n for n in captured.graph.nodes if n.target is ITEM]


def test_an_array_refuses_writes() -> None:
    def loss(z: Tensor) -> Tensor:
        weights = torch.ones(4)
        weights.numpy()[0] = 3.0
        return (z * weights).sum()

    step, model, optimizer, batch = of(loss)
    with pytest.raises(ValueError, match="read-only"):
        tutti.distribute(step, model, optimizer, "")(*batch)


def test_a_constant_on_a_device_that_is_not_here() -> None:
    """A plan may be for another machine: the value is read as another one."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")

    def loss(z: Tensor) -> Tensor:
        return z.square().mean() * int(torch.ones(3, device="cuda").sum())

    step, model, optimizer, batch = of(loss)
    with pytest.raises(CaptureError, match="plain number of a tensor's value"):
        tutti.distribute(step, model, optimizer, "")(*batch)


def test_a_loop_looks_no_turn_through_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[fx.Node] = []
    is_known = known_values._is_known
    monkeypatch.setattr(
        known_values, "_is_known", lambda node: (looked.append(node), is_known(node))[1]
    )

    def loss(z: Tensor) -> Tensor:
        for _ in range(40):
            z = z * 0.5
            if z.sum().item() > 100:
                z = z + 1
        return z.square().mean()

    step, model, optimizer, batch = of(loss)
    capture(step, model, optimizer, batch, assumed=Assumed())
    assert len(looked) < 40 * 4 * 2  # four ops a turn
