"""Small networks and batches that several programs share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, ROWS, CLASSES = 32, 8, 4, 4


def tokens(which: int, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones."""
    drawn = torch.Generator().manual_seed(which)
    text = torch.randint(1, VOCAB, (rows, length + 1), generator=drawn)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def vectors(which: int, rows: int = 8, size: int = 8) -> tuple[Tensor, Tensor]:
    """Vectors and classes."""
    drawn = torch.Generator().manual_seed(which)
    classes = torch.randint(0, CLASSES, (rows,), generator=drawn)
    return torch.randn(rows, size, generator=drawn), classes


def images(which: int, rows: int = 4, channels: int = 3, size: int = 8) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    drawn = torch.Generator().manual_seed(which)
    classes = torch.randint(0, CLASSES, (rows,), generator=drawn)
    return torch.randn(rows, channels, size, size, generator=drawn), classes


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    """Causal self-attention in two heads."""

    def __init__(self, width: int, heads: int = 2, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.c_attn(x).split(c, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, width: int, dropout: float = 0.0, *, causal: bool = True) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = (
            Attention(width, causal=causal),
            mlp(width, 4 * width, width, act=nn.GELU),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Two blocks with tied embeddings; `model(x, y)` gives logits and the loss."""

    def __init__(self, width: int = 8, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class RMSNorm(nn.Module):
    """Scaled to a root mean square of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Llama(nn.Module):
    """One block with rotary positions, grouped keys and a gated MLP; keeps its last loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tok_embeddings, self.output = (
            nn.Embedding(VOCAB, width),
            nn.Linear(width, VOCAB, bias=False),
        )
        self.tok_embeddings.weight = self.output.weight
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, 4, bias=False), nn.Linear(width, 4, bias=False)
        self.w1, self.w3 = nn.Linear(width, 16, bias=False), nn.Linear(width, 16, bias=False)
        self.w2 = nn.Linear(16, width, bias=False)
        self.norm_1, self.norm_2, self.norm_3 = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        angles = torch.outer(torch.arange(16.0), 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))
        dtype = torch.get_default_dtype()
        self.register_buffer("freqs_cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("freqs_sin", angles.sin().to(dtype), persistent=False)
        self.last_loss: Any = None

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = (f[: x.shape[1], None] for f in (self.freqs_cos, self.freqs_sin))
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.tok_embeddings(ids)
        x, (b, t) = self.norm_1(h), ids.shape
        q = self.turned(self.wq(x).view(b, t, 2, 4)).transpose(1, 2)
        k = self.turned(self.wk(x).view(b, t, 1, 4)).expand(b, t, 2, 4).transpose(1, 2)
        v = self.wv(x).view(b, t, 1, 4).expand(b, t, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.wo(y.transpose(1, 2).reshape(b, t, -1))
        x = self.norm_2(h)
        h = h + self.w2(F.silu(self.w1(x)) * self.w3(x))
        logits = self.output(self.norm_3(h))
        if targets is not None:
            self.last_loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
        return logits
