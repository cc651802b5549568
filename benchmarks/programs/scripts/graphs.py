"""Networks on graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script
from benchmarks.programs.scripts.blocks import CLASSES

program = Register("graphs")
NODES = 16


class GCNLayer(nn.Module):
    """`adj @ (x W) + b`."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(a, b)), nn.Parameter(torch.zeros(b))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return (torch.sparse.mm if adj.is_sparse else torch.mm)(adj, x @ self.weight) + self.bias


class GCN(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GCNLayer(8, 8), GCNLayer(8, CLASSES)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.gc1(x, adj)), 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def _graph(*, sparse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    adj = (torch.rand(NODES, NODES) < 0.3).double() + torch.eye(NODES)
    adj = adj / adj.sum(1, keepdim=True)
    labels = torch.randint(0, CLASSES, (NODES,))
    return torch.randn(NODES, 8), adj.to_sparse() if sparse else adj, labels, torch.arange(10)


def _gcn(*, sparse: bool) -> Script:
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    features, adj, labels, idx_train = _graph(sparse=sparse)

    def train_step(
        model: Any, optimizer: Any, features: Tensor, adj: Tensor, labels: Tensor, idx: Tensor
    ) -> Tensor:
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss = F.nll_loss(output[idx], labels[idx])
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, [(features, adj, labels, idx_train)] * CALLS)


@program("GCN", "the whole graph at each call; a loss on the training nodes' indices")
def gcn() -> Script:
    return _gcn(sparse=False)


@program("GCN, sparse adjacency", "torch.sparse.mm")
def gcn_sparse() -> Script:
    return _gcn(sparse=True)


@program("GAT", "edges as a list, softmax over neighbours by masks")
def gat() -> Script:
    class GAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, CLASSES)
            self.a = nn.Parameter(0.1 * torch.randn(2, 2, 4))

        def forward(self, h: Tensor, adj: Tensor) -> Tensor:
            g = self.W(h).view(-1, 2, 4)
            e = (g * self.a[0]).sum(-1)[:, None] + (g * self.a[1]).sum(-1)[None]
            e = F.leaky_relu(e, 0.2).masked_fill((adj == 0).unsqueeze(-1), float("-inf"))
            a = F.dropout(F.softmax(e, dim=1), 0.1, self.training)
            return self.out(F.elu(torch.einsum("ijh,jhf->ihf", a, g).reshape(-1, 8)))

    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)

    def train_step(
        model: Any, optimizer: Any, x: Tensor, adj: Tensor, y: Tensor, mask: Tensor
    ) -> Any:
        optimizer.zero_grad()
        output = model(x, adj)
        loss = F.cross_entropy(output[mask], y[mask])
        loss.backward()
        optimizer.step()
        return loss, (output.argmax(1) == y).double().mean()

    return Script(train_step, model, optimizer, [_graph(sparse=False)] * CALLS)


@program("GraphSAGE by edges", "messages gathered along an edge list and added with index_add_")
def sage() -> Script:
    model = nn.ModuleDict(
        {"own": nn.Linear(8, 8), "others": nn.Linear(8, 8), "out": nn.Linear(8, CLASSES)}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train_step(model: Any, optimizer: Any, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        source, target = edges
        summed = torch.zeros_like(x).index_add_(0, target, x[source])
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(source))).clamp(min=1)
        h = F.relu(model["own"](x) + model["others"](summed / degree[:, None]))
        loss = F.cross_entropy(model["out"](h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (
            torch.randn(NODES, 8),
            torch.randint(0, NODES, (2, 30)),
            torch.randint(0, CLASSES, (NODES,)),
        )
        for _ in range(CALLS)
    ]
    return Script(train_step, model, optimizer, batches)
