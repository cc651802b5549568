"""Real ranks in float32: twenty steps stay with one device, for every axis and level of zero."""

from __future__ import annotations

from typing import Any

import pytest

import runs
import zoo
from ranks import Ranks

NUM_STEPS = 20
ON_TWO = [
    ("llama", "tensor=2"),
    ("llama", "data=2 zero=3"),
    ("gpt", "seq=2"),
    ("gpt2", "data=2 zero=2"),
    ("resnet", "data=2"),
    ("lstm", "data=2"),
    ("scheduler", "data=2 zero=1"),
]
ON_FOUR = [
    ("llama", "data=2 tensor=2 zero=3"),
    ("gpt2", "data=2 seq=2"),
    ("resnet", "data=4 zero=3"),
]


def check(ranks: Ranks, name: str, layout: str, num_ranks: int) -> None:
    losses, state = runs.on_one_device(name, NUM_STEPS)
    results: list[Any] = ranks.run(runs.train, name, layout, NUM_STEPS, n=num_ranks)
    for found, whole in results:
        runs.assert_same_losses(found, losses)
        runs.assert_same_state(whole, state)


@pytest.mark.parametrize(("name", "layout"), ON_TWO)
def test_two_ranks_train_as_one(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout, 2)


@pytest.mark.parametrize(("name", "layout"), ON_FOUR)
def test_four_ranks_train_as_one(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout, 4)


@pytest.mark.parametrize("name", ["llama", "resnet", "lstm", "scheduler"])
def test_one_device_trains_as_plain_pytorch(name: str) -> None:
    """What the ranks are compared with above is itself the plain step."""
    expected = [loss.item() for loss in zoo.play(zoo.CASES[name], NUM_STEPS)]
    runs.assert_same_losses(runs.on_one_device(name, NUM_STEPS)[0], expected)


def test_dropout_really_drops() -> None:
    """Without masks, the equality of the ranks' losses would show nothing about them."""
    play = runs.prepare("gpt2")
    play.step.model.eval()
    assert abs(play.losses(1)[0] - runs.on_one_device("gpt2", NUM_STEPS)[0][0]) > 1e-4
