"""A mixture of experts with stacked weights and a capacity: the search splits the experts over `expert`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.planner.placement.placement import find_place

EXPERTS, WIDTH, CAPACITY = 4, 32, 12


class Mixture(nn.Module):
    """Each token goes to its best expert, if that has room (Switch Transformer): [tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, 4 * WIDTH))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, 4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        best = F.one_hot(shares.argmax(-1), EXPERTS)
        place = best.cumsum(0) * best - 1
        sent = (
            F.one_hot(place.clamp(0, CAPACITY - 1), CAPACITY)
            * (best * (place < CAPACITY))[..., None]
        )
        sent = sent.to(x.dtype)
        inside = torch.einsum("tec,td->ecd", sent, x)
        made = torch.bmm(F.gelu(torch.bmm(inside, self.up)), self.down)
        return x + torch.einsum("tec,ecd->td", sent * shares[..., None], made)


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def arguments() -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), Mixture())
    batch = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
    return train_step, model, torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5), batch


def test_experts_are_split() -> None:
    made = find_place(capture(*arguments()), Layout.parse("expert=2"))
    assert made.place["*.up"] == made.place["*.down"] == "expert, -, -"
    assert made.words[0].startswith("mixture of experts: experts over expert (")
    assert made.seconds < made.whole_seconds


def test_same_numbers_over_experts() -> None:
    step, model, optimizer, batch = arguments()
    verdict = tutti.verify(step, model, optimizer, batch, "expert=2 tensor=2")
    assert verdict.ok and verdict.max_error < 1e-9, str(verdict)
