"""Contracts of `torch_private/optimizer_marks.py`."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tutti.torch_private.optimizer_marks import (
    CHOICE_OF_SCALER,
    MARKS,
    SCALED_BY_KERNEL,
    UNCHECKED,
    hook_before_steps,
    hooks_of_optimizer,
    hooks_off,
    is_hooked,
    is_scaled_by_kernel,
    is_wrapped_by_scheduler,
    mark_stepped,
    remove_hooks,
    stepped_mark_kept,
)


def _adam(**options: Any) -> torch.optim.Adam:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return torch.optim.Adam([p], **options)


def _warned(scheduler: StepLR) -> bool:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        scheduler.step()
    return any("lr_scheduler.step()" in str(w.message) for w in found)


def test_a_scheduler_asks_whether_the_optimizer_has_stepped() -> None:
    first, second = _adam(), _adam()
    assert _warned(StepLR(first, 1))
    scheduler = StepLR(second, 1)
    mark_stepped(second)
    assert not _warned(scheduler)


def test_a_step_inside_leaves_the_mark_as_it_was() -> None:
    optimizer = _adam()
    scheduler = StepLR(optimizer, 1)
    with stepped_mark_kept(optimizer):
        optimizer._opt_called = False  # type: ignore[attr-defined]
        with stepped_mark_kept(optimizer):
            mark_stepped(optimizer)
        assert _warned(scheduler)


def test_a_scheduler_wraps_step_and_marks_the_wrapper() -> None:
    optimizer = _adam()
    assert not is_wrapped_by_scheduler(optimizer.step)
    StepLR(optimizer, 1)
    assert is_wrapped_by_scheduler(optimizer.step)


def test_an_optimizer_s_steps_leave_marks_beside_its_state() -> None:
    optimizer = _adam(fused=True)
    before = {*vars(optimizer)}
    StepLR(optimizer, 1)
    optimizer.step()
    added = {*vars(optimizer)} - before - {"step"}
    assert added and added <= MARKS


def test_a_fused_step_notes_that_it_has_checked_its_tensors() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], 0.1, fused=True)
    assert UNCHECKED in MARKS and getattr(optimizer, UNCHECKED) is True
    optimizer.step()
    assert getattr(optimizer, UNCHECKED) is False


def test_hooks_of_an_optimizer_are_in_two_tables() -> None:
    optimizer, seen = _adam(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    assert [len(table or ()) for table in hooks_of_optimizer(optimizer)] == [1, 1, 0, 0]
    assert [*hooks_of_optimizer(object())] == [None, None]
    with hooks_off(optimizer):
        optimizer.step()
    assert seen == []
    optimizer.step()
    assert seen == ["before", "after"]
    remove_hooks(optimizer)
    optimizer.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("kind", [OrderedDict, dict], ids=["pytorch", "plain"])
def test_a_hook_for_a_block_needs_no_table_of_pytorch(kind: type) -> None:
    optimizer, seen = _adam(), []
    optimizer._optimizer_step_pre_hooks = kind()
    if kind is dict:
        with pytest.raises(TypeError, match="weak reference"):
            optimizer.register_step_pre_hook(lambda *_: None)
        optimizer._optimizer_step_pre_hooks.clear()
    with hook_before_steps(optimizer, lambda one, *_: seen.append(one)):
        optimizer.step()
    optimizer.step()
    assert seen == [optimizer] and not optimizer._optimizer_step_pre_hooks
    with hook_before_steps(object(), lambda *_: None):
        pass


def test_hooks_of_all_optimizers_are_in_two_more_tables() -> None:
    optimizer, seen = _adam(), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        assert [len(table or ()) for table in hooks_of_optimizer(optimizer)] == [0, 0, 1, 1]
        with hooks_off(optimizer):
            optimizer.step()
        assert seen == []
        optimizer.step()
        assert seen == ["before", "after"]
    finally:
        for handle in handles:
            handle.remove()
    assert [len(table or ()) for table in hooks_of_optimizer(optimizer)] == [0, 0, 0, 0]


def test_a_scaler_asks_one_function_whether_to_step() -> None:
    optimizer, scaler, seen = _adam(), GradScaler("cpu"), []
    scaler.scale(optimizer.param_groups[0]["params"][0].sum())
    choose = lambda scaler, one, state, *_args, **_options: seen.append((one, state))  # noqa: E731
    with mock.patch.object(*CHOICE_OF_SCALER, choose):
        scaler.step(optimizer)
    ((one, state),) = seen
    assert one is optimizer
    assert [float(x) for x in state["found_inf_per_device"].values()] == [0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_steps_itself_in_the_place_of_a_fused_kernel(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, scaler, seen = _adam(fused=fused), GradScaler("cpu"), []
    scaler.scale(optimizer.param_groups[0]["params"][0].sum())
    counted = lambda *_args, **_options: seen.append(1)  # noqa: E731
    with mock.patch.object(*CHOICE_OF_SCALER, counted):
        scaler.step(optimizer)
    assert len(seen) == (not fused)
    scaler.update()
    assert is_scaled_by_kernel(optimizer) == fused and not is_scaled_by_kernel(object())
    monkeypatch.setattr(optimizer, SCALED_BY_KERNEL[1], False, raising=fused)
    assert isinstance(optimizer, SCALED_BY_KERNEL[0]) and not is_scaled_by_kernel(optimizer)
    with mock.patch.object(*CHOICE_OF_SCALER, counted):
        scaler.step(optimizer)
    assert len(seen) == 1 + (not fused)


def test_an_optimizer_has_hooks_once_it_is_made() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    assert is_hooked(_adam()) and not is_hooked(Around())
