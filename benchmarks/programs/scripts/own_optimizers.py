"""Optimizers as people write them, each on a small network or language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts import own
from benchmarks.programs.scripts.blocks import CLASSES, GPT, mlp, tokens, vectors

program = Register("own_optimizers")


class Sam(Optimizer):
    """Sharpness-aware minimization around a base optimizer, in two steps."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [
            p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("two steps")


class Lookahead(Optimizer):
    """Slow weights that follow every `k` steps; the count is a number in the group."""

    def __init__(self, optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.optimizer.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
            group["counter"] += 1
            if group["counter"] >= self.k:
                group["counter"] = 0
                for p in group["params"]:
                    slow = self.optimizer.state[p]["slow"]
                    slow.add_(p.data - slow, alpha=self.alpha)
                    p.data.copy_(slow)


def _batches() -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]


def _step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def _with(make: Callable[[Any], Any]) -> Script:
    model = mlp(8, 16, CLASSES, act=nn.Tanh)
    return Script(_step, model, make(model.parameters()), _batches())


@program("Lion", "a function as the optimizer's own attribute; sign updates")
def lion() -> Script:
    return _with(lambda params: own.Lion(params, lr=1e-3))


@program("schedule-free SGD", "k and weight_sum count in the group; train() and eval() in between")
def schedule_free() -> Script:
    made = _with(lambda params: own.ScheduleFree(params))
    optimizer, model = made.optimizer, made.model
    held_out = made.batches[0]

    @torch.no_grad()
    def between(call: int) -> Any:
        with whole(model, slots=True):
            optimizer.eval()
            loss = F.cross_entropy(model(held_out[0]), held_out[1])
            optimizer.train()
        return loss

    made.between = between
    return made


@program(
    "SOAP", "a first step that only gathers; a basis made anew every other step; lists in the state"
)
def soap() -> Script:
    return _with(lambda params: own.Soap(params))


@program("Shampoo", "a Python count in the state; eigenvalues every other step")
def shampoo() -> Script:
    return _with(lambda params: own.Shampoo(params))


@program("LAMB", "the step counts in the group; a trust ratio by where")
def lamb() -> Script:
    return _with(lambda params: own.Lamb(params))


@program("Prodigy", "d, an estimate by .item(), in the group")
def prodigy() -> Script:
    return _with(lambda params: own.Prodigy(params))


@program("SAM", "two forwards and backwards; weights kept and put back by p.data")
def sam() -> Script:
    model = mlp(8, 16, CLASSES, act=nn.Tanh)
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        return loss

    return Script(train_step, model, optimizer, _batches())


@program("Lookahead", "an optimizer around another; a counter in the group, a branch on it")
def lookahead() -> Script:
    return _with(lambda params: Lookahead(torch.optim.Adam(params, lr=1e-2)))


@program(
    "Muon with an auxiliary Adam",
    "one optimizer of two kinds of groups, chosen by a flag; counts in Python",
)
def muon_with_adam() -> Script:
    class MuonWithAuxAdam(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if group["use_muon"]:
                        if len(state) == 0:
                            state["momentum_buffer"] = torch.zeros_like(p)
                        state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                        update = p.grad.lerp_(state["momentum_buffer"], group["momentum"])
                        p.add_(own.orthogonal(update), alpha=-group["lr"])
                        continue
                    if len(state) == 0:
                        state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                        state["step"] = 0
                    state["step"] += 1
                    state["m"].lerp_(p.grad, 0.1)
                    state["v"].lerp_(p.grad.square(), 0.05)
                    m, v = (
                        state["m"] / (1 - 0.9 ** state["step"]),
                        state["v"] / (1 - 0.95 ** state["step"]),
                    )
                    p.mul_(1 - group["lr"] * 0.01)
                    p.add_(m / (v.sqrt() + 1e-8), alpha=-group["lr"])

    model = GPT()
    matrices = [p for n, p in model.blocks.named_parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    optimizer = MuonWithAuxAdam(
        [
            {"params": matrices, "use_muon": True, "lr": 0.02, "momentum": 0.95},
            {"params": rest, "use_muon": False, "lr": 3e-4},
        ]
    )

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)[1]
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss

    return Script(train_step, model, optimizer, [tokens(i) for i in range(CALLS)])


@program("Adan", "three moments; the last gradient is state; a count in the group")
def adan() -> Script:
    class Adan(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.98, 0.92, 0.99), "eps": 1e-8})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                b1, b2, b3 = group["betas"]
                group["step"] = group.get("step", 0) + 1
                c1, c2 = 1.0 - b1 ** group["step"], 1.0 - b2 ** group["step"]
                c3 = (1.0 - b3 ** group["step"]) ** 0.5
                for p in group["params"]:
                    state = self.state[p]
                    if len(state) == 0:
                        for name in ("exp_avg", "exp_avg_sq", "exp_avg_diff"):
                            state[name] = torch.zeros_like(p)
                    if "pre_grad" not in state or group["step"] == 1:
                        state["pre_grad"] = p.grad.clone()
                    diff = p.grad - state["pre_grad"]
                    state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                    state["exp_avg_diff"].mul_(b2).add_(diff, alpha=1 - b2)
                    seen = diff.mul(b2).add_(p.grad)
                    state["exp_avg_sq"].mul_(b3).addcmul_(seen, seen, value=1 - b3)
                    denom = (state["exp_avg_sq"].sqrt() / c3).add_(group["eps"])
                    p.addcdiv_(state["exp_avg"] / c1, denom, value=-group["lr"])
                    p.addcdiv_(state["exp_avg_diff"] / c2, denom, value=-group["lr"] * b2)
                    state["pre_grad"].copy_(p.grad)

    return _with(lambda params: Adan(params))


@program("Sophia", "a Hessian's diagonal every other step, by a counter of the loop")
def sophia() -> Script:
    model = mlp(8, 16, CLASSES, act=nn.Tanh)

    class SophiaG(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.95), "rho": 0.04})

        @torch.no_grad()
        def update_hessian(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "hessian" not in state:
                        state["hessian"], state["exp_avg"] = (
                            torch.zeros_like(p),
                            torch.zeros_like(p),
                        )
                    state["hessian"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=0.05)

        @torch.no_grad()
        def step(self, closure: Any = None, bs: int = 8) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["exp_avg"].lerp_(p.grad, 0.1)
                    ratio = (
                        state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)
                    ).clamp(None, 1)
                    p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])

    optimizer, count = SophiaG(model.parameters()), {"iter": 0}

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        if count["iter"] % 2 == 0:
            sampled = model(x).detach().argmax(-1)
            F.cross_entropy(model(x), sampled).backward()
            optimizer.update_hessian()
            optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(bs=8)
        optimizer.zero_grad(set_to_none=True)
        count["iter"] += 1
        return loss

    return Script(train_step, model, optimizer, _batches(), watch=lambda: count)
