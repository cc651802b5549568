"""Slots that an optimizer makes in a later call: by its own rule, or since the user has changed an option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from small_steps import step as train_step
from tutti.errors import CaptureError

CALLS = 7
Slots = dict[str, Any]


class Own(torch.optim.Optimizer):
    """SGD with `more(group, p, slots)` after the update of each parameter."""

    def __init__(self, params: Any, more: Callable[[dict[str, Any], Tensor, Slots], None]) -> None:
        super().__init__(params, {"lr": 0.1, "n": 0})
        self.more = more

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["n"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
                self.more(group, p, self.state[p])


def slow_weights(group: dict[str, Any], p: Tensor, slots: Slots) -> None:
    """timm's Lookahead: the slow weights begin at the third call."""
    if group["n"] % 3 == 0:
        if "slow" not in slots:
            slots["slow"] = p.clone()
        slots["slow"].lerp_(p, 0.5)
        p.copy_(slots["slow"])


def a_count(group: dict[str, Any], p: Tensor, slots: Slots) -> None:
    if group["n"] >= 3:
        slots["count"] = slots.get("count", 0) + 1
        p.mul_(1 - 0.01 * slots["count"])


def a_count_in_a_tensor(group: dict[str, Any], p: Tensor, slots: Slots) -> None:
    if group["n"] >= 3 and p.dim() > 1:
        if "count" not in slots:
            slots["count"] = torch.zeros(())
        slots["count"] += 1
        p.mul_(1 - 0.01 * slots["count"])


class Shared(Own):
    """A count of all parameters together, which begins at the third call."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, self._count)

    def _count(self, group: dict[str, Any], p: Tensor, slots: Slots) -> None:
        if group["n"] >= 3:
            self.state["all"] = self.state.get("all", 0) + 1
            p.mul_(1 - 0.001 * self.state["all"])


def momentum(optimizer: Any, call: int) -> None:
    if call == 2:
        optimizer.param_groups[0]["momentum"] = 0.9


def thaw(optimizer: Any, call: int) -> None:
    for p in optimizer.param_groups[0]["params"][2:4]:
        p.requires_grad_(call >= 2)


def nothing(optimizer: Any, call: int) -> None: ...


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], None]]] = {
    "slow weights": (lambda ps: Own(ps, slow_weights), nothing),
    "a count": (lambda ps: Own(ps, a_count), nothing),
    "a count in a tensor": (lambda ps: Own(ps, a_count_in_a_tensor), nothing),
    "a shared count": (Shared, nothing),
    "momentum later": (lambda ps: torch.optim.SGD(ps, 0.1), momentum),
    "weights thawed": (lambda ps: torch.optim.AdamW(ps, 0.01), thaw),
}


def trained(kind: str, layout: str | None) -> list[np.ndarray]:
    """The losses, the weights and the slots at the end; by plain PyTorch without a layout."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    make, change = KINDS[kind]
    optimizer = make(model.parameters())
    change(optimizer, 0)
    step = None if layout is None else tutti.distribute(train_step, model, optimizer, layout)
    losses = []
    for call in range(CALLS):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(call)).double()
        losses.append(float(step(x) if step is not None else train_step(model, optimizer, x)))
        change(optimizer, call + 1)
    with tutti.whole(model, slots=True):
        found = [np.asarray(losses)]
        for p in model.parameters():
            slots = optimizer.state.get(p, {})
            found += [x.detach().numpy().copy() for x in (p, *slots.values()) if torch.is_tensor(x)]
            found += [np.asarray(x) for x in slots.values() if isinstance(x, int | float)]
    return found


@pytest.mark.parametrize(
    ("layout", "n"),
    [
        ("data=2 zero=1", 2),
        ("data=2 zero=3 micro=2", 2),
        ("pipe=2 micro=2", 2),
        ("data=2 pipe=2 zero=1 micro=2", 4),
        ("data=2 tensor=2 zero=1", 4),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_as_on_one_device(ranks: Ranks, kind: str, layout: str, n: int) -> None:
    expected = trained(kind, None)
    for found in ranks.run(trained, kind, layout, n=n):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device(kind: str) -> None:
    for x, y in zip(trained(kind, ""), trained(kind, None), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def refused_apart() -> str:
    try:
        trained("slow weights", "replica=2 sync=average(every=2)")
    except CaptureError as error:
        return str(error)
    return ""


def test_replicas_refuse_it(ranks: Ranks) -> None:
    for text in ranks.run(refused_apart, n=2):
        assert "Own makes the slot 'slow' for \"0.weight\" in this step" in text
        assert "each replica has its own rows" in text
