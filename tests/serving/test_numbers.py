"""Python numbers that a step reads and the script changes between calls, in a run with servers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from serving.test_worker_side import OneServer
from tutti.environment import ROLE, SERVERS
from tutti.errors import ServerError
from tutti.serving import worker_side


class Summed(torch.optim.Optimizer):
    """Adds up gradients in a slot that its first step makes; its options are those of no other optimizer."""

    def __init__(self, params: Any, alpha: float = 0.1, every: int = 2) -> None:
        super().__init__(params, {"alpha": alpha, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slots = self.state[p]
                if not slots:
                    slots["z"] = torch.zeros_like(p)
                slots["z"].add_(p.grad)
                p.add_(slots["z"], alpha=-group["alpha"] / group["every"])


def train_step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    y = model(x)
    loss = y.square().mean() + model.beta * y.abs().mean() / (model.epoch + 1)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(model.scale)
    optimizer.step()
    return loss


def made() -> tuple[Any, Summed]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2).double()
    model.beta, model.epoch, model.scale = 0.5, 0, 0.9
    return model, Summed(model.parameters())


def change(model: Any, optimizer: Summed, k: int) -> None:
    if k == 1:
        model.beta *= 0.7
    elif k == 2:
        model.epoch += 1
    elif k == 3:
        optimizer.param_groups[0]["alpha"] *= 0.5
        optimizer.param_groups[0]["every"] += 1


@pytest.fixture(autouse=True)
def one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROLE.name, "worker 0")
    monkeypatch.setenv(SERVERS.name, "nowhere:1")
    monkeypatch.setattr(worker_side, "Client", OneServer)
    monkeypatch.setattr(worker_side, "_JOINED", [])
    monkeypatch.setattr(worker_side.atexit, "register", lambda _: None)
    OneServer.asked = []
    OneServer.state = {
        n: {"weight": p.detach().clone(), "z": torch.zeros_like(p)}
        for n, p in made()[0].named_parameters()
    }


def distributed(model: Any, optimizer: Summed) -> Any:
    return tutti.distribute(train_step, model, optimizer, "replica=2 server=1 sync=async")


def test_numbers_follow_the_script() -> None:
    model, optimizer = made()
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    step = distributed(model, optimizer)
    for k in range(5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k)).double()
        torch.testing.assert_close(
            step(x), train_step(plain, plain_optimizer, x[:4]).detach(), rtol=0, atol=1e-12
        )
        change(model, optimizer, k)
        change(plain, plain_optimizer, k)


def test_a_constant_of_the_servers_update_is_refused_by_name() -> None:
    model, optimizer = made()
    step = distributed(model, optimizer)
    step(torch.ones(8, 4).double())
    model.scale = 0.8
    with pytest.raises(ServerError, match="another update than") as error:
        step(torch.ones(8, 4).double())
    assert "scale, which was a constant" in str(error.value)


def test_a_weight_that_is_frozen_later_is_refused_by_name() -> None:
    model, optimizer = made()
    step = distributed(model, optimizer)
    step(torch.ones(8, 4).double())
    model.bias.requires_grad_(False)
    model.bias.grad = None
    with pytest.raises(ServerError, match="another update than") as error:
        step(torch.ones(8, 4).double())
    assert '"bias" is trained no longer' in str(error.value)


def other_step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return train_step(model, optimizer, x)


def test_a_second_training_step_is_refused_by_name() -> None:
    model, optimizer = made()
    first = distributed(model, optimizer)
    other = tutti.distribute(other_step, model, optimizer, "replica=2 server=1 sync=async")
    first(torch.ones(8, 4).double())
    with pytest.raises(ServerError, match="under servers: train_step and other_step"):
        other(torch.ones(8, 4).double())
