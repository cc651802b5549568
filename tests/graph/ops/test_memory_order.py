"""Operands in every order in memory, with gaps, as views of conjugates: a table lists ops that fail."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tutti
from brute_force import MODE
from small_steps import trained
from tutti.graph.ops import memory_order
from tutti.rules.samples.op_samples import FAMILIES
from tutti.rules.samples.pointwise_samples import pointwise_samples
from tutti.rules.samples.sample import Sample

SAMPLES = [
    *(s for of_family in FAMILIES.values() for s in of_family if s.operands()),
    *pointwise_samples(MODE),
]
# A view of the same memory needs what it says; graphs have `reshape`.
VIEWS = {torch.ops.aten.view.default}
# The mark of an input, of which no kernel exists.
MARKS = {torch.ops.tutti.shard_as.default}


def turned(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values of `x`, its dims in memory in another order."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def gapped(x: Tensor, dim: int) -> Tensor:
    """The values of `x`, with zeros between those of a dim."""
    wide = torch.zeros([2 * n if d == dim else n for d, n in enumerate(x.shape)], dtype=x.dtype)
    return wide.unflatten(dim, (-1, 2)).select(dim + 1, 0).copy_(x)


def conjugated(x: Tensor) -> Tensor:
    """The values of `x`, as a view of their conjugates."""
    return x.conj_physical().conj()


def copied(x: Tensor) -> Tensor:
    if x.is_conj():
        return conjugated(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def same(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


def called(sample: Sample, tensors: list[Tensor], *, plainly: bool = False) -> list[Tensor]:
    """What the call of a sample returns, as a step makes it or `plainly`; an op may write its operands."""
    args, kwargs = sample._with([copied(x) for x in tensors])
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a traceback for CUDA
    found = sample.op(*args, **kwargs) if plainly else memory_order.call(sample.op, args, kwargs)
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]


def test_every_op_reads_operands_in_every_order() -> None:
    misread: set[Any] = set()
    tried = 0
    for sample in SAMPLES:
        if sample.op in VIEWS | MARKS:
            continue
        generator = torch.Generator().manual_seed(0)
        tensors = [o.made(generator) for o in sample.operands()]
        wanted = called(sample, tensors)
        for i, x in enumerate(tensors):
            # A kernel that takes gaps for indices may write anywhere: no plain calls.
            for dim in range(x.ndim):
                others = [*tensors[:i], gapped(x, dim), *tensors[i + 1 :]]
                assert all(map(same, called(sample, others), wanted)), (sample, i, dim)
            orders = list(itertools.permutations(range(x.ndim)))[1:]
            forms = [turned(x, order) for order in orders] + [conjugated(x)] * x.is_complex()
            for form in forms:
                others = [*tensors[:i], form, *tensors[i + 1 :]]
                assert all(map(same, called(sample, others), wanted)), (sample, i, form.stride())
                tried += 1
                if sample.op not in memory_order.ORDERS:
                    continue  # that call was plain
                try:
                    found = called(sample, others, plainly=True)
                except RuntimeError:
                    misread.add(sample.op)
                else:
                    misread |= set() if all(map(same, found, wanted)) else {sample.op}
    assert tried > 3000
    assert misread == set(memory_order.ORDERS) & {s.op for s in SAMPLES}
    assert torch.ops.aten.native_group_norm_backward.default in misread


class Attention(nn.Module):
    """Attention between the pixels of a picture, as in diffusion models: channels come first in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = (
            y.reshape(n, 2, c // 2, h * w).transpose(-1, -2).contiguous()
            for y in self.qkv(self.norm(x)).chunk(3, dim=1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        x = x + y.transpose(1, 2).reshape(n, c, h, w)
        return self.norm(x.flatten(2))


class Turned(nn.Module):
    """A group norm, and complex pairs, of what another order in memory was made contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x).transpose(1, 2).contiguous())
        return torch.view_as_complex(y.reshape(y.shape[0], 8, 2, -1).mT.contiguous()).abs()


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y * torch.linspace(0, 1, y.shape[-1])).square().mean()


@pytest.mark.parametrize(
    ("make", "shape"), [(Attention, (4, 8, 2, 3)), (Turned, (4, 6, 6))], ids=["attention", "turned"]
)
@pytest.mark.parametrize("layout", ["", "data=2 zero=1", "data=2 micro=2"])
def test_a_step_that_makes_tensors_contiguous(
    make: Any, shape: tuple[int, ...], layout: str
) -> None:
    ends = []
    for played in (False, True):
        torch.manual_seed(0)
        model, x = make().double(), torch.randn(shape, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Any = trained(_loss)
        if played and layout:
            assert tutti.verify(step, model, optimizer, (x,), layout).ok
            return
        play = tutti.distribute(step, model, optimizer, "") if played else None
        losses = [play(x) if play else step(model, optimizer, x) for _ in range(3)]
        ends.append([*losses, *(p.detach().clone() for p in model.parameters())])
    for expected, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
