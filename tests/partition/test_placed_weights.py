"""A placed weight keeps its sharding beside activations of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import squares, trained
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.verification.verdict import Subject

WIDTH, HEADS, KEY_HEADS, TOKENS = 64, 16, 4, 32
PLACE = {"[qkv].weight": "tensor, -", "o.weight": "-, tensor"}


class GroupedQueryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        keys = WIDTH // HEADS * KEY_HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(WIDTH, keys, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        k, v = (y.repeat_interleave(HEADS // KEY_HEADS, dim=1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def program(rows: int) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), GroupedQueryAttention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject(trained(squares), model, optimizer, (torch.randn(rows, TOKENS, WIDTH),))
    place = {f"1.{name}": sharding for name, sharding in PLACE.items()}
    return subject.program(Layout.parse("tensor=2"), place)


@pytest.mark.parametrize("rows", [8, 4096])
def test_many_tokens_do_not_gather_a_small_weight(rows: int) -> None:
    large = [n for n in program(rows).collectives if n.meta["val"].numel() == rows * TOKENS * WIDTH]
    moved = [(n.target.__name__, n.meta["region"]) for n in large]  # type: ignore[union-attr]
    assert moved == [("all_reduce", "forward"), ("all_reduce", "backward")]
