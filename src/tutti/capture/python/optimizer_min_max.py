"""Python's `min` and `max` in the code of optimizers, in the graph."""

from __future__ import annotations

import builtins
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from tutti.capture.python.user_globals import in_place_of
from tutti.capture.state.lift import (
    optimizers_of,
)


@contextlib.contextmanager
def min_max_in_graph(optimizer: Any) -> Iterator[None]:
    """Keep Python's `min` and `max` of step counts and norms in an optimizer's code in the graph.

    Other entries of these globals stay: the user's step may count in them.
    """
    homes = [*map(_home, optimizers_of(optimizer))]
    with (
        in_place_of("min", _min_max("min"), homes),
        in_place_of("max", _min_max("max"), homes),
    ):
        yield


def _home(optimizer: Optimizer) -> dict[str, Any]:
    """The globals of the optimizer's code, in a module or not."""
    step: Any = inspect.unwrap(type(optimizer).step)
    return step.__globals__


def _min_max(name: str) -> Callable[..., Any]:
    plain = getattr(builtins, name)
    symbolic = getattr(torch, f"sym_{name}")

    def choose(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and any(isinstance(a, torch.SymFloat | torch.SymInt) for a in args):
            return symbolic(*args)
        return plain(*args, **kwargs)

    return choose
