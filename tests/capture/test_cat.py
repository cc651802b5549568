"""A concatenation of one tensor is that tensor, in micro-batches too; an empty part may decide the dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import tutti
from small_steps import trained

PACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "one tensor": lambda x: torch.cat([x], 0),
    "one tensor, along its last dim": lambda x: torch.cat([x], -1),
    "one and an empty one": lambda x: torch.cat([x.new_zeros(0), x], 0),
    "as einops packs it": lambda x: torch.cat([x.reshape(-1, 4)], 0).unflatten(0, (8, 3)),
}


@pytest.mark.parametrize("name", PACKS)
def test_one_part_is_split_in_time(name: str) -> None:
    pack = PACKS[name]
    model = nn.Linear(4, 4).double()
    step = trained(lambda m, x: pack(m(x)).square().mean())
    x = torch.randn(8, 3, 4, dtype=torch.float64)
    found = tutti.verify(step, model, SGD(model.parameters(), 0.1), (x,), "micro=2")
    assert found.ok, str(found)


def test_an_empty_part_decides_the_dtype() -> None:
    model = nn.Linear(4, 4)

    def step(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(0, 4, dtype=torch.float64), m(x)])

    x = torch.ones(2, 4)
    found = tutti.distribute(step, model, None, "")(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, step(model, x))
