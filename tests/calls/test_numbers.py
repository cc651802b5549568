"""The numbers of a call are those that a walk over the optimizers finds, whatever was changed since."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tutti.calls.numbers import Numbers
from tutti.capture.state.lift import numbers


def _set(key: str, value: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        optimizer.param_groups[0][key] = value

    change.__name__ = f"{key}={value}"
    return change


def _add_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})


def _load(optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)


def _remove(optimizer: Any) -> None:
    del optimizer.param_groups[0]["betas"]


def _rename(optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = optimizer.param_groups[0].pop("betas")[0]


@pytest.mark.parametrize(
    "change",
    [
        _set("lr", 0.5),
        _set("lr", 2),
        _set("lr", torch.tensor(0.5)),
        _set("betas", (0.5, 0.6)),
        _set("betas", (0.5,)),
        _set("betas", (0.5, 0.6, 0.7)),
        _set("betas", (0, 1)),
        _set("betas", 0.5),
        _set("momentum", 0.5),
        _add_group,
        _load,
        _remove,
        _rename,
    ],
    ids=lambda change: change.__name__,
)
def test_a_change_is_seen(change: Callable[[Any], None]) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.125)
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.25)
    found, leaves = Numbers([optimizer, other]), [torch.ones(2), 1.5, 3, 2.5]
    before = found.of(leaves, {})
    assert before == numbers([optimizer, other], leaves, {})
    assert found.of(leaves, {}) == before
    change(optimizer)
    now = numbers([optimizer, other], leaves, {})
    assert now != before
    assert found.of(leaves, {}) == now
    assert found.of(leaves, {}) == now
    assert all(type(x) is float for x in now.values())


def test_without_an_optimizer_there_are_the_batchs_floats() -> None:
    assert Numbers(None).of([1, 0.5], {"python.a": 2.0}) == {
        "python.a": 2.0,
        "number.0": 0.5,
    }
