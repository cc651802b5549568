"""A NaN that comes in with an input: it stops a checked step if it reaches a result."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks

NAN = float("nan")


def step_on(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def without_marks(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return step_on(model, optimizer, x.nan_to_num())


def skipping(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    if x.isnan().any().item():
        return x.new_zeros(())
    return step_on(model, optimizer, x)


def called(
    layout: str, row: int | None, step: Any = step_on, value: float = NAN
) -> tuple[str, list[Tensor], list[Tensor]]:
    """The error of the second call, whose batch holds a NaN in a row, and the weights around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    played = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), 0.1), layout)
    x = torch.randn(8, 4).double()
    with mock.patch.dict(os.environ, {"TUTTI_CHECK_NAN": "1"}):
        played(x)
        before = [v.clone() for v in played.model_state().values()]
        x = x.clone()
        if row is not None:
            x[row, 1] = value
        error = ""
        try:
            played(x)
        except tutti.TuttiError as found:
            error = str(found)
    return error, before, list(played.model_state().values())


@pytest.mark.parametrize("layout", ["", "micro=4"])
def test_a_bad_batch_stops_with_its_name_and_keeps_the_state(layout: str) -> None:
    error, before, after = called(layout, 5)
    assert "NaN or infinity came in with batch.0 and reached what it returns at step 1" in error
    assert "test_came_in.py:20" in error and "nan_to_num" in error
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("step", [without_marks, skipping])
@pytest.mark.parametrize("layout", ["", "micro=4"])
def test_what_the_step_removes_does_not_stop(step: Any, layout: str) -> None:
    error, _, after = called(layout if step is without_marks else "", 5, step)
    assert not error and all(x.isfinite().all() for x in after)


@pytest.mark.parametrize("row", [1, 6])
@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3", "data=2 micro=2"])
def test_all_ranks_name_the_rank_that_has_it(ranks: Ranks, layout: str, row: int) -> None:
    for error, before, after in ranks.run(called, layout, row, n=2):
        assert f"came in with batch.0 (rank {row // 4}) and reached" in error
        assert all(map(torch.equal, before, after))
    for error, _, after in ranks.run(called, layout, row, without_marks, n=2):
        assert not error and all(x.isfinite().all() for x in after)


def test_ranks_of_a_pipeline_stop(ranks: Ranks) -> None:
    found = ranks.run(called, "pipe=2 micro=2", 1, n=2)
    for rank, (error, before, after) in enumerate(found):
        assert f"came in with batch.0 (rank {rank})" in error
        assert all(map(torch.equal, before, after))


def test_a_weight_that_holds_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    played = tutti.distribute(step_on, model, torch.optim.SGD(model.parameters(), 0.1), "")
    played(torch.ones(2, 4))
    with torch.no_grad():
        model.weight[0, 0] = NAN
    monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    with pytest.raises(tutti.TuttiError, match="with weight and reached") as caught:
        played(torch.ones(2, 4))
    assert "checkpoint" in caught.value.fix


class Filled(nn.Module):
    """A buffer with NaN for what is not there yet."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.full((3,), NAN))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.seen.copy_(torch.cat([out.detach().mean().reshape(1), self.seen[:-1]]))
        return out


def test_a_buffer_may_hold_nan_where_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_CHECK_NAN", "1")
    model = Filled()
    played = tutti.distribute(step_on, model, torch.optim.SGD(model.parameters(), 0.1), "")
    for _ in range(2):
        played(torch.ones(2, 4))
    assert played.model_state()["seen"].isnan().tolist() == [False, False, True]
