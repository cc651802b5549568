"""A hook that waits for all gradients of some tensors, and runs for others in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from tutti.torch_private.module_tables import hooks_of_tensor
from tutti.torch_private.multi_grad_hooks import for_copy, wait_for


def _hooks(x: Any) -> list[Any]:
    return [*(hooks_of_tensor(x)[0] or {}).values()]


def test_a_hook_waits_for_other_tensors_for_a_while() -> None:
    own = [torch.ones(2, requires_grad=True) for _ in range(2)]
    others = [torch.ones(2, requires_grad=True) for _ in range(2)]
    seen: list[list[float]] = []
    register_multi_grad_hook(own, lambda grads: seen.append([float(g.sum()) for g in grads]))
    undone = []
    for x, other in zip(own, others, strict=True):
        (hook,) = _hooks(x)
        other.register_hook(hook)
        undone.append(wait_for(hook, other))
    (others[0].sum() + 3 * others[1].sum()).backward()
    assert seen == [[2.0, 6.0]]
    for undo in undone:
        undo()
    (5 * own[0].sum() + own[1].sum()).backward()
    assert seen[1:] == [[10.0, 2.0]]


def test_any_other_hook_stays() -> None:
    x = torch.ones(2, requires_grad=True)
    register_multi_grad_hook([x], lambda grad: None, mode="any")
    for hook in (*_hooks(x), lambda grad: grad):
        wait_for(hook, torch.ones(2, requires_grad=True))()


def test_a_copy_waits_for_copies_alone() -> None:
    own = [torch.ones(2, requires_grad=True) for _ in range(2)]
    copies = [torch.ones(2, requires_grad=True) for _ in range(2)]
    seen: list[list[float]] = []
    register_multi_grad_hook(own, lambda grads: seen.append([float(g.sum()) for g in grads]))
    memo: dict[int, Any] = {}
    for x, copy in zip(own, copies, strict=True):
        copy.register_hook(for_copy(_hooks(x)[0], copy, memo))
    (copies[0].sum() + 3 * copies[1].sum()).backward()
    (5 * own[0].sum() + own[1].sum()).backward()
    assert seen == [[2.0, 6.0], [10.0, 2.0]]
