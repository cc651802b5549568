"""Networks that generate."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import Block, mlp

program = Register("generative")


class VAE(nn.Module):
    """An encoder to mean and log variance, a decoder from a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 8)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def _units() -> list[tuple[Tensor]]:
    return [(torch.rand(8, 8),) for _ in range(CALLS)]


@program(
    "vae",
    "a loss summed over the batch; train_loss += loss.item() outside; samples drawn in between",
)
def vae() -> Script:
    model = VAE()
    optimizer, total = torch.optim.Adam(model.parameters(), lr=1e-3), [0.0]

    def loss_function(recon: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
        bce = F.binary_cross_entropy(recon, x.view(-1, 8), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    def train_step(model: Any, optimizer: Any, data: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_function(model(data)[0], data, *model(data)[1:])
        loss.backward()
        optimizer.step()
        return loss

    noise = torch.randn(2, 4)

    def between(call: int) -> Any:
        with torch.no_grad(), whole(model):
            return model.decode(noise)

    return Script(train_step, model, optimizer, _units(), between, lambda: total)


@program(
    "VAE with KL annealing", "trainer.beta *= 10 in between; a free-bits threshold as an attribute"
)
def vae_annealed() -> Script:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.beta, self.free_bits = VAE(), 1e-3, 0.05
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

        def training_step(self, model: Any, optimizer: Any, x: Tensor) -> dict[str, Tensor]:
            recon, mu, logvar = model(x)
            kl = (
                (-0.5 * (1 + logvar - mu.pow(2) - logvar.exp()))
                .mean(0)
                .clamp(min=self.free_bits)
                .sum()
            )
            rec = F.mse_loss(recon, x)
            loss = rec + self.beta * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss, "kl": kl.detach(), "rec": rec.detach()}

    trainer = Trainer()

    def between(call: int) -> None:
        trainer.beta *= 10

    return Script(trainer.training_step, trainer.model, trainer.optimizer, _units(), between)


@program(
    "VQ-VAE",
    "nearest codes, a straight-through estimator, a codebook by moving averages in buffers",
)
def vq_vae() -> Script:
    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("embedding", torch.randn(16, 4))
            self.register_buffer("cluster_size", torch.zeros(16))
            self.register_buffer("embed_avg", self.embedding.clone())

        def forward(self, z: Tensor) -> Any:
            d = (
                z.pow(2).sum(1, keepdim=True)
                - 2 * z @ self.embedding.t()
                + self.embedding.pow(2).sum(1)
            )
            codes = d.argmin(1)
            onehot = F.one_hot(codes, 16).type(z.dtype)
            quantized = F.embedding(codes, self.embedding)
            if self.training:
                self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.embed_avg.data.mul_(0.9).add_(onehot.t() @ z.detach(), alpha=0.1)
                n = self.cluster_size.sum()
                smoothed = (self.cluster_size + 1e-5) / (n + 16 * 1e-5) * n
                self.embedding.data.copy_(self.embed_avg / smoothed.unsqueeze(1))
            diff = (quantized.detach() - z).pow(2).mean()
            return z + (quantized - z).detach(), diff, codes

    model = nn.ModuleDict({"enc": mlp(8, 16, 4), "vq": Quantizer(), "dec": mlp(4, 16, 8)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Any:
        model.zero_grad()
        quantized, latent_loss, codes = model["vq"](model["enc"](x))
        recon = F.mse_loss(model["dec"](quantized), x)
        (recon + 0.25 * latent_loss).backward()
        optimizer.step()
        return recon, latent_loss, codes

    return Script(train_step, model, optimizer, _units())


@program(
    "DDPM",
    "times and noise drawn in the step, sinusoidal embeddings, an average of weights within it",
)
def ddpm() -> Script:
    class Eps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp(8 + 8, 32, 8, act=nn.SiLU)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            freqs = torch.exp(torch.arange(4) * -(math.log(10000) / 3))
            angles = t[:, None] * freqs[None, :]
            return self.mlp(torch.cat([x, angles.sin(), angles.cos()], dim=-1))

    class Diffusion(nn.Module):
        def __init__(self, steps: int = 20) -> None:
            super().__init__()
            self.net, self.num_timesteps = Eps(), steps
            bars = torch.cumprod(1 - torch.linspace(1e-4, 0.2, steps), 0)
            self.register_buffer("sqrt_bar", bars.sqrt())
            self.register_buffer("sqrt_one_minus_bar", (1 - bars).sqrt())

        def forward(self, x: Tensor) -> Tensor:
            t = torch.randint(0, self.num_timesteps, (x.shape[0],))
            noise = torch.randn_like(x)
            noisy = self.sqrt_bar[t][:, None] * x + self.sqrt_one_minus_bar[t][:, None] * noise
            return F.mse_loss(self.net(noisy, t), noise)

    model = Diffusion()
    ema = Diffusion()
    ema.load_state_dict(model.state_dict())
    both = nn.ModuleDict({"model": model, "ema": ema.requires_grad_(False)})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train_step(both: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = both["model"](x)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both["model"].parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(both["ema"].parameters(), both["model"].parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        return loss

    return Script(train_step, both, optimizer, _units())


@program(
    "DiT",
    "conditioned by adaLN, labels dropped at random, an average of weights outside of the step",
)
def dit() -> Script:
    class DiT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x_embedder, self.y_embedder = nn.Linear(4, 8), nn.Embedding(5, 8)
            self.t_embedder, self.block = mlp(8, 8, 8, act=nn.SiLU), Block(8, causal=False)
            self.adaLN, self.final = nn.Sequential(nn.SiLU(), nn.Linear(8, 24)), nn.Linear(8, 4)
            nn.init.constant_(self.adaLN[1].bias, 0)

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            freqs = torch.exp(-math.log(100) * torch.arange(4) / 4)
            args = t[:, None].to(x.dtype) * freqs[None]
            emb = self.t_embedder(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))
            if self.training:
                y = torch.where(torch.rand(y.shape[0]) < 0.1, 4, y)
            shift, scale, gate = self.adaLN(emb + self.y_embedder(y)).chunk(3, dim=1)
            h = self.x_embedder(x)
            h = h + gate.unsqueeze(1) * self.block(
                h * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
            )
            return self.final(h)

    model = DiT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        t = torch.rand(x.shape[0])
        noise = torch.randn_like(x)
        loss = F.mse_loss(
            model((1 - t)[:, None, None] * x + t[:, None, None] * noise, t, y), noise - x
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @torch.no_grad()
    def between(call: int) -> None:
        with whole(model):
            for name, p in model.named_parameters():
                ema[name].mul_(0.99).add_(p.data, alpha=0.01)

    batches = [(torch.randn(4, 4, 4), torch.randint(0, 4, (4,))) for _ in range(CALLS)]
    return Script(train_step, model, optimizer, batches, between, lambda: ema)


@program("RealNVP", "coupling layers with masks as buffers, a log determinant")
def realnvp() -> Script:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([[0.0, 1.0] * 4, [1.0, 0.0] * 4]))
            self.t = nn.ModuleList(mlp(8, 16, 8, act=nn.LeakyReLU) for _ in range(2))
            self.s = nn.ModuleList(nn.Sequential(*mlp(8, 16, 8), nn.Tanh()) for _ in range(2))

        def log_prob(self, x: Tensor) -> Tensor:
            log_det, z = x.new_zeros(x.shape[0]), x
            for i in reversed(range(2)):
                z_ = self.mask[i] * z
                s, t = self.s[i](z_) * (1 - self.mask[i]), self.t[i](z_) * (1 - self.mask[i])
                z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
                log_det -= s.sum(dim=1)
            prior = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8))
            return prior.log_prob(z) + log_det

    model = Flow()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = -model.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, [(torch.randn(8, 8),) for _ in range(CALLS)])
