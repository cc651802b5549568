"""State that a step sets anew instead of writing into it is updated as if it were written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import tutti
from small_steps import step
from tutti.capture.step import capture
from tutti.errors import CaptureError


class Running(nn.Module):
    """Keeps statistics of its outputs, in the way that `change` does it."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 2), change
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("last", torch.ones(2))
        self.register_buffer("none", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.change(self, y)
        return y - self.mean + self.last


def by_attribute(model: Any, y: Tensor) -> None:
    model.mean = 0.75 * model.mean + 0.25 * y.detach().mean(0)
    model.count = model.count + 1


def by_table(model: Any, y: Tensor) -> None:
    model._buffers["mean"] = model.mean + y.detach().mean(0)


def by_data(model: Any, y: Tensor) -> None:
    model.mean.data = model.mean + y.detach().mean(0)


def weights_by_data(model: Any, y: Tensor) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.25, 0.25)


def exchanged(model: Any, y: Tensor) -> None:
    model.mean, model.last = model.last, model.mean + y.detach().mean(0)


def as_it_was(model: Any, y: Tensor) -> None:
    model.mean = model.mean


WAYS = [by_attribute, by_table, by_data, weights_by_data, exchanged, as_it_was]


def batches() -> list[Tensor]:
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))


def both(make: Callable[[], tuple[nn.Module, Optimizer]]) -> list[dict[str, Tensor]]:
    """The state after some steps, played and by plain PyTorch."""
    torch.manual_seed(0)
    model, optimizer = make()
    plain, own = copy.deepcopy((model, optimizer))
    played = tutti.distribute(step, model, optimizer, "")
    for x in batches():
        assert torch.equal(played(x), step(plain, own, x))
    return [dict(m.state_dict()) for m in (model, plain)]


@pytest.mark.parametrize("change", WAYS, ids=lambda x: x.__name__)
def test_state_set_anew_is_state(change: Callable[[Any, Tensor], None]) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Running(change)
        return model, SGD(model.parameters(), 0.1)

    found, wanted = both(make)
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "data=2 micro=2"])
@pytest.mark.parametrize("change", [weights_by_data, exchanged], ids=lambda x: x.__name__)
def test_it_is_the_same_step_on_ranks(change: Callable[[Any, Tensor], None], layout: str) -> None:
    if change is exchanged and "micro" in layout:
        pytest.skip("what a forward keeps of one micro-batch the next one would read")
    model = Running(change)
    optimizer = SGD(model.parameters(), 0.1)
    assert tutti.verify(step, model, optimizer, (batches()[0],), layout).ok


class Heavy(Optimizer):
    """Momentum whose slots are set anew; with `whole`, all slots of a parameter together."""

    def __init__(self, params: Any, *, whole: bool) -> None:
        super().__init__(params, {"lr": 0.1, "whole": whole})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if not slots:
                    slots["speed"] = torch.zeros_like(p)
                speed = 0.5 * slots["speed"] + p.grad
                if group["whole"]:
                    self.state[p] = {"speed": speed}
                else:
                    slots["speed"] = speed
                p.data = p.data - group["lr"] * speed


@pytest.mark.parametrize("whole", [False, True])
def test_slots_set_anew_are_state(whole: bool) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(4, 2)
        return model, Heavy(model.parameters(), whole=whole)

    found, wanted = both(make)
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


# --- what is refused -----------------------------------------------------------------------------


def a_parameter(model: Any, y: Tensor) -> None:
    model.linear.bias = nn.Parameter(model.linear.bias + 1)


def another_shape(model: Any, y: Tensor) -> None:
    model.mean = y.detach()


def another_dtype(model: Any, y: Tensor) -> None:
    model.count = model.count * 0.5


def another_size(model: Any, y: Tensor) -> None:
    model.mean.resize_(8)


def nothing(model: Any, y: Tensor) -> None:
    model.mean = None


def data_of_another_shape(model: Any, y: Tensor) -> None:
    model.linear.bias.data = y.detach()


def slot_of_another_shape(model: Any, y: Tensor) -> None:
    """Nothing notes an assignment to a dict: the line is that of its value."""
    model.slots["momentum_buffer"] = model.mean.repeat(2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (a_parameter, "model.linear.bias = nn.Parameter(model.linear.bias + 1)"),
        (another_shape, "model.mean = y.detach()"),
        (nothing, "model.mean = None"),
        (slot_of_another_shape, "model.mean.repeat(2)"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_refused_value_has_its_line(change: Callable[[Any, Tensor], None], line: str) -> None:
    model = Running(change)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)

    def stepping(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        model.slots = optimizer.state[model.linear.bias]
        y = model.linear(x)
        change(model, y)
        del model.slots
        return y.sum()

    with pytest.raises(CaptureError) as caught:
        capture(stepping, model, optimizer, (batches()[0],))
    assert line in caught.value.at and "test_rebound.py" in caught.value.at
    if change is a_parameter:
        assert "self.bias.data.copy_(value)" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (a_parameter, 'replaces the parameter "linear.bias"'),
        (another_shape, r'replaces "mean", \[2\] torch.float32, by \[8, 2\] torch.float32'),
        (another_size, r'resizes "mean" from \[2\] to \[8\]'),
        (another_dtype, r'replaces "count", \[\] torch.int64, by \[\] torch.float32'),
        (data_of_another_shape, r"a tensor's data, \[2\] torch.float32, by \[8, 2\]"),
        (nothing, 'replaces "mean" by None'),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_state_keeps_its_form(change: Callable[[Any, Tensor], None], told: str) -> None:
    model = Running(change)
    model.forward = lambda x: (model.change(model, y := model.linear(x)), y)[1]  # type: ignore[method-assign]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CaptureError, match=told):
        capture(step, model, SGD(model.parameters(), 0.1), (batches()[0],))
    assert all(torch.equal(model.state_dict()[name], x) for name, x in before.items())


def test_one_of_two_modules_that_share_a_buffer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Running(by_attribute))
    model[0].register_buffer("mean", model[1].mean)
    with pytest.raises(CaptureError, match="in one of the modules that share it"):
        capture(step, model, SGD(model.parameters(), 0.1), (batches()[0],))


def test_data_is_that_of_pytorch_again() -> None:
    model = nn.Linear(4, 2)
    capture(step, model, SGD(model.parameters(), 0.1), (batches()[0],))
    assert "data" not in vars(Tensor)
    given = torch.ones(3)
    model.bias.data = given
    assert model.bias.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("whole", [True, False])
def test_state_of_an_optimizer_that_the_step_removes(whole: bool) -> None:
    model = nn.Linear(4, 2)

    def removing(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = step(model, optimizer, x)
        if whole:
            optimizer.state.clear()
        else:
            optimizer.state.pop(model.weight)
        return loss

    told = r'removes "optim\.weight\.momentum_buffer" from the state'
    with pytest.raises(CaptureError, match=told) as found:
        capture(removing, model, SGD(model.parameters(), 0.1, momentum=0.9), (batches()[0],))
    assert 'state[p]["momentum_buffer"].zero_()' in found.value.fix
