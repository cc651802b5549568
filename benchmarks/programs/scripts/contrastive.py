"""Networks that learn from pairs and views."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.script import CALLS, Register, Script
from benchmarks.programs.scripts.blocks import Block, mlp, tokens

program = Register("contrastive")


def _views() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(CALLS)]


@program("SimCLR", "a loss over all pairs of the batch; the diagonal masked with a bool")
def simclr() -> Script:
    model, temperature = mlp(8, 16, 8), 0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def info_nce_loss(features: Tensor, n: int) -> tuple[Tensor, Tensor]:
        labels = torch.cat([torch.arange(n) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).to(features.dtype)
        features = F.normalize(features, dim=1)
        similarity = features @ features.T
        mask = torch.eye(2 * n, dtype=torch.bool)
        labels = labels[~mask].view(2 * n, -1)
        similarity = similarity[~mask].view(2 * n, -1)
        positives = similarity[labels.bool()].view(2 * n, -1)
        negatives = similarity[~labels.bool()].view(2 * n, -1)
        logits = torch.cat([positives, negatives], dim=1) / temperature
        return logits, torch.zeros(2 * n, dtype=torch.long)

    def train_step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        logits, labels = info_nce_loss(model(torch.cat([a, b])), len(a))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, _views())


@program("NT-Xent by masked_fill", "SimCLR as rewritten with masks instead of boolean indexing")
def nt_xent() -> Script:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([model(a), model(b)]), dim=-1)
        n = z.shape[0]
        logits = (z @ z.T / 0.2).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
        loss = F.cross_entropy(logits, (torch.arange(n) + n // 2) % n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, _views())


@program(
    "MoCo", "a momentum encoder, a queue as a buffer, its pointer a tensor; all within the step"
)
def moco() -> Script:
    class MoCo(nn.Module):
        def __init__(self, m: float = 0.9, T: float = 0.2, K: int = 32) -> None:
            super().__init__()
            self.K, self.m, self.T = K, m, T
            self.encoder_q, self.encoder_k = mlp(8, 16, 8), mlp(8, 16, 8)
            self.encoder_k.load_state_dict(self.encoder_q.state_dict())
            self.encoder_k.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: Tensor) -> None:
            where = (self.queue_ptr + torch.arange(keys.shape[0])) % self.K
            self.queue.index_copy_(1, where, keys.T)
            self.queue_ptr.copy_((self.queue_ptr + keys.shape[0]) % self.K)

        def forward(self, im_q: Tensor, im_k: Tensor) -> Any:
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for a, b in zip(
                    self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
                ):
                    b.data = b.data * self.m + a.data * (1.0 - self.m)
                k = F.normalize(self.encoder_k(im_k), dim=1)
            pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
            neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
            logits = torch.cat([pos, neg], dim=1) / self.T
            self._dequeue_and_enqueue(k)
            return logits, torch.zeros(logits.shape[0], dtype=torch.long)

    model, criterion = MoCo(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)

    def train_step(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
        output, target = model(im_q=a, im_k=b)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train_step, model, optimizer, _views())


@program(
    "MoCo, the pointer by int()",
    "the original's queue: ptr = int(self.queue_ptr), a slice written",
    changes=0,
)
def moco_int() -> Script:
    made = moco()
    model = made.model

    @torch.no_grad()
    def enqueue(keys: Tensor) -> None:
        ptr, size = int(model.queue_ptr), keys.shape[0]
        model.queue[:, ptr : ptr + size] = keys.T
        model.queue_ptr[0] = (ptr + size) % model.K

    model._dequeue_and_enqueue = enqueue
    return made


@program("CLIP", "two towers, a learned temperature clamped in the step by .data, a symmetric loss")
def clip() -> Script:
    class CLIP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual, self.token_embedding = mlp(12, 16, 8), nn.Embedding(32, 8)
            self.block, self.text_projection = Block(8), nn.Parameter(0.3 * torch.randn(8, 8))
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def forward(self, image: Tensor, text: Tensor) -> Any:
            x = self.block(self.token_embedding(text))
            said = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection
            seen, said = F.normalize(self.visual(image), dim=1), F.normalize(said, dim=1)
            logits = self.logit_scale.exp() * seen @ said.t()
            return logits, logits.t()

    model = CLIP()
    gain = [p for n, p in model.named_parameters() if p.ndim < 2 or "logit_scale" in n]
    rest = [p for n, p in model.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": gain, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}],
        lr=1e-3,
        betas=(0.9, 0.98),
    )

    def train_step(model: Any, optimizer: Any, images: Tensor, texts: Tensor) -> Any:
        a, b = model(images, texts)
        labels = torch.arange(len(images))
        loss = (F.cross_entropy(a, labels) + F.cross_entropy(b, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        return loss, model.logit_scale.detach()

    batches = [(torch.randn(4, 12), tokens(i)[0]) for i in range(CALLS)]
    return Script(train_step, model, optimizer, batches)


@program("triplet margin", "three calls of one network; a margin that grows in between")
def triplet() -> Script:
    model, criterion = mlp(8, 16, 8), nn.TripletMarginLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_step(model: Any, optimizer: Any, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(a), model(p), model(n))
        loss.backward()
        optimizer.step()
        return loss

    def between(call: int) -> None:
        criterion.margin += 0.3

    batches = [tuple(torch.randn(3, 8, 8)) for _ in range(CALLS)]
    return Script(train_step, model, optimizer, batches, between)
