"""An error about the user's step shows the user's lines, and none of the tracer's between them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.errors import CommError, LayoutError
from tutti.user_lines import OnlyUsersFrames


def _branching(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    if int(loss) > 1:
        loss = loss * 2
    return loss


def _names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def _at_the_step(x: Tensor) -> None:
    tutti.distribute(_branching, nn.Linear(3, 3))(x)


def _at_verify(x: Tensor) -> None:
    tutti.verify(_branching, nn.Linear(3, 3), None, (x,), "data=2")


@pytest.mark.parametrize(("call", "own"), [(_at_the_step, 4), (_at_verify, 1)])
def test_the_traceback_ends_in_the_users_step(call: Callable[[Tensor], Any], own: int) -> None:
    """`own`: functions of tutti that the caller called."""
    with pytest.raises(tutti.TuttiError) as caught:
        call(torch.ones(4, 3))
    names = _names(caught.value)
    at = names.index(call.__name__)
    assert names[-1] == _branching.__name__
    assert len(names) <= at + 1 + own + 1, names


def _raises(error: Exception) -> None:
    with OnlyUsersFrames():
        torch.nn.Module().apply(lambda _: (_ for _ in ()).throw(error))


@pytest.mark.parametrize(
    ("error", "is_cut"), [(LayoutError("x"), True), (CommError("x"), False), (ValueError(), False)]
)
def test_which_errors_are_cut(error: Exception, is_cut: bool) -> None:
    """A lost rank's collective is found in the frames; what is not the user's mistake is shown whole."""
    with pytest.raises(type(error)) as caught:
        _raises(error)
    assert ("apply" not in _names(caught.value)) == is_cut
