"""Types of tensors for which a step asks: `type(x) is Tensor`, `isinstance(p, nn.Parameter)`, its own."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import looking, losing, small_model
from ranks import Ranks
from tutti.errors import CaptureError


def of_loss(
    loss: Callable[[Any], Tensor], scale: Callable[[Any], float] = lambda _: 1.0
) -> Program:
    """`scale` looks at the batch."""
    return losing(small_model(), lambda model, x: loss(model(x)) * scale(x))


def doubled(x: Any) -> Any:
    return x * 2 if type(x) is torch.Tensor else x


def exact_types() -> Program:
    return of_loss(lambda z: doubled(z).square().mean() * (1 if type(z) in (list, tuple) else 3))


def parameters_and_buffers() -> Program:
    made = small_model()

    def look(p: Any) -> None:
        if type(p) == nn.Parameter and isinstance(p, nn.Parameter):  # noqa: E721
            p.grad.mul_(3)
        for b in made.buffers():
            if type(b) is Tensor and not isinstance(b, nn.Parameter):
                p.grad.add_(b.sum())
        for one in (made[0].weight, made[0].weight.detach(), made[1].running_mean):
            p.grad.mul_(2.0 if isinstance(one, nn.Parameter) else 0.7)

    return looking(made, look)


def other_uses_of_type() -> Program:
    def loss(z: Tensor) -> Tensor:
        made = type("Made", (), {"scale": 2.0})
        if isinstance(made, type) and isinstance(int, type) and type(z) is not int:
            z = z * made.scale
        if (
            type([1]) is list
            and type(made()) is made
            and type(made) is type
            and issubclass(type, object)
        ):
            z = z * 1.5
        return z.square().mean() + z.mean() * (
            7 if isinstance(3, type) or issubclass(int, type) else 1
        )

    return of_loss(loss)


PROGRAMS = [exact_types, parameters_and_buffers, other_uses_of_type]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_one_device_and_a_layout(program: Callable[[], Program]) -> None:
    assert_as_eager(program)
    assert "type" not in globals() and type is builtins.type


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_ranks(ranks: Ranks, program: Callable[[], Program]) -> None:
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=3")


class Image(Tensor): ...


def mean(z: Tensor) -> Tensor:
    return z.square().mean()


def of_a_class() -> Program:
    *rest, (x,) = of_loss(mean, lambda x: 3.0 if isinstance(x, Image) else 1.0)
    return *rest, (x.as_subclass(Image),)  # type: ignore[return-value]


def with_an_attribute() -> Program:
    *rest, (x,) = of_loss(mean, lambda x: getattr(x, "scale", 1.0))
    x.scale = 3.0
    return *rest, (x,)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (of_a_class, "batch tensor 0 is a Image, and the step may depend on that"),
        (with_an_attribute, 'batch tensor 0 has an attribute "scale"'),
    ],
)
def test_a_batch_is_refused(program: Callable[[], Program], words: str) -> None:
    step, made, optimizer, batch = program()
    with pytest.raises(CaptureError, match=words):
        tutti.distribute(step, made, optimizer, "")(*batch)
    with pytest.raises(CaptureError, match=words):
        tutti.verify(step, made, optimizer, batch, "data=2")
