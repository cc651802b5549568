"""State moves to shared memory once, and its former memory is free."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
from ranks import Ranks
from tutti.state.residences import known_residence
from tutti.state.shared_storage import Lodging


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """A step that updates nothing."""
    with torch.no_grad():
        return model(x).square().mean()


def train_bias(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step that updates the biases alone."""
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _moves(layout: str, frozen: bool) -> tuple[list[int], list[float], list[bool]]:
    """The moves of each of four calls, their results, and whether each weight lies in shared memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if frozen:
        model.requires_grad_(False)
        step = tutti.distribute(evaluate, model, None, layout)
    else:
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        step = tutti.distribute(train_bias, model, optimizer, layout)
    moves, results = [], []
    x = torch.linspace(-1, 1, 32).view(4, 8)
    for _ in range(4):
        with mock.patch.object(Lodging, "move_in", autospec=True) as moved:
            moved.side_effect = MOVE_IN
            results.append(step(x).item())
        moves.append(moved.call_count)
    home = known_residence(model)
    assert home is not None
    lies = []
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        lies.append(p.to_local().data_ptr() == home.shared.lodgings[name].own.data_ptr())
    return moves, results, lies


MOVE_IN = Lodging.move_in


@pytest.mark.parametrize("frozen", [True, False])
def test_state_that_a_step_only_reads_moves_once(ranks: Ranks, frozen: bool) -> None:
    """Each call copied it anew, and it was held twice."""
    for moves, results, lies in ranks.run(_moves, "data=2 zero=3", frozen, n=2):
        assert moves == [4, 0, 0, 0]
        assert all(lies)
        assert len(set(results)) == (1 if frozen else 4)
