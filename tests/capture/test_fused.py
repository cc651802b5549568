"""Optimizers with a fused kernel: one op a parameter, PyTorch's own numbers, nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import tutti
from tutti.capture.captured import Captured
from tutti.capture.state.fused import qualifies
from tutti.capture.state.lift import create_slots
from tutti.capture.step import capture
from tutti.errors import CaptureError
from tutti.graph.ops.fused_updates import BY_OP
from tutti.verification.verdict import Subject

Make = Callable[..., Optimizer]


def _groups(kind: Make, model: nn.Module) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return kind([{"params": weights}, {"params": biases, "lr": 0.3, "weight_decay": 0.0}])


def _of(kind: Make) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters())


class Cautious(AdamW):
    """Inherits its step."""


class Halved(AdamW):
    """A step of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


VARIANTS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": _of(partial(Adam, lr=0.01, weight_decay=0.1)),
    "adam_amsgrad": _of(partial(Adam, lr=0.01, amsgrad=True)),
    "adamw": _of(partial(AdamW, lr=0.01)),
    "adamw_maximize": _of(partial(AdamW, lr=0.01, maximize=True, amsgrad=True)),
    "adamw_foreach": _of(partial(AdamW, lr=0.01, foreach=True)),
    "adamw_loop": _of(partial(AdamW, lr=0.01, foreach=False)),
    "adamw_fused": _of(partial(AdamW, lr=0.01, fused=True)),
    "adamw_tensor_lr": _of(partial(AdamW, lr=torch.tensor(0.01, dtype=torch.float64))),
    "adamw_inherited": _of(partial(Cautious, lr=0.01)),
    "adamw_groups": partial(_groups, partial(AdamW, lr=0.01, weight_decay=0.1)),
    "sgd": _of(partial(SGD, lr=0.1)),
    "sgd_decay_maximize": _of(partial(SGD, lr=0.1, weight_decay=0.1, maximize=True)),
    "sgd_momentum": _of(partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "sgd_nesterov": _of(partial(SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "sgd_fused": _of(partial(SGD, lr=0.1, momentum=0.9, fused=True)),
    "sgd_groups": partial(_groups, partial(SGD, lr=0.1, momentum=0.9)),
    "adagrad": _of(partial(Adagrad, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.1)),
    "adagrad_fused": _of(partial(Adagrad, lr=0.1, weight_decay=0.1, fused=True)),
}


def _train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def _batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, dtype=dtype), torch.randn(8, 4, dtype=dtype)


def _captured(optimizer: Optimizer, model: nn.Module) -> Captured:
    return capture(_train, model, optimizer, _batch(next(model.parameters()).dtype))


def _updates(captured: Captured) -> list[Any]:
    return [n for n in captured.graph.nodes if n.target in BY_OP]


def _plain(optimizer: Optimizer) -> Optimizer:
    """The same optimizer without a fused or foreach path."""
    for group in optimizer.param_groups:
        group["fused"] = group["foreach"] = False
    return optimizer


@pytest.mark.parametrize("name", VARIANTS)
def test_one_op_a_parameter_with_the_numbers_of_the_plain_eager_step(name: str) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    ours, theirs = VARIANTS[name](model), _plain(VARIANTS[name](twin))
    schedules = [LambdaLR(o, lambda k: 1 / (1 + k)) for o in (ours, theirs)]
    step = tutti.distribute(_train, model, ours, "")
    for _ in range(3):
        batch = _batch()
        want = _train(twin, theirs, *batch)
        torch.testing.assert_close(step(*batch), want, rtol=1e-12, atol=1e-12)
        for schedule in schedules:
            schedule.step()
    assert len(_updates(step.program.captured)) == 4
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-12)
        for key, slot in theirs.state[q].items():
            torch.testing.assert_close(
                ours.state[p][key], slot, rtol=1e-12, atol=1e-12, check_dtype=key != "step"
            )


@cache
def _subject(name: str) -> Subject:
    model = _model(torch.float32)
    return Subject(_train, model, VARIANTS[name](model), _batch(torch.float32))


@pytest.mark.parametrize("layout", ["", "data=2 zero=1", "data=2 zero=3"])
@pytest.mark.parametrize("name", ["adamw_groups", "adam_amsgrad", "sgd_nesterov", "adagrad"])
def test_verified_in_the_models_own_dtype(name: str, layout: str) -> None:
    verdict = _subject(name).verdict(tutti.Layout.parse(layout))
    assert verdict.ok, str(verdict)


def test_a_dampened_momentum_that_has_begun() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    _train(model, optimizer, *_batch())
    twin, theirs = copy.deepcopy((model, optimizer))
    step = tutti.distribute(_train, model, optimizer, "")
    for _ in range(2):
        batch = _batch()
        want = _train(twin, theirs, *batch)
        torch.testing.assert_close(step(*batch), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "sgd", "sgd_momentum", "adagrad"])
