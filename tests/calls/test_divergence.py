"""Ranks that are given other things than the rest: told at once, with rank, tensor, step and line."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
from captured_once import captured_once
from ranks import Ranks
from small_steps import step as train_step
from tutti.calls import divergence
from tutti.comm.host.awake import AwakeClock
from tutti.errors import CommError

BAD, STEPS = 3, 6
PLACE = {"0.weight": "tensor, -", "2.weight": "-, tensor"}
SHORT = {"TUTTI_TIMEOUT": "2"}
FOUR = ["data=4 zero=3", "data=2 tensor=2 zero=1"]


class Run:
    """What a fault may change: the step, its model and optimizer, and the batch of the call to come."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = tutti.distribute(train_step, self.model, self.optimizer, layout, place=PLACE)
        self.x = torch.zeros(0)

    def batch(self, k: int) -> Tensor:
        """The global batch of call k."""
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(k)).double()


def another_batch(run: Run) -> None:
    run.x = run.x + 1e-3


def one_element(run: Run) -> None:
    run.x[5, 3] += 1.0


def another_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.02


def another_shape(run: Run) -> None:
    run.x = run.x[:4]


def another_dtype(run: Run) -> None:
    run.x = run.x.float()


def another_option(run: Run) -> None:
    run.optimizer.param_groups[0]["amsgrad"] = True


def another_mode(run: Run) -> None:
    run.model.eval()


def added_to(run: Run) -> None:
    with torch.no_grad():
        run.model[2].bias.add_(0.01)


def another_slot(run: Run) -> None:
    p = run.model[2].bias
    moment: Any = run.optimizer.state[p]["exp_avg_sq"]
    (moment._local_tensor if isinstance(moment, DTensor) else moment).mul_(4.0)


def loaded(run: Run) -> None:
    run.step.num_steps = 100


FAULTS: dict[Callable[[Run], None], tuple[str, ...]] = {
    another_batch: ("at step 3: batch tensor 0 (float64[8, 16])", "has values on rank", "others on rank"),
    one_element: ("different batches at step 3: batch tensor 0",),
    another_lr: ('different numbers at step 3: "', "is 0.01 on rank", "0.02 on rank"),
    another_shape: ("at step 3: batch tensor 0 is float64[8, 16] on rank", ", float64[4, 16] on rank",),
    another_dtype: ("at step 3: batch tensor 0 is float64[8, 16] on rank", ", float32[8, 16] on rank",),
    another_option: ("different programs of train_step", "at step 3"),
    another_mode: ("different programs of train_step", "at step 3"),
    another_slot: ('"optim.2.bias.exp_avg_sq" has other values on rank', "before step 3"),
    added_to: ('"2.bias" has other values on rank', "before step 3"),
    loaded: ("at different steps of train_step", "step 3 on rank", "step 100 on rank"),
}  # fmt: skip


def ends(name: str, layout: str) -> tuple[list[str], int]:
    """What each call of a run ends in, where the last rank has a fault before one of them; seconds."""
    fault = next(f for f in FAULTS if f.__name__ == name)
    run, found = Run(layout), []
    began = time.monotonic()
    for k in range(STEPS):
        run.x = run.batch(k)
        if k == BAD and dist.get_rank() == dist.get_world_size() - 1:
            fault(run)
        try:
            with captured_once("divergence"):
                run.step(run.x)
            found.append("")
        except tutti.TuttiError as error:
            found.append(f"{type(error).__name__}: {error}")
            break
    return found, int(time.monotonic() - began)


