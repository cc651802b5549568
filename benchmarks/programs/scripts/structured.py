"""Graphs, tables, series: what is neither text nor images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script, whole
from benchmarks.programs.scripts.blocks import mlp

program = Register("structured")
NODES = 16


def _dlrm(*, sparse: bool) -> Script:
    class DLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb_l = nn.ModuleList(
                nn.EmbeddingBag(12, 4, mode="sum", sparse=sparse) for _ in range(3)
            )
            self.bot_l, self.top_l = mlp(5, 8, 4), mlp(10, 8, 1)

        def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
            x = self.bot_l(dense)
            ly = [e(indices[k], offsets[k]) for k, e in enumerate(self.emb_l)]
            T = torch.cat([x, *ly], dim=1).view(x.size(0), -1, x.size(1))
            Z = torch.bmm(T, T.transpose(1, 2))
            li = torch.tensor([i for i in range(4) for j in range(i)])
            lj = torch.tensor([j for i in range(4) for j in range(i)])
            return torch.sigmoid(self.top_l(torch.cat([x, Z[:, li, lj]], dim=1)))

    model, loss_fn = DLRM(), nn.BCELoss(reduction="mean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(
        model: Any, optimizer: Any, X: Tensor, lS_o: Tensor, lS_i: Tensor, T: Tensor
    ) -> Tensor:
        E = loss_fn(model(X, lS_o, lS_i), T)
        optimizer.zero_grad()
        E.backward()
        optimizer.step()
        return E

    batches = []
    for _ in range(CALLS):
        offsets = (torch.arange(8) * 2).repeat(3, 1)
        batches.append(
            (
                torch.randn(8, 5),
                offsets,
                torch.randint(0, 12, (3, 16)),
                torch.randint(0, 2, (8, 1)).double(),
            )
        )
    return Script(train_step, model, optimizer, batches)


@program("DLRM", "embedding bags with offsets, pairwise products, BCE")
def dlrm() -> Script:
    return _dlrm(sparse=False)


@program("DLRM, sparse=True", "the original's default: sparse gradients of the embeddings")
def dlrm_sparse() -> Script:
    return _dlrm(sparse=True)


@program("regression", "a polynomial; random batches; a loop until the loss is small, outside")
def regression() -> Script:
    model = nn.Linear(4, 1)

    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.smooth_l1_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(-0.1 * param.grad)
        return loss

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.cat([torch.randn(8, 1) ** i for i in range(1, 5)], 1)
        return x, x @ torch.ones(4, 1) + 2

    return Script(train_step, model, None, [batch() for _ in range(CALLS)])


@program(
    "snli", "a bidirectional LSTM over pairs of sentences, an embedding that is fixed, lr halves"
)
def snli() -> Script:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.projection = nn.Embedding(32, 8), nn.Linear(8, 8)
            self.rnn = nn.LSTM(8, 4, 1, dropout=0.0, bidirectional=True)
            self.out, self.fix_emb = mlp(32, 16, 3), True

        def encode(self, x: Tensor) -> Tensor:
            e = self.embed(x)
            if self.fix_emb:
                e = e.detach()
            zeros = e.new_zeros(2, x.shape[1], 4)
            _, (ht, _) = self.rnn(F.relu(self.projection(e)), (zeros, zeros))
            return ht.transpose(0, 1).contiguous().view(x.shape[1], -1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            p, h = self.encode(batch["premise"]), self.encode(batch["hypothesis"])
            return self.out(torch.cat([p, h, (p - h).abs(), p * h], 1))

    model, criterion = Classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Any:
        model.train()
        optimizer.zero_grad()
        answer = model(batch)
        right = (torch.max(answer, 1)[1].view(batch["label"].size()) == batch["label"]).sum()
        loss = criterion(answer, batch["label"])
        loss.backward()
        optimizer.step()
        return loss, right

    def between(call: int) -> None:
        if call == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
            model.fix_emb = False

    batches = []
    for _ in range(CALLS):
        words = torch.randint(0, 32, (2, 5, 4))
        batches.append(
            ({"premise": words[0], "hypothesis": words[1], "label": torch.randint(0, 3, (4,))},)
        )
    return Script(train_step, model, optimizer, batches, between)


@program("TCN", "dilated causal convolutions, weight_norm, a changed length")
def tcn() -> Script:
    from torch.nn.utils.parametrizations import weight_norm

    class TCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = weight_norm(nn.Conv1d(2, 8, 2, padding=1))
            self.conv2 = weight_norm(nn.Conv1d(8, 8, 2, padding=2, dilation=2))
            self.down, self.linear, self.dropout = (
                nn.Conv1d(2, 8, 1),
                nn.Linear(8, 1),
                nn.Dropout(0.1),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.dropout(F.relu(self.conv1(x)[..., :-1]))
            y = self.dropout(F.relu(self.conv2(y)[..., :-2]))
            return self.linear(F.relu(y + self.down(x))[:, :, -1])

    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        return loss

    batches = [(torch.randn(4, 2, n), torch.randn(4, 1)) for n in (8, 8, 6, 8)]
    return Script(train_step, model, optimizer, batches)


@program(
    "matrix factorization",
    "user and item embeddings, biases by squeeze, an evaluation of all pairs",
)
def factorization() -> Script:
    class MF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(10, 4), nn.Embedding(12, 4)
            self.user_bias, self.item_bias = nn.Embedding(10, 1), nn.Embedding(12, 1)
            self.mu = nn.Parameter(torch.tensor(3.0), requires_grad=False)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            both = (self.user(u) * self.item(v)).sum(1)
            return both + self.user_bias(u).squeeze() + self.item_bias(v).squeeze() + self.mu

    model = MF()
    optimizer = torch.optim.Adam(
        filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2, weight_decay=1e-4
    )

    def train_step(
        model: Any, optimizer: Any, users: Tensor, items: Tensor, ratings: Tensor
    ) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(users, items), ratings)
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> Any:
        with torch.no_grad(), whole(model):
            return (model.user.weight @ model.item.weight.T).topk(3, dim=1).indices

    batches = [
        (torch.randint(0, 10, (8,)), torch.randint(0, 12, (8,)), 5 * torch.rand(8))
        for _ in range(CALLS)
    ]
    return Script(train_step, model, optimizer, batches, between)


@program(
    "PINN", "derivatives by autograd.grad with create_graph, weights of losses adapted in between"
)
def pinn() -> Script:
    model = mlp(2, 16, 16, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lambdas = {"pde": 1.0, "boundary": 1.0}

    def train_step(model: Any, optimizer: Any, points: Tensor, edge: Tensor, values: Tensor) -> Any:
        points = points.clone().requires_grad_(True)
        u = model(points)
        du = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)[0]
        dxx = torch.autograd.grad(du[:, 0], points, torch.ones_like(du[:, 0]), create_graph=True)[
            0
        ][:, 0]
        pde = (du[:, 1] - 0.1 * dxx).square().mean()
        boundary = F.mse_loss(model(edge), values)
        loss = lambdas["pde"] * pde + lambdas["boundary"] * boundary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"pde": pde, "boundary": boundary}

    def between(call: int) -> None:
        lambdas["boundary"] = 0.9 * lambdas["boundary"] + 0.5

    batches = [(torch.rand(8, 2), torch.rand(8, 2), torch.randn(8, 1)) for _ in range(CALLS)]
    return Script(train_step, model, optimizer, batches, between)
