"""Other stages wait for the gradient of a convolution's input, not for those of its weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tutti
from ranks import Ranks
from small_steps import squares, step, trained
from tutti.graph.ops.loop import Body
from tutti.layout import Layout
from tutti.pipeline.ready import in_time
from tutti.pipeline.timed import Timed
from tutti.verification.verdict import Subject

BACKWARD = torch.ops.aten.convolution_backward.default
WITHOUT_WEIGHT, ONLY_WEIGHT = [True, False, False], [False, True, True]


def images(bias: bool = True) -> nn.Sequential:
    """Four convolutions of one kind each."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=bias),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, dilation=2, padding=2, bias=bias),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2, bias=bias),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=bias),
    )


def made(layout: str, *, bias: bool = True) -> Timed:
    torch.manual_seed(0)
    model = images(bias)
    optimizer = torch.optim.AdamW(model.parameters())
    subject = Subject(trained(squares), model, optimizer, (torch.randn(4, 3, 8, 8),))
    return in_time(subject.program(Layout.parse(layout)))


def masks(bodies: list[Body]) -> dict[str, list[Any]]:
    """What the convolutions of each kind of part compute."""
    found: dict[str, list[Any]] = {}
    for body in bodies:
        for (_, kind), part in body.parts.items():
            nodes = part.graph.find_nodes(op="call_function", target=BACKWARD)
            found.setdefault(kind, []).extend(list(node.args[-1]) for node in nodes)
    return found


@pytest.mark.parametrize("schedule", ["zb", "zbv"])
def test_gradients_of_weights_fill_idle_time(schedule: str) -> None:
    timed = made(f"pipe=2 micro=2 schedule={schedule}")
    found = masks(timed.bodies)
    assert found["I"]
    assert all(mask == WITHOUT_WEIGHT for mask in found["I"])
    assert ONLY_WEIGHT in found["W"]
    assert len(found["I"] + found["W"]) == 2 * 4 - 1  # the batch needs no gradient


def test_without_a_bias() -> None:
    found = masks(made("pipe=2 micro=2 schedule=zb", bias=False).bodies)
    assert [False, True, False] in found["W"]


def test_other_schedules_compute_both_at_once() -> None:
    found = masks(made("pipe=2 micro=2").bodies)
    batch, *others = sorted(found["B"])  # the batch needs no gradient
    assert batch == ONLY_WEIGHT
    assert others == 3 * [[True, True, True]]


def losses(layout: str | None) -> list[float]:
    """Of five steps in float64; without a layout in plain PyTorch."""
    torch.manual_seed(0)
    model, x = images().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if layout is None:
        return [step(model, optimizer, x).item() for _ in range(5)]
    run = tutti.distribute(step, model, optimizer, layout)
    return [run(x).item() for _ in range(5)]


@pytest.mark.parametrize("layout", ["pipe=2 micro=2 schedule=zb", "pipe=2 micro=4 schedule=zbv"])
def test_ranks_train_as_plain_pytorch(ranks: Ranks, layout: str) -> None:
    expected = losses(None)
    for found in ranks.run(losses, layout, n=2):
        assert found == pytest.approx(expected, rel=1e-12)
