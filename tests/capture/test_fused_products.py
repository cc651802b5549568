"""Slices of fused products become rows of a dim of parts, which `tensor` splits within each part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_steps import trained
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.verification.verdict import Subject

aten = torch.ops.aten
WIDTH, HEADS, TOKENS = 16, 4, 6
Reads = Callable[[Tensor], Tensor]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of heads beside each other."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def split(y: Tensor) -> Tensor:
    return attended(*y.split(WIDTH, dim=2))


def by_hand(y: Tensor) -> Tensor:
    return attended(y[..., :WIDTH], y[..., WIDTH : 2 * WIDTH], y[..., 2 * WIDTH :])


def one_and_two(y: Tensor) -> Tensor:
    q, kv = y.split([WIDTH, 2 * WIDTH], dim=-1)
    return attended(q, *kv.chunk(2, dim=-1))


def transposed(y: Tensor) -> Tensor:
    return attended(*(x.transpose(1, 2) for x in y.transpose(1, 2).chunk(3, dim=1)))


def grouped(y: Tensor) -> Tensor:
    """Two heads of queries for one of keys: parts of 2, 1 and 1."""
    q, k, v = y.split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for x in (q, k, v))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return a.transpose(1, 2).flatten(2)


def halves(y: Tensor) -> Tensor:
    """As rotary embeddings cut each head: its dim is no product's columns."""
    heads = y.unflatten(-1, (HEADS, -1))
    a, b = heads.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1).flatten(2)[..., :WIDTH]


class Fused(nn.Module):
    """A residual block around what `reads` makes of one product of several values."""

    def __init__(self, reads: Reads, parts: int = 3) -> None:
        super().__init__()
        self.reads = reads
        self.fused, self.out = nn.Linear(WIDTH, parts * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.reads(self.fused(x)))


class Plain(Fused):
    """The same, with a product and a sum in place of `F.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.reads(x @ self.fused.weight.t() + self.fused.bias))


class Crossed(nn.Module):
    """An attention from one half of the tokens to the other; its weights are sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x[:, : TOKENS // 2], x[:, TOKENS // 2 :]
        return x + self.attention(one, other, other, need_weights=False)[0].repeat(1, 2, 1)


def subject(block: nn.Module) -> Subject:
    """A step on the block between two linear layers."""
    torch.manual_seed(0)
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    model = nn.Sequential(nn.Linear(8, WIDTH), block, nn.Linear(WIDTH, 4))
    batch = torch.randn(8, TOKENS, 8), torch.randn(8, TOKENS, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loss_of = trained(lambda model, x, y: F.mse_loss(model(x), y))
    return Subject(loss_of, model, optimizer, batch)


FUSED = {
    "split": lambda: Fused(split),
    "by hand": lambda: Fused(by_hand),
    "a product and a sum": lambda: Plain(split),
    "one and two": lambda: Fused(one_and_two),
    "transposed": lambda: Fused(transposed),
    "crossed": Crossed,
}
APART = {"grouped": lambda: Fused(grouped, 2), "halves": lambda: Fused(halves)}
OUT = {name: {"1.out.weight": "-, tensor"} for name in (*FUSED, *APART)} | {
    "crossed": {"1.attention.out_proj.weight": "-, tensor"}
}


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4", "data=2 tensor=2 zero=3"])
@pytest.mark.parametrize("name", FUSED)
def test_each_rank_computes_its_heads_of_every_part(name: str, layout: str) -> None:
    """No activation is gathered: the parts' sum is the one collective of the block in each direction."""
    one = subject(FUSED[name]())
    program = one.program(Layout.parse(layout), OUT[name])
    gathers = (collectives.all_gather, collectives.all_to_all)
    assert [n for n in program.collectives if n.target in gathers and n.meta["val"].ndim == 3] == []
    fused = next(n for n in program.plan.compute if n.endswith(("fused.weight", "in_proj_weight")))
    assert str(program.plan.compute[fused]) == f"3*{WIDTH}@tensor, {WIDTH}"
    found = one.verdict(Layout.parse(layout), program=program)
    assert found.ok, str(found)


@pytest.mark.parametrize("name", APART)
def test_other_slices_stay(name: str) -> None:
    one = subject(APART[name]())
    program = one.program(Layout.parse("tensor=2"), OUT[name])
    assert any(n.target is aten.slice.Tensor for n in program.captured.graph.nodes)
    found = one.verdict(Layout.parse("tensor=2"), program=program)
    assert found.ok, str(found)


def test_a_gradient_in_parts_is_concatenated_once() -> None:
    graph = subject(FUSED["split"]()).program(Layout(), {}).captured.graph
    assert [n.target for n in graph.nodes if n.target is aten.slice.Tensor] == []
    (cat,) = [n for n in graph.nodes if n.target is aten.cat.default]
    assert tuple(cat.meta["val"].shape) == (8, TOKENS, 3, WIDTH)
