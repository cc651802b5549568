"""Predicted weights against late gradients, where theory says when steps are stable."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from server.protocol.test_machine import Desk
from server.protocol.updaters import Sgd
from tutti.server.protocol.update import WEIGHT, ServedVariable

MOMENTUM = 0.9 ** (1 / 3)
POINT = ServedVariable(
    name="w", shape=(2,), dtype=torch.float64, slots={"first": ((2,), torch.float64)}
)
STRAIGHT = ServedVariable(name="w", shape=(2,), dtype=torch.float64)


@dataclass
class Momentum(Sgd):
    """m <- b m + (1 - b) g, w <- w - lr m."""

    variables: tuple[ServedVariable, ...] = (POINT,)

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        first = state["first"].lerp_(gradient, 1 - MOMENTUM)
        state[WEIGHT].sub_(first, alpha=scalars["lr"])


def distance(sync: str, steepness: float, num_workers: int = 3, updates: int = 600) -> float:
    """How far from the bottom of a valley workers are who take turns, each pulling after its push."""
    desk = Desk(sync, Momentum(), num_workers=num_workers)
    turns: deque[tuple[int, int, Tensor]] = deque()
    for worker in range(num_workers):
        desk.join(worker)
        turns.append((worker, 0, desk.weights()["w"]))
    for k in range(updates):
        worker, version, seen = turns.popleft()
        clock = k // num_workers
        desk.push(worker, clock + 1, version=version, made={"w": seen}, given={"lr": steepness})
        now = desk.pull(worker, clock + 1)
        turns.append((worker, now.version, now.parts[0].values.clone()))
    tau = num_workers - 1
    assert desk.machine.ledger.staleness[tau] == updates - tau
    return desk.weights()["w"].abs().max().item()


@pytest.mark.parametrize(
    ("sync", "stable", "unstable"), [("async", 0.4, 0.7), ("async(predict)", 2.6, 3.2)]
)
def test_two_updates_late_steps_are_stable_as_far_as_theory_says(
    sync: str, stable: float, unstable: float
) -> None:
    """Roots of (z - 1)(z - b) z^3 + h (1 - b) z (z + p (z - 1)): on the unit circle at h = 0.49 and 2.87."""
    assert distance(sync, stable) < 0.2
    assert distance(sync, unstable) > 10


def test_the_prediction_of_a_straight_way_is_where_it_leads() -> None:
    """Weights that move by as much each update are given as they are once the gradient is applied."""
    desk, count, given = Desk("async(predict)", Sgd(variables=(STRAIGHT,)), num_workers=3), 150, {}
    for worker in range(3):
        desk.join(worker)
    gradient = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    for k in range(count):
        desk.push(k % 3, k // 3 + 1, version=max(0, k - 2), made=gradient, given={"lr": 0.125})
        given[k + 3] = desk.pull(k % 3, k // 3 + 1).parts[0].values.clone()
    torch.testing.assert_close(given[count - 1], desk.weights()["w"], rtol=0, atol=1e-3)
    assert abs(desk.machine.ledger.lag - 2) < 1e-3
