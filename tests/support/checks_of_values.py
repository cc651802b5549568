"""Checks of a loss and a batch that hold, each on another way than the first guess.

They stand outside of tests: pytest reads the values of a failed `assert` again.
"""

from __future__ import annotations

import torch
from torch import Tensor


def a_floating_point_error(loss: Tensor, x: Tensor) -> None:
    if not torch.isfinite(loss):
        raise FloatingPointError("the loss is infinite or NaN")


def an_overflow_error(loss: Tensor, x: Tensor) -> None:
    if not torch.isfinite(loss).all():
        raise OverflowError("the loss is infinite or NaN")


def a_check_after_one_that_is_not_made(loss: Tensor, x: Tensor) -> None:
    """The read after `or` is made on one way alone."""
    if loss > -1 or x.sum() > 1e9:
        pass
    if x.sum() > 1e9:
        raise ValueError("too large")
    assert loss > -1, "negative"


def checks_of_one_line(loss: Tensor, x: Tensor) -> None:
    """`torchdiffeq` asks this of its points in time, in a loop over rows here."""
    for row in (x[:, 0].sort().values, x[:, 1].sort(descending=True).values):
        up = row[1:] > row[:-1]
        assert up.all() or (~up).all()
        assert row.min() < row.max()


def more_checks_than_ways(loss: Tensor, x: Tensor) -> None:
    for row in x.detach().repeat(2, 1):
        assert torch.isfinite(row).all()


def a_value_in_the_text_of_an_error(loss: Tensor, x: Tensor) -> None:
    if not torch.isfinite(loss).all():
        raise RuntimeError(f"the loss is {loss.item()}")


def a_value_in_the_text_of_an_assertion(loss: Tensor, x: Tensor) -> None:
    assert torch.isfinite(loss).all(), f"the loss is {loss.item():.3f}"
    assert (x < 100).all(), f"the batch has {x.max():.3f}, {(x > 100).nonzero()}"


GUARDS = {
    guard.__name__: guard
    for guard in (
        a_floating_point_error,
        an_overflow_error,
        a_check_after_one_that_is_not_made,
        checks_of_one_line,
        more_checks_than_ways,
        a_value_in_the_text_of_an_error,
        a_value_in_the_text_of_an_assertion,
    )
}
