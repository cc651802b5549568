"""Numbers and tensors that a step keeps in Python: what is read is never frozen, what is changed is kept."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import tempfile
import time
import uuid
import warnings
from os import urandom
from time import perf_counter
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import python_programs as programs
import tutti
from in_turn import in_turn
from python_programs import PROGRAMS
from ranks import Ranks


def distributed(layout: str) -> Any:
    return lambda step, model, optimizer: tutti.distribute(step, model, optimizer, layout)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-10, atol=1e-12)


# At most a second trace for a number that turns out to change, and one for each branch taken.
MOST_TRACES = {
    "float_in_a_closure": 2,
    "counter_in_a_dict": 2,
    "optimizer_that_counts": 3,
    "global_counter": 1,
    "cosine_inside": 3,
}


# Of these `micro` refuses the loss: it needs all samples at once.
COUPLED = ("criterion", "label_smoothing", "tensor_of_a_closure", "first_call_of_its_own")


def check_verified(layout: str, *given: Any) -> None:
    """That the layout plays the same step, or is refused."""
    verdict = tutti.verify(*given, (programs.batch(0),), layout)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("name", "layout"), in_turn(PROGRAMS, [["data=2 zero=1"], ["data=2 micro=2"]])
)
def test_one_device_is_eager_and_verify_leaves_python_as_it_is(name: str, layout: str) -> None:
    made: list[tutti.Step] = []

    def play(step: Any, model: Any, optimizer: Any) -> tutti.Step:
        if "micro" in layout and name in COUPLED:
            with pytest.raises(tutti.ShardingError, match="all its samples at once"):
                check_verified(layout, step, model, optimizer)
        else:
            check_verified(layout, step, model, optimizer)
        made.append(tutti.distribute(step, model, optimizer, ""))
        return made[0]

    expected = programs.values(name, programs.eager)
    assert_same(programs.values(name, play), expected)
    if name in MOST_TRACES:
        traces = {id(one) for found in made[0]._programs.known.by_key.values() for one in found}
        assert len(traces) <= MOST_TRACES[name]


def test_programs_whose_traces_are_counted() -> None:
    assert MOST_TRACES.keys() <= PROGRAMS.keys()


def on_ranks(name: str, layout: str) -> list[Any]:
    return programs.values(name, distributed(layout))


# Programs of numbers alone, each with one that ranks play: its numbers are given, changed and branched on in
# the same way. Where in Python they stand is the same to a rank as to one device.
AS_ON_RANKS = {
    "counter_in_a_dict": "trainer",
    "dicts_that_make_values": "trainer",
    "float_in_a_closure": "trainer",
    "number_of_numpy": "trainer",
    "attribute_of_a_function": "trainer",
    "default_argument": "number_as_a_tensor",
    "global_counter": "global_beside_its_optimizer",
    "options_that_change": "lr_set_inside",
    "step_lr_inside": "cosine_inside",
    "lambda_inside": "cosine_inside",
}
ON_RANKS = [name for name in PROGRAMS if name not in AS_ON_RANKS]


def test_programs_that_ranks_leave_out() -> None:
    assert AS_ON_RANKS.keys() <= PROGRAMS.keys() and set(AS_ON_RANKS.values()) <= {*ON_RANKS}


@pytest.mark.parametrize(
    ("name", "layout"), in_turn(ON_RANKS, [["data=2"], ["data=2 zero=3"], ["pipe=2"]])
)
def test_two_ranks_are_eager(ranks: Ranks, name: str, layout: str) -> None:
    expected = programs.values(name, programs.eager)
    for found in ranks.run(on_ranks, name, layout, n=2):
        assert_same(found, expected)


def test_effects_are_applied_and_traces_leave_nothing() -> None:
    trainer = programs.Trainer()
    model = programs.mlp()
    step = tutti.distribute(trainer.step, model, torch.optim.SGD(model.parameters(), 0.1), "")
    loss = step(programs.batch(0))
    assert trainer.count == 1 and type(trainer.count) is int
    assert type(trainer.last) is torch.Tensor and trainer.last.equal(loss)
    assert trainer.log["loss"].equal(2 * loss)


def test_a_list_that_grows_is_refused_with_its_name() -> None:
    losses: list[torch.Tensor] = []

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        losses.append(programs.plain(model, optimizer, x))
        return losses[0]

    model = programs.mlp()
    with pytest.raises(tutti.CaptureError, match=r"changes len\(losses\) in Python") as caught:
        tutti.distribute(step, model, torch.optim.SGD(model.parameters(), 0.1), "")(
            programs.batch(0)
        )
    assert "change losses between calls" in caught.value.fix and not losses


def test_a_branch_on_zero_is_a_guard() -> None:
    """To PyTorch's symbols a number that was compared with zero is zero from then on."""

    def step(model: Any, optimizer: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        loss = model(x).square().mean()
        if weight == 0.0:
            loss = loss * 3
        return programs.update(loss + weight, optimizer)

    model = programs.mlp()
    twin = programs.mlp()
    played = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), 0.1), "")
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for k, weight in enumerate((0.0, 0.5, 0.0, 0.7)):
        x = programs.batch(k)
        assert float(played(x, weight)) == pytest.approx(float(step(twin, other, x, weight)))


