"""What servers cannot run is refused with the node and the reason; equal steps have equal fingerprints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tutti.capture.step import capture
from tutti.errors import CaptureError
from tutti.server.split.three_parts import Split, split
from tutti.server.split.updater import GraphUpdater


class Two(nn.Module):
    """Two layers and a copy of the first that a step may let trail behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("trailing", torch.zeros(3, 3))


def split_of(step: Callable[..., Any], *, lr: float = 0.1, names: str = "") -> Split:
    torch.manual_seed(0)
    model = Two()
    trained = [p for n, p in model.named_parameters() if n.startswith(names)]
    return split(capture(step, model, torch.optim.SGD(trained, lr=lr), (torch.randn(4, 3),)))


def loss_of(model: Any, x: Any) -> Any:
    return model.second(torch.tanh(model.first(x))).square().mean()


def plain(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss


def returns(what: Callable[[Any], Any], model: Any, optimizer: Any, x: Any) -> Any:
    plain(model, optimizer, x)
    return what(model)


def twice(model: Any, optimizer: Any, x: Any) -> Any:
    plain(model, optimizer, x)
    return plain(model, optimizer, x)


def shaken(model: Any, optimizer: Any, x: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad))
    optimizer.step()


class Langevin(torch.optim.Optimizer):
    """A step along the gradient and one at random."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


def trails(model: Any, optimizer: Any, x: Any) -> None:
    plain(model, optimizer, x)
    with torch.no_grad():
        model.trailing.lerp_(model.first.weight, 0.1)


def mixes(model: Any, optimizer: Any, x: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    model.first.bias.grad.add_(model.first.weight.grad.sum(0))
    optimizer.step()


def clips(model: Any, optimizer: Any, x: Any) -> None:
    model.zero_grad()
    loss_of(model, x).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (twice, "uses the result of an update"),
        (shaken, 'reads "draw" to update "first.weight"'),
        (trails, "neither trained nor state"),
        (mixes, "of 2 gradients"),
        (partial(returns, lambda m: m.first.weight * 1), "is returned by the step"),
    ],
)
def test_what_servers_cannot_run_is_refused(step: Callable[..., Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        split_of(step)


def test_an_update_at_random_is_refused() -> None:
    model = Two()
    found = capture(plain, model, Langevin(model.parameters(), {"lr": 0.1}), (torch.randn(4, 3),))
    with pytest.raises(CaptureError, match="draws random numbers in the update"):
        split(found)


def test_a_norm_over_weights_that_are_not_trained_is_refused() -> None:
    with pytest.raises(CaptureError, match="no optimizer of the step trains"):
        split_of(clips, names="first")
    assert split_of(clips).coupling is not None


def test_equal_steps_have_equal_fingerprints() -> None:
    first, again, other = (GraphUpdater(split_of(s)).fingerprint for s in (plain, plain, clips))
    assert first == again != other
    assert GraphUpdater(split_of(plain, lr=0.7)).fingerprint == first  # an input, no constant


def test_a_fused_update_overwrites_its_state() -> None:
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    updater = GraphUpdater(split(capture(plain, model, optimizer, (torch.randn(4, 3),))))
    weight = model.first.weight
    slots = {n: x.clone() for n, x in optimizer.state[weight].items()}
    state = {"weight": weight.detach().clone(), **slots}
    before = {n: (x, x.data_ptr()) for n, x in state.items()}
    numbers = {"optim.0.lr": 0.1, "optim.0.weight_decay": 0.01}
    numbers |= {"optim.0.betas.0": 0.9, "optim.0.betas.1": 0.999}
    for _ in range(2):
        optimizer.zero_grad()
        weight.grad = torch.randn(3, 3)
        optimizer.step()
        updater.update("first.weight", state, weight.grad, numbers)
    assert torch.equal(state["weight"], weight)
    assert all(torch.equal(state[n], x) for n, x in optimizer.state[weight].items())
    assert all(state[n] is x and x.data_ptr() == at for n, (x, at) in before.items())
