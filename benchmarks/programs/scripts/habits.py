"""Habits of training scripts, each on a small network."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.script import CALLS, HALF, Register, Script
from benchmarks.programs.scripts.blocks import CLASSES, GPT, mlp, tokens, vectors

program = Register("habits")


def _batches() -> list[tuple[Tensor, Tensor]]:
    dtype = torch.get_default_dtype()
    return [(x.to(dtype), y) for x, y in (vectors(i) for i in range(CALLS))]


def _adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@program(
    "gradient accumulation", "zero_grad only every other call, by a counter outside", changes=1
)
def accumulation() -> Script:
    model = mlp(8, 16, CLASSES)
    optimizer = _adam(model)

    def train_step(model: Any, optimizer: Any, micro: Any) -> Any:
        losses = []
        optimizer.zero_grad()
        for x, y in micro:  # was: one call a micro-batch, a step of the optimizer at every second
            loss = F.cross_entropy(model(x), y) / len(micro)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return losses

    pairs = _batches()
    return Script(train_step, model, optimizer, [([pairs[i], pairs[i - 1]],) for i in range(CALLS)])


@program(
    "gradient accumulation over calls", "if (i + 1) % 2 == 0: step and zero_grad; as it stands"
)
def accumulation_over_calls() -> Script:
    model = mlp(8, 16, CLASSES)
    optimizer, state = _adam(model), {"i": 0}

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if (state["i"] + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        state["i"] += 1
        return loss

    return Script(train_step, model, optimizer, _batches(), watch=lambda: state)


@program("GradScaler", "scale, unscale_, clip, step, update; disabled where there is no GPU")
def grad_scaler() -> Script:
    model = mlp(8, 16, CLASSES)
    optimizer, scaler = _adam(model), torch.amp.GradScaler("cpu", enabled=False)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Script(train_step, model, optimizer, _batches())


@program("GradScaler, enabled", "the scale grows every other step; inf checks")
def grad_scaler_on() -> Script:
    model = mlp(8, 16, CLASSES)
    optimizer, scaler = _adam(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Script(train_step, model, optimizer, _batches(), watch=scaler.state_dict)


@program(
    "lr warm-up within the step", "lr written into the groups by the step, from its own counter"
)
def lr_in_step() -> Script:
    model = GPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    state = {"step": 0}

    def lr_at(it: int) -> float:
        return 1e-3 * (it + 1) / 2 if it < 2 else 1e-3 * 0.5 * (1 + math.cos(math.pi * it / 8))

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(state["step"])
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        return loss

    return Script(
        train_step, model, optimizer, [tokens(i) for i in range(CALLS)], watch=lambda: state
    )


@program(
    "scheduler.step() within the step",
    "the step holds the scheduler, as Lightning's users write it",
)
def scheduler_in_step() -> Script:
    model = mlp(8, 16, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Script(train_step, model, optimizer, _batches())


@program("AverageMeter", "losses.update(loss.item(), n) outside; avg compared", changes=0)
def meters() -> Script:
    class AverageMeter:
        def __init__(self) -> None:
            self.sum, self.count = 0.0, 0

        def update(self, val: float, n: int) -> None:
            self.sum += val * n
            self.count += n

    model, meter, kept = mlp(8, 16, CLASSES), AverageMeter(), {}

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "correct": (output.argmax(1) == y).sum(), "n": x.shape[0]}

    def between(call: int) -> None:
        meter.update(float(call), 8)
        kept[call] = meter.sum / meter.count

    return Script(train_step, model, _adam(model), _batches(), between, lambda: kept)


@program("loss.item() within the step", "epoch_loss += loss.item(), as most loops do")
def item_in_step() -> Script:
    model, log = mlp(8, 16, CLASSES), defaultdict(float)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log["loss"] += loss.item()
        return loss.item()

    return Script(train_step, model, _adam(model), _batches(), watch=lambda: dict(log))


@program("NaN guard", "if torch.isnan(loss): skip; a branch on a tensor")
def nan_guard() -> Script:
    model = mlp(8, 16, CLASSES)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            return loss
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, _adam(model), _batches())


@program("an uneven last batch", "8, 8, 5 and 3 samples")
def uneven() -> Script:
    model = mlp(8, 16, CLASSES)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(x[:n], y[:n]) for (x, y), n in zip(_batches(), (8, 8, 5, 3), strict=True)]
    return Script(train_step, model, _adam(model), batches)


@program("autocast", "the forward under bfloat16", within=HALF)
def autocast() -> Script:
    model = mlp(8, 16, CLASSES).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, [(x.float(), y) for x, y in _batches()])


@program("activation checkpointing", "torch.utils.checkpoint around each block, with dropout")
def checkpointing() -> Script:
    from torch.utils.checkpoint import checkpoint

    class Net(GPT):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())

    model = Net(dropout=0.1)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    return Script(train_step, model, _adam(model), [tokens(i) for i in range(CALLS)])
