"""Attributes that users set on parameters and buffers: a step that reads or sets them is as eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import looking, losing, small_model
from ranks import Ranks
from tutti.errors import CaptureError

CALLS = 4


def marks() -> Program:
    """Flags, texts, numbers and a dict."""
    made = small_model()
    made[0].weight.is_expert, made[1].weight.kind = True, "norm"
    made[2].weight.scale, made[2].bias.info = 3.0, {"scale": 0.5}

    def look(p: Any) -> None:
        if getattr(p, "is_expert", False):
            p.grad = None
        elif hasattr(p, "scale"):
            p.grad.mul_(p.scale)
        elif getattr(p, "kind", "") == "norm":
            p.grad.neg_()
        elif info := getattr(p, "info", None):
            p.grad.mul_(info["scale"])

    return looking(made, look)


def names_made_by_code() -> Program:
    made = small_model()
    made[0].weight.scale_1 = 2.0

    def look(p: Any) -> None:
        p.grad.mul_(getattr(p, f"scale_{1}", 1.0)).mul_(vars(p).get("scale_1", 1.0))

    return looking(made, look)


def counts() -> Program:
    """A number that the step changes."""
    made = small_model()
    for p in made.parameters():
        p.count = 0

    def look(p: Any) -> None:
        p.count += 1
        p.grad.mul_(1.0 / p.count)

    return looking(made, look)


def main_gradients() -> Program:
    """A tensor that the step overwrites, as Megatron's."""
    made = small_model()
    for p in made.parameters():
        p.main_grad = torch.zeros_like(p)

    def look(p: Any) -> None:
        p.main_grad.mul_(0.5).add_(p.grad)
        p.grad = p.main_grad.clone()

    return looking(made, look)


def last_gradients() -> Program:
    """A tensor that the step assigns."""
    made = small_model()
    for p in made.parameters():
        p.last = None

    def look(p: Any) -> None:
        if p.last is not None:
            p.grad.add_(p.last, alpha=0.5)
        p.last = p.grad.clone()

    return looking(made, look)


def another_parameter() -> Program:
    made = small_model()
    made[0].bias.partner = made[1].weight

    def look(p: Any) -> None:
        if hasattr(p, "partner"):
            p.grad.add_(p.partner.detach())

    return looking(made, look)


