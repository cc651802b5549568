"""Large tables travel by row: those that a batch reads are pulled and pushed; the numbers are the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.server.protocol.virtual_servers import VirtualServers
from tutti.server.split.three_parts import split
from tutti.verification.comparisons import feed_of
from tutti.verification.verdict import Subject
from tutti.verification.verify_servers import verdict_of

SIZE, WIDTH, PADDING = 70_000, 4, 3


class Tables(nn.Module):
    """A large table, its padding left alone, a small one, and a layer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.large = nn.Embedding(SIZE, WIDTH, padding_idx=PADDING)
        self.small = nn.Embedding(10, WIDTH)
        self.head, self.tied = nn.Linear(WIDTH, 5), tied

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.large(tokens) + self.small(tokens % 10)
        scale = self.large.weight.sum() if self.tied else 1.0
        return self.head(h) * scale


def train_step(model: Any, optimizer: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


def batch(which: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Some tokens are the same, some padding, and some are not counted."""
    g = torch.Generator().manual_seed(which)
    tokens = torch.randint(SIZE, (rows, 5), generator=g)
    tokens[:, 1], tokens[0, 2], tokens[1:, 3] = 17, PADDING, SIZE - 1
    targets = torch.randint(5, (rows, 5), generator=g)
    targets[0] = -1
    return tokens, targets


def test_only_large_tables_that_are_looked_up_travel_by_row() -> None:
    def kinds(model: nn.Module, **options: Any) -> dict[str, bool]:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        made = split(capture(train_step, model, optimizer, batch(0)))
        return {o.variable.name: o.variable.rows for o in made.owned}

    assert kinds(Tables()) == {
        "large.weight": True,
        "small.weight": False,
        "head.weight": False,
        "head.bias": False,
    }
    assert not any(kinds(Tables(tied=True)).values())


@pytest.mark.parametrize("sync", ["step", "async", "async(after=2, predict)"])
def test_rows_give_the_step_of_one_device_and_the_table_never_travels(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tables()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layout = Layout.parse(f"replica=2 server=2 sync={sync}")
    phases = []
    for batches in [[batch(0)]] * (sync != "async") + [[batch(1), batch(2)]] * (sync != "step"):
        subject = Subject(partial(train_step), model, optimizer, batches[0], steps=2)
        phases.append((subject, [feed_of(subject.captured, optimizer, one) for one in batches]))
    sent: list[int] = []
    plain = VirtualServers._cut

    def counted(self: VirtualServers, worker: int, gradients: Any) -> Any:
        parts = plain(self, worker, gradients)
        table = [p for k, p in parts.items() if self.blocks[k].variable.name == "large.weight"]
        assert all(p.rows is not None and bool((p.rows[1:] > p.rows[:-1]).all()) for p in table)
        sent.append(sum(len(p.values) for p in table))
        return parts

    monkeypatch.setattr(VirtualServers, "_cut", counted)
    found = verdict_of(*phases[0], layout, then=phases[1] if len(phases) > 1 else None)
    assert found.ok and found.max_error < 1e-13, found
    assert len(sent) >= 4 and 0 < max(sent) <= 30
