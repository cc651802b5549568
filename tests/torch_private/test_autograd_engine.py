"""Contracts of `torch_private/autograd_engine.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from tutti.torch_private.autograd_engine import (
    ENGINE_RUNS,
    are_unwritten,
    next_node_number,
    running_node_number,
    set_grad_enabled,
    version_of,
)


def test_every_way_to_a_backward_runs_through_the_engine() -> None:
    runs = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            runs.append("begins")
            result = run(*args, **kwargs)
            runs.append("ends")
            return result

        return backward

    x = torch.ones(2, requires_grad=True)
    with ExitStack() as stack:
        for owner, name in ENGINE_RUNS:
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        x.sum().backward()
        assert runs == ["begins", "ends"] and x.grad is not None
        torch.autograd.backward(x.sum())
        torch.autograd.grad(x.sum(), x)
    assert len(runs) == 6
    x.sum().backward()
    assert len(runs) == 6


def test_a_node_of_the_backward_has_the_number_of_its_forward() -> None:
    x = torch.ones(2, requires_grad=True)
    number = next_node_number()
    y = x.sin()
    assert next_node_number() == number + 1
    seen: list[int | None] = []
    x.register_hook(lambda grad: seen.append(running_node_number()))
    assert running_node_number() is None

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cos.default:
                seen.append(running_node_number())
            return func(*args, **(kwargs or {}))

    with Watch():
        y.sum().backward()
    assert number in seen and running_node_number() is None


def test_a_write_counts_up_the_version_of_the_tensor_and_its_views() -> None:
    x = torch.zeros(2)
    view, before = x[:1], version_of(x)
    x.add_(1)
    view.zero_()
    assert version_of(x) == version_of(view) == before + 2
    assert are_unwritten([(x, before + 2)]) and not are_unwritten([(x, before)])
    x.data.add_(1)  # behind autograd's back
    assert version_of(x) == before + 2


def test_gradients_are_switched_off_and_on() -> None:
    set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        set_grad_enabled(True)
    assert torch.is_grad_enabled()