class BySign(Optimizer):
    """Reads attributes in its own step."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                step = p.grad.sign() if getattr(p, "by_sign", False) else p.grad
                p.add_(step, alpha=-group["lr"] * getattr(p, "rate", 1.0))


def an_optimizer() -> Program:
    made = small_model()
    made[0].weight.by_sign, made[2].weight.rate = True, 2.5
    return looking(made, lambda _: None, BySign(made.parameters()))


def hooks() -> Program:
    """They hold the parameter by a closure, by a default argument, and get it from PyTorch, as in Opacus."""
    made = small_model()

    def counted(p: Any) -> None:
        p._seen += 1
        p.grad.mul_(1.0 / p._seen)

    def near(p: nn.Parameter) -> Callable[[Tensor], Tensor]:
        return lambda grad: grad + 0.1 * p.detach()

    for p in made.parameters():
        p._seen = 0
        p.register_hook(near(p))
        p.register_hook(lambda grad, p=p: grad * (1 + p._seen) + p.detach())
        p.register_post_accumulate_grad_hook(counted)
    return looking(made, lambda _: None)


def a_buffer() -> Program:
    made = small_model()
    made[1].running_mean.weight_of = 2.0

    def loss_of(model: nn.Module, x: Tensor) -> Any:
        loss = model(x).square().mean()
        return loss + sum(getattr(b, "weight_of", 0.0) * b.sum() for b in model.buffers())

    return losing(made, loss_of)


class Marked(nn.Parameter):
    """A class of the user, for which no code asks."""


def an_unasked_class() -> Program:
    made = small_model()
    made[0].weight = Marked(made[0].weight.detach())
    return looking(made, lambda _: None)


PROGRAMS = [marks, names_made_by_code, counts, main_gradients, last_gradients, another_parameter]
PROGRAMS += [an_optimizer, hooks, a_buffer, an_unasked_class]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_one_device_and_a_layout(program: Callable[[], Program]) -> None:
    assert_as_eager(program, calls=CALLS)


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
@pytest.mark.parametrize(
    "program", [marks, counts, last_gradients, hooks], ids=lambda p: p.__name__
)
def test_on_ranks(ranks: Ranks, program: Callable[[], Program], layout: str) -> None:
    assert_as_eager_on_ranks(ranks, program, layout, CALLS)


def attributes_of_ranks(layout: str) -> list[Any]:
    step, made, optimizer, batch = counts()
    made[0].weight.is_expert = True
    train = tutti.distribute(step, made, optimizer, layout)
    train(*batch)
    found = [(made[0].weight.count, made[0].weight.is_expert)]
    with tutti.whole(made):
        found.append((made[0].weight.count, made[0].weight.is_expert))
    for p in made.parameters():  # a user's own change between two calls
        p.count = 9
    train(batch[0][:4])  # another shape: it is traced again
    return [*found, made[0].weight.count, train.state_dict()["python.0.weight.count"]]


def test_parameters_of_ranks_keep_them(ranks: Ranks) -> None:
    expected = [(1, True), (1, True), 10, 10]
    assert attributes_of_ranks("") == expected
    assert ranks.run(attributes_of_ranks, "data=2 zero=3", n=2) == [expected] * 2


class Expert(nn.Parameter):
    """A class of the user, for which code asks."""

    is_moe = True


def with_experts(look: Callable[[Any], None]) -> Program:
    made = small_model()
    made[0].weight = Expert(made[0].weight.detach())
    return looking(made, look)


def asks_for_a_class() -> Program:
    return with_experts(lambda p: p.grad.mul_(3.0) if isinstance(p, Expert) else None)


def asks_for_its_attribute() -> Program:
    return with_experts(lambda p: p.grad.mul_(3.0) if getattr(p, "is_moe", False) else None)


def sets_a_new_one() -> Program:
    def look(p: Any) -> None:
        p.last = p.grad.clone()

    return looking(small_model(), look)


def deletes_one() -> Program:
    made = small_model()
    made[0].weight.once = 3.0

    def look(p: Any) -> None:
        if hasattr(p, "once"):
            del p.once

    return looking(made, look)


def has_a_name_of_fakes() -> Program:
    made = small_model()
    made[0].weight.constant = 3.0
    return looking(made, lambda p: p.grad.mul_(getattr(p, "constant", 1.0)))


def sets_one_past_the_model() -> Program:
    made = small_model()

    def hook(p: Any, grad: Tensor) -> Tensor:
        p.seen += 1
        return grad * (1.0 / p.seen)

    for p in made.parameters():
        p.seen = 0
        p.register_hook(functools.partial(hook, p))
    return looking(made, lambda _: None)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (asks_for_a_class, '"0.weight" is a Expert, and the step may depend on that'),
        (asks_for_its_attribute, '"0.weight" is a Expert, and the step may depend on that'),
        (sets_a_new_one, 'sets a new attribute of "0.weight": last'),
        (deletes_one, 'deletes an attribute of "0.weight": once'),
        (has_a_name_of_fakes, '"0.weight" has an attribute "constant"'),
        (sets_one_past_the_model, 'sets the attribute "seen" of "0.weight" past the model'),
    ],
)
def test_refused(program: Callable[[], Program], words: str) -> None:
    step, made, optimizer, batch = program()
    before = {name: dict(vars(p)) for name, p in made.named_parameters()}
    with pytest.raises(CaptureError, match=words):
        tutti.distribute(step, made, optimizer, "")(*batch)
    assert {name: dict(vars(p)) for name, p in made.named_parameters()} == before
