"""What a step leaves in the model besides values: `requires_grad` of parameters, modes of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import small_model
from ranks import Ranks

CALLS = 4


def changing(
    before: Callable[[Any, int], None], after: Callable[[Any], None] = lambda _: None
) -> Program:
    """A step that calls `before(model, number of the call)` first, and `after(model)` at its end."""
    count = {"calls": 0}

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        before(model, count["calls"])
        count["calls"] += 1
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        after(model)
        return loss.detach()

    model = small_model()
    return step, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), (torch.randn(8, 6),)


def frozen_later() -> Program:
    return changing(lambda model, n: model[0].requires_grad_(False) if n == 1 else None)


def frozen_at_the_end() -> Program:
    return changing(lambda model, n: None, lambda model: model[0].requires_grad_(False))


def frozen_by_turns() -> Program:
    return changing(lambda model, n: model[0].requires_grad_(n % 2 == 0))


def frozen_and_back() -> Program:
    def after(model: Any) -> None:
        for p in model.parameters():
            p.requires_grad = True

    return changing(lambda model, n: model[2].requires_grad_(False), after)


def evaluated_at_the_end() -> Program:
    return changing(lambda model, n: None, lambda model: model.eval())


def evaluated_later() -> Program:
    return changing(lambda model, n: model[1].eval() if n == 1 else None)


def trained_then_evaluated() -> Program:
    return changing(lambda model, n: model.train(), lambda model: model.eval())


PROGRAMS = [
    *(frozen_later, frozen_at_the_end, frozen_by_turns, frozen_and_back),
    *(evaluated_at_the_end, evaluated_later, trained_then_evaluated),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x.__name__)
def test_the_next_call_finds_them(program: Callable[[], Program]) -> None:
    assert_as_eager(program, calls=CALLS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x.__name__)
def test_on_real_ranks(ranks: Ranks, program: Callable[[], Program]) -> None:
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=3", calls=CALLS)
