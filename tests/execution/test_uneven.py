"""Batches that no layout was made for: an uneven last one, other first dims, samples in another dim."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from captured_once import captured_once
from ranks import Ranks

PLACE = {"0.weight": "tensor, -", "3.weight": "-, tensor"}
ROWS = (12, 7, 12, 6)
TWO = [
    "data=2",
    "data=2 zero=1 micro=4",
    "data=2 zero=3",
    "micro=5 tensor=2",
    "pipe=2 micro=4 schedule=zb",
]
FOUR = ["data=4 zero=3", "data=2 tensor=2 zero=1", "data=2 pipe=2 micro=2 zero=1"]


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over samples of which some are ignored; dropout; a clip."""
    logits = model(x)
    loss = F.cross_entropy(logits, y, ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), logits.detach()


def batch(k: int, rows: int) -> tuple[Tensor, Tensor]:
    """Vectors and classes; the first of more than one sample is ignored."""
    chance = torch.Generator().manual_seed(k)
    y = torch.randint(0, 4, (rows,), generator=chance)
    y[0] = -1 if rows > 1 else 0
    return torch.randn(rows, 8, generator=chance).double(), y


def run(layout: str) -> tuple[list[Any], list[str]]:
    """What each step returns, and the warnings."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = tutti.distribute(train_step, model, optimizer, layout, place=PLACE)
    with captured_once("uneven"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [step(*batch(k, rows)) for k, rows in enumerate(ROWS)]
    return [(float(loss), logits.tolist()) for loss, logits in found], [
        str(w.message) for w in caught
    ]


@cache
def on_ranks(ranks: Ranks, layout: str, n: int) -> list[Any]:
    return ranks.after(run, "").run(run, layout, n=n)


def check(ranks: Ranks, layout: str, n: int) -> None:
    expected, _ = ranks.after(run, "").result
    for found, _ in on_ranks(ranks, layout, n):
        for (loss, logits), (one, rows) in zip(found, expected, strict=True):
            assert loss == pytest.approx(one, rel=1e-12, abs=1e-13)
            torch.testing.assert_close(
                torch.tensor(logits), torch.tensor(rows), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks(ranks: Ranks, layout: str) -> None:
    check(ranks, layout, 2)


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks(ranks: Ranks, layout: str) -> None:
    check(ranks, layout, 4)


def test_it_is_said(ranks: Ranks) -> None:
    for _, said in on_ranks(ranks, "data=2", 2):
        uneven = [w for w in said if "do not divide by data=2" in w]
        assert len(uneven) == 1 and "drop_last=True" in uneven[0], said