def check(found: list[tuple[list[str], int]], said: tuple[str, ...]) -> None:
    for texts, seconds in found:
        assert texts[:-1] == [""] * BAD and len(texts) == BAD + 1, texts
        for words in said:
            assert words in texts[-1], texts[-1]
        assert seconds < 25  # of a time-out of 30
        assert "CommError" in texts[-1] and "test_divergence.py" in texts[-1], texts[-1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_two_ranks(ranks: Ranks, fault: Any) -> None:
    for layout in ["data=2"] if fault is not added_to else ["data=2", "data=2 zero=1"]:
        check(ranks.run(ends, fault.__name__, layout, n=2), FAULTS[fault])


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
@pytest.mark.parametrize("fault", [another_batch, another_lr, another_shape])
def test_two_ranks_with_weights_in_parts(ranks: Ranks, fault: Any, layout: str) -> None:
    check(ranks.run(ends, fault.__name__, layout, n=2), FAULTS[fault])


@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("fault", [another_batch, another_shape])
def test_four_ranks(ranks: Ranks, fault: Any, layout: str) -> None:
    check(ranks.run(ends, fault.__name__, layout, n=4), FAULTS[fault])


def test_a_weight_that_other_ranks_have_too(ranks: Ranks) -> None:
    """Split over `tensor`, and whole over `data`."""
    check(ranks.run(ends, "added_to", "data=2 tensor=2", n=4), FAULTS[added_to])


def noticed_after(name: str) -> int:
    """How many calls a model of more weights than are looked at at once makes after a fault on rank 1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))).double()
    step = tutti.distribute(train_step, model, torch.optim.AdamW(model.parameters()), "data=2")
    for k in range(60):
        if k == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                model.get_parameter(name).mul_(1.5)
        try:
            with captured_once("layers"):
                step(torch.ones(8, 8).double())
        except CommError as error:
            assert name in error.what and "other values" in error.what, error
            return k - 2
    return 60


@pytest.mark.parametrize("name", ["0.bias", "5.weight", "11.weight"])
def test_weights_of_a_larger_model_are_looked_at_in_turn(ranks: Ranks, name: str) -> None:
    """24 weights are two looks, 72 slots six: within six times eight calls each weight is seen."""
    after = ranks.run(noticed_after, name, n=2)
    assert max(after) <= 48 and after[0] == after[1]


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """An evaluation."""
    with torch.no_grad():
        return model(x).square().mean()


def one_evaluates(layout: str, at: int, before: bool) -> tuple[list[str], float]:
    """How the calls end where rank 0 alone evaluates once, for the first time or not; seconds of the last."""
    run, found, began = Run(layout), [], 0.0
    look = tutti.distribute(evaluate, run.model, layout=layout)
    for k in range(STEPS):
        began = time.monotonic()
        try:
            if before and k == 1:
                look(run.batch(k))
            if k == at and dist.get_rank() == 0:
                look(run.batch(k))
            run.step(run.batch(k))
            found.append("")
        except tutti.TuttiError as error:
            found.append(f"{type(error).__name__}: {error}")
            break
    return found, time.monotonic() - began


@pytest.mark.parametrize("before", [False, True])
def test_one_rank_alone_evaluates(ranks: Ranks, before: bool) -> None:
    for texts, seconds in ranks.run(one_evaluates, "data=2 zero=3", BAD, before, n=2):
        assert texts[:-1] == [""] * BAD
        assert "the ranks call different steps" in texts[-1], texts[-1]
        which = "call 2 of evaluate" if before else "the first call of evaluate"
        assert f"rank 0: {which}, at test_divergence.py" in texts[-1], texts[-1]
        assert f"rank 1: call {BAD + 1} of train_step" in texts[-1], texts[-1]
        assert "if rank == 0" in texts[-1] and seconds < 10


def evaluations(layout: str) -> list[str]:
    """How evaluations end, where the last rank is given another batch at the second one."""
    run, found = Run(layout), []
    look = tutti.distribute(evaluate, run.model, layout=layout, place=PLACE)
    for k in range(2):
        x = run.batch(k)
        if k and dist.get_rank() == dist.get_world_size() - 1:
            x[0] = 0
        try:
            look(x)
            found.append("")
        except tutti.TuttiError as error:
            found.append(str(error))
    return found


def test_evaluations_too(ranks: Ranks) -> None:
    for texts in ranks.run(evaluations, "tensor=2", n=2):
        assert texts[0] == "" and "different batches at step 1: batch tensor 0" in texts[1]


def one_calls_once_more() -> tuple[list[str], list[str]]:
    """Rank 0 has a last batch of another size that rank 1 has not: what it warns of, and how it ends."""
    run, found = Run("data=2"), []
    with warnings.catch_warnings(record=True) as caught, mock.patch.dict(os.environ, SHORT):
        warnings.simplefilter("always")
        with mock.patch.object(divergence, "WAIT_SECONDS", 0.5):
            for rows in [8, 8, 4][: 3 - dist.get_rank()]:
                try:
                    run.step(run.batch(0)[:rows])
                except tutti.TuttiError as error:
                    found.append(str(error))
    if dist.get_rank():
        time.sleep(3)  # elsewhere, such as in a barrier
    return [str(w.message) for w in caught], found


def test_a_rank_that_calls_once_more_says_for_whom_it_waits(ranks: Ranks) -> None:
    (warned, ended), other = ranks.run(one_calls_once_more, n=2)
    assert other == ([], [])
    assert any(
        "rank 0 has waited" in w and "for rank 1, which has not called it" in w for w in warned
    )
    assert len(ended) == 1 and "rank 1 did not call train_step within 2 s of rank 0" in ended[0]


def apart(name: str) -> tuple[list[str], int]:
    """As `ends`, of ranks that share no memory, as those of two hosts."""
    with mock.patch.dict(os.environ, {"TUTTI_SHARED_MEMORY": "off", "TUTTI_TIMEOUT": "5"}):
        divergence._BOARDS.clear()
        return ends(name, "data=2")


@pytest.mark.parametrize("fault", [another_batch, another_lr, added_to])
def test_between_hosts_it_is_told_at_the_next_call(fault: Any) -> None:
    pool = Ranks(timeout_seconds=8.0)
    try:
        found = pool.run(apart, fault.__name__, n=2)
    finally:
        pool.close()
    for texts, _ in found:
        k, text = next((k, text) for k, text in enumerate(texts) if text)
        assert k in (BAD, BAD + 1), texts
        assert FAULTS[fault][0].partition("at step")[0] in text, text


class SuspendedOnce:
    """The module `time` for a process that is suspended in its first sleep."""

    seconds = 2.6

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(max(seconds, self.seconds))
        self.seconds = 0.0


def suspended_in_a_wait() -> str:
    """How a call of another size ends, if rank 0 is suspended in it and rank 1 comes after the timeout."""
    run = Run("data=2")
    run.step(run.batch(0))
    short_looks = functools.partial(AwakeClock, 0.1)
    with (
        mock.patch.dict(os.environ, SHORT),
        mock.patch.object(divergence, "time", SuspendedOnce()),
        mock.patch.object(divergence, "AwakeClock", short_looks),
    ):
        if dist.get_rank():
            time.sleep(SuspendedOnce.seconds + 0.3)
        try:
            run.step(run.batch(0)[:4])
        except tutti.TuttiError as error:
            return str(error)
    return ""


def test_a_suspension_in_a_wait_does_not_count(ranks: Ranks) -> None:
    assert ranks.run(suspended_in_a_wait, n=2) == ["", ""]


def far_apart(late: int, options: dict[str, str]) -> list[str]:
    """Two steps without a collective, in turn; rank `late` waits before some calls."""
    with mock.patch.dict(os.environ, options):
        model = nn.Linear(4, 4)

        def evaluate(model: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x).square().mean()

        def score(model: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x).abs().sum()

        first, second = (tutti.distribute(one, model, None, "data=2") for one in (evaluate, score))
        x, waits = torch.ones(5, 4), dist.get_rank() == late
        found = []
        first(x), second(x)
        try:
            for k in range(40):
                if waits and k in (5, 15, 25):
                    time.sleep(0.15)
                (first if k % 10 < 8 else second)(x)
        except CommError as error:
            found.append(str(error))
        dist.barrier()
        return found


@pytest.mark.filterwarnings("ignore:the 5 samples")
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("options", [{}, {"TUTTI_SHARED_MEMORY": "off"}])
def test_ranks_many_calls_apart_are_in_no_other_step(
    ranks: Ranks, late: int, options: dict[str, str]
) -> None:
    """A program that computes an uneven batch whole has no collective: nobody waits for anybody."""
    assert ranks.run(far_apart, late, options, n=2) == [[], []]
