"""Gradients that calls leave, over calls of several programs and steps: as in an eager run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import tutti
from tutti.errors import CaptureError

pytestmark = pytest.mark.usefixtures("in_float64")

Step = Callable[..., Any]


class Deep(nn.Module):
    """Of three layers the first ones, and of two heads one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.active, self.head = 3, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.active]:
            x = x + F.gelu(layer(x))
        return self.heads[self.head](x)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def batch(k: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(k)
    return torch.randn(8, 4, generator=made), torch.randn(8, 4, generator=made)


def updated(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(m(x), y)
    loss.backward()
    o.step()
    return loss


def zeros_at_the_top(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad(set_to_none=False)
    return updated(m, o, x, y)


def zeros_after_the_forward(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(m(x), y)
    m.zero_grad(set_to_none=False)
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    o.step()
    return loss


def zeros_at_the_end(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = updated(m, o, x, y)
    o.zero_grad(set_to_none=False)
    return loss


def zeros_by_hand(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()
    return updated(m, o, x, y)


def zeros_in_data(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.data.zero_()
    return updated(m, o, x, y)


def zeros_by_hand_at_the_end(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = updated(m, o, x, y)
    for p in m.parameters():
        if p.grad is not None:
            p.grad.zero_()
    return loss


def none_at_the_top(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad()
    return updated(m, o, x, y)


def none_at_the_end(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = updated(m, o, x, y)
    o.zero_grad()
    return loss


def zeros_or_none(m: Any, o: Any, x: Tensor, y: Tensor) -> Tensor:
    o.zero_grad(set_to_none=m.active == 2)
    return updated(m, o, x, y)


def first_call_is_smaller(m: nn.Module, o: Any, x: Tensor, y: Tensor) -> Tensor:
    """Depends on whether there was a gradient, and not on its value."""
    first = all(p.grad is None for p in m.parameters())
    o.zero_grad()
    loss = F.mse_loss(m(x), y) * (0.5 if first else 2.0)
    loss.backward()
    o.step()
    return loss


ZEROS = [
    zeros_at_the_top,
    zeros_after_the_forward,
    zeros_at_the_end,
    zeros_by_hand,
    zeros_in_data,
    zeros_by_hand_at_the_end,
]
NONE = [none_at_the_top, none_at_the_end]
STEPS: list[Step] = [*ZEROS, *NONE, zeros_or_none, first_call_is_smaller]


def depths(model: Any, k: int) -> None:
    model.active = (1, 3, 3, 2, 1, 3, 2, 1)[k]


def heads(model: Any, k: int) -> None:
    model.head = (0, 0, 1, 0, 1, 1, 0, 0)[k]


def frozen(model: Any, k: int) -> None:
    model.layers[0].requires_grad_(k < 2 or k > 5)


def resized(model: Any, k: int) -> None:
    """Nothing but the batches changes."""


CHANGES: list[Callable[[Any, int], None]] = [depths, heads, frozen, resized]


def rows(k: int, change: Any) -> tuple[Tensor, Tensor]:
    x, y = batch(k)
    count = 8 - k % 4 if change is resized else 8
    return x[:count], y[:count]


def compared(
    steps: list[Step],
    change: Callable[[Any, int], None],
    make: Callable[[Any], Any] = adamw,
    prepare: Callable[[Any], Any] = lambda m: None,
    num_calls: int = 8,
) -> tuple[list[tutti.Step], Any]:
    """Assert that distributed steps that share an optimizer, called in turn, do what the plain ones do."""
    mine = Deep()
    theirs = copy.deepcopy(mine)
    for m in (mine, theirs):
        prepare(m)
    one, other = make(mine), make(theirs)
    distributed = [tutti.distribute(step, mine, one, "") for step in steps]
    for k in range(num_calls):
        for m in (mine, theirs):
            change(m, k)
        i = k % len(steps)
        loss, expected = distributed[i](*rows(k, change)), steps[i](theirs, other, *rows(k, change))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-12), k
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-9, atol=1e-10), (k, name)
    return distributed, mine


def num_programs(step: tutti.Step) -> int:
    known = step._programs.known.by_key.values()
    return len({id(one) for found in known for one in found})


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", STEPS)
def test_a_parameter_without_a_gradient_in_a_call(
    step: Step, change: Callable[[Any, int], None], make: Callable[[Any], Any]
) -> None:
    compared([step], change, make)


@pytest.mark.parametrize("step", NONE)
def test_a_step_that_keeps_no_gradients_has_a_program_for_each_change(step: Step) -> None:
    for change, count in ((depths, 4), (heads, 3), (frozen, 2)):
        (made,), _ = compared([step], change)
        assert num_programs(made) == count


@pytest.mark.parametrize("step", [*ZEROS, *NONE])
def test_a_step_whose_gradients_are_all_there_has_one_program(step: Step) -> None:
    def fewer(m: Any) -> None:
        del m.heads[1]

    (made,), _ = compared([step], lambda m, k: None, prepare=fewer)
    assert num_programs(made) == 1 and made._num_traces == 1


def of_head(k: int, zero: Callable[[Any, Any], None]) -> Step:
    def step(m: Any, o: Any, x: Tensor, y: Tensor) -> Tensor:
        zero(m, o)
        loss = F.mse_loss(m.heads[k](F.gelu(m.layers[k](x))), y)
        loss.backward()
        o.step()
        return loss

    return step


def by_hand(m: Any, o: Any) -> None:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.zero_()


@pytest.mark.parametrize(
    "zero",
    [
        lambda m, o: o.zero_grad(set_to_none=False),
        lambda m, o: m.zero_grad(set_to_none=False),
        by_hand,
        lambda m, o: o.zero_grad(),
    ],
)
def test_two_steps_with_one_optimizer(zero: Callable[[Any, Any], None]) -> None:
    compared([of_head(0, zero), of_head(1, zero)], lambda m, k: None)


def test_two_steps_of_which_one_clears() -> None:
    steps = [
        of_head(0, lambda m, o: o.zero_grad(set_to_none=False)),
        of_head(1, lambda m, o: o.zero_grad()),
    ]
    compared([*steps, steps[0]], lambda m, k: None, num_calls=9)


def test_steps_on_a_model_and_on_a_part_of_it() -> None:
    """The step on the part finds zeros of the other one."""

    def part(m: Any, o: Any, x: Tensor, y: Tensor) -> Tensor:
        o.zero_grad(set_to_none=False)
        loss = F.mse_loss(m[0](x), y)
        loss.backward()
        o.step()
        return loss

    mine = Deep()
    theirs = copy.deepcopy(mine)
    made, others = [], []
    for m, to in ((mine, made), (theirs, others)):
        to += [(zeros_at_the_top, m, adamw(m)), (part, m.layers, adamw(m.layers))]
    distributed = [tutti.distribute(f, m, o, "") for f, m, o in made]
    for k in range(5):
        for step, (plain, m, o) in zip(distributed, others, strict=True):
            if k or plain is not zeros_at_the_top:
                assert torch.allclose(step(*batch(k)), plain(m, o, *batch(k)), rtol=1e-9)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("step", [zeros_at_the_top, zeros_by_hand, zeros_or_none, *NONE[:1]])
def test_gradients_of_eager_code_before_the_first_call(step: Step) -> None:
    def before(m: Any) -> None:
        m.active = 3
        for head in (0, 1):
            m.head = head
            F.mse_loss(m(batch(9)[0]), batch(9)[1]).backward()
        m.head = 0

    compared([step], depths, prepare=before)


def test_gradients_of_eager_code_count_once() -> None:
    """The script's `.grad` stays as it is, but the first call sets it to None on one device."""

    def before(m: Any) -> None:
        for head in (0, 1):
            m.head = head
            m(batch(9)[0]).sum().backward()

    steps = [none_at_the_top, zeros_at_the_top]
    _, model = compared([*steps, steps[1]], heads, prepare=before, num_calls=8)
    assert all(p.grad is not None for p in model.parameters())


class Directed(torch.optim.Optimizer):
    """The first step of a weight has another form: it moves nothing. Without a gradient none decays."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if "mean" not in state:
                    if not p.grad.any():
                        raise ValueError("a gradient of zero has no direction")
                    state["mean"] = p.grad / p.grad.norm()
                    continue
                state["mean"].lerp_(p.grad, 0.5)
                p.mul_(0.9).add_(state["mean"], alpha=-group["lr"])


@pytest.mark.parametrize("step", [zeros_at_the_top, zeros_at_the_end])
def test_a_later_eager_call_of_a_step_finds_them(step: Step) -> None:
    """Weights that come to the optimizer later take a first step of another form, which runs eagerly."""
    mine = Deep()
    theirs = copy.deepcopy(mine)
    made: list[Any] = []
    for m in (mine, theirs):
        later = {id(p) for p in m.layers[2].parameters()}
        made.append(Directed([p for p in m.parameters() if id(p) not in later]))
    distributed = tutti.distribute(step, mine, made[0], "")
    for k in range(8):
        for m, o in zip((mine, theirs), made, strict=True):
            m.head, m.active = k % 2, 2 if k < 5 else 3
            if k == 5:
                o.add_param_group({"params": [*m.layers[2].parameters()]})
        expected = step(theirs, made[1], *batch(k))
        assert torch.allclose(distributed(*batch(k)), expected, rtol=1e-9), k
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("num_calls", [0, 2])
def test_another_step_leaves_what_a_step_adds_to(num_calls: int) -> None:
    model = Deep()
    optimizer = adamw(model)
    first = tutti.distribute(none_at_the_end, model, optimizer, "")
    second = tutti.distribute(none_at_the_top, model, optimizer, "")
    for k in range(num_calls):
        first(*batch(k))
    second(*batch(2))
    with pytest.raises(CaptureError, match="adds to gradients that an earlier call left") as caught:
        first(*batch(3))
    assert "loss.backward()" in caught.value.at and "zero_grad" in caught.value.fix


def test_verify_compares_with_gradients_of_an_earlier_step() -> None:
    for step in STEPS:
        model = Deep()
        found = tutti.verify(step, model, adamw(model), batch(0), "data=2", steps=3)
        assert found.ok, str(found)
