"""A queue of keys in a buffer, as in MoCo, with its position in a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks

SIZE = 24


class Contrast(nn.Module):
    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("queue", F.normalize(torch.randn(4, SIZE), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        queries = F.normalize(self.inner(x), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.inner(other), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone()], 1)
        self.put(keys)
        return logits

    @torch.no_grad()
    def put(self, keys: Tensor) -> None:
        """As the refusal of `queue[:, p : p + count]` with `p = int(pointer)` advises."""
        at = (self.pointer + torch.arange(len(keys))) % SIZE
        self.queue[:, at] = keys.T
        self.pointer[0] = (self.pointer[0] + len(keys)) % SIZE


def _train_step(model: Any, optimizer: Any, x: Tensor, other: Tensor) -> Tensor:
    logits = model(x, other)
    loss = F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _trained(layout: str | None) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = Contrast().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None if layout is None else tutti.distribute(_train_step, model, optimizer, layout)
    found = []
    for _ in range(5):
        batch = torch.randn(2, 8, 8, dtype=torch.float64).unbind()
        found.append(_train_step(model, optimizer, *batch) if step is None else step(*batch))
    with tutti.whole(model):
        found += [x.clone() for x in model.state_dict().values()]
    return found, 0 if step is None else step._num_traces


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "tensor=2"])
def test_positions_in_a_tensor_are_those_of_each_call(ranks: Ranks, layout: str) -> None:
    for found, num_traces in ranks.run(_trained, layout, n=2):
        torch.testing.assert_close(found, _trained(None)[0], rtol=0, atol=1e-12)
        assert num_traces == 1
