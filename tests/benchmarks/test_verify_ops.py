"""`benchmarks.verify_ops` sees wrong numbers, refusals and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tutti
from benchmarks.verify_ops import outcome, written

X = torch.linspace(0.5, 4.0, 8, dtype=torch.float64).reshape(2, 4)


@pytest.mark.parametrize("layout", ["", "data=2"])
def test_ops_that_are_right(layout: str) -> None:
    assert outcome(torch.cumsum, ((X, 1), {}), layout) == "same"
    assert outcome(torch.floor_divide, ((X.long(), 2), {}), layout) == "same"
    assert outcome(written(Tensor.mul_), ((X, 3.0), {}), layout) == "same"


def test_what_eager_does_not_train_is_left_out() -> None:
    assert outcome(torch.linalg.cholesky, ((X, 3), {}), "") == "left out"
    assert outcome(torch.log, ((X[:0],), {}), "") == "left out"


def test_a_refused_op() -> None:
    assert outcome(torch.nonzero, ((X,), {}), "").startswith("refused: aten.nonzero")


def test_wrong_numbers_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(step: Any, model: Any, optimizer: Any, layout: str) -> Any:
        return lambda *batch: step(model, optimizer, *(x * 1.001 for x in batch))

    monkeypatch.setattr(tutti, "distribute", off)
    assert outcome(torch.exp, ((X,), {}), "").startswith("WRONG")
    monkeypatch.setattr(tutti, "distribute", lambda *_: lambda *_: 1 // 0)
    assert outcome(torch.exp, ((X,), {}), "").startswith("FAILED ZeroDivisionError")
