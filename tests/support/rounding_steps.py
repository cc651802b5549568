"""Steps in which gradients are zero in exact arithmetic, so that an optimizer makes updates of rounding.

Keys of attention with a bias (softmax does not see a shift), biases before BatchNorm (which takes the mean
away), BatchNorm over two values (which are 1 and -1 then, whatever they were).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
Built = tuple[Callable[..., Tensor], nn.Module, Optimizer, Batch]


class Lion(Optimizer):
    """The sign of the momentum: of rounding, it is a full update."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.betas = 0.9, 0.99

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp(p.grad, 1 - self.betas[0]).sign(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - self.betas[1])


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def adam_without_eps(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-20)


def updated(loss: Tensor, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Block(nn.Module):
    """Attention with biases, and a small MLP."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# --- a masked autoencoder -----------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, width: int = 16, patch: int = 6, count: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(patch, width), nn.Linear(width, patch)
        self.places = nn.Parameter(torch.randn(1, count, width) * 0.02)
        self.masked = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder, self.decoder = Block(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor, keep: Tensor, back: Tensor) -> Tensor:
        e = self.embed(x) + self.places
        wide = (-1, -1, e.shape[-1])
        z = self.encoder(torch.gather(e, 1, keep[..., None].expand(*wide)))
        z = torch.cat([z, self.masked.expand(len(x), x.shape[1] - z.shape[1], -1)], 1)
        z = torch.gather(z, 1, back[..., None].expand(*wide)) + self.places
        return self.head(self.decoder(z))


def mae_step(
    model: nn.Module, optimizer: Optimizer, x: Tensor, keep: Tensor, back: Tensor
) -> Tensor:
    return updated((model(x, keep, back) - x).square().mean(), optimizer)


def mae(make: Make = adamw) -> Built:
    model = Masked()
    order = torch.stack([torch.randperm(8) for _ in range(4)])
    batch = torch.randn(4, 8, 6), order[:, :2], order.argsort(1)
    return mae_step, model, make(model.parameters()), batch


# --- images and texts, contrasted ---------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Linear(6, width), nn.Embedding(20, width)
        self.image, self.text = Block(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a = F.normalize(self.image(self.patches(image)).mean(1), dim=-1)
        b = F.normalize(self.text(self.tokens(text)).mean(1), dim=-1)
        return self.scale.exp() * a @ b.t()


def clip_step(model: nn.Module, optimizer: Optimizer, image: Tensor, text: Tensor) -> Tensor:
    logits, same = model(image, text), torch.arange(len(image))
    loss = (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2
    return updated(loss, optimizer)


def clip(make: Make = adamw) -> Built:
    model = Pair()
    batch = torch.randn(4, 8, 6), torch.randint(20, (4, 6))
    return clip_step, model, make(model.parameters()), batch


# --- a network that predicts its own average ----------------------------------------------------


def _head(given: int, width: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(given, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, out)
    )


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), _head(16, 32, 16))
        self.predictor = _head(16, 32, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def byol_step(model: Twins, optimizer: Optimizer, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = model.target(b), model.target(a)
    made = model.predictor(model.online(a)), model.predictor(model.online(b))
    loss = sum(2 - 2 * F.cosine_similarity(p, z, dim=-1) for p, z in zip(made, wanted, strict=True))
    updated(loss.mean(), optimizer)  # type: ignore[union-attr]
    with torch.no_grad():
        for mean, p in zip(model.target.parameters(), model.online.parameters(), strict=True):
            mean.lerp_(p, 0.01)
    return loss.mean()  # type: ignore[union-attr]


def byol(make: Make = adamw) -> Built:
    model = Twins()
    trained = [p for p in model.parameters() if p.requires_grad]
    return byol_step, model, make(trained), (torch.randn(8, 12), torch.randn(8, 12))


# --- encoder and decoder ------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
        self.both = nn.Transformer(width, 2, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.both(self.embed(source), self.embed(target), tgt_mask=mask))


def translation_step(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> Tensor:
    source, target, labels = batch
    return updated(
        F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten()), optimizer
    )


def transformer(make: Make = adamw) -> Built:
    model = Translator()
    batch = tuple(torch.randint(20, (4, n)) for n in (6, 5, 5))
    return translation_step, model, make(model.parameters()), batch


# --- convolutions with biases before BatchNorm --------------------------------------------------


def _narrow_wide_narrow(given: int, out: int, stride: int) -> nn.Module:
    wide = 2 * given
    return nn.Sequential(
        *(nn.Conv2d(given, wide, 1), nn.BatchNorm2d(wide), nn.ReLU6()),
        *(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.BatchNorm2d(wide), nn.ReLU6()),
        *(nn.Conv2d(wide, out, 1), nn.BatchNorm2d(out)),
    )


def classes_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return updated(F.cross_entropy(model(x), y), optimizer)


def mobilenet(make: Make = adamw) -> Built:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6()),
        _narrow_wide_narrow(8, 16, 2),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    return classes_step, model, make(model.parameters()), batch


class UNet(nn.Module):
    """Down to one value a channel and sample."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down, self.low = self._twice(3, width), self._twice(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.head = nn.Conv2d(2 * width, 1, 1)

    def _twice(self, given: int, out: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(given, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        low = self.low(F.max_pool2d(first, 2))
        return self.head(torch.cat([self.up(low), first], 1))


def masks_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return updated(F.binary_cross_entropy_with_logits(model(x), y), optimizer)


def unet(make: Make = adamw) -> Built:
    model = UNet()
    batch = torch.randn(2, 3, 2, 2), torch.rand(2, 1, 2, 2).round()
    return masks_step, model, make(model.parameters()), batch


# By name, with a place for the weights under an axis `tensor`.
CASES: dict[str, tuple[Callable[[Make], Built], dict[str, str]]] = {
    "mae": (mae, {"*.up.weight": "tensor, -"}),
    "clip": (clip, {"*.up.weight": "tensor, -"}),
    "byol": (byol, {"predictor.0.weight": "tensor, -"}),
    "transformer": (transformer, {"*linear1.weight": "tensor, -"}),
    "mobilenet": (mobilenet, {"3.3.weight": "tensor, -, -, -"}),
    "unet": (unet, {"down.0.weight": "tensor, -, -, -"}),
}
