"""Batches of many sizes: the numbers of one device, and memory that does not grow with them."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks
from small_steps import trained
from tutti import api
from tutti.runtime.residence import residence_of

LENGTHS = (8, 12, 16, 10, 6, 14, 8, 18)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(32, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / tokens.shape[1]


def losses_of(layout: str | None) -> list[float]:
    """Losses of a run over batches of many lengths; without a layout, in plain PyTorch."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = trained(loss_of)
    played = tutti.distribute(step, model, optimizer, layout) if layout is not None else None
    torch.manual_seed(1)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(32, (4, length))
        found.append((played(tokens) if played else step(model, optimizer, tokens)).item())
    if played is not None and played.layout.num_ranks > 1:
        home = residence_of(model, played.layout)
        for shared in home.shared.arenas:  # buffers of all programs lie in the same few
            assert len(shared._arenas._arenas) <= 3
    return found


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_ranks_train_as_one_over_many_lengths(ranks: Ranks, layout: str) -> None:
    expected = losses_of(None)
    for found in ranks.run(losses_of, layout, n=2):
        assert found == pytest.approx(expected, rel=1e-10)


def test_no_more_programs_are_kept_than_asked_for() -> None:
    model = nn.Linear(4, 4)
    step = tutti.distribute(lambda m, x: m(x).sum(), model, None, "")
    with mock.patch.object(api, "MOST_PROGRAMS", 2):
        kept: list[weakref.ref[object]] = []
        for rows in (2, 3, 4, 3, 5, 6):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(step(x), model(x).sum())
            assert step._last is not None
            kept.append(weakref.ref(step._last.execution))
    gc.collect()
    alive = {i for i, one in enumerate(kept) if one() is not None}
    assert alive == {4, 5}  # those of 5 and of 6 rows
