"""A write keeps the order of its tensor in memory, on which later views of the same memory depend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from small_steps import step
from tutti.capture.second_trace import functional
from tutti.capture.step import capture
from tutti.errors import CaptureError

aten = torch.ops.aten
Write = Callable[[Tensor], object]


def a_mask() -> Tensor:
    return torch.ones(3, 5, dtype=torch.bool).triu(1)


def some_rows() -> Tensor:
    return torch.tensor([0, 2])


# Writes into b h i j: 8, 4, 3, 5.
WRITES: dict[str, Write] = {
    "masked_fill_": lambda d: d.masked_fill_(a_mask(), -9.0),
    "masked_fill_ by a tensor": lambda d: d.masked_fill_(a_mask(), torch.tensor(-9.0)),
    "masked_scatter_": lambda d: d.masked_scatter_(a_mask(), torch.ones(8, 4, 3, 5)),
    "an index": lambda d: d.__setitem__((slice(None), some_rows()), 2.0),
    "an index of a mask": lambda d: d.__setitem__((..., a_mask()), 2.0),
    "where": lambda d: d.copy_(torch.where(a_mask(), -9.0, d)),
    "add_": lambda d: d.add_(torch.ones(8, 4, 3, 5)),
    "mul_": lambda d: d.mul_(2.0),
    "pow_": lambda d: d.pow_(2.0),
    "clamp_": lambda d: d.clamp_(min=0.1),
    "copy_": lambda d: d.copy_(torch.ones(8, 4, 3, 5)),
    "zero_": lambda d: d[:, 1:].zero_(),
    "index_fill_": lambda d: d.index_fill_(1, some_rows(), 2.0),
    "index_add_": lambda d: d.index_add_(1, some_rows(), torch.ones(8, 2, 3, 5)),
    "index_copy_": lambda d: d.index_copy_(1, some_rows(), torch.ones(8, 2, 3, 5)),
    "scatter_": lambda d: d.scatter_(1, torch.ones(8, 1, 3, 5, dtype=torch.long), 2.0),
    "tril_": lambda d: d.tril_(),
    "cumsum_": lambda d: d.cumsum_(2),
    "renorm_": lambda d: d.detach().renorm_(2, 0, 1.0),
    "bernoulli_": lambda d: d[0].bernoulli_(0.5),
    "out": lambda d: torch.cumsum(torch.ones(8, 4, 3, 5), 2, out=d.detach()),
    "out of another order": lambda d: torch.exp(
        torch.ones(8, 3, 4, 5).transpose(1, 2), out=d.detach()
    ),
}


class TalkingHeads(nn.Module):
    """Writes into what an einsum of a permuted tensor gives, and into a permuted part of it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(6, 4), write
        self.before, self.after = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        d = self.linear(x).view(8, 3, 5, 4).permute(0, 3, 1, 2)
        d = torch.einsum("b h i j, h g -> b g i j", d, self.before)
        self.write(d)
        d = torch.einsum("b h i j, h g -> b g i j", d.softmax(-1), self.after)
        wide = d.permute(0, 2, 3, 1).contiguous().repeat(1, 1, 1, 2)
        part = wide[..., :4].permute(0, 3, 1, 2)
        self.write(part)
        return part.permute(0, 2, 3, 1).reshape(8, 15, 4) + wide.view(8, 15, 8)[..., 4:] * 2


def program(write: Write) -> Program:
    model = TalkingHeads(write)
    return step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 15, 6),)


def masked() -> Program:
    return program(WRITES["masked_fill_"])


@pytest.mark.parametrize("name", WRITES)
def test_views_after_a_write(name: str) -> None:
    assert_as_eager(partial(program, WRITES[name]), "data=2")


def test_on_real_ranks(ranks: Ranks) -> None:
    assert_as_eager_on_ranks(ranks, masked, "data=2 zero=3")


class SeenStrided(nn.Module):
    """Reads memory in its own order after a write into all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            d = x.t().sin()
            d.masked_fill_(d > 0.5, 0.1)
            seen = d.as_strided((6, 8), (8, 1))
        return self.linear(seen.reshape(8, 6))


def seen_strided() -> Program:
    model = SeenStrided()
    return step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 6),)


def test_elements_in_the_order_of_memory() -> None:
    assert_as_eager(seen_strided, "data=2")


def test_an_error_in_the_second_trace_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "order_may_change", lambda *args: False)
    train_step, *rest, batch = masked()
    with pytest.raises(CaptureError, match="Cannot view a tensor") as found:
        capture(train_step, *rest, batch)
    assert '"masked_fill_": lambda' in found.value.at
    assert "masked_fill_" in found.value.why and "clone" in found.value.fix
    assert isinstance(found.value.__cause__, ValueError)
