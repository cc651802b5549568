"""Real ranks: ten steps stay with one device, for every axis and level of zero; a few in float32."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import pytest
import torch
from torch import nn

import runs
import tutti
from ranks import Ranks
from small_steps import step as train_step
from tutti.state.residence import local_of

NUM_STEPS, NUM_NARROW = 10, 4
ON_TWO = [
    ("llama", "tensor=2"),
    ("llama", "data=2 zero=3"),
    ("gpt2", "data=2 zero=2"),
    ("resnet", "data=2 zero=3"),
    ("lstm", "data=2"),
    ("scheduler", "data=2 zero=1"),
    ("gpt", "seq=2 zero=1"),
]
ON_FOUR = [
    ("gpt_tied", "data=2 tensor=2 zero=3"),
    ("gpt_tied", "data=2 seq=2"),
    ("llama", "data=2 seq=2 zero=3"),
]
# A smooth model: in float32 a ReLU that rounding flips moves losses by more than a mistake may.
NARROW, OF_NARROW = "scheduler", ("tensor=2", "data=2 zero=2")
INSENSITIVE = 1e-5


def check(ranks: Ranks, name: str, layout: str, num_ranks: int) -> None:
    one = ranks.after(runs.on_one_device, name, NUM_STEPS)
    losses, state = one.result
    results: list[Any] = one.run(runs.train, name, layout, NUM_STEPS, n=num_ranks)
    for found, whole in results:
        runs.assert_same_losses(found, losses)
        runs.assert_same_state(whole, state)


@pytest.mark.parametrize(("name", "layout"), ON_TWO)
def test_two_ranks_train_as_one(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout, 2)


def test_ranks_find_one_placement(ranks: Ranks) -> None:
    """Each rank searches by itself; a different result would be refused, or give other numbers."""
    name = "gpt_tied"
    one = ranks.after(runs.on_one_device, name, NUM_NARROW)
    losses, state = one.result
    for found, whole in one.run(runs.train_unplaced, name, "tensor=2", NUM_NARROW, n=2):
        runs.assert_same_losses(found, losses)
        runs.assert_same_state(whole, state)


@pytest.mark.parametrize(("name", "layout"), ON_FOUR)
def test_four_ranks_train_as_one(ranks: Ranks, name: str, layout: str) -> None:
    check(ranks, name, layout, 4)


@pytest.fixture(scope="module")
def bound() -> float:
    """How far rounding alone would take one device in a few steps."""
    return runs.ROUNDINGS * runs.sensitivity(NARROW, NUM_NARROW)


@pytest.mark.parametrize("layout", OF_NARROW)
def test_a_few_steps_in_float32(ranks: Ranks, layout: str, bound: float) -> None:
    """As far as rounding alone would take one device, and that is not far."""
    assert bound < INSENSITIVE
    one = ranks.after(runs.on_one_device, NARROW, NUM_NARROW, False)
    for found, _ in one.run(runs.train, NARROW, layout, NUM_NARROW, False, n=2):
        runs.assert_same_losses(found, one.result[0], bound)


@pytest.mark.parametrize("name", ["llama", "resnet", "lstm", "scheduler"])
def test_one_device_trains_as_plain_pytorch(ranks: Ranks, name: str) -> None:
    """What the ranks are compared with above is itself the plain step."""
    expected = runs.plainly(name, NUM_STEPS)
    runs.assert_same_losses(ranks.after(runs.on_one_device, name, NUM_STEPS).result[0], expected)


def test_dropout_really_drops(ranks: Ranks) -> None:
    """Without masks, the equality of the ranks' losses would show nothing about them."""
    play = runs.prepare("gpt_tied")
    play.step.model.eval()
    losses, _ = ranks.after(runs.on_one_device, "gpt_tied", NUM_STEPS).result
    assert abs(play.losses(1)[0] - losses[0]) > 1e-4


def double(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2.0)


def with_hooks(layout: str) -> list[float]:
    """Losses with gradient hooks, of which one goes, over two forms of the batch; "" is plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    handle = model.weight.register_hook(lambda grad: grad * 0.5)
    model.bias.register_post_accumulate_grad_hook(double)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    played: Any = tutti.distribute(train_step, model, optimizer, layout) if layout else None
    losses = []
    for k, rows in enumerate((8, 8, 4, 4, 8)):
        x = torch.ones(rows, 4, dtype=torch.float64) * (k + 1)
        losses.append(float(played(x) if layout else train_step(model, optimizer, x)))
        if k == 3:
            handle.remove()
    return losses


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "tensor=2"])
def test_gradient_hooks_stay_on_ranks(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(with_hooks, layout, n=2):
        assert found == pytest.approx(with_hooks(""), rel=1e-12)


def copies(layout: str) -> tuple[int, bool, bool]:
    """Bytes of the saved weights; whether the copies are those of then; whether they stay."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    played = tutti.distribute(train_step, model, optimizer, layout)
    x = torch.randn(8, 64)
    played(x)
    then = [local_of(p).clone() for p in model.state_dict().values()]
    best, given = copy.deepcopy(model.state_dict()), copy.deepcopy(played.state_dict())
    file = io.BytesIO()
    torch.save({n: local_of(given[n]) for n in best}, file)
    same = [torch.equal(local_of(p), was) for p, was in zip(best.values(), then, strict=True)]
    played(x)
    stay = [torch.equal(local_of(best[n]), local_of(given[n])) for n in best]
    return file.getbuffer().nbytes, all(same), all(stay)


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2"])
def test_state_dicts_can_be_copied_and_pickled(ranks: Ranks, layout: str) -> None:
    """In shared memory too; what is pickled is this rank's part, not what lies around it."""
    for nbytes, same, stay in ranks.run(copies, layout, n=2):
        assert same and stay
        assert nbytes < 64 * 65 * 4 + 8000


def fails_alone() -> list[str]:
    """What each step ends in, where a bad index lies in the rows of the second rank at the second one."""
    os.environ["TUTTI_TIMEOUT"] = "3"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(32, 4))
    played = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), 0.1), "data=2")
    ends = []
    for k in range(4):
        x = torch.ones(8, 4, dtype=torch.int64)
        x[7, 0] = 99 if k == 1 else 1
        try:
            played(x)
            ends.append("")
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def test_a_rank_that_fails_in_a_step_ends_the_run() -> None:
    """Its later steps would meet others of the ranks that go on."""
    pool = Ranks()
    try:
        first, second = pool.run(fails_alone, n=2)
    finally:
        pool.close()
    assert first[0] == second[0] == ""
    assert second[1].startswith("IndexError") and first[1].startswith("CommError")
    for ends in (first, second):
        assert all("an earlier step ended half-way on this rank" in one for one in ends[2:])
    assert "(IndexError: index out of range in self)" in second[2]
