"""The small models of the zoo that are written here rather than taken from a library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal self-attention with separate projections; x is [batch, seq, dim]."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.o(heads.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Pre-norm transformer block; x is [batch, seq, dim]."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, dropout)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Decoder-only transformer: tokens [batch, seq] -> logits [batch, seq, vocab].

    tied: the head uses the embedding's weight. remat: recompute each block in the backward.
    """

    def __init__(
        self,
        *,
        vocab: int = 64,
        seq: int = 16,
        dim: int = 32,
        num_heads: int = 4,
        num_layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        remat: bool = False,
    ) -> None:
        super().__init__()
        self.remat = remat
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.pos(positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    """`nn.Transformer` between embeddings and a head: two token tensors -> logits."""

    def __init__(self, *, vocab: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.body = nn.Transformer(
            dim, 4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64,
            dropout=0.1, batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(dim, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        x = self.body(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class LSTMLM(nn.Module):
    """Two-layer LSTM language model: tokens [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, *, vocab: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class MLP(nn.Module):
    """Residual multi-layer perceptron: [batch, dim] -> [batch, classes]."""

    def __init__(self, *, dim: int = 16, num_classes: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias), nn.Linear(4 * dim, dim, bias)
        self.head = nn.Linear(dim, num_classes, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(x))))


class UNet(nn.Module):
    """Convolutions down and up again, with skips between: [batch, 3, size, size] -> [batch, classes]."""

    def __init__(self, *, width: int = 8, depth: int = 3, num_classes: int = 8) -> None:
        super().__init__()
        widths = [width] * (depth + 1)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_convolution(w, w) for w in widths[1:])
        self.bottom = _convolution(width, width)
        self.up = nn.ModuleList(_convolution(2 * w, w) for w in widths[1:])
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = layer(torch.cat([x, skips.pop()], 1))
        return self.head(x.mean((2, 3)))


def _convolution(inputs: int, outputs: int) -> nn.Module:
    """A convolution, a norm of each sample and a nonlinearity."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(2, outputs), nn.SiLU()
    )
