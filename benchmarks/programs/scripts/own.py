"""Optimizers as people write them for themselves: numbers in groups, states and attributes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def orthogonal(g: Tensor, steps: int = 3) -> Tensor:
    """A few Newton-Schulz iterations towards the nearest orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    turned = x.size(-2) > x.size(-1)
    x = x.mT if turned else x
    for _ in range(steps):
        xx = x @ x.mT
        x = a * x + (b * xx + c * xx @ xx) @ x
    return x.mT if turned else x


class Muon(Optimizer):
    """Orthogonalized momentum for matrices."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": True})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(g)
                buf = state["momentum_buffer"]
                buf.lerp_(g, 1 - group["momentum"])
                g = g.lerp_(buf, group["momentum"]) if group["nesterov"] else buf
                size = max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.add_(orthogonal(g), alpha=-group["lr"] * size)


class Lion(Optimizer):
    """The sign of an interpolated momentum; keeps a function as its own attribute."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        self._init_lr = lr
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})
        self.update_fn = self._update

    @staticmethod
    def _update(
        p: Tensor, g: Tensor, m: Tensor, lr: float, wd: float, b1: float, b2: float
    ) -> None:
        p.data.mul_(1.0 - lr * wd)
        update = m.clone().mul_(b1).add(g, alpha=1.0 - b1).sign_()
        p.add_(update, alpha=-lr)
        m.mul_(b2).add_(g, alpha=1.0 - b2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                self.update_fn(
                    p, p.grad, state["exp_avg"], group["lr"], group["weight_decay"], *group["betas"]
                )


class ScheduleFree(Optimizer):
    """Schedule-free SGD: `k` and `weight_sum` are numbers in the group; train() and eval() swap weights."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, warmup: int = 2) -> None:
        super().__init__(
            params,
            {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0, "lr_max": -1.0,
             "train_mode": True},
        )  # fmt: skip

    @torch.no_grad()
    def _swap(self, weight: Any, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight(group["beta"]))
                group["train_mode"] = mode

    def train(self) -> None:
        self._swap(lambda beta: 1 - beta, True)

    def eval(self) -> None:
        self._swap(lambda beta: 1 - 1 / beta, False)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            k, beta = group["k"], group["beta"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup"])
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = lr_max**2
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            ckp1 = weight / weight_sum
            for p in group["params"]:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p)
                z, grad = self.state[p]["z"], p.grad
                p.lerp_(end=z, weight=ckp1)
                p.add_(grad, alpha=lr * (beta * (1 - ckp1) - 1))
                z.sub_(grad, alpha=lr)
            group["k"] = k + 1


class Soap(Optimizer):
    """Adam in the eigenbasis of Shampoo, whose basis is made anew every other step."""

    def __init__(self, params: Any, lr: float = 3e-3, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "every": every})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
                    if p.dim() == 2:
                        state["GG"] = [g @ g.T, g.T @ g]
                        state["Q"] = [
                            torch.linalg.eigh(x + torch.diag(torch.arange(1.0, len(x) + 1)))[1]
                            for x in state["GG"]
                        ]
                    continue
                turned = state["Q"][0].T @ g @ state["Q"][1] if p.dim() == 2 else g
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(turned, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).add_(turned.square(), alpha=1 - b2)
                size = group["lr"] * (1 - b2 ** state["step"]) ** 0.5 / (1 - b1 ** state["step"])
                norm = state["exp_avg"] / state["exp_avg_sq"].sqrt().add(group["eps"])
                back = state["Q"][0] @ norm @ state["Q"][1].T if p.dim() == 2 else norm
                p.add_(back, alpha=-size)
                if p.dim() == 2:
                    for x, gram in zip(state["GG"], (g @ g.T, g.T @ g), strict=True):
                        x.lerp_(gram, 1 - b2)
                    if state["step"] % group["every"] == 0:
                        state["Q"] = [
                            torch.linalg.qr(x @ q)[0]
                            for x, q in zip(state["GG"], state["Q"], strict=True)
                        ]


class Shampoo(Optimizer):
    """Preconditioners by power -1/4, made anew every other step; the step count is a Python number."""

    def __init__(
        self, params: Any, lr: float = 0.1, momentum: float = 0.9, update_freq: int = 2
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "update_freq": update_freq})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["momentum_buffer"] = grad.clone()
                    for i, size in enumerate(grad.shape):
                        state[f"precond_{i}"] = 1e-2 * torch.eye(size)
                        state[f"inv_precond_{i}"] = torch.zeros(size, size)
                grad = grad.mul(1 - group["momentum"]).add(
                    state["momentum_buffer"], alpha=group["momentum"]
                )
                for i, size in enumerate(grad.shape):
                    flat = grad.transpose(0, i).reshape(size, -1)
                    state[f"precond_{i}"].add_(flat @ flat.T)
                    if state["step"] % group["update_freq"] == 0:
                        values, basis = torch.linalg.eigh(state[f"precond_{i}"])
                        power = (
                            basis
                            @ torch.diag(values.clamp(min=1e-9) ** (-1 / (2 * grad.dim())))
                            @ basis.T
                        )
                        state[f"inv_precond_{i}"].copy_(power)
                    turned = state[f"inv_precond_{i}"] @ flat
                    grad = turned.reshape(grad.transpose(0, i).shape).transpose(0, i)
                state["step"] += 1
                state["momentum_buffer"] = grad.clone()
                p.add_(grad, alpha=-group["lr"])


class Lamb(Optimizer):
    """Adam with a trust ratio; counts in Python."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            group["step"] = group.get("step", 0) + 1
            c1, c2 = 1 - b1 ** group["step"], 1 - b2 ** group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = (m / c1) / ((v / c2).sqrt() + group["eps"]) + group["weight_decay"] * p
                w_norm, g_norm = p.norm(2.0), update.norm(2.0)
                one = torch.ones_like(w_norm)
                ratio = torch.where(w_norm > 0, torch.where(g_norm > 0, w_norm / g_norm, one), one)
                p.add_(update * ratio, alpha=-group["lr"])


class Prodigy(Optimizer):
    """An estimate `d` of the distance to the solution, kept in the group as a number by `.item()`."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "d": 1e-3, "d_num": 0.0, "k": 0})

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        (b1, b2), d, k = group["betas"], group["d"], group["k"]
        b3, lr = math.sqrt(b2), group["lr"]
        num, den = group["d_num"] * b3, 0.0
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["p0"] = p.detach().clone()
                for name in ("s", "exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p)
            num += (d * lr * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten())).item()
            state["exp_avg"].mul_(b1).add_(p.grad, alpha=d * (1 - b1))
            state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=d * d * (1 - b2))
            state["s"].mul_(b3).add_(p.grad, alpha=d * lr)
            den += state["s"].abs().sum().item()
        if den > 0:
            group["d"] = d = max(d, num / den)
        group["d_num"] = num
        for p in group["params"]:
            state = self.state[p]
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-d * lr)
        group["k"] = k + 1
