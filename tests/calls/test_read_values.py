"""Steps whose Python reads values of tensors go the way that eager goes, at every call."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import reading_programs as programs
import tutti
from in_turn import in_turn
from python_programs import update
from ranks import Ranks
from reading_programs import READING


def distributed(layout: str) -> Any:
    return lambda step, model, optimizer: tutti.distribute(step, model, optimizer, layout)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)


# Each way that these go is traced once.
MOST_TRACES = {"radam": 2, "asgd": 2, "layerwise": 3, "estimating": 2}


# Programs that no layout with `micro` or `pipe` plays, whatever they read.
NOT_IN_TIME = {
    "averaged_inside": "reads the result of an update|needs all its samples at once",
    "begins_with_its_first_batch": "needs all its samples at once",
    "scales_by_what_it_reads": "needs all its samples at once",
}


@pytest.mark.parametrize(("name", "layout"), in_turn(READING, [["tensor=2"], ["data=2 zero=3"]]))
def test_one_device_is_eager_and_a_layout_is_verified(name: str, layout: str) -> None:
    made: list[tutti.Step] = []

    def play(step: Any, model: Any, optimizer: Any) -> tutti.Step:
        found = tutti.verify(step, model, optimizer, (programs.batch(0),), layout)
        assert found.ok, str(found)
        made.append(tutti.distribute(step, model, optimizer, ""))
        return made[0]

    assert_same(programs.values(name, play), programs.values(name, programs.eager))
    if name in MOST_TRACES:
        assert made[0]._num_traces <= MOST_TRACES[name]


def test_programs_whose_traces_are_counted() -> None:
    assert MOST_TRACES.keys() <= READING.keys()


def on_ranks(name: str, layout: str) -> list[Tensor]:
    return programs.values(name, distributed(layout))


# Each with one that ranks play, which reads values of the same kinds and branches as it does.
AS_ON_RANKS = {
    "ends_the_program": "skips_a_loss_that_is_not_finite",
    "scaled by fused kernels": "scaled",
    "nadam": "radam",
    "asgd": "radam",
}
ON_RANKS = [name for name in READING if name not in AS_ON_RANKS]


def test_programs_that_ranks_leave_out() -> None:
    assert AS_ON_RANKS.keys() <= READING.keys() and set(AS_ON_RANKS.values()) <= {*ON_RANKS}


@pytest.mark.parametrize(
    ("name", "layout"), in_turn(ON_RANKS, [["data=2"], ["data=2 zero=1"], ["data=2 zero=3"]])
)
def test_two_ranks_are_eager(ranks: Ranks, name: str, layout: str) -> None:
    expected = programs.values(name, programs.eager)
    for found in ranks.run(on_ranks, name, layout, n=2):
        assert_same(found, expected)


IN_TIME = [name for name in READING if name not in NOT_IN_TIME]


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn(IN_TIME, [["micro=2", "data=2 pipe=2 micro=2"], ["pipe=2", "data=2 micro=2 zero=2"]]),
)
def test_micro_batches_and_stages_are_verified(name: str, layout: str) -> None:
    found = tutti.verify(*READING[name](), (programs.batch(0),), layout)
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn(
        [name for name in ON_RANKS if name not in NOT_IN_TIME],
        [["pipe=2 micro=2"], ["data=2 micro=2"], ["pipe=2 micro=4 schedule=zb"], ["pipe=2"]],
    ),
)
def test_micro_batches_and_stages_on_two_ranks_are_eager(
    ranks: Ranks, name: str, layout: str
) -> None:
    expected = programs.values(name, programs.eager)
    for found in ranks.run(on_ranks, name, layout, n=2):
        assert_same(found, expected)


@pytest.mark.parametrize("name", NOT_IN_TIME)
def test_what_needs_all_samples_at_once_is_refused(name: str) -> None:
    with pytest.raises(tutti.ShardingError, match=NOT_IN_TIME[name]):
        tutti.verify(*READING[name](), (programs.batch(0),), "micro=2")


def test_replicas_that_would_go_different_ways_are_refused() -> None:
    step, model, optimizer = READING["radam"]()
    layout = "replica=2 sync=average(every=2)"
    with pytest.raises(tutti.CaptureError, match="branches on a value of a tensor") as caught:
        tutti.verify(step, model, optimizer, (programs.batch(0),), layout)
    assert "a layout without" in caught.value.fix


@pytest.mark.parametrize("name", ["scaled", "scaled by fused kernels"])
def test_a_scaler_under_replicas_is_refused_by_name(name: str) -> None:
    step, model, optimizer = READING[name]()
    layout = "replica=2 sync=average(every=2)"
    with pytest.raises(tutti.CaptureError, match=r"GradScaler.* branches on a value") as caught:
        tutti.verify(step, model, optimizer, (programs.batch(0),), layout)
    assert "scaler.step(o)" in caught.value.at
    assert caught.value.fix.startswith("GradScaler(enabled=False)")
    assert "data=N" in caught.value.fix


def test_nothing_of_a_run_that_went_another_way_counts() -> None:
    step, model, optimizer = READING["skips_a_loss_that_is_not_finite"]()
    played = tutti.distribute(step, model, optimizer, "")
    played(programs.batch(0))
    before = [p.detach().clone() for p in model.parameters()]
    assert played(programs.batch(1) * float("inf")).isnan()
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    assert played(programs.batch(1)).isfinite()
    assert not all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_value_outside_that_changes_between_calls_is_read_anew() -> None:
    model, limit = programs.mlp(), torch.tensor(1.0)

    def step(m: Any, o: Any, x: Tensor) -> Any:
        scale = limit.item()
        return update(m(x).square().mean(), o), scale if scale < 2 else -scale

    played = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), 0.1), "")
    found = []
    for k, value in enumerate((1.0, 1.5, 3.0, 0.5)):
        limit.fill_(value)
        found.append(float(played(programs.batch(k))[1]))
    assert found == [1.0, 1.5, -3.0, 0.5]


def shares(x: Tensor) -> list[float]:
    """Metrics whose arithmetic fails where a branch leaves it out."""
    hits, count = (x > 9).sum().item(), (x > 8).sum().item()
    excess = (x.max() - 100).item()
    return [
        hits / count if count > 0 else 0.0,
        hits % count if count else -1,
        math.log(excess) if excess > 0 else 1.0,
        count**-1 if count != 0 else 2.0,
        math.floor(10 * hits / count) if count > 0 else 3,
    ]


def test_arithmetic_that_a_branch_leaves_out_does_not_fail() -> None:
    """A trace assumes the numbers, and the run of the wrong way divides by zero."""
    model = programs.mlp()

    def step(m: Any, o: Any, x: Tensor) -> Any:
        first = shares(x)
        return update(m(x).square().mean() * (1 + first[0]), o), first

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = tutti.verify(step, model, optimizer, (programs.batch(0),), "data=2 zero=1")
    assert found.ok, str(found)
    other = copy.deepcopy(model)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    played = tutti.distribute(step, model, optimizer, "")
    for shift in (0.0, 9.0, 200.0, 0.0, 9.0):
        x = programs.batch(0) + shift
        loss, found_shares = played(x)
        expected, expected_shares = step(other, own, x)
        assert found_shares == pytest.approx(expected_shares)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()))


def test_an_error_on_the_way_of_the_call_is_raised() -> None:
    model = programs.mlp()

    def step(m: Any, o: Any, x: Tensor) -> Any:
        loss = update(m(x).square().mean(), o)
        count = (x > 100).sum().item()
        return loss, (1 / count if count < 5 else 0.0)

    before = [p.detach().clone() for p in model.parameters()]
    played = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    with pytest.raises(ZeroDivisionError):
        played(programs.batch(0))
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_program_ends_where_eager_ends_it() -> None:
    step, model, optimizer = READING["ends_the_program"]()
    played = tutti.distribute(step, model, optimizer, "")
    played(programs.batch(0))
    with pytest.raises(SystemExit) as ended:
        played(programs.batch(1) * float("nan"))
    assert ended.value.code == 7
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_value_that_is_read_again_after_a_write() -> None:
    """What stands in a tensor when it is read counts, not what stands there at the end."""
    model = programs.mlp()

    def step(m: Any, x: Tensor) -> Tensor:
        x = m(x).detach().sum()
        first = x.item()
        x += 10.0
        second = x.item()
        return torch.tensor(second - first) if second > first else x

    assert float(tutti.distribute(step, model, None, "")(programs.batch(0))) == pytest.approx(10.0)


def test_a_number_that_is_not_itself_is_nan() -> None:
    model = programs.mlp()

    def step(m: Any, x: Tensor) -> Tensor:
        loss = m(x).square().mean()
        now = loss.item()
        return torch.zeros_like(loss) if now != now else loss

    played = tutti.distribute(step, model, None, "")
    for factor in (1.0, float("nan"), 2.0, float("nan")):
        x = programs.batch(0) * factor
        assert float(played(x)) == pytest.approx(float(step(model, x).detach()))


def test_equal_numbers_are_two_inputs() -> None:
    """A trace in which two numbers are equal holds for calls in which they are."""
    model = programs.mlp()

    def step(m: Any, x: Tensor, a: float, b: float) -> Tensor:
        return m(x).sum() * (a if a == b else 3 * b)

    played = tutti.distribute(step, model, None, "")
    for a, b in ((0.5, 0.5), (0.5, 0.7), (0.3, 0.7), (0.3, 0.3), (0.2, 0.1)):
        x = programs.batch(0)
        assert float(played(x, a, b)) == pytest.approx(float(step(model, x, a, b)))


def test_a_number_of_a_tensor_that_equals_an_input() -> None:
    """A branch finds both 0, or both equal: the tensor is read in each call all the same."""
    model = programs.mlp()

    def step(m: Any, x: Tensor, count: Tensor, a: float) -> Tensor:
        factor = 1.0 if a == 0 else 2.0
        number = count.item()
        if number == 0:
            return m(x).sum() * factor
        return m(x).sum() * (5.0 if number == a else 3.0)

    played = tutti.distribute(step, model, None, "")
    for number, a in (
        (0, 0.0),
        (2, 0.0),
        (2, 2.0),
        (0, 2.0),
        (3, 2.0),
        (0, 0.0),
        (2, 2.0),
        (4, 0.0),
    ):
        x, count = programs.batch(0), torch.tensor(float(number))
        assert float(played(x, count, a)) == pytest.approx(float(step(model, x, count, a)))