def test_the_optimizer_is_left_as_it_was(name: str) -> None:
    model = _model()
    optimizer = VARIANTS[name](model)
    create_slots(optimizer)
    assert bool(optimizer.state) == (name != "sgd")
    fused, foreach = (optimizer.param_groups[0][k] for k in ("fused", "foreach"))
    before, marks = copy.deepcopy(optimizer.state_dict()), set(vars(optimizer))
    groups = optimizer.param_groups
    function = getattr(torch, "_fused_adamw_")  # noqa: B009

    def broken(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        _train(model, optimizer, x, y)
        raise KeyError("afterwards")

    for step in (_train, broken):
        try:
            capture(step, model, optimizer, _batch())
        except KeyError:
            assert step is broken
        now = optimizer.state_dict()
        assert optimizer.param_groups is groups and set(vars(optimizer)) == marks
        assert now["param_groups"] == before["param_groups"]
        assert (groups[0]["fused"], groups[0]["foreach"]) == (fused, foreach)
        for slots, old in zip(now["state"].values(), before["state"].values(), strict=True):
            assert all(slots[k].equal(old[k]) for k in old)
    assert getattr(torch, "_fused_adamw_") is function  # noqa: B009


def _with_bf16_slots() -> Optimizer:
    optimizer = AdamW(_model().parameters())
    create_slots(optimizer)
    for slots in optimizer.state.values():
        slots["exp_avg"] = slots["exp_avg"].bfloat16()
    return optimizer


def _complex() -> Optimizer:
    return AdamW([nn.Parameter(torch.randn(4, dtype=torch.complex64))])


NOT_FUSED: dict[str, Callable[[], Optimizer]] = {
    "own step": lambda: Halved(_model().parameters()),
    "no kernel": lambda: torch.optim.RMSprop(_model().parameters()),
    "differentiable": lambda: AdamW(_model().parameters(), differentiable=True),
    "slots of another dtype": _with_bf16_slots,
    "complex": _complex,
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_does_not_qualify(name: str) -> None:
    assert not qualifies(NOT_FUSED[name]())


def test_a_step_of_its_own_takes_the_plain_path() -> None:
    model = _model()
    optimizer = Halved(model.parameters(), lr=0.01)
    twin, theirs = copy.deepcopy((model, optimizer))
    captured = _captured(optimizer, model)
    assert not _updates(captured)
    step = tutti.distribute(_train, model, optimizer, "")
    for _ in range(2):
        batch = _batch()
        want = _train(twin, theirs, *batch)
        torch.testing.assert_close(step(*batch), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)])
def test_a_model_on_the_meta_device(kind: Make, fused: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = kind(model.parameters(), lr=0.01, fused=fused)
    assert len(_updates(_captured(optimizer, model))) == 4
    step = tutti.distribute(_train, model, optimizer, "")
    batch = _batch(torch.float32)
    losses = [float(step(*batch)) for _ in range(5)]
    assert losses[-1] < losses[0]
    for p in model.parameters():
        slots = optimizer.state[p].values()
        assert all(s.device.type == "cpu" and s.isfinite().all() for s in slots)


@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)])
def test_slots_of_a_fused_optimizer_begin_as_those_of_a_plain_one(kind: Make) -> None:
    """PyTorch's fused SGD starts with a buffer that nobody has set, and sets it in its first step."""
    optimizer = kind(_model().parameters(), lr=0.1, fused=True)
    create_slots(optimizer)
    slots = [x for s in optimizer.state.values() for x in s.values()]
    assert slots and all(not x.any() for x in slots)
    assert all(g["fused"] for g in optimizer.param_groups)


def test_a_gradient_scaler_is_refused() -> None:
    model = _model(torch.float32)
    optimizer: Any = AdamW(model.parameters(), fused=True)

    def scaled(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        try:
            _train(model, optimizer, x, y)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    with pytest.raises(CaptureError, match="gradient scaler"):
        capture(scaled, model, optimizer, _batch(torch.float32))


def test_momentum_without_a_buffer_begins_by_an_eager_call() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = None
    with pytest.raises(CaptureError, match=r"makes the slot 'momentum_buffer' for \"0\.weight\""):
        _captured(optimizer, model)
    twin, theirs = copy.deepcopy((model, optimizer))
    step = tutti.distribute(_train, model, optimizer, "")
    for _ in range(3):
        batch = _batch()
        want = _train(twin, theirs, *batch)
        torch.testing.assert_close(step(*batch), want, rtol=1e-12, atol=1e-12)


def test_a_step_that_removes_momentum_is_refused_with_its_line() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def anew(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        del optimizer.state[model[2].weight]  # type: ignore[index]
        _train(model, optimizer, x, y)

    with pytest.raises(CaptureError, match="a parameter whose momentum is gone") as caught:
        capture(anew, model, optimizer, _batch())
    assert "optimizer.step()" in caught.value.at
