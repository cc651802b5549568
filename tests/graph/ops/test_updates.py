"""Fused updates as ops: PyTorch's own steps in float64, nothing changed that should not be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tutti.graph.ops.fused_updates import _FUSED, KERNELS, Kernel

BY_NAME = {k.name: k for k in KERNELS}
SHAPES = ((3, 5), (7,), (), (2, 3, 4, 5))
ADAM = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-3}
# kernel, its numbers, the plain optimizer, how slots begin by name
CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "adam": (
        "adam", {**ADAM, "amsgrad": False, "maximize": False},
        partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-3),
    ),
    "adamw_amsgrad_maximize": (
        "adamw", {**ADAM, "amsgrad": True, "maximize": True},
        partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-3, amsgrad=True,
                maximize=True),
    ),
    "sgd": (
        "sgd", {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False,
                "maximize": True},
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, maximize=True),
    ),
    "sgd_dampened": (
        "sgd", {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.3, "nesterov": False,
                "maximize": False},
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, momentum=0.9, dampening=0.3),
    ),
    "sgd_nesterov": (
        "sgd", {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": True,
                "maximize": False},
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        "adagrad", {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 1e-3, "maximize": False},
        partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.2, weight_decay=0.1, eps=1e-3),
    ),
}  # fmt: skip
SLOTS = {
    "exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq", "max_exp_avg_sqs": "max_exp_avg_sq",
    "momentum_buffers": "momentum_buffer", "sums": "sum", "steps": "step",
}  # fmt: skip


def played(optimizer: Any, num_steps: int) -> list[Tensor]:
    """The last gradients, after steps with fresh ones."""
    grads: list[Tensor] = []
    for _ in range(num_steps):
        grads = [torch.randn_like(p) for p in optimizer.param_groups[0]["params"]]
        for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return grads


def lists_of(kernel: Kernel, optimizer: Any, grads: list[Tensor]) -> list[list[Tensor]]:
    """Copies of the kernel's operands as they stand."""
    params = optimizer.param_groups[0]["params"]
    found = []
    for name in kernel.lists:
        own = {"params": params, "grads": grads}.get(name)
        if own is None:
            own = [s[SLOTS[name]] for p in params if SLOTS[name] in (s := optimizer.state[p])]
        found.append([x.detach().clone() for x in own if x is not None])
    return found


def start(name: str) -> tuple[Kernel, dict[str, Any], Any]:
    torch.manual_seed(0)
    kernel, numbers, make = CASES[name]
    params = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in SHAPES]
    optimizer = make(params, foreach=False)
    played(optimizer, 3)
    return BY_NAME[kernel], numbers, optimizer


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_optimizers_own_step(name: str) -> None:
    kernel, numbers, optimizer = start(name)
    before = lists_of(kernel, optimizer, [])
    grads = played(optimizer, 1)
    after = lists_of(kernel, optimizer, grads)
    before[1] = grads
    if "steps" in kernel.lists:
        before[-1] = after[-1]  # counted already
    kept = [[x.clone() for x in xs] for xs in before]
    new = kernel.op(*before, **numbers)
    wanted = [x for k in kernel.written for x in after[k]]
    for have, want in zip(new, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-13, atol=1e-13)
    assert all(
        x.equal(y) for xs, ys in zip(before, kept, strict=True) for x, y in zip(xs, ys, strict=True)
    ), "the functional op changes nothing"
    over = kernel.overwriting(*before, **numbers)
    assert all(
        x is y for x, y in zip(over, (x for k in kernel.written for x in before[k]), strict=True)
    )
    assert all(x.equal(y) for x, y in zip(over, new, strict=True))
    for k in set(range(len(kernel.lists))) - set(kernel.written):
        assert all(x.equal(y) for x, y in zip(before[k], kept[k], strict=True)), kernel.lists[k]
    recorded = [[x.clone() for x in xs] for xs in kept]
    assert kernel.recorded(*recorded, **numbers) is None
    assert all(x.equal(y) for x, y in zip(recorded[0], over, strict=False))


def turned(x: Tensor) -> Tensor:
    """The same values, the last dim outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x


def gapped(x: Tensor) -> Tensor:
    """The same values, every second place of a larger memory."""
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("lie", [turned, gapped])
@pytest.mark.parametrize("which", ["params", "grads", "exp_avgs", "all"])
def test_tensors_may_lie_in_memory_in_any_way(lie: Callable[[Tensor], Tensor], which: str) -> None:
    kernel, numbers, optimizer = start("adamw_amsgrad_maximize")
    plain = lists_of(kernel, optimizer, played(optimizer, 1))
    other = [
        [lie(x.clone()) for x in xs] if which in (n, "all") else [x.clone() for x in xs]
        for n, xs in zip(kernel.lists, plain, strict=True)
    ]
    strides = [x.stride() for xs in other for x in xs]
    assert strides != [x.stride() for xs in plain for x in xs]
    wanted = kernel.op(*plain, **numbers)
    for have in (kernel.op(*other, **numbers), kernel.overwriting(*other, **numbers)):
        for x, y in zip(have, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)
    assert [x.stride() for xs in other for x in xs] == strides


def test_which_devices_and_types_have_a_kernel() -> None:
    adamw = BY_NAME["adamw"]
    assert adamw.has(torch.device("cpu"), torch.bfloat16)
    assert not adamw.has(torch.device("cpu"), torch.complex64)
    assert not adamw.has(torch.device("meta"), torch.float32)
    fused = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "CUDA")
    assert adamw.has(torch.device("cuda"), torch.float32) == fused


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_off_the_cpu_get_counts_of_float32(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read them as such: float64 would be another number in silence."""
    seen: list[Tensor] = []
    monkeypatch.setitem(_FUSED, "adamw", lambda *lists, **_: seen.extend(lists[-1]))
    x = torch.ones(3, dtype=torch.float64, device=device)
    steps = [torch.ones((), dtype=torch.float64, device=device)]
    BY_NAME["adamw"].overwrite([x], [x], [x], [x], [], steps, **CASES["adamw_amsgrad_maximize"][1])
    assert [s.dtype for s in seen] == [torch.float64 if device == "cpu" else torch.float32]
