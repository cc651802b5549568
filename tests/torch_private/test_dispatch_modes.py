"""Contracts of `torch_private/dispatch_modes.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tutti.torch_private.dispatch_modes import (
    TorchDispatchMode,
    no_modes,
    no_torch_function,
    not_overridden,
    num_function_modes,
)
from tutti.torch_private.fake_tensors import FakeTensor, FakeTensorMode


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_ops_inside() -> None:
    with _Ops() as ops:
        torch.ones(2).mul_(2)
    assert ops.seen == [torch.ops.aten.ones.default, torch.ops.aten.mul_.Tensor]


def test_without_modes_ops_give_real_values() -> None:
    with FakeTensorMode(), _Ops() as ops:
        assert type(torch.ones(2)) is FakeTensor
        seen = len(ops.seen)
        with no_modes():
            assert torch.ones(2).tolist() == [1, 1]
        assert len(ops.seen) == seen


def test_without_functions_modes_do_not_see_a_read_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    with _Functions() as functions, no_torch_function():
        Tensor.grad.__get__(x)  # pyright: ignore
        x + 1
    assert functions.seen == []


class _OpsOnly(Tensor):
    __torch_function__ = not_overridden


def test_a_subclass_may_leave_functions_as_they_are() -> None:
    x = torch.ones(2).as_subclass(_OpsOnly)
    assert type(x) is _OpsOnly and type(x + 1) is Tensor


def test_default_devices_are_counted_among_the_modes() -> None:
    assert num_function_modes() == 0
    with torch.device("meta"):
        assert num_function_modes() == 1
    torch.set_default_device("meta")
    try:
        assert num_function_modes() == 1
    finally:
        torch.set_default_device(None)
    assert num_function_modes() == 0
