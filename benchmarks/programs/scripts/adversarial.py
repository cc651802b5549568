"""Generators and their critics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script
from benchmarks.programs.scripts.blocks import mlp

program = Register("adversarial")


class Generator(nn.Sequential):
    """From 4 numbers to 8."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 8), nn.Tanh()
        )


@program("dcgan", "two networks and two optimizers, one criterion, labels by torch.full and fill_")
def dcgan() -> Script:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.netG = nn.Sequential(
                nn.ConvTranspose2d(4, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
                nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
            )  # fmt: skip
            self.netD = nn.Sequential(
                nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
            )  # fmt: skip

    model, criterion = Net(), nn.BCELoss()
    optimizers = tuple(
        torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999))
        for net in (model.netD, model.netG)
    )

    def train_step(model: Any, optimizers: Any, real: Tensor) -> Any:
        optimizerD, optimizerG = optimizers
        model.netD.zero_grad()
        label = torch.full((real.size(0),), 1.0, dtype=real.dtype)
        errD_real = criterion(model.netD(real).view(-1), label)
        errD_real.backward()
        fake = model.netG(torch.randn(real.size(0), 4, 1, 1))
        label.fill_(0.0)
        errD_fake = criterion(model.netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        model.netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(model.netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        return errD_real + errD_fake, errG

    return Script(train_step, model, optimizers, [(torch.randn(4, 1, 8, 8),) for _ in range(CALLS)])


@program("WGAN-GP", "a penalty on gradients; the generator trained every other call by a counter")
def wgan_gp() -> Script:
    model = nn.ModuleDict({"G": Generator(), "D": mlp(8, 16, 1, act=nn.Tanh)})
    optimizers = {
        k: torch.optim.Adam(model[k].parameters(), lr=2e-4, betas=(0.5, 0.9)) for k in model
    }
    opt = {"n_critic": 2, "lambda_gp": 10.0, "batches_done": 0}

    def train_step(model: Any, optimizers: Any, real: Tensor) -> Any:
        z = torch.randn(real.shape[0], 4)
        optimizers["D"].zero_grad()
        fake = model["G"](z)
        alpha = torch.rand(real.size(0), 1)
        mixed = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_(True)
        d_mixed = model["D"](mixed)
        grads = torch.autograd.grad(
            d_mixed, mixed, torch.ones_like(d_mixed), create_graph=True, retain_graph=True
        )[0]
        penalty = ((grads.norm(2, dim=1) - 1) ** 2).mean()
        d_loss = (
            -model["D"](real).mean() + model["D"](fake.detach()).mean() + opt["lambda_gp"] * penalty
        )
        d_loss.backward()
        optimizers["D"].step()
        g_loss = torch.zeros(())
        if opt["batches_done"] % opt["n_critic"] == 0:
            optimizers["G"].zero_grad()
            g_loss = -model["D"](model["G"](z)).mean()
            g_loss.backward()
            optimizers["G"].step()
        opt["batches_done"] += 1
        return d_loss, g_loss

    return Script(
        train_step,
        model,
        optimizers,
        [(torch.randn(8, 8),) for _ in range(CALLS)],
        watch=lambda: opt,
    )


@program("WGAN, clipped weights", "p.data.clamp_ after the step; RMSprop; noise drawn twice")
def wgan() -> Script:
    model = nn.ModuleDict({"G": mlp(4, 16, 8), "D": mlp(8, 16, 1)})
    optimizers = [torch.optim.RMSprop(model[k].parameters(), lr=5e-3) for k in ("D", "G")]

    def train_step(model: Any, optimizers: Any, real: Tensor) -> Any:
        d, g = optimizers
        d.zero_grad()
        fake = model["G"](torch.randn(real.shape[0], 4)).detach()
        loss_d = -torch.mean(model["D"](real)) + torch.mean(model["D"](fake))
        loss_d.backward()
        d.step()
        for p in model["D"].parameters():
            p.data.clamp_(-0.01, 0.01)
        g.zero_grad()
        loss_g = -torch.mean(model["D"](model["G"](torch.randn(real.shape[0], 4))))
        loss_g.backward()
        g.step()
        return loss_d, loss_g

    return Script(train_step, model, optimizers, [(torch.randn(8, 8),) for _ in range(CALLS)])


@program(
    "CycleGAN / pix2pix", "a model class with set_requires_grad, optimize_parameters, LambdaLR"
)
def cyclegan() -> Script:
    class CycleGAN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.G_A, self.G_B, self.D_A = mlp(8, 16, 8), mlp(8, 16, 8), mlp(8, 16, 1)
            self.criterionGAN, self.lambda_A = nn.MSELoss(), 10.0
            self.loss_names = ["G", "cycle", "D"]

        def set_requires_grad(self, nets: list[nn.Module], requires_grad: bool) -> None:
            for net in nets:
                for p in net.parameters():
                    p.requires_grad = requires_grad

        def optimize_parameters(
            self, opt_g: Any, opt_d: Any, a: Tensor, b: Tensor
        ) -> dict[str, Tensor]:
            fake_b = self.G_A(a)
            rec_a = self.G_B(fake_b)
            self.set_requires_grad([self.D_A], False)
            opt_g.zero_grad()
            score = self.D_A(fake_b)
            loss_g = self.criterionGAN(score, torch.ones_like(score))
            cycle = F.l1_loss(rec_a, a) * self.lambda_A
            (loss_g + cycle).backward()
            opt_g.step()
            self.set_requires_grad([self.D_A], True)
            opt_d.zero_grad()
            real, fake = self.D_A(b), self.D_A(fake_b.detach())
            loss_d = 0.5 * (
                self.criterionGAN(real, torch.ones_like(real))
                + self.criterionGAN(fake, torch.zeros_like(fake))
            )
            loss_d.backward()
            opt_d.step()
            return {"G": loss_g, "cycle": cycle, "D": loss_d}

    model = CycleGAN()
    generators = [*model.G_A.parameters(), *model.G_B.parameters()]
    optimizers = [
        torch.optim.Adam(generators, 2e-3, (0.5, 0.999)),
        torch.optim.Adam(model.D_A.parameters(), 2e-3),
    ]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 1) / 5) for o in optimizers
    ]

    def train_step(model: Any, optimizers: Any, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return model.optimize_parameters(*optimizers, a, b)

    def between(call: int) -> None:
        for scheduler in schedulers:
            scheduler.step()
        model.lambda_A = 10.0 - call

    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(CALLS)]
    return Script(train_step, model, optimizers, batches, between)
