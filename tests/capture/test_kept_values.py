"""What modules keep from call to call besides their state: tensors in the place of others are kept, no value
of a trace is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from small_steps import step
from tutti.capture.step import capture
from tutti.errors import CaptureError


class Keeping(nn.Module):
    """Remembers its last output, and its longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.seen, self.longest = torch.ones(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        self.seen = self.linear(x)
        self.fresh = self.seen
        return self.seen


def captured(train_step: Any, model: nn.Module) -> None:
    capture(train_step, model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 4),))


def test_modules_keep_no_value_of_a_trace() -> None:
    model = Keeping()
    seen = model.seen
    captured(step, model)
    assert model.seen is seen and not hasattr(model, "fresh")


class Stateful(nn.Module):
    """Reads at each call what the call before has left, in the way that `change` does it."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 2), change
        self.hidden, self.later, self.seen = torch.zeros(2), None, {"count": torch.zeros(())}
        self.past: list[Tensor] = [torch.zeros(2)]
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.linear(x))


def hidden(model: Any, y: Tensor) -> Tensor:
    y = y + model.hidden
    model.hidden = y.detach().mean(0)
    return y


def count_of_constants(model: Any, y: Tensor) -> Tensor:
    model.seen["count"] = model.seen["count"] + 1
    return y * model.seen["count"]


def from_nothing(model: Any, y: Tensor) -> Tensor:
    model.later = y.detach() if model.later is None else y.detach() + model.later
    return y + model.later


def buffer_from_nothing(model: Any, y: Tensor) -> Tensor:
    model.none = y.detach() if model.none is None else y.detach() + model.none
    return y + model.none


def in_a_list(model: Any, y: Tensor) -> Tensor:
    y = y + model.past[0]
    model.past[0] = y.detach().mean(0)
    return y


def grown(model: Any, y: Tensor) -> Tensor:
    y = y + model.past[-1]
    model.past.append(y.detach().mean(0))
    return y


@pytest.mark.parametrize(
    ("change", "name"),
    [(buffer_from_nothing, "0.none"), (grown, "0.past[1]")],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_tensor_that_calls_cannot_keep_is_refused(change: Any, name: str) -> None:
    model = nn.Sequential(Stateful(change))
    before = dict(vars(model[0])), list(model[0].past), dict(model[0].seen)
    with pytest.raises(CaptureError, match=re.escape(f'keeps a tensor in "{name}"')):
        captured(step, model)
    assert before == (vars(model[0]), model[0].past, model[0].seen) and model[0].none is None


@pytest.mark.parametrize(
    "change",
    [hidden, count_of_constants, in_a_list, from_nothing],
    ids=lambda x: x.__name__,
)
def test_a_tensor_is_kept_from_call_to_call(change: Any) -> None:
    def losses(played: bool) -> list[float]:
        torch.manual_seed(0)
        model = Stateful(change)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = tutti.distribute(step, model, optimizer, "") if played else None
        batches = torch.randn(4, 8, 4)
        return [float(called(x) if called else step(model, optimizer, x)) for x in batches]

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def cached(model: Any, y: Tensor) -> Tensor:
    if model.later is None:
        model.later = torch.arange(y.shape[1]) + torch.ones_like(y[0])
    return y * model.later


def cast(model: Any, y: Tensor) -> Tensor:
    model.hidden = model.hidden.to(torch.float64)
    return y * model.hidden


def last_output(model: Any, y: Tensor) -> Tensor:
    model.hidden = model.later = y
    model.past[:] = [y]
    return y


@pytest.mark.parametrize("change", [cached, cast, last_output], ids=lambda x: x.__name__)
def test_what_is_the_same_at_each_call_may_be_kept(change: Any) -> None:
    model = Stateful(change)
    captured(step, model)
    assert model.later is None and len(model.past) == 1
    assert model.hidden.equal(torch.zeros(2))
