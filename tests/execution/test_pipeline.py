"""Real ranks of a pipeline: a few steps stay with one device, dropout and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import runs
import stacks
import tutti
from captured_once import captured_once
from ranks import Ranks
from tests.execution import eight_ranks
from wide import wide_step, widened

NUM_STEPS = 4
ON_TWO = [
    ("gpt_tied", "pipe=2 micro=4 schedule=zb"),
    ("llama", "pipe=2 micro=4 schedule=zbv"),
]
ON_FOUR = [("gpt_tied", "pipe=2 data=2 zero=1 micro=4")]


def check(ranks: Ranks, name: str, layout: str, num_ranks: int) -> None:
    one = ranks.after(runs.on_one_device, name, NUM_STEPS)
    losses, state = one.result
    results: list[Any] = one.run(runs.train, name, layout, NUM_STEPS, n=num_ranks)
    seen: set[str] = set()
    for found, whole in results:
        runs.assert_same_losses(found, losses)
        # What another pipeline rank keeps is in the dicts of its ranks.
        assert whole.keys() < state.keys()
        runs.assert_same_state(whole, {n: state[n] for n in whole})
        seen |= whole.keys()
    assert seen == state.keys()


@pytest.mark.parametrize(("name", "layout"), ON_TWO)
def test_two_places_train_as_one(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout, 2)


@pytest.mark.parametrize(("name", "layout"), ON_FOUR)
def test_four_ranks_train_as_one(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout, 4)


def test_eight_ranks_train_as_one(ranks: Ranks) -> None:
    one = ranks.after(eight_ranks.losses, "", 3)
    layout = "data=2 pipe=2 tensor=2 micro=8 zero=3"
    for found in one.run(eight_ranks.losses, layout, 3, n=8):
        runs.assert_same_losses(found, one.result)


AWKWARD = ("thrice", "common", "counting", "telling", "summed", "decay")


def built(name: str) -> Any:
    """One of them in float64."""
    step, model, optimizer, batches = stacks.built(name)
    return wide_step(step), model, optimizer, widened(model, *batches)


def returned(layout: str) -> dict[str, list[Any]]:
    """All that three steps of each awkward program return."""
    found = {}
    for name in AWKWARD:
        step, model, optimizer, batches = built(name)
        run = tutti.distribute(step, model, optimizer, layout)
        with captured_once(name):
            steps = [tree_leaves(run(*batches[k % 2])) for k in range(3)]
        found[name] = [x.tolist() for leaves in steps for x in leaves]
    return found


def plainly(name: str) -> list[Tensor]:
    """The same in plain PyTorch."""
    step, model, optimizer, batches = built(name)
    steps = [tree_leaves(step(model, optimizer, *batches[k % 2])) for k in range(3)]
    return [x.detach().clone() for leaves in steps for x in leaves]


def assert_same(found: dict[str, list[Any]]) -> None:
    for name in AWKWARD:
        expected = plainly(name)
        assert len(found[name]) == len(expected)
        for mine, x in zip(found[name], expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=x.dtype), x, rtol=1e-10, atol=1e-12)


# gpipe keeps what every micro-batch has made while others are added up.
@pytest.mark.parametrize("layout", ["pipe=2 micro=7 schedule=gpipe", "pipe=2 micro=4 schedule=zb"])
def test_awkward_programs_on_two_places(ranks: Ranks, layout: str) -> None:
    for found in ranks.after(returned, "micro=7").run(returned, layout, n=2):
        assert_same(found)


def test_awkward_programs_in_micro_batches_on_one_device(ranks: Ranks) -> None:
    assert_same(ranks.after(returned, "micro=7").result)


def _refused_plan() -> str:
    step, model, optimizer, batches = stacks.built("twice")
    try:
        tutti.distribute(step, model, optimizer, "pipe=2")(*batches[0])
    except tutti.TuttiError as error:
        return str(error)
    return ""


def test_every_rank_refuses_alike(ranks: Ranks) -> None:
    texts = ranks.run(_refused_plan, n=2)
    assert "reads the result of an update" in texts[0]
    assert len(set(texts)) == 1
