"""Values outside of an optimizer that its step, a step in its place, or a hook of all optimizers changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import looking, small_model
from ranks import Ranks

CALLS = 4
COUNT = [0]
OUTSIDE = SimpleNamespace(count=0)


class Counting(torch.optim.SGD):
    """Counts its calls in its class."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        type(self).calls += 1
        self.param_groups[0]["lr"] = 0.1 / type(self).calls
        return super().step(closure)


class Slots(torch.optim.Optimizer):
    """Counts its calls in a global list and in an object outside; the slots are its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        COUNT[0] += 1
        OUTSIDE.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if not slots:
                    slots["mean"] = torch.zeros_like(p)
                slots["mean"].lerp_(p.grad, 0.1)
                p.add_(slots["mean"], alpha=-group["lr"] / (COUNT[0] + OUTSIDE.count))


def _with(optimizer_of: Callable[[Any], Any]) -> Program:
    Counting.calls = COUNT[0] = OUTSIDE.count = 0
    made = small_model()
    return looking(made, lambda _: None, optimizer_of(made.parameters()))


def counts_in_its_class() -> Program:
    return _with(lambda params: Counting(params, 0.1))


def counts_outside() -> Program:
    return _with(Slots)


def _patched(optimizer_of: Callable[[Any], Any], scheduled: bool = False) -> Program:
    made, calls = small_model(), {"count": 0}
    optimizer = optimizer_of(made.parameters())
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain = optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        calls["count"] += 1
        torch.nn.utils.clip_grad_norm_(made.parameters(), 0.1 * calls["count"])
        return plain(*args, **options)

    optimizer.step = step
    return looking(made, lambda _: None, optimizer)


def another_step_of_adamw() -> Program:
    return _patched(lambda params: torch.optim.AdamW(params, 0.1))


def another_step_over_a_schedulers() -> Program:
    return _patched(lambda params: torch.optim.SGD(params, 0.1), scheduled=True)


def warm_up_by_a_hook_of_all() -> Program:
    made, calls = small_model(), {"before": 0, "after": 0}

    def before(optimizer: Any, *_: Any) -> None:
        calls["before"] += 1
        optimizer.param_groups[0]["lr"] = 0.1 / calls["before"]

    def after(*_: Any) -> None:
        calls["after"] += 1
        with torch.no_grad():
            made[0].weight.mul_(1 - 0.1 * calls["after"])

    HANDLES.append(register_optimizer_step_pre_hook(before))
    HANDLES.append(register_optimizer_step_post_hook(after))
    return looking(made, lambda _: None, torch.optim.Adam(made.parameters(), 0.1))


def a_hook_that_waits_for_all_gradients() -> Program:
    made, seen = small_model(), {}

    def note(grads: Any) -> None:
        seen["norm"] = torch.stack([g.norm() for g in grads if g is not None]).norm()

    def look(p: Any) -> None:
        p.grad.div_(1 + seen["norm"])

    HANDLES.append(register_multi_grad_hook([*made.parameters()], note))
    return looking(made, look)


HANDLES: list[Any] = []
PROGRAMS = [
    counts_in_its_class,
    counts_outside,
    another_step_of_adamw,
    warm_up_by_a_hook_of_all,
    a_hook_that_waits_for_all_gradients,
]


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    while HANDLES:
        HANDLES.pop().remove()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_one_device_and_a_layout(program: Callable[[], Program]) -> None:
    assert_as_eager(program, calls=CALLS)


@pytest.mark.parametrize(
    "program",
    [another_step_over_a_schedulers, *(p for p in PROGRAMS if p is not warm_up_by_a_hook_of_all)],
    ids=lambda p: p.__name__,
)
def test_on_ranks(ranks: Ranks, program: Callable[[], Program]) -> None:
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=3", CALLS)


def test_the_counters_of_a_call() -> None:
    for program, count in (
        (counts_in_its_class, lambda: Counting.calls),
        (counts_outside, lambda: COUNT[0]),
    ):
        step, made, optimizer, batch = program()
        played = tutti.distribute(step, made, optimizer, "")
        for calls in (1, 2, 3):
            played(*batch)
            assert count() == calls
