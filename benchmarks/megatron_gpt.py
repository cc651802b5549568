"""The GPT of Megatron-DeepSpeed as plain PyTorch: what the published iterations of `measured_clusters` ran.

Activations are (sequence, batch, width), as there, so that attention needs no copies of queries and keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DROPOUT = 0.1
# The shardings of Megatron: columns of the first matmul, rows of the second; half of the vocabulary.
PLACE = {"*qkv.weight": "tensor, -", "*up.weight": "tensor, -", "tokens.weight": "tensor, -"}


class FusedSoftmax(nn.Module):
    """Scale, mask and softmax, which Megatron computes in one kernel."""

    def forward(self, scores: Tensor, scale: float, mask: Tensor) -> Tensor:
        """Shares of `scores` (batch, heads, sequence, sequence) along the last dim."""
        return torch.softmax(scores * scale + mask, -1)


class Softmax(nn.Module):
    """The same op by op and in float32, for shapes that the fused kernel refuses (`has_fused_softmax`)."""

    def forward(self, scores: Tensor, scale: float, mask: Tensor) -> Tensor:
        """As `FusedSoftmax`."""
        wide = (scores.float() * scale).masked_fill(mask.bool(), -10000.0)
        return torch.softmax(wide, -1).to(scores.dtype)


def has_fused_softmax(micro_batch: int, heads: int) -> bool:
    """Whether Megatron's fused kernel takes this many local heads: four rows of scores share a block of it.

    Source: `FusedScaleMaskSoftmax.is_kernel_available` of Megatron-LM.
    """
    return micro_batch * heads % 4 == 0


class Residual(nn.Module):
    """The bias of a linear layer, dropout, and the sum with the block's input: one fused kernel, or three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """`x` and the linear layer's `y` (sequence, batch, width)."""
        return x + F.dropout(y + self.bias, DROPOUT)


class Block(nn.Module):
    """One layer: attention with masked softmax and dropout, then a perceptron of four times the width."""

    def __init__(self, width: int, heads: int, fused_softmax: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 4 * width)
        self.projection = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.attention_residual, self.perceptron_residual = Residual(width), Residual(width)
        self.softmax = FusedSoftmax() if fused_softmax else Softmax()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`x` (sequence, batch, width); `mask` (sequence, sequence), added to the scores."""
        s, b, w = x.shape
        of_head = w // self.heads
        qkv = self.qkv(self.attention_norm(x)).view(s, b * self.heads, 3 * of_head)
        q, k, v = (y.transpose(0, 1) for y in qkv.chunk(3, -1))
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, self.heads, s, s)
        shares = self.softmax(scores, 1 / math.sqrt(of_head), mask)
        shares = F.dropout(shares, DROPOUT).view(b * self.heads, s, s)
        mixed = torch.bmm(shares, v).transpose(0, 1).reshape(s, b, w)
        x = self.attention_residual(x, self.projection(mixed))
        hidden = F.gelu(self.up(self.perceptron_norm(x)), approximate="tanh")
        return self.perceptron_residual(x, self.down(hidden))


class Gpt(nn.Module):
    """Embeddings, `layers` blocks, a final norm, and logits by the embeddings' own weight."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        layers: int,
        sequence: int,
        vocabulary: int,
        fused_softmax: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads, fused_softmax) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocabulary) of `tokens` (batch, sequence)."""
        s = tokens.shape[1]
        weight = self.norm.weight
        mask = torch.full((s, s), -10000.0, dtype=weight.dtype, device=weight.device).triu(1)
        places = torch.arange(s, device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(places), DROPOUT)
        x = x.transpose(0, 1).contiguous()
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x).transpose(0, 1), self.tokens.weight)


def train_step(
    model: Gpt, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Forward, loss and backward."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
