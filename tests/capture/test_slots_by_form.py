"""Slots that are made by the form of a parameter are those that a step on the weights makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capture.test_lift import OPTIMIZERS
from tutti.capture.state.first_form import make_slots
from tutti.capture.state.lift import create_slots
from tutti.capture.state.slots_by_form import make_slots_by_form

MORE = {
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "lr in a tensor": partial(torch.optim.AdamW, lr=torch.tensor(0.1)),
    "capturable": partial(torch.optim.Adam, capturable=False, foreach=True),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rprop by another rate": partial(torch.optim.Rprop, lr=0.03),
    "asgd by another rate": partial(torch.optim.ASGD, lr=0.03, t0=0),
    "rmsprop plain": torch.optim.RMSprop,
}


def parameters() -> list[nn.Parameter]:
    """One of each form: a number, vectors, matrices with dims of one, a kernel, none of them zero."""
    torch.manual_seed(0)
    shapes = [(), (1,), (3,), (130,), (40, 7), (1, 90), (90, 1), (5, 3, 3, 3), (2, 2)]
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made.append(nn.Parameter(torch.randn(9, 11, dtype=torch.bfloat16)))
    made.append(nn.Parameter(torch.randn(9, 11, dtype=torch.float64)))
    return made


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype, a.device, a.stride(), a.requires_grad) == (
            (b.shape, b.dtype, b.device, b.stride(), b.requires_grad)
        ) and a.equal(b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_slots_are_those_of_a_step_on_the_weights(name: str) -> None:
    make = (OPTIMIZERS | MORE)[name]
    expected, found = make(parameters()), make(parameters())
    create_slots(expected)
    weights = [p.detach().clone() for p in found.param_groups[0]["params"]]
    assert make_slots_by_form(found)
    both = zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True)
    for p, other in both:
        mine, theirs = found.state.get(p, {}), expected.state.get(other, {})
        assert list(mine) == list(theirs)
        assert all(same(x, theirs[key]) for key, x in mine.items()), (p.shape, mine, theirs)
        assert p.grad is None
    assert all(map(torch.equal, found.param_groups[0]["params"], weights))
    memory = [x.data_ptr() for s in found.state.values() for x in s.values() if torch.is_tensor(x)]
    assert len(set(memory)) == len(memory)  # no slot is another parameter's


def test_slots_of_groups_begin_by_the_options_of_each() -> None:
    one, two = parameters()[3:5]
    groups = [{"params": [one], "lr": 0.5}, {"params": [two], "lr": 0.25}]
    optimizer = torch.optim.Rprop(groups)
    assert make_slots_by_form(optimizer)
    assert optimizer.state[one]["step_size"].eq(0.5).all()
    assert optimizer.state[two]["step_size"].eq(0.25).all()


def test_slots_that_are_there_stay() -> None:
    one, two = parameters()[3:5]
    optimizer = torch.optim.AdamW([one, two])
    one.grad = torch.ones_like(one)
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[one].items()}
    assert make_slots_by_form(optimizer)
    assert all(v.equal(before[k]) for k, v in optimizer.state[one].items())
    assert not optimizer.state[two]["exp_avg"].any()


class Copying(Optimizer):
    """A slot that begins as the weight."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not self.state[p]:
                self.state[p]["begin"] = p.detach().clone()


def test_what_varies_or_lies_otherwise_is_left_to_a_step_on_the_weights() -> None:
    assert not make_slots_by_form(Copying(parameters()))
    kernel = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([kernel])
    assert not make_slots_by_form(optimizer) and not optimizer.state
    make_slots(optimizer)
    assert optimizer.state[kernel]["exp_avg"].stride() == kernel.stride()


class Counted(TorchDispatchMode):
    """Bytes of all tensors that calls return."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nbytes += sum(x.nbytes for x in tree_leaves(result) if torch.is_tensor(x))
        return result


def test_nothing_of_the_size_of_the_weights_is_made_but_the_slots() -> None:
    weights = [nn.Parameter(torch.randn(500, 300)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    with Counted() as counted:
        make_slots(optimizer)
    assert counted.nbytes < 2.05 * sum(p.nbytes for p in weights)
