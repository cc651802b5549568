"""Sparse gradients and sparse tensors: the numbers of one device, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from ranks import Ranks
from tutti.capture.substitutes import sparse
from tutti.errors import CaptureError


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def squares(model: Any, optimizer: Any, indices: Tensor) -> Tensor:
    loss = model(indices).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def lookups(made: Any, optimizer: Any) -> Program:
    model = nn.Sequential(made(20, 8, sparse=True))
    indices = torch.randint(15, (8, 3), generator=generator())
    return squares, model, optimizer(model.parameters(), lr=0.1), (indices,)


def bags_under_adagrad() -> Program:
    return lookups(nn.EmbeddingBag, Adagrad)


def adjacency() -> Program:
    def step(model: Any, optimizer: Any, a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(torch.sparse.mm(a, model(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(8, 4)
    x, y = torch.randn(8, 8, generator=generator()), torch.randn(8, 4, generator=generator())
    a = (torch.rand(8, 8, generator=generator()) > 0.6).to(x.dtype).to_sparse()
    return step, model, Adam(model.parameters(), lr=0.01), (a, x, y)


OPTIMIZERS = [SGD, partial(SGD, momentum=0.9), Adagrad]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("made", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_sparse_gradients_of_optimizers_that_do_the_same_with_dense_ones(
    made: Any, optimizer: Any
) -> None:
    assert_as_eager(partial(lookups, made, optimizer))


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_an_adjacency_in_the_batch(layout: str) -> None:
    def program() -> Program:
        step, model, optimizer, (a, x, y) = adjacency()
        return step, model, optimizer, (a.to_sparse_csr() if layout == "csr" else a, x, y)

    assert_as_eager(program)


@pytest.mark.parametrize("program", [bags_under_adagrad, adjacency], ids=lambda p: p.__name__)
def test_two_ranks(ranks: Ranks, program: Any) -> None:
    assert_as_eager_on_ranks(ranks, program, "data=2 zero=3")


class Lazy(SGD):
    """Might look at which rows have a gradient."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [Adam, Lazy])
def test_sparse_gradients_of_other_optimizers_are_refused(optimizer: Any) -> None:
    train_step, model, update, batch = lookups(nn.Embedding, optimizer)
    with pytest.raises(CaptureError, match="a sparse gradient") as found:
        tutti.distribute(train_step, model, update)(*batch)
    assert "model(indices)" in found.value.at


def test_sparse_buffers_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("a", torch.eye(2).to_sparse())
    with pytest.raises(CaptureError, match="is a sparse tensor"):
        tutti.distribute(squares, model)


def test_an_adjacency_that_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_ROOM", 100)
    with pytest.raises(CaptureError, match="as a dense one"):
        sparse.dense((torch.eye(20).to_sparse(),))


def test_a_sparse_constant_is_refused() -> None:
    a = torch.eye(8).to_sparse()

    def step(model: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(a, model(x)).sum()

    with pytest.raises(CaptureError, match="a sparse tensor") as found:
        tutti.distribute(step, nn.Linear(8, 4))(torch.ones(8, 8))
    assert "torch.sparse.mm(a, model(x))" in found.value.at
    assert "arguments of the step" in found.value.fix
