"""Programs whose optimizers take a first step of another form than their later ones."""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from as_eager import Program


class Basis(Optimizer):
    """Adam in an eigenbasis; the first step makes the basis of the gradient, and moves nothing.

    The basis is a list of tensors in the state, and made anew at every third step.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "every": 3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if "count" not in state:
                    state["count"] = 0
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["both"] = [_gram(grad), _gram(grad.T)]
                    state["basis"] = [torch.linalg.eigh(x)[1].flip(-1) for x in state["both"]]
                    continue
                left, right = state["basis"]
                turned = left.T @ grad @ right
                state["count"] += 1
                state["mean"].lerp_(turned, 1 - b1)
                state["square"].lerp_(turned.square(), 1 - b2)
                scale = (1 - b2 ** state["count"]) ** 0.5 / (1 - b1 ** state["count"])
                update = state["mean"] / (state["square"].sqrt() + 1e-8)
                p.add_(left @ update @ right.T, alpha=-group["lr"] * scale)
                for kept, now in zip(state["both"], (_gram(grad), _gram(grad.T)), strict=True):
                    kept.lerp_(now, 1 - b2)
                if state["count"] % group["every"] == 0:
                    state["basis"] = [
                        torch.linalg.qr(x @ q)[0]
                        for x, q in zip(state["both"], state["basis"], strict=True)
                    ]


def _gram(x: Tensor) -> Tensor:
    return x @ x.T + 1e-3 * torch.diag(torch.arange(1.0, len(x) + 1))


class Roots(Optimizer):
    """Gradients times roots of their gram matrices, which begin at the identity; roots every other step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if not state:
                    state["count"] = 0
                    state["momentum"] = grad.clone()
                    state["root"] = torch.eye(len(p), dtype=p.dtype)
                    state["gram"] = 1e-4 * state["root"]
                grad = grad.lerp(state["momentum"], group["momentum"])
                state["gram"].add_(grad @ grad.T)
                if state["count"] % 2 == 0:
                    values, basis = torch.linalg.eigh(state["gram"])
                    root = basis @ torch.diag(values.clamp(min=1e-9) ** -0.25) @ basis.T
                    state["root"].copy_(root)
                state["count"] += 1
                state["momentum"] = state["root"] @ grad
                p.add_(state["momentum"], alpha=-group["lr"])


class Directed(Optimizer):
    """Fails with gradients of zero, which have no direction; counts in the group, noise in the first step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    if not p.grad.any():
                        raise ValueError("a gradient of zero has no direction")
                    state["mean"] = p.grad / p.grad.norm()
                state["mean"].lerp_(p.grad, 1 / (1 + group["count"]))
                p.add_(state["mean"], alpha=-group["lr"])


class Twice(Optimizer):
    """Steps by two methods of its own, around a base optimizer; `step` itself is none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def climb(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.detach().clone()
                p.add_(0.05 * p.grad)

    @torch.no_grad()
    def fall(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("climb() and fall()")


class Rule(enum.IntEnum):
    PLAIN = 3
    SIGN = 7


class Shared(Optimizer):
    """Counts in its state under a name of its own, from its first step on; an option is a word."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "rule": Rule.SIGN})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if "calls" not in self.state:
            first = self.param_groups[0]["params"][0]
            self.state["calls"], self.state["largest"] = 0, torch.zeros((), dtype=first.dtype)  # type: ignore[index]
        self.state["calls"] += 1  # type: ignore[index]
        for group in self.param_groups:
            rule = {Rule.PLAIN: Tensor.clone, Rule.SIGN: Tensor.sign}[group["rule"]]
            for p in group["params"]:
                largest: Any = self.state["largest"]  # type: ignore[index]
                largest.copy_(torch.maximum(0.9 * largest, p.grad.abs().max()))
                p.sub_(rule(p.grad) * largest * group["lr"] / self.state["calls"])  # type: ignore[index]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=made), torch.randn(8, 4, generator=made)


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def _program(kind: Any, **options: Any) -> Program:
    made = model()
    return step, made, kind(made.parameters(), **options), batch()


def basis() -> Program:
    return _program(Basis)


def roots() -> Program:
    return _program(Roots)


def directed() -> Program:
    return _program(Directed)


def shared() -> Program:
    return _program(Shared)


def dampened() -> Program:
    return _program(SGD, lr=0.1, momentum=0.9, dampening=0.5)


def twice() -> Program:
    def by_two(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.climb()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.fall()
        optimizer.zero_grad()
        return loss

    made = model()
    return by_two, made, Twice(made.parameters()), batch()


def beside_adam() -> Program:
    """One optimizer of each kind; a frozen weight; noise."""
    made = nn.Sequential(
        nn.Linear(8, 6, bias=False), nn.Dropout(0.2), nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
    )
    made[2].requires_grad_(False)
    kept = torch.optim.AdamW(made[3].parameters(), lr=1e-2)

    def both(model: Any, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for one in optimizers.values():
            one.step()
            one.zero_grad()
        return loss

    return both, made, {"basis": Basis(made[0].parameters()), "adam": kept}, batch()


_ALL = (basis, roots, directed, shared, dampened, twice, beside_adam)
PROGRAMS = {one.__name__: one for one in _ALL}
