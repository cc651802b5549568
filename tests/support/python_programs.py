"""Training programs that keep numbers and tensors in Python, each to be compared with itself in eager mode.

A program is made anew at each call: (step function, model, optimizer, what happens between two calls).
"""

from __future__ import annotations

import copy
import math
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import tutti

Made = tuple[Callable[..., Any], nn.Module, Any, Callable[[int], None]]

calls = 0
SETTINGS = SimpleNamespace(beta=0.5)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def update(loss: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def nothing(_k: int) -> None:
    return None


def plain(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    return update(m(x).square().mean(), o)


class Trainer:
    """A bound method as the step, a number of its own that changes outside, one that changes inside."""

    share = 0.7

    def __init__(self) -> None:
        self.count, self.beta, self.last, self.scale = 0, 0.1, None, (1.0, 2.0)
        self.log: dict[str, Any] = {}

    def step(self, model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        self.count += 1
        loss = model(x).square().mean() * self.beta * self.share * self.scale[1]
        if self.last is not None:
            loss = loss + 0.1 * self.last
        if self.count % 3 == 0:
            loss = loss * 2
        self.last = update(loss / self.count, optimizer)
        self.log["loss"] = self.last * 2
        return self.last


def trainer() -> Made:
    one, model = Trainer(), mlp()

    def between(k: int) -> None:
        if k == 1:
            one.beta *= 10
        if k == 3:
            one.scale = (1.0, 3.0)

    return one.step, model, AdamW(model.parameters(), lr=0.01), between


def counter_in_a_dict() -> Made:
    state, model = {"i": 0, "warm": 4}, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        state["i"] += 1
        factor = state["i"] / state["warm"] if state["i"] < state["warm"] else 1.0
        return update(m(x).square().mean() * factor, o)

    return step, model, SGD(model.parameters(), lr=0.1), nothing


class _Makes(dict[str, Any]):
    """As Transformers' ACT2FN: what stands there is a class, what it gives is a new module each time."""

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(key)()


def dicts_that_make_values() -> Made:
    acts, model = _Makes(tanh=nn.Tanh, sigmoid=nn.Sigmoid), mlp()
    counts: defaultdict[str, int] = defaultdict(int)
    counts["calls"] = 1

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        counts["calls"] += 1
        return update(acts["tanh"](m(x)).square().mean() / counts["calls"], o)

    def between(k: int) -> None:
        if k == 2:
            acts["tanh"] = nn.Sigmoid
        if k == 3:
            del counts["calls"]  # the next one makes it anew

    return step, model, SGD(model.parameters(), lr=0.1), between


def global_counter() -> Made:
    global calls
    calls, model = 0, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return update(m(x).square().mean() * SETTINGS.beta**calls, o)

    return step, model, SGD(model.parameters(), lr=0.1), nothing


def float_in_a_closure() -> Made:
    beta, model = 0.0, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        y = m(x)
        return update(y.square().mean() + beta * y.abs().mean(), o)

    def between(k: int) -> None:
        nonlocal beta
        beta = min(1.0, (k + 1) / 4)

    return step, model, SGD(model.parameters(), lr=0.1), between


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.1
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

    def forward(self, y: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return ((y - self.mean) * self.weight).square().mean() * (1 - self.smoothing)


def criterion() -> Made:
    """A module outside of the model: its numbers, its weights, and a buffer that it sets anew."""
    one, model = Criterion(), mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        return update(one(m(x)), o)

    def between(k: int) -> None:
        one.smoothing += 0.05
        one.weight.mul_(1.5)
        if k == 2:
            one.eval()

    return step, model, SGD(model.parameters(), lr=0.1), between


def label_smoothing() -> Made:
    loss_of, model = nn.CrossEntropyLoss(weight=torch.ones(2, dtype=torch.float64)), mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        return update(loss_of(m(x), (x[:, 0] > 0).long()), o)

    def between(k: int) -> None:
        loss_of.label_smoothing = 0.1 * (k // 2)
        assert loss_of.weight is not None
        loss_of.weight[0] *= 2

    return step, model, SGD(model.parameters(), lr=0.1), between


def teacher() -> Made:
    """An average of the weights, kept by the step itself."""
    model = mlp()
    ema = copy.deepcopy(model).requires_grad_(False)
    params = list(model.parameters())

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = update((m(x) - ema(x)).square().mean() + m(x).square().mean(), o)
        with torch.no_grad():
            for old, new in zip(ema.parameters(), params, strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return loss

    return step, model, SGD(model.parameters(), lr=0.1), nothing


def tensor_of_a_closure() -> Made:
    mean, model = torch.zeros(2, dtype=torch.float64), mlp()
    kept = {"var": torch.ones(2, dtype=torch.float64)}

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        y = m(x)
        with torch.no_grad():
            mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            kept["var"] = 0.9 * kept["var"] + 0.1 * y.var(0)
        return update(((y - mean) / kept["var"].sqrt()).square().mean(), o)

    return step, model, SGD(model.parameters(), lr=0.1), nothing


def tensor_of_a_tuple() -> Made:
    """In a closure, in a tuple of one, and beside a number."""
    pair, model = (
        (torch.zeros(2, dtype=torch.float64), (torch.ones(2, dtype=torch.float64), 3)),
        mlp(),
    )

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        mean, (var, scale) = pair
        y = m(x)
        loss = update(((y - mean) / var.sqrt() * scale).square().mean(), o)
        with torch.no_grad():
            mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            var.mul_(0.9).add_(y.square().mean(0), alpha=0.1)
        return loss

    return step, model, SGD(model.parameters(), lr=0.1), nothing


class Paired(SGD):
    """Slots of a tensor and a count, written in place and put anew, as averages of weights are kept."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if not slots:
                    slots["mean"] = torch.zeros_like(p), self.count
                mean, count = slots["mean"]
                slots["mean"] = mean.lerp_(p.grad, 0.1), count + 1
                p.sub_(mean, alpha=group["lr"] / (1 + count))
        self.count += 1


def optimizer_with_tuples() -> Made:
    model = mlp()
    return plain, model, Paired(model.parameters(), lr=0.5), nothing


def tensors_in_odd_places() -> Made:
    """In a tuple, as views, as a default, bound to a function, and where nothing looks."""
    pair = torch.ones(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    grid, model = torch.arange(4, dtype=torch.float64).reshape(2, 2).t(), mlp()
    shift, bound = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    hidden = MappingProxyType({"scale": torch.ones(1, dtype=torch.float64).expand(2)})

    def scaled(by: Tensor, y: Tensor, *, plus: Tensor = shift) -> Tensor:
        return by * y * hidden["scale"] + plus

    rescaled = partial(scaled, bound)

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        return update((rescaled(m(x) * pair[0]) @ pair[1] + grid.t().sum()).square().mean(), o)

    def between(k: int) -> None:
        for one in (pair[0], grid, shift, bound):
            one.mul_(1.0 + 0.01 * k).add_(0.1)
        pair[1].t()[0].mul_(0.5)
        if k == 3:
            hidden["scale"].set_(torch.full((2,), 0.5, dtype=torch.float64))

    return step, model, SGD(model.parameters(), lr=0.1), between


def first_call_of_its_own() -> Made:
    """A flag that the step sets, and a tensor where nothing was."""
    state, model = SimpleNamespace(begun=False, mean=None), mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        y = m(x)
        if not state.begun:
            state.mean, state.begun = y.detach().mean(0), True
        state.mean = 0.5 * state.mean + 0.5 * y.detach().mean(0)
        return update((y - state.mean).square().mean(), o)

    return step, model, SGD(model.parameters(), lr=0.1), nothing


def scheduler_inside(kind: Callable[[Optimizer], Any]) -> Callable[[], Made]:
    def make() -> Made:
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=0.1)
        scheduler = kind(optimizer)

        def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
            loss = update(m(x).square().mean(), o)
            scheduler.step()
            return loss

        return step, model, optimizer, nothing

    return make


def lr_set_inside() -> Made:
    state, model = {"it": 0}, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        for group in o.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * state["it"] / 10))
        state["it"] += 1
        return update(m(x).square().mean(), o)

    return step, model, AdamW(model.parameters(), lr=0.1), nothing


class Counting(nn.Module):
    """A module of the model that counts, and keeps a tensor that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 2), 0
        self.hidden = torch.zeros(2, dtype=torch.float64)
        self.past = [torch.zeros(2, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.linear(x) / self.count + self.hidden + self.past[0]
        self.hidden = y.detach().mean(0)
        self.past[0] = 0.5 * self.hidden
        return y


def module_that_counts() -> Made:
    torch.manual_seed(0)
    model = Counting().double()
    return plain, model, SGD(model.parameters(), lr=0.1), nothing


class Warms(SGD):
    """Lives beside the globals that the step counts in, and asks for a `min`."""

    warm = 3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                slots["step"] = slots.get("step", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] * min(1.0, slots["step"] / self.warm))


def global_beside_its_optimizer() -> Made:
    global calls
    calls, model = 0, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        global calls
        loss = update(m(x).square().mean() * (0.5, 1.0, 2.0)[calls % 3], o)
        calls += 1
        return loss

    return step, model, Warms(model.parameters(), lr=0.1), nothing


def state_cleared() -> Made:
    model = mlp()
    optimizer = Warms(model.parameters(), lr=0.1)

    def between(k: int) -> None:
        if k == 2:
            optimizer.state.clear()

    return plain, model, optimizer, between


def environment() -> Made:
    model = mlp()
    os.environ["TUTTI_TEST_SCALE"] = "1.0"

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        scale = float(os.environ["TUTTI_TEST_SCALE"])
        return update(m(x).square().mean() * scale, o)

    def between(k: int) -> None:
        os.environ["TUTTI_TEST_SCALE"] = str(1.0 + k // 2)

    return step, model, SGD(model.parameters(), lr=0.1), between


def number_of_numpy() -> Made:
    """Returned beside the loss: what a program prints of it is no literal of Python."""
    state, model = {"beta": np.float64(0.5)}, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = update(m(x).square().mean() * state["beta"], o)
        state["told"] = state["beta"]
        return loss

    def between(k: int) -> None:
        assert float(state["told"]) == float(state["beta"])
        state["beta"] = np.float64(0.5 + k)

    return step, model, SGD(model.parameters(), lr=0.1), between


class Counts(SGD):
    """Counts in its groups, in its slots, as an attribute; branches on one; a first slot by `setdefault`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["sum"] = group.setdefault("sum", 0.0) + group["lr"] ** 2
            for p in group["params"]:
                slots = self.state[p]
                if len(slots) == 0:
                    slots["step"], slots["mean"] = 0, torch.zeros_like(p)
                slots["step"] += 1
                count = slots.setdefault("count", 0) + 1
                slots["count"] = count
                slots["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                size = (
                    group["lr"] / math.sqrt(slots["step"]) / (1 - 0.9**count) / (1 + group["sum"])
                )
                p.sub_(slots["mean"], alpha=size * group["k"] / self.num_steps)
                if slots["step"] % 3 == 0:
                    p.mul_(0.99)


def optimizer_that_counts() -> Made:
    model = mlp()
    return plain, model, Counts(model.parameters(), lr=0.1), nothing


def options_that_change() -> Made:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.1)

    def between(k: int) -> None:
        optimizer.param_groups[0]["eps"] = 1e-8 * 10**k
        optimizer.param_groups[0]["lr"] *= 0.9

    return plain, model, optimizer, between


def default_argument() -> Made:
    model = mlp()

    def step(m: nn.Module, o: Any, x: Tensor, *, state: dict[str, int] = {"i": 0}) -> Tensor:  # noqa: B006
        state["i"] += 1
        return update(m(x).square().mean() * state["i"], o)

    step.__kwdefaults__["state"] = {"i": 0}  # a dict of each program's own
    return step, model, SGD(model.parameters(), lr=0.1), nothing


def number_as_a_tensor() -> Made:
    state, model = {"i": 1}, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        state["i"] += 1
        scale = torch.tensor(state["i"], dtype=torch.float64)
        return update(m(x).square().mean() / scale.sqrt(), o)

    return step, model, SGD(model.parameters(), lr=0.1), nothing


def number_as_a_size() -> Made:
    """What a shape depends on is a constant of each trace."""
    state, model = {"width": 4}, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(4, dtype=x.dtype)
        mask[: state["width"]] = 1
        return update(m(x * mask).square().mean(), o)

    def between(k: int) -> None:
        state["width"] = 4 - k % 3

    return step, model, SGD(model.parameters(), lr=0.1), between


def attribute_of_a_function() -> Made:
    model = mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        scaled.count += 1  # type: ignore[attr-defined]
        return update(scaled(m(x)).square().mean(), o)

    def scaled(y: Tensor) -> Tensor:
        return y * scaled.beta / scaled.count  # type: ignore[attr-defined]

    scaled.count, scaled.beta = 0, 0.5  # type: ignore[attr-defined]

    def between(k: int) -> None:
        scaled.beta = 0.5 + k  # type: ignore[attr-defined]

    return step, model, SGD(model.parameters(), lr=0.1), between


def hook_with_a_number() -> Made:
    state, model = {"scale": 1.0}, mlp()
    head: Any = model[2]
    head.weight.register_hook(lambda g: g * state["scale"])

    def between(k: int) -> None:
        state["scale"] *= 0.5

    return plain, model, SGD(model.parameters(), lr=0.1), between


def set_of_names() -> Made:
    skipped, model = {"0.weight", "2.bias"}, mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        o.zero_grad()
        loss.backward()
        for name, p in m.named_parameters():
            if name in skipped:
                p.grad = None
        o.step()
        return loss.detach()

    def between(k: int) -> None:
        if k == 2:
            skipped.discard("0.weight")

    return step, model, SGD(model.parameters(), lr=0.1), between


PROGRAMS: dict[str, Callable[[], Made]] = {
    one.__name__: one
    for one in (
        trainer,
        counter_in_a_dict,
        dicts_that_make_values,
        global_counter,
        global_beside_its_optimizer,
        state_cleared,
        environment,
        number_of_numpy,
        float_in_a_closure,
        criterion,
        label_smoothing,
        teacher,
        tensor_of_a_closure,
        tensors_in_odd_places,
        first_call_of_its_own,
        lr_set_inside,
        module_that_counts,
        optimizer_that_counts,
        options_that_change,
        default_argument,
        number_as_a_tensor,
        number_as_a_size,
        attribute_of_a_function,
        hook_with_a_number,
        set_of_names,
        tensor_of_a_tuple,
        optimizer_with_tuples,
    )
} | {
    "cosine_inside": scheduler_inside(lambda o: CosineAnnealingLR(o, 10)),
    "step_lr_inside": scheduler_inside(lambda o: StepLR(o, 2, 0.5)),
    "lambda_inside": scheduler_inside(lambda o: LambdaLR(o, lambda k: min(1.0, (k + 1) / 3))),
}
NUM_CALLS = 6


def batch(k: int) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))


def values(name: str, play: Callable[..., Callable[..., Any]]) -> list[Any]:
    """The losses of a program, and its weights at the end; `play` makes its step what is called."""
    step, model, optimizer, between = PROGRAMS[name]()
    called = play(step, model, optimizer)
    losses = []
    for k in range(NUM_CALLS):
        losses.append(float(called(batch(k))))
        between(k)
    with tutti.whole(model):
        return [*losses, *(p.detach().clone() for p in model.parameters())]


def eager(step: Any, model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    return lambda x: step(model, optimizer, x)
