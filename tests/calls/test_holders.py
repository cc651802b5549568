"""State is found where it hangs now, whatever was replaced since the last step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from small_steps import step as train_step
from tutti.calls.holders import Holders
from tutti.capture.state.lift import state_of
from tutti.errors import CaptureError


def _model() -> nn.Sequential:
    """A weight at two places, one of them deep inside, and buffers, two of them one tensor."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    inner[1].running_var = inner[1].running_mean
    model = nn.Sequential(nn.Linear(3, 3, bias=False), inner, nn.Linear(3, 3))
    model[2].weight = model[0].weight  # type: ignore[union-attr]
    return model


def _inner(model: Any) -> Any:
    return model[1]


def _made() -> tuple[nn.Module, torch.optim.Optimizer, Holders]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, Holders(model, [optimizer], state_of(model, optimizer))


def _replace_buffer(model: Any, _: Any) -> bool:
    model[1][1].running_mean = torch.ones(3)
    return True


def _load_optimizer(_: Any, optimizer: Any) -> bool:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return False


def _replace_slots(_: Any, optimizer: Any) -> bool:
    p = optimizer.param_groups[0]["params"][0]
    optimizer.state[p] = {k: v.clone() for k, v in optimizer.state[p].items()}
    return False


def _replace_slot(_: Any, optimizer: Any) -> bool:
    slots = optimizer.state[optimizer.param_groups[0]["params"][1]]
    slots["exp_avg"] = slots["exp_avg"].clone()
    return True


def _remove_slot(_: Any, optimizer: Any) -> bool:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"]
    return False


def _reorder_slots(_: Any, optimizer: Any) -> bool:
    slots = optimizer.state[optimizer.param_groups[0]["params"][1]]
    slots["step"] = slots.pop("step")
    return True


def _remove_buffer(model: Any, _: Any) -> bool:
    del model[1][1].running_mean
    return False


def _exchange_parameters(model: Any, _: Any) -> bool:
    norm = model[1][1]
    norm.weight, norm.bias = norm.bias, norm.weight
    return False


def _add_parameter(model: Any, _: Any) -> bool:
    model[1][0].scale = nn.Parameter(torch.ones(3))
    return False


def _replace_module(model: Any, _: Any) -> bool:
    model[1] = copy.deepcopy(model[1])
    return False


def _replace_parameter(model: Any, _: Any) -> bool:
    model[1][0].bias = nn.Parameter(torch.ones(3))
    return False


def _untie_buffer(model: Any, _: Any) -> bool:
    model[1][1].running_var = torch.ones(3)
    return True


def _nothing(_model: Any, _optimizer: Any) -> bool:
    return True


@pytest.mark.parametrize(
    "change",
    [
        _nothing,
        _replace_buffer,
        _untie_buffer,
        _load_optimizer,
        _replace_slots,
        _replace_slot,
        _remove_slot,
        _reorder_slots,
        _remove_buffer,
        _exchange_parameters,
        _add_parameter,
        _replace_module,
        _replace_parameter,
    ],
)
def test_what_is_replaced_is_noticed(change: Any) -> None:
    """Either the tensors are those that a walk finds, or it is known that they may not be."""
    model, optimizer, holders = _made()
    names = [s.name for s in state_of(model, optimizer)]
    known = change(model, optimizer)
    now = holders.tensors()
    assert (now is not None) == known
    if now is not None:
        walked = {s.name: s.tensor for s in state_of(model, optimizer)}
        assert all(x is walked[name] for x, name in zip(now, names, strict=True))


def _train_beside_plain(
    model: nn.Module, kind: type[torch.optim.Optimizer], replace: Callable[..., None]
) -> tuple[nn.Module, tutti.Step, Tensor]:
    """Three steps of `model` and of a plain twin, with `replace(model, optimizer, k)` after each."""
    plain, ours = copy.deepcopy(model), model
    pairs = [(m, kind(m.parameters(), 0.1)) for m in (plain, ours)]  # type: ignore[call-arg]
    step = tutti.distribute(train_step, ours, pairs[1][1], "")
    x = torch.randn(4, 3, dtype=torch.float64)
    for k in range(3):
        assert torch.allclose(train_step(*pairs[0], x), step(x), rtol=1e-12)
        for pair in pairs:
            replace(*pair, k)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b.detach(), rtol=1e-12)
    return ours, step, x


def test_a_step_goes_on_with_what_was_replaced() -> None:
    """A loaded optimizer and a new buffer between two steps, against the plain step."""

    def replace(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
        _inner(model)[1].running_mean = torch.full((3,), 0.5, dtype=torch.float64)
        _load_optimizer(model, optimizer)

    torch.manual_seed(0)
    _train_beside_plain(_model().double(), torch.optim.AdamW, replace)


def test_a_parameter_whose_memory_was_replaced_is_followed() -> None:
    def replace(model: Any, _: torch.optim.Optimizer, k: int) -> None:
        model.weight.data = torch.full((3, 3), 0.1 * k, dtype=torch.float64)

    torch.manual_seed(0)
    model, step, x = _train_beside_plain(nn.Linear(3, 3).double(), torch.optim.SGD, replace)
    weight = model.get_parameter("weight")
    at, before = weight.data_ptr(), weight.detach().clone()
    step(x)
    assert weight.data_ptr() == at  # updated where the user has put it
    assert not torch.equal(weight, before)


def _assigned(model: Any, _: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _new_parameter(model: Any, _: Any) -> None:
    model.weight = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize("change", [_assigned, _new_parameter], ids=lambda x: x.__name__)
def test_parameters_that_only_the_optimizer_holds_are_refused(change: Callable[..., None]) -> None:
    """In plain PyTorch it would go on updating the ones that nobody uses."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    step = tutti.distribute(train_step, model, optimizer, "")
    step(torch.ones(2, 3))
    change(model, optimizer)
    with pytest.raises(
        CaptureError, match=r"SGD holds a parameter of shape .* that the model does"
    ):
        step(torch.ones(2, 3))


def test_state_that_is_gone_is_named() -> None:
    model, optimizer, _ = _made()
    wanted = state_of(model, optimizer)
    optimizer.state.clear()
    with pytest.raises(CaptureError, match=r'the state "optim\..*" is gone'):
        Holders(model, [optimizer], wanted)


class Viewing(nn.Module):
    """A buffer that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("front", self.whole[:4])  # type: ignore[index]
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.front.add_(1)  # type: ignore[operator]
        return self.linear(x) + self.whole.sum()  # type: ignore[operator]


def test_state_that_is_a_view_of_other_state_may_be_read_but_not_changed() -> None:
    model = Viewing()
    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), 0.1), "")
    step(torch.ones(2, 3))
    model.changes = True
    with pytest.raises(CaptureError, match='"front" and "whole" share memory'):
        step(torch.ones(2, 3))
