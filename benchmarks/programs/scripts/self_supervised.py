"""Networks that learn from views and from what is hidden."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import Block, mlp

program = Register("self_supervised")


def _views() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(CALLS)]


@program(
    "BYOL", "a target network kept within the model, moved outside of the step, tau by a cosine"
)
def byol() -> Script:
    class BYOL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
            )
            self.predictor, self.target = mlp(8, 16, 8), copy.deepcopy(self.online)
            self.target.requires_grad_(False)
            self.tau = 0.9

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
            with torch.no_grad():
                ta, tb = self.target(a).detach(), self.target(b).detach()
            return (self.loss(pa, tb) + self.loss(pb, ta)).mean()

        @staticmethod
        def loss(x: Tensor, y: Tensor) -> Tensor:
            return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)

        @torch.no_grad()
        def update_moving_average(self) -> None:
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.data = q.data * self.tau + p.data * (1 - self.tau)

    model = BYOL()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def train_step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        loss = model(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        with whole(model):
            model.update_moving_average()
        model.tau = 1 - 0.1 * (math.cos(math.pi * call / CALLS) + 1) / 2

    return Script(train_step, model, optimizer, _views(), between)


@program(
    "DINO",
    "student and teacher, a center as a buffer, temperatures by epoch, the last layer frozen at first",
)
def dino() -> Script:
    class DINOLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 8))
            self.schedule = [0.04, 0.05, 0.06, 0.07]

        def forward(self, student: Tensor, teacher: Tensor, epoch: int) -> Tensor:
            out = (student / 0.1).chunk(2)
            wanted = (
                F.softmax((teacher - self.center) / self.schedule[epoch], dim=-1).detach().chunk(2)
            )
            total, terms = 0, 0
            for i, q in enumerate(wanted):
                for v in range(len(out)):
                    if v != i:
                        total += torch.sum(-q * F.log_softmax(out[v], dim=-1), dim=-1).mean()
                        terms += 1
            with torch.no_grad():
                self.center = self.center * 0.9 + teacher.mean(dim=0, keepdim=True) * 0.1
            return total / terms

    model = nn.ModuleDict({"student": mlp(8, 16, 8), "teacher": mlp(8, 16, 8), "loss": DINOLoss()})
    model["teacher"].load_state_dict(model["student"].state_dict())
    model["teacher"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["student"].parameters(), lr=1e-3)
    now = {"epoch": 0, "momentum": 0.9}

    def train_step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat([a, b])
        loss = model["loss"](model["student"](both), model["teacher"](both), now["epoch"])
        optimizer.zero_grad()
        loss.backward()
        if now["epoch"] < 1:
            for name, p in model["student"].named_parameters():
                if name.startswith("2"):
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            m = now["momentum"]
            pairs = zip(model["student"].parameters(), model["teacher"].parameters(), strict=True)
            for q, k in pairs:
                k.data.mul_(m).add_((1 - m) * q.detach().data)
        return loss

    def between(call: int) -> None:
        now["epoch"] = min(call + 1, 3)
        now["momentum"] = 1 - 0.1 * (math.cos(math.pi * (call + 1) / CALLS) + 1) / 2

    return Script(train_step, model, optimizer, _views(), between)


@program("MAE", "random masking by an argsort of noise, gather, a loss on what is hidden")
def mae() -> Script:
    class MAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = nn.Linear(12, 8), Block(8, causal=False)
            self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, 8))
            self.pos = nn.Parameter(0.02 * torch.randn(1, 16, 8), requires_grad=False)
            self.decoder, self.pred = Block(8, causal=False), nn.Linear(8, 12)

        def forward(self, patches: Tensor, ratio: float = 0.75) -> Tensor:
            n, length, _ = patches.shape
            x, keep = self.embed(patches) + self.pos, int(length * (1 - ratio))
            noise = torch.rand(n, length)
            shuffle = torch.argsort(noise, dim=1)
            restore = torch.argsort(shuffle, dim=1)
            kept = torch.gather(x, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, 8))
            mask = torch.ones([n, length])
            mask[:, :keep] = 0
            mask = torch.gather(mask, dim=1, index=restore)
            x = self.encoder(kept)
            x = torch.cat([x, self.mask_token.repeat(n, length - keep, 1)], dim=1)
            x = torch.gather(x, 1, restore.unsqueeze(-1).repeat(1, 1, 8)) + self.pos
            loss = (self.pred(self.decoder(x)) - patches).pow(2).mean(dim=-1)
            return (loss * mask).sum() / mask.sum()

    model = MAE()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95)
    )

    def train_step(model: Any, optimizer: Any, patches: Tensor) -> Tensor:
        loss = model(patches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, [(torch.randn(4, 16, 12),) for _ in range(CALLS)])


@program("VICReg", "variances and covariances over the batch")
def vicreg() -> Script:
    model = mlp(8, 16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-6)

    def off_diagonal(x: Tensor) -> Tensor:
        n, _ = x.shape
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def train_step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        x, y = model(a), model(b)
        repr_loss = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std = [torch.sqrt(v.var(dim=0) + 0.0001) for v in (x, y)]
        std_loss = sum(torch.mean(F.relu(1 - s)) for s in std) / 2
        cov = [(v.T @ v) / (len(v) - 1) for v in (x, y)]
        cov_loss = sum(off_diagonal(c).pow_(2).sum().div(8) for c in cov)
        loss = 25 * repr_loss + 25 * std_loss + cov_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, _views())