# Tensors of the step's own, and numbers beside slots; the others keep numbers alone, or tensors alike.
SAVED_BY_RANKS = ("tensor_of_a_closure", "optimizer_that_counts", "optimizer_with_tuples")
SAVED = (*SAVED_BY_RANKS, "tensor_of_a_tuple", "trainer", "teacher", "cosine_inside")


def resumed(layout: str, folder: str, names: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """Losses of programs that went on, and of ones that were made anew and read a checkpoint."""
    went_on, began_again = [], []
    for name in names:
        made, model, optimizer, _ = PROGRAMS[name]()
        step = tutti.distribute(made, model, optimizer, layout)
        for k in range(3):
            step(programs.batch(k))
        step.save(f"{folder}/{name}")
        went_on += [float(step(programs.batch(k))) for k in (3, 4)]
        made, model, optimizer, _ = PROGRAMS[name]()
        again = tutti.distribute(made, model, optimizer, layout)
        again.load(f"{folder}/{name}")
        began_again += [float(again(programs.batch(k))) for k in (3, 4)]
        state = again.state_dict()
        made, model, optimizer, _ = PROGRAMS[name]()
        third = tutti.distribute(made, model, optimizer, layout)
        if "pipe" in layout:  # before its first call it does not know which tensors a rank keeps
            with pytest.raises(tutti.CheckpointError, match="lacks"):
                third.load_state_dict(state)
            third(programs.batch(0))
        third.load_state_dict(state)
        went_on.append(float(again(programs.batch(5))))
        began_again.append(float(third(programs.batch(5))))
    return went_on, began_again


def test_checkpoints_hold_what_a_step_changes(tmp_path: Any) -> None:
    went_on, began_again = resumed("", str(tmp_path), SAVED)
    assert began_again == pytest.approx(went_on, rel=1e-10)


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2"])
def test_checkpoints_of_ranks_hold_what_a_step_changes(
    ranks: Ranks, tmp_path: Any, layout: str
) -> None:
    given = layout, str(tmp_path), SAVED_BY_RANKS
    for went_on, began_again in ranks.run(resumed, *given, n=2):
        assert began_again == pytest.approx(went_on, rel=1e-10)


def test_a_value_that_the_step_does_not_reach_is_refused(tmp_path: Any) -> None:
    made, model, optimizer, _ = PROGRAMS["counter_in_a_dict"]()
    step = tutti.distribute(made, model, optimizer, "")
    step(programs.batch(0))
    step.save(tmp_path / "there")
    other = tutti.distribute(programs.plain, model, optimizer, "")
    with pytest.raises(tutti.CheckpointError, match=r"state\['i'\]"):
        other.load(tmp_path / "there")


def test_an_iterator_that_the_step_advances_is_refused() -> None:
    count = itertools.count(1)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return programs.update(model(x).square().mean() / next(count), optimizer)  # here

    model = programs.mlp()
    with pytest.raises(tutti.CaptureError, match="takes the next of count, a count") as caught:
        tutti.distribute(step, model, torch.optim.SGD(model.parameters(), 0.1), "")(
            programs.batch(0)
        )
    assert "# here" in caught.value.at and next(count) == 1


def test_what_cannot_be_set_anew_is_not_written_into() -> None:
    hidden, part = MappingProxyType({"sum": torch.zeros(2)}), torch.zeros(4, 4)[:, :2]

    def where_nothing_looks(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden["sum"].add_(1)
        return model(x).sum() + hidden["sum"].sum()

    def into_a_part(model: Any, x: torch.Tensor) -> torch.Tensor:
        part.add_(1)
        return model(x).sum() + part.sum()

    refused = (
        (where_nothing_looks, "tensor that it was not given"),
        (into_a_part, "writes into part"),
    )
    for step, what in refused:
        with pytest.raises(tutti.CaptureError, match=what):
            tutti.distribute(step, programs.mlp())(programs.batch(0))
    assert not hidden["sum"].any() and not part.any()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_that_reads_the_clock_is_warned_once_with_its_line(by_name: bool) -> None:
    model, clock = nn.Linear(2, 2), perf_counter

    def loss_of(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    def own_names(m: nn.Module, o: Any, x: Tensor) -> tuple[Tensor, float]:
        begin = perf_counter()
        o.zero_grad()
        loss = loss_of(m, x)
        loss.backward()
        o.step()
        return loss.detach(), clock() - begin

    def step(m: nn.Module, o: Any, x: Tensor) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        o.zero_grad()
        loss = loss_of(m, x)
        loss.backward()
        o.step()
        return loss.detach(), time.perf_counter() - begin

    chosen = own_names if by_name else step
    called = tutti.distribute(chosen, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(
        UserWarning, match=r"time.perf_counter\(\) at .*test_python_values.py"
    ) as told:
        called(torch.ones(2, 2))
    assert len([w for w in told if "is read once" in str(w.message)]) == 2  # two lines
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(torch.zeros(2, 2))
    assert clock is perf_counter is time.perf_counter


def test_a_step_that_reads_random_bytes_of_the_system_is_warned_with_each_line() -> None:
    model = nn.Linear(2, 2)

    def step(m: nn.Module, o: Any, x: Tensor) -> tuple[Tensor, Any]:
        drawn = (
            os.urandom(4),
            urandom(4),
            secrets.randbelow(10**9),
            uuid.uuid4(),
            random.SystemRandom().random(),
        )
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        with tempfile.TemporaryDirectory():  # a library's own names are no matter
            pass
        return loss.detach(), [str(x) for x in drawn]

    called = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"os.urandom\(\) at .*test_python_values.py") as told:
        first = called(torch.ones(2, 2))
    assert len([w for w in told if "is read once" in str(w.message)]) == 5  # one of each line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert called(torch.zeros(2, 2))[1] == first[1]
    assert urandom is os.urandom and os.urandom(4) != os.urandom(4)


temperature = "a global that the step below does not read"


class Pairs(tuple[Any, ...]):
    """A tuple that counts something else than its values."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter(("other",))

    def __getitem__(self, key: Any) -> Any:
        raise NotImplementedError


def test_a_tuple_of_a_class_with_its_own_length() -> None:
    model = programs.mlp()
    held = model.kinds = Pairs(([0.5, 2.0], 1))
    weights, _ = tuple.__iter__(held)

    def step(m: Any, x: Tensor) -> Tensor:
        return m(x).sum() * next(tuple.__iter__(m.kinds))[0]

    played = tutti.distribute(step, model, None, "")
    x = torch.randn(3, 4, dtype=torch.float64)
    for factor in (0.5, 3.0):
        weights[0] = factor
        torch.testing.assert_close(played(x).detach(), step(model, x).detach())


def test_a_global_with_the_name_of_an_attribute_is_not_read() -> None:
    """Changing it traced the step again at every call."""
    global temperature

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.temperature = nn.Linear(3, 1), 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) / self.temperature

    model = Scaled()

    def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 3)
    for k in range(4):
        temperature = f"another text {k}"
        step(x)
    assert step._num_traces == 1
