"""Ops over lists of tensors, as optimizers call them: each is one op per tensor, with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager
from small_steps import trained

aten = torch.ops.aten
# A tensor of factors for the list must be on the CPU, and a trace has none there: refused by PyTorch's check.
LEFT_OUT = [f"{name}.Tensor" for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")]
NAMES = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1
    floor frac lerp lgamma log log10 log1p log2 max maximum minimum mm mul neg norm pow powsum
    reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"""


def overloads() -> Iterator[str]:
    for name in NAMES.split():
        for form in (name, f"{name}_"):
            packet = getattr(aten, f"_foreach_{form}", None)
            for overload in packet.overloads() if packet is not None else ():
                if "out" not in overload and f"{form}.{overload}" not in LEFT_OUT:
                    yield f"{form}.{overload}"


def called(which: str, x: Tensor) -> list[Tensor]:
    """The results, or the written operands."""
    name, overload = which.split(".")
    op = getattr(getattr(aten, f"_foreach_{name}"), overload)
    lists = [[x * k, x * k + 0.1, x * k - 0.1] for k in (0.5, 0.75, 1.0)]
    if name == "mm":
        lists[1] = [y.T for y in lists[1]]
    first, given = lists[0], iter(lists)
    operands: dict[str, Any] = {"List[number]": [0.5, 0.25, 2.0], "number": 0.5}
    operands["Tensor"] = torch.tensor(0.5, dtype=x.dtype)
    kinds = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
    result = op(*(next(given) if k == "List[Tensor]" else operands[k] for k in kinds))
    return first if result is None else result


def test_every_op() -> None:
    every = list(overloads())
    assert len(every) > 100

    def step(model: Any, x: Tensor) -> list[Tensor]:
        return [y for which in every for y in called(which, x)]

    x = torch.rand(3, 4, dtype=torch.float64) / 2 + 0.2
    model: Any = nn.Linear(1, 1)
    found, expected = tutti.distribute(step, model, None, "")(x), step(model, x)
    names = [which for which in every for _ in range(3)]
    for name, a, b in zip(names, found, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


class OtherArithmetic(torch.optim.Optimizer):
    """Its ops over lists have rounded rates; those one by one have not."""

    def __init__(self, params: Any, foreach: bool) -> None:
        super().__init__(params, {"foreach": foreach})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            if group["foreach"]:
                rate = torch.tensor(0.1, dtype=torch.float32)
                torch._foreach_addcmul_(group["params"], grads, [-rate] * len(grads))
            else:
                for p, grad in zip(group["params"], grads, strict=True):
                    p.add_(grad, alpha=-0.1)


def other_arithmetic() -> Program:
    model = nn.Linear(4, 3)
    step: Any = trained(lambda model, x: model(x).square().mean())
    return step, model, OtherArithmetic(model.parameters(), foreach=True), (torch.randn(8, 4),)


def test_an_optimizer_of_ones_own_keeps_its_option() -> None:
    assert_as_eager(other_arithmetic)
