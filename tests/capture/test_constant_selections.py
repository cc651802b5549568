"""Elements picked by constants of a step: as eager, and each shape is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import losing_output
from ranks import Ranks
from small_steps import trained
from tutti.capture.python import constant_selections, known_values
from tutti.capture.step import capture
from tutti.errors import CaptureError

aten = torch.ops.aten


def contrastive(z: Tensor) -> Tensor:
    """As SimCLR's loss: each row without its own column."""
    z = F.normalize(z)
    rows = z @ z.T
    mask = ~torch.eye(len(z), dtype=torch.bool)
    return rows[mask].view(len(z), -1).logsumexp(1).mean()


def labelled(z: Tensor) -> Tensor:
    """As another one: masks picked by masks, of labels that count."""
    labels = torch.cat([torch.arange(4) for _ in range(2)])
    same = (labels[None] == labels[:, None]).double()
    own, rows = torch.eye(8, dtype=torch.bool), z @ z.T
    same, rows = same[~own].view(8, -1), rows[~own].view(8, -1)
    right, wrong = rows[same.bool()].view(8, -1), rows[~same.bool()].view(8, -1)
    logits = torch.cat([right, wrong], 1)
    return F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))


def triangles(z: Tensor) -> Tensor:
    """Rows of which masks pick different numbers of elements."""
    rows = (z.T @ z).tanh()
    upper = torch.ones(4, 4).triu(1) == 1
    i, j = torch.where(torch.arange(4)[:, None] < torch.arange(4)[None])
    lower = torch.nonzero(torch.tril(torch.ones(4, 4)))
    at_last = rows[lower[:, 0], lower[:, 1]].sum()
    chosen = torch.masked_select(rows, upper.T).sum()
    return rows[upper].square().mean() + rows[i, j].exp().mean() + at_last + chosen


def of_some_dims(z: Tensor) -> Tensor:
    """A mask before other dims, behind them, and beside an index."""
    x, own = z.view(8, 2, 2), torch.eye(2, dtype=torch.bool)
    odd = torch.arange(8) % 2 == 1
    few = torch.tensor([1, 2, 3, 5])
    none = x[torch.zeros(8, dtype=torch.bool)].sum()
    return x[odd].exp().mean() + (x[:, own] * x[:, ~own]).mean() + x[few, :, odd[:2]].sum() + none


def writes(z: Tensor) -> Tensor:
    """Different values at each position, in rows and elsewhere."""
    own = torch.eye(4, dtype=torch.bool)
    a, b, c = z[:4].clone(), z[:4].clone(), z.view(8, 2, 2).clone()
    a[~own] = z.sum(1).repeat(2)[:12]
    b[own.triu()] = z[4:, 0]
    c[:, own[:2, :2]] = z[:, :2].tanh()
    c[:, ~own[:2, :2]] = 2.0
    d = z[4:].masked_scatter(~own, z)
    return a.tanh().mean() + b.square().mean() + (c * c.sum(0)).mean() + (d * a).mean()


def others(z: Tensor) -> Any:
    pairs = torch.combinations(torch.arange(4))
    repeated = torch.arange(2).repeat_interleave(torch.tensor([1, 3]))
    values, counts = torch.unique(torch.arange(4) // 3, return_counts=True)
    rows = torch.unique(torch.eye(3), dim=0)
    total = sum(z[i].square().sum() for i in torch.tensor([0, 2]))
    total = total + (z[:, pairs[:, 0]] * z[:, pairs[:, 1]]).mean() + z[:, repeated].exp().mean()
    return total + (z[:, values] * counts).mean() + (z[:, :3] @ rows).square().mean()


ALL = [contrastive, labelled, triangles, of_some_dims, writes, others]


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.__name__)
def test_selections(loss: Callable[[Tensor], Any]) -> None:
    assert_as_eager(lambda: losing_output(loss))


def every() -> Program:
    return losing_output(lambda z: sum(loss(z) for loss in ALL))


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
def test_on_ranks(ranks: Ranks, layout: str) -> None:
    assert_as_eager_on_ranks(ranks, every, layout)


def in_samples() -> Program:
    """Selections from each sample, which micro-batches may have."""

    def loss(model: Any, x: Tensor) -> Tensor:
        z = model(x).view(-1, 2, 2)
        mask = ~torch.eye(2, dtype=torch.bool)
        return (z[:, mask].exp() * z[:, torch.ones(2, 2).triu() == 1][:, :2]).mean()

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return trained(loss), model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 6),)


def test_in_a_pipeline() -> None:
    assert_as_eager(in_samples, "pipe=2 micro=2")


def test_ranks_keep_the_rows_of_a_mask_that_picks_as_many_of_each() -> None:
    step, model, optimizer, batch = losing_output(contrastive)
    nodes = capture(step, model, optimizer, batch).graph.nodes
    assert [n for n in nodes if n.target is aten.gather.default]
    assert not [n for n in nodes if n.target is aten.index.Tensor]


def test_no_graph_holds_positions() -> None:
    step, model, optimizer, batch = losing_output(contrastive)
    captured = capture(step, model, optimizer, batch)
    assert not [n for n in captured.graph.nodes if n.op == "get_attr"]


def test_batches_of_several_sizes() -> None:
    torch.manual_seed(0)
    step, model, optimizer, _ = losing_output(contrastive)
    played = tutti.distribute(step, model, optimizer, "")
    for n in (8, 4, 6, 10):
        x = torch.randn(n, 6)
        expected = contrastive(model(x)).item()
        assert float(played(x)) == pytest.approx(expected, abs=1e-5)


def test_a_mask_too_large_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (known_values, constant_selections):
        monkeypatch.setattr(module, "MOST_NUMBERS", 60)
    step, model, optimizer, batch = losing_output(contrastive)
    with pytest.raises(CaptureError, match="constants of more than 60 numbers") as error:
        tutti.distribute(step, model, optimizer, "")(*batch)
    assert "rows[mask]" in str(error.value)


def test_a_mask_of_values_is_refused() -> None:
    step, model, optimizer, batch = losing_output(lambda z: z[z > 0].mean())
    with pytest.raises(CaptureError, match="shape that depends on values"):
        tutti.distribute(step, model, optimizer, "")(*batch)


@pytest.mark.parametrize("write", [False, True])
def test_a_mask_of_another_shape(write: bool) -> None:
    def loss(z: Tensor) -> Tensor:
        z, mask = z.clone(), torch.eye(4, dtype=torch.bool)
        if write:
            z[mask] = torch.arange(4.0)
        return z[mask].sum()

    step, model, optimizer, batch = losing_output(loss)
    with pytest.raises(CaptureError, match="The shape of the mask"):
        tutti.distribute(step, model, optimizer, "")(*batch)


def test_too_few_values_to_write() -> None:
    """One for each row would fit the rows."""

    def loss(z: Tensor) -> Tensor:
        z, mask = z[:4].clone(), ~torch.eye(4, dtype=torch.bool)
        z[mask] = torch.arange(4.0)
        return z.sum()

    step, model, optimizer, batch = losing_output(loss)
    with pytest.raises(CaptureError, match="RuntimeError"):
        tutti.distribute(step, model, optimizer, "")(*batch)
