"""A default device that the user has set counts in the step, and nowhere in tutti's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from tutti.capture.default_device import in_own_default, own_default_in, users_default


def made() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(3)]


def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    assert torch.empty(0).device == torch.get_default_device()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("set_by", ["set_default_device", "block"])
def test_a_step_under_another_default_device(set_by: str, tmp_path: Any) -> None:
    """`meta` stands for a GPU: a tensor of tutti's own that lay there would have no values."""

    def losses(device: str) -> list[float]:
        model, optimizer, batches = made()
        if set_by == "block":
            with torch.device(device):
                return taken(model, optimizer, batches)
        torch.set_default_device(device)
        try:
            return taken(model, optimizer, batches)
        finally:
            torch.set_default_device("cpu")

    def taken(model: Any, optimizer: Any, batches: Any) -> list[float]:
        step = tutti.distribute(train_step, model, optimizer, "")
        found = [float(step(*batch)) for batch in batches]
        step.save(tmp_path / "saved")
        step.load(tmp_path / "saved")
        assert step.explain()
        state = step.state_dict()
        step.load_state_dict(state)
        return [*found, float(step(*batches[0]))]

    try:
        assert losses("meta") == losses("cpu")
    finally:
        torch.set_default_device(None)


def test_verify_under_another_default_device() -> None:
    model, optimizer, batches = made()
    with torch.device("meta"):
        assert tutti.verify(train_step, model, optimizer, batches[0], "data=2 zero=2").ok


def test_the_users_code_sees_its_own_default() -> None:
    def inner() -> tuple[str, str]:
        mine = torch.empty(0).device.type
        with users_default():
            return mine, torch.empty(0).device.type

    class Held:
        def method(self) -> tuple[str, str]:
            return inner()

    with torch.device("meta"):
        assert in_own_default(inner)() == ("cpu", "meta")
        assert own_default_in("method")(Held)().method() == ("cpu", "meta")
        assert torch.empty(0).device.type == "meta"
    assert in_own_default(inner)() == ("cpu", "cpu")


def test_an_error_leaves_the_default_as_it_was() -> None:
    @in_own_default
    def fail() -> None:
        raise ValueError

    with torch.device("meta"):
        with pytest.raises(ValueError):
            fail()
        assert torch.get_default_device().type == "meta"
        with users_default():
            assert torch.get_default_device().type == "meta"
