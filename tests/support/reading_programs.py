"""Training programs whose Python reads values of tensors, each to be compared with itself in eager mode."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, AdamW, NAdam, Optimizer, RAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

import tutti
from looping_programs import LOOPING
from python_programs import mlp, plain, update

Made = tuple[Callable[..., Any], nn.Module, Any]
NUM_CALLS = 8


def with_optimizer(kind: Callable[..., Optimizer]) -> Callable[[], Made]:
    def made() -> Made:
        model = mlp()
        return plain, model, kind(model.parameters())

    return made


def skips_a_loss_that_is_not_finite() -> Made:
    model = mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        if not torch.isfinite(loss):
            return loss.detach()
        return update(loss, o)

    return step, model, SGD(model.parameters(), lr=0.1)


def ends_the_program() -> Made:
    model = mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        if not math.isfinite(loss.item()):
            sys.exit(7)
        return update(loss, o)

    return step, model, SGD(model.parameters(), lr=0.1)


def scales_by_what_it_reads() -> Made:
    model = mlp()

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        now = loss.item()
        if now > 0.2:
            loss = loss * 0.5
        return update(loss / (1 + math.sqrt(now)), o) + now

    return step, model, SGD(model.parameters(), lr=0.1)


def averaged_inside() -> Made:
    model = mlp()
    average = AveragedModel(model)

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = plain(m, o, x)
        average.update_parameters(m)
        return loss + average(x).square().mean().detach()

    return step, model, SGD(model.parameters(), lr=0.1)


class Begins(nn.Module):
    """A mean that is set at the first call, as codebooks of VQ-VAEs are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if not self.initted:
            self.mean.copy_(y.detach().mean(0))
            self.initted.copy_(torch.tensor(True))
        else:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - 0.5 * self.mean


def begins_with_its_first_batch() -> Made:
    model = Begins()
    return plain, model, SGD(model.parameters(), lr=0.1)


class Layerwise(Optimizer):
    """A step of each parameter in proportion to its norm (LAMB), with branches on norms."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                move = state["mean"] / (1 - 0.9 ** state["step"])
                size, length = p.norm(), move.norm()
                ratio = 1.0 if size == 0 or length == 0 else size / length
                p.add_(move * ratio, alpha=-group["lr"])


def layerwise() -> Made:
    model = mlp()
    nn.init.zeros_(next(reversed(list(model.parameters()))))
    return plain, model, Layerwise(model.parameters())


class Estimating(Optimizer):
    """Its step size comes from sums that it reads into Python numbers of its group (Prodigy)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-2, "d0": 1e-2, "above": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        d, above, below = group["d"], group["above"], 0.0
        for p in group["params"]:
            state = self.state[p]
            if "start" not in state:
                state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
            above += (p.grad * (state["start"] - p)).sum().item() * d / group["d0"]
            state["sum"].add_(p.grad, alpha=d / group["d0"])
            below += state["sum"].abs().sum().item()
        if below == 0:
            return
        if d == group["d0"]:
            d = max(d, above / below)
        group["above"], group["d"] = above, max(d, above / below)
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["d"] * group["lr"])


def scaled(*, fused: bool = False) -> Made:
    """A gradient scaler, which skips updates and shrinks and grows its scale."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    factors = torch.tensor([1.0, 1.0, 1.0, math.inf, 1.0, math.inf, 1.0, 1.0])

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean() * factors[0]
        o.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(o)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        scaler.step(o)
        scaler.update()
        factors.copy_(factors.roll(-1))
        return torch.stack([loss.detach(), torch.tensor(scaler.get_scale())])

    return step, model, AdamW(model.parameters(), lr=0.01, fused=fused or None)


def plateau_inside() -> Made:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.3)
    schedule = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    def step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
        loss = plain(m, o, x)
        schedule.step(loss)
        return loss

    return step, model, optimizer


def returns_numbers() -> Made:
    model = mlp()
    kept, total = mlp(), {"loss": 0.0, "seen": 0}

    def step(m: nn.Module, o: Any, x: Tensor) -> dict[str, Any]:
        same = all(map(torch.equal, m.parameters(), kept.parameters()))
        y = m(x)
        loss = update(y.square().mean() * (2 if same else 1), o)
        total["loss"] += loss.item()
        total["seen"] += (y > 0).sum().item()
        pair = torch.tensor([loss.item(), 2.0]).sum()
        return {**total, "any": (y > 0.5).any().item(), "same": same, "pair": pair}

    return step, model, SGD(model.parameters(), lr=0.1)


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def counts_outside() -> Made:
    """Counters outside of the model, of which a read is the first use and a write the second one."""
    model, switch = mlp(), torch.tensor(True)
    counts = [torch.ones(shape, dtype=dtype) for dtype in DTYPES for shape in ((), (1,))]

    def step(m: nn.Module, o: Any, x: Tensor) -> list[Any]:
        scale = 2.0 if switch.item() else 1.0
        for k, count in enumerate(counts):
            scale += (count.item() == 2, float(count) == 3, not count, bool(count - 1))[k % 4]
            count.add_(1)
        switch.logical_not_()
        loss = update(m(x).square().mean() * scale, o)
        return [loss, switch.clone(), *(count.double() + 0 for count in counts)]

    return step, model, SGD(model.parameters(), lr=0.01)


def reads_outside() -> Made:
    """Tensors outside of the model that no op takes, and some that arithmetic takes as numbers."""
    model, kept = mlp(), nn.Module()
    limit, on, same = torch.tensor([2]), torch.tensor(False), torch.zeros(2)
    kept.register_buffer("rate", torch.tensor(0.5))
    kept.register_buffer("count", torch.tensor(2))

    def step(m: nn.Module, o: Any, x: Tensor) -> Any:
        rate, count = kept.rate.item(), int(kept.count)  # type: ignore[operator,arg-type]
        loss = m(x).square().mean() * (1 + rate) / count
        if on or count > limit.tolist()[0]:
            loss = loss * 2
        equal = torch.equal(same, same)
        kept.count.add_(1)  # type: ignore[operator]
        kept.rate.mul_(0.5)  # type: ignore[operator]
        return update(loss, o), rate, count, equal

    return step, model, SGD(model.parameters(), lr=0.1)


READING: dict[str, Callable[[], Made]] = {
    one.__name__: one
    for one in (
        skips_a_loss_that_is_not_finite,
        ends_the_program,
        scales_by_what_it_reads,
        averaged_inside,
        begins_with_its_first_batch,
        layerwise,
        scaled,
        plateau_inside,
        returns_numbers,
        counts_outside,
        reads_outside,
    )
} | {
    "scaled by fused kernels": lambda: scaled(fused=True),
    "nadam": with_optimizer(lambda p: NAdam(p, lr=0.05)),
    "radam": with_optimizer(lambda p: RAdam(p, lr=0.05)),
    "asgd": with_optimizer(lambda p: ASGD(p, lr=0.05, t0=3)),
    "estimating": with_optimizer(Estimating),
    **LOOPING,
}


def batch(k: int) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))


def values(name: str, play: Callable[..., Callable[..., Any]]) -> list[Tensor]:
    """The losses of a program, and its weights at the end; `play` makes its step what is called."""
    step, model, optimizer = READING[name]()
    called = play(step, model, optimizer)
    returned = [x for k in range(NUM_CALLS) for x in tree_leaves(called(batch(k)))]
    losses = [torch.as_tensor(x).detach().clone() for x in returned]
    with tutti.whole(model):
        return [*losses, *(p.detach().clone() for p in model.parameters())]


def eager(step: Any, model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    return lambda x: step(model, optimizer, x)
